"""The conditions around the measurement: clocks, temperature, throttling, other processes, memory and energy.

Read between blocks, never within one. A block that was throttled, or shared its device, is marked and left out of the
figures that verdicts rest on, never silently.
"""

import contextlib
import math
import os
import re
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel.measure import gpus
from duel.measure.device import Device, World, host_peak_memory
from duel.measure.nvml import Gpu
from duel.measure.probes import usable_cpus

FOREIGN_LOAD = 0.05  # share of the CPUs' time that others may take within a block
TICK_SECONDS = 0.01  # the unit of the kernel's CPU times
ENERGY_SECONDS = 10.0  # the shortest window for which energy is reported
IDLE_SECONDS = 1.0
PROC, POWERCAP = Path("/proc"), Path("/sys/class/powercap")


@dataclass(frozen=True)
class Conditions:
    """Conditions of one block; None: not reported.

    ``foreign_load`` is the share that others than the row's own processes have of this process's CPUs' time.
    """

    clock_mhz: float | None = None
    temperature_celsius: float | None = None
    throttles: tuple[str, ...] | None = ()
    unknown: int | None = 0
    foreign_load: float | None = None
    ecc_errors: int = 0  # uncorrected ones since the previous block

    @property
    def faults(self) -> list[str]:
        """Why the block is left out; empty if it is not."""
        reasons = [f"throttled ({cause})" for cause in self.throttles or ()]
        reasons += ["another process on the device"] if self.unknown else []
        reasons += ["uncorrected memory error"] if self.ecc_errors else []
        return reasons + (["other processes on the CPUs"] if (self.foreign_load or 0.0) > FOREIGN_LOAD else [])


