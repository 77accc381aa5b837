"""TPU chips by name: what a program is compiled for without one, and what it would have to fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Chip:
    """One kind of TPU.

    ``topology`` is libtpu's name for four of them, each a device under ``config``. ``memory_gib`` is what it leaves
    a program, read off its refusals: up to 4 % less than the chip has. ``flops_per_second`` (bfloat16) and
    ``bytes_per_second`` (of its memory) are of one chip, as published; ``source`` says where they were read.
    """

    name: str
    topology: str
    config: str
    memory_gib: float
    flops_per_second: float
    bytes_per_second: float
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


_DOCS = "docs.cloud.google.com/tpu/docs"
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("v4", "v4:2x2x1", "megacore", 30.75, 275e12, 1.2e12, "glennklockwood.com/garden/tpuv4"),
            Chip("v5e", "v5e:2x2", "default", 15.75, 197e12, 0.819e12, f"{_DOCS}/v5e"),
            Chip("v5p", "v5p:2x2x1", "default", 95.74, 459e12, 2.765e12, "yobitel.com/knowledge-base/tpu-v5p"),
            Chip("v6e", "v6e:2x2", "default", 31.25, 918e12, 1.64e12, f"{_DOCS}/v6e"),
        )
    }
)


def bound(chip: Chip, flops: float, moved: float) -> str:
    """Return which roof a program of ``flops`` FLOP that moves ``moved`` bytes would meet: compute or memory."""
    return "compute" if flops / chip.flops_per_second >= moved / chip.bytes_per_second else "memory"
