"""What a device is called, and what its machine knows about it: the part that both frameworks share."""

import contextlib
import ctypes
import importlib.metadata
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from duel import variables
from duel.catalogue import PRECISIONS, Benchmark
from duel.measure import gpus, probes
from duel.recipes import Recipe
from duel.switches import ON, default_value


@dataclass(frozen=True)
class World:
    """The processes that compute a row together, one device each, as seen by one of them.

    ``rank`` counts them over all nodes and ``local_rank`` on this one; they meet at ``address``, host:port of rank 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""


ALONE = World()


@dataclass(frozen=True)
class Device:
    """A kind of device that a framework can compute on.

    ``count`` devices of ``kind`` (cpu, gpu, tpu, mps) are available; ``name`` and the rest describe the first of them.
    ``memory_bytes`` is what the device has, not what is free.
    """

    kind: str
    name: str
    count: int
    driver: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Setting:
    """What is computed, how, and on what: everything a side needs besides samples and weights.

    ``precision`` is a policy of the catalogue or "float64". ``switches`` are values by name (``duel.switches``); those
    not listed are as a newcomer gets them. ``product`` and ``microbatch`` are for per-sample gradients, ``recipe`` is
    for a training to accuracy.
    """

    benchmark: Benchmark
    size: str
    precision: str
    device: Device
    world: World = ALONE
    switches: Mapping[str, str] = field(default_factory=dict)
    product: str = ""
    microbatch: int = 0
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        for switch in self.switches:
            default_value(switch)  # raises ValueError for an unknown name

    def value(self, switch: str) -> str:
        """Return what ``switch`` is set to, else what a newcomer gets. Raises ValueError for an unknown name."""
        return self.switches.get(switch, default_value(switch))

    def on(self, switch: str) -> bool:
        return self.value(switch) == ON

    @property
    def loss_scale(self) -> float:
        return PRECISIONS[self.precision].loss_scale if self.precision in PRECISIONS else 1.0


def choose(kind: str | None, available: Iterable[Device]) -> Device:
    """Return the device of ``kind``, or the first of ``available`` for None.

    Raises ValueError naming what is available.
    """
    devices = {device.kind: device for device in available}
    if kind is None:
        return next(iter(devices.values()))
    if kind not in devices:
        raise ValueError(f"device kind {kind!r} is not available here; available: {', '.join(devices)}")
    return devices[kind]


def cpu() -> Device:
    """Return this machine's processor. It counts as one device, however many cores it has."""
    return Device("cpu", probes.cpu_name(), 1, memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def gpu(name: str, count: int, compute_capability: str | None) -> Device:
    """Return a GPU as the framework sees it, with driver version and memory if its maker's library knows ``name``."""
    try:
        found = gpus.opened(name)
    except LookupError:
        return Device("gpu", name, count, compute_capability=compute_capability)
    return Device("gpu", name, count, found.driver, compute_capability, found.memory_bytes)


_peak_kept = 0  # the peak before ``uncounted_memory``


@contextlib.contextmanager
def uncounted_memory() -> Iterator[None]:
    """Exclude the host memory that the block inside takes from ``host_peak_memory`` (on Linux)."""
    global _peak_kept
    before = host_peak_memory()[0]
    yield
    with contextlib.suppress(OSError):  # no such file, or not writable: then it counts
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak to what is resident
        _peak_kept = before


def host_peak_memory() -> tuple[int, str]:
    """Return this process's peak resident memory in bytes, and the name of that figure: "host_peak_rss"."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss is inherited from the parent process; VmHWM is this program's own
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return max(_peak_kept, int(line.split()[1]) * 1024), "host_peak_rss"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "host_peak_rss"


def keeping(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a process that will call ``keep_memory``: glibc, from 2.35 on, asks for huge pages.

    It reads this when a process starts, and asks only where the kernel gives huge pages to those who ask (madvise).
    """
    name = "GLIBC_TUNABLES"
    both = ":".join(filter(None, ("glibc.malloc.hugetlb=1", environment.get(name))))  # of two settings the last counts
    own = environment.get(variables.OWN, "") + ("" if name in environment else f" {name}")
    return {**environment, name: both, variables.OWN: own}


def keep_memory() -> None:
    """Have malloc keep for this process what it frees, in one pool for all threads, as far as it is glibc's.

    By default glibc returns large blocks and the ends of its pools to the kernel, which then maps their pages anew, one
    fault each (mallopt(3)).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of <malloc.h>: M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
        for parameter, value in ((-1, -1), (-4, 0), (-8, 1)):
            libc.mallopt(parameter, value)


def keeps_memory() -> bool:
    """Return whether malloc takes even a block of 256 MiB, more than glibc keeps by default, from the heap.

    Otherwise such a block is a mapping of its own. The heap may be above or below those.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(2**28)) or 0
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        maps = []
    spans = [line.split()[0].split("-") for line in maps if line.endswith("[heap]")]
    libc.free(ctypes.c_void_p(block))
    return any(int(start, 16) <= block < int(end, 16) for start, end in spans)


def in_huge_pages() -> float:
    """Return which part of malloc's heap that is in memory is in huge pages, from 0 to 1; 0 where none is known."""
    sizes = {"Rss": 0, "AnonHugePages": 0}  # kB
    heap = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for words in map(str.split, lines):
        if "-" in words[0]:  # addresses: a mapping begins
            heap = words[-1] == "[heap]"
        elif heap and words[0][:-1] in sizes:
            sizes[words[0][:-1]] += int(words[1])
    return sizes["AnonHugePages"] / max(sizes["Rss"], 1)


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those ``packages`` that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