class Watch:
    """Watches the device of this process of ``world``. ``missing`` has the reason for what cannot be reported."""

    def __init__(self, device: Device, world: World) -> None:
        self.missing: dict[str, str] = {}
        self._device, self._world = device, world
        self._cpus = usable_cpus()
        self._peers = dict.fromkeys(_sharing(world, self._cpus), 0.0)  # CPU seconds by process, as last read
        self._gpu: Gpu | None = None
        if device.kind == "gpu":
            try:
                self._gpu = gpus.opened(device.name, world.local_rank % device.count)
            except LookupError as error:
                self.missing |= dict.fromkeys(("clock_mhz", "temperature_celsius", "joules_per_item"), str(error))
                self.missing |= dict.fromkeys(("device_id", "device_process_bytes", "ecc_errors"), str(error))
        self._others = self._gpu.unknown if self._gpu else 0
        self._ecc_errors = self._gpu.ecc_errors if self._gpu else None
        self._start = self._before = self._cpu_seconds()
        self._begun: tuple[float, list[float]] | None = None
        self.idle_watts = self._idle()

    @property
    def warning(self) -> str:
        """What is wrong before anything has started; empty if nothing is."""
        return f"{self._others} other processes are on the {self._device.name}" if self._others else ""

    @property
    def device_id(self) -> str | None:
        """Which device it is: a GPU's UUID, or the numbers of the CPUs."""
        return self._gpu.uuid if self._gpu else ",".join(map(str, self._cpus)) if self._device.kind == "cpu" else None

    @property
    def sliced(self) -> bool:
        """Whether the device is a MIG slice, whose power and ceilings are not its own."""
        return " MIG " in self._device.name or (self._gpu is not None and bool(self._gpu.mig))

    @property
    def untold(self) -> str:
        """What no block could be left out for, because it is not reported; empty if everything is."""
        gaps = ["conditions on the other ranks"] if self._world.size > 1 else []
        if self._device.kind == "gpu" and self._gpu is None:
            gaps.append(f"throttling and other processes ({self.missing['clock_mhz']})")
        failures = self._gpu.failures if self._gpu else {}
        asked = {"throttling": "throttles", "other processes": "unknown"}
        return ", ".join(gaps + [f"{topic} ({failures[name]})" for topic, name in asked.items() if name in failures])

    @property
    def least_seconds(self) -> float:
        """How long the timed blocks must last so that their energy can be measured; 0 if it cannot."""
        measured = self._world.size == 1 and not self.sliced and self._joules()
        return ENERGY_SECONDS if measured else 0.0

    def block(self) -> Conditions:
        """Return the conditions since the last call."""
        now = self._cpu_seconds()
        since, self._before = self._before, now
        load = self._load(since, now)
        if self._gpu is None:
            clock = self._cpu_clock() if self._device.kind == "cpu" else None
            return Conditions(clock_mhz=clock, foreign_load=load)
        gpu, errors, throttles = self._gpu, self._gpu.ecc_errors, self._gpu.throttles
        new = 0
        if errors is not None:
            new = max(0, errors - (errors if self._ecc_errors is None else self._ecc_errors))
            self._ecc_errors = errors
        held_down = None if throttles is None else tuple(throttles)
        return Conditions(gpu.clock_mhz, gpu.temperature_celsius, held_down, gpu.unknown, load, new)

    def begin(self) -> None:
        """Mark the start of the measured blocks."""
        self._start = self._before = self._cpu_seconds()
        joules = self._joules()
        self._begun = (time.monotonic(), joules) if joules else None

    def columns(self, conditions: list[Conditions], items: int) -> dict[str, Any]:
        """Return the row's columns for these blocks, which computed ``items``, with the reasons for the empty ones."""
        clocks = [each.clock_mhz for each in conditions if each.clock_mhz is not None]
        warmest = [each.temperature_celsius for each in conditions if each.temperature_celsius is not None]
        gpu = self._gpu
        columns: dict[str, Any] = {
            "clock_mhz": statistics.median(clocks) if clocks else None,
            "clock_mhz_lowest": min(clocks, default=None),
            "temperature_celsius": max(warmest, default=None),
            "foreign_load": self._load(self._start, self._before),
            "device_process_bytes": gpu.own_bytes if gpu else None,
            "host_peak_bytes": host_peak_memory()[0],
            "ecc_errors": gpu.ecc_errors if gpu else None,
            "mig": True if self.sliced else gpu.mig if gpu else None,
            **self._energy(items),
        }
        kind = self._device.kind
        reasons = dict.fromkeys(columns, f"not reported by a {kind} device")
        reasons |= {"clock_mhz": "not reported by the CPUs"} if kind == "cpu" else {}
        reasons |= {"foreign_load": "not reported by the kernel (/proc/stat)"}
        reasons |= self.missing | (gpu.failures if gpu else {})
        reasons |= {"clock_mhz_lowest": reasons["clock_mhz"]}
        return columns | {"missing": {name: reasons[name] for name, value in columns.items() if value is None}}

    @property
    def no_counter(self) -> str:
        """Why energy cannot be measured, if it cannot."""
        if self._world.size > 1:
            return "measured on one device"
        if self.sliced:
            return "the device is a MIG slice, the counter is the whole GPU's"
        why = "no energy counter can be read here (NVML and amdsmi on GPUs, RAPL on CPUs)"
        return self._gpu.failures.get("joules_per_item", why) if self._gpu else why

    def counters(self) -> list[float]:
        """Return the energy counters in joules, for ``used``; empty if the work's energy cannot be measured."""
        return [] if self._world.size > 1 or self.sliced else self._joules()

    def used(self, before: list[float], after: list[float]) -> float | None:
        """Return the joules between two of what ``counters`` returned; None if they could not be measured."""
        return self._used(before, after) if before else None

    def _energy(self, items: int) -> dict[str, Any]:
        names = ("joules_per_item", "mean_watts", "idle_watts", "energy_source")
        nothing = dict.fromkeys(names)
        if self._world.size > 1:  # the counter covers one of them, the work all
            self.missing |= dict.fromkeys(names, "measured on one device")
            return nothing
        if self.sliced:
            self.missing |= dict.fromkeys(names, "the device is a MIG slice, the counter is the whole GPU's")
            return nothing
        joules = self._joules()
        if self._begun is None or not joules:
            self.missing = dict.fromkeys(names, self.missing.get("joules_per_item", self.no_counter)) | self.missing
            return nothing
        seconds, used = time.monotonic() - self._begun[0], self._used(self._begun[1], joules)
        if used is None:
            self.missing |= dict.fromkeys(names, "the energy counter went backwards")
        elif seconds < ENERGY_SECONDS:
            self.missing |= dict.fromkeys(names, f"a window of {seconds:.1f} s; {ENERGY_SECONDS:.0f} are needed")
        else:
            source = self._gpu.source if self._gpu else "RAPL"
            return dict(zip(names, (used / items, used / seconds, self.idle_watts, source), strict=True))
        return nothing

    def _idle(self) -> float | None:
        """Return the watts before anything has started."""
        before = self._joules()
        if not before:
            return None
        start = time.monotonic()
        time.sleep(IDLE_SECONDS)
        used, seconds = self._used(before, self._joules()), time.monotonic() - start
        return used / seconds if used is not None and seconds else None

    def _joules(self) -> list[float]:
        """Return the energy counters of the GPU or of each CPU package; empty if none can be read."""
        if self._gpu is not None:
            joules = self._gpu.joules
            return [] if joules is None else [joules]
        return self._rapl("energy_uj") if self._device.kind == "cpu" else []

    def _used(self, before: list[float], after: list[float]) -> float | None:
        """Return the joules between two readings; None if a counter ran backwards. CPU counters wrap at their range."""
        ranges = [0.0] * len(before) if self._gpu else self._rapl("max_energy_range_uj")
        if not len(before) == len(after) == len(ranges):
            return None
        used = [b - a if b >= a else b - a + most for a, b, most in zip(before, after, ranges, strict=True)]
        return None if min(used) < 0 else sum(used)

    def _rapl(self, file: str) -> list[float]:
        """Return the joules of each package; empty if there are none or only root may read them."""
        zones = [path for path in sorted(POWERCAP.glob("*")) if re.fullmatch(r"intel-rapl:\d+", path.name)]
        try:  # not 'psys', which is the whole platform, packages included
            packages = [zone for zone in zones if (zone / "name").read_text().startswith("package-")]
            return [int((package / file).read_text()) / 1e6 for package in packages]
        except OSError:
            return []

    def _cpu_seconds(self) -> tuple[float, float, float]:
        """Return (now, seconds that the usable CPUs were busy, of which the row's); NaN if not reported."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        for process in self._peers:
            with contextlib.suppress(OSError):  # it has ended, and uses no more
                self._peers[process] = _used_by(process)
        own = sum(each.ru_utime + each.ru_stime for each in usage) + sum(self._peers.values())
        try:
            lines = (PROC / "stat").read_text().splitlines()
        except OSError:
            return time.monotonic(), float("nan"), own
        mine = {f"cpu{number}" for number in self._cpus}
        ticks = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in mine]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's already
        busy = sum(int(value) for line in ticks for place, value in enumerate(line[:8]) if place not in (3, 4))
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), own

    def _load(self, before: tuple[float, float, float], after: tuple[float, float, float]) -> float | None:
        """Return others' share of the usable CPUs' time between two readings, less the error of the kernel's ticks.

        Of each process besides this one the kernel reports ticks, too.
        """
        wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
        if math.isnan(busy):
            return None
        others = busy - own - TICK_SECONDS * (len(self._cpus) + len(self._peers))
        return max(0.0, others) / (max(wall, TICK_SECONDS) * len(self._cpus))

    def _cpu_clock(self) -> float | None:
        try:
            lines = (PROC / "cpuinfo").read_text().splitlines()
        except OSError:
            return None
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        mine = [clocks[number] for number in self._cpus if number < len(clocks)]
        return statistics.fmean(mine) if mine else None


def _sharing(world: World, cpus: list[int]) -> list[int]:
    """Return the other processes of ``world`` that run on ``cpus`` only: a launcher may give a node's ranks the same.

    Those of other nodes are not seen. What a rank uses that has some of ``cpus`` and others counts as others' load.
    """
    if not world.address or not hasattr(os, "sched_getaffinity"):
        return []
    found = []
    for path in PROC.glob("[0-9]*/cmdline"):
        process = int(path.parent.name)
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = path.read_bytes().decode(errors="replace").split("\0")
            if process != os.getpid() and world.address in words and os.sched_getaffinity(process) <= set(cpus):
                found.append(process)
    return found


def _used_by(process: int) -> float:
    """Return the CPU seconds of a process and its reaped children. Raises OSError if it has ended."""
    _, _, fields = (PROC / str(process) / "stat").read_text().rpartition(")")  # the name before may have spaces
    return sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")


def left_out(conditions: list[Conditions]) -> tuple[list[int], str]:
    """Return the numbers of the blocks that are left out, and how many for each reason."""
    numbers = [number for number, each in enumerate(conditions) if each.faults]
    reasons = Counter(fault for each in conditions for fault in each.faults)
    return numbers, "; ".join(f"{count} {reason}" for reason, count in reasons.items())
