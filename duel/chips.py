"""TPU chips by name: what a program is compiled for without one, and what it would have to fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Chip:
    """One kind of TPU.

    ``topology`` is libtpu's name for four of them. ``memory_bytes``, ``flops_per_second`` (bfloat16) and
    ``bytes_per_second`` (of its memory) are of one chip, as published; ``source`` says where they were read. Its GB are
    taken for GiB: what libtpu itself refuses is the sharper bound.
    """

    name: str
    topology: str
    memory_bytes: int
    flops_per_second: float
    bytes_per_second: float
    source: str


_DOCS = "docs.cloud.google.com/tpu/docs"
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("v4", "v4:2x2x1", 32 * 2**30, 275e12, 1.2e12, "glennklockwood.com/garden/tpuv4"),
            Chip("v5e", "v5e:2x2", 16 * 2**30, 197e12, 0.819e12, f"{_DOCS}/v5e"),
            Chip("v5p", "v5p:2x2x1", 95 * 2**30, 459e12, 2.765e12, "yobitel.com/knowledge-base/tpu-v5p"),
            Chip("v6e", "v6e:2x2", 32 * 2**30, 918e12, 1.64e12, f"{_DOCS}/v6e"),
        )
    }
)


def bound(chip: Chip, flops: float, moved: float) -> str:
    """Return which roof a program of ``flops`` FLOP that moves ``moved`` bytes would meet: compute or memory."""
    return "compute" if flops / chip.flops_per_second >= moved / chip.bytes_per_second else "memory"
