"""The GPU that this process computes on, whoever made it, by its maker's management library."""

from duel.measure.amd import AmdGpu
from duel.measure.nvml import Gpu

AMD = ("amd", "radeon", "instinct")


def by_amd(name: str) -> bool:
    return any(word in name.lower() for word in AMD)


def opened(name: str, index: int = 0) -> Gpu:
    """Open the ``index``th GPU that this process sees, called ``name``. Raises LookupError, with the reason."""
    return AmdGpu.open(name, index) if by_amd(name) else Gpu.open(name, index)
