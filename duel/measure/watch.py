"""What goes on around the measurement: clocks, temperature, throttling, other processes, memory and energy.

Asked between blocks, never within one. A block that was throttled, or shared its device, is marked and left out of the
figures that verdicts are made of, never silently.
"""

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

from duel.measure.device import Device, World, host_peak_memory
from duel.measure.nvml import Gpu
from duel.measure.probes import usable_cpus

FOREIGN_LOAD = 0.05  # of the CPUs' time, that others may take within a block
TICK_SECONDS = 0.01  # the kernel counts the time of a CPU in these
ENERGY_SECONDS = 10.0  # the shortest window that energy is told of
IDLE_SECONDS = 1.0
PROC, POWERCAP = Path("/proc"), Path("/sys/class/powercap")


@dataclass(frozen=True)
class Conditions:
    """Those of one block; None is not told. ``foreign_load``: others' share of the time of this process's CPUs."""

    clock_mhz: float | None = None
    temperature_celsius: float | None = None
    throttles: tuple[str, ...] | None = ()
    unknown: int | None = 0
    foreign_load: float | None = None
    ecc_errors: int = 0  # uncorrected ones since the block before

    @property
    def faults(self) -> list[str]:
        """Why the block is left out; empty if it is not."""
        said = [f"throttled ({words})" for words in self.throttles or ()]
        said += ["another process on the device"] if self.unknown else []
        said += ["uncorrected memory error"] if self.ecc_errors else []
        return said + (["other processes on the CPUs"] if (self.foreign_load or 0.0) > FOREIGN_LOAD else [])


class Watch:
    """Of the device that ``world``'s process computes on. What cannot be told has its reason in ``missing``."""

    def __init__(self, device: Device, world: World) -> None:
        self.missing: dict[str, str] = {}
        self._device, self._world = device, world
        self._cpus = usable_cpus()
        self._gpu: Gpu | None = None
        if device.kind == "gpu":
            try:
                self._gpu = Gpu.open(device.name, world.local_rank % device.count)
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
        """What is wrong before anything has begun; empty if nothing is."""
        return f"{self._others} other processes are on the {self._device.name}" if self._others else ""

    @property
    def device_id(self) -> str | None:
        """Which device it is: a GPU's UUID, the numbers of the CPUs."""
        return self._gpu.uuid if self._gpu else ",".join(map(str, self._cpus)) if self._device.kind == "cpu" else None

    @property
    def sliced(self) -> bool:
        """Whether the device is a MIG slice: its power and its ceilings are not its own."""
        return " MIG " in self._device.name or (self._gpu is not None and bool(self._gpu.mig))

    @property
    def untold(self) -> str:
        """What no block could be left out for, because nobody said it; empty where all was told."""
        said = ["what befell the other ranks"] if self._world.size > 1 else []
        if self._device.kind == "gpu" and self._gpu is None:
            said.append(f"throttling and other processes ({self.missing['clock_mhz']})")
        failures = self._gpu.failures if self._gpu else {}
        asked = {"throttling": "throttles", "other processes": "unknown"}
        return ", ".join(said + [f"{words} ({failures[name]})" for words, name in asked.items() if name in failures])

    @property
    def least_seconds(self) -> float:
        """How long the timed blocks must last so that their energy can be measured; 0 where it cannot."""
        measured = self._world.size == 1 and not self.sliced and self._joules()
        return ENERGY_SECONDS if measured else 0.0

    def block(self) -> Conditions:
        """Those since the last call."""
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
        """The measured blocks begin now."""
        self._start = self._before = self._cpu_seconds()
        joules = self._joules()
        self._begun = (time.monotonic(), joules) if joules else None

    def columns(self, conditions: list[Conditions], items: int) -> dict[str, Any]:
        """The row's columns for these blocks, in which ``items`` were computed, with the reasons for the empty ones."""
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
        reasons = dict.fromkeys(columns, f"a {kind} device does not say")
        reasons |= {"clock_mhz": "the CPUs do not say"} if kind == "cpu" else {}
        reasons |= {"foreign_load": "the kernel does not say (/proc/stat)"}
        reasons |= self.missing | (gpu.failures if gpu else {})
        reasons |= {"clock_mhz_lowest": reasons["clock_mhz"]}
        return columns | {"missing": {name: reasons[name] for name, value in columns.items() if value is None}}

    def _energy(self, items: int) -> dict[str, Any]:
        names = ("joules_per_item", "mean_watts", "idle_watts", "energy_source")
        nothing = dict.fromkeys(names)
        if self._world.size > 1:  # the counter is of one of them, what is computed is of all
            self.missing |= dict.fromkeys(names, "measured on one device")
            return nothing
        if self.sliced:
            self.missing |= dict.fromkeys(names, "the device is a MIG slice, the counter is the whole GPU's")
            return nothing
        joules = self._joules()
        if self._begun is None or not joules:
            why = "no energy counter can be read here (NVML on NVIDIA GPUs, RAPL on CPUs)"
            if self._gpu:
                why = self._gpu.failures.get("joules_per_item", why)
            self.missing = dict.fromkeys(names, self.missing.get("joules_per_item", why)) | self.missing
            return nothing
        seconds, used = time.monotonic() - self._begun[0], self._used(self._begun[1], joules)
        if used is None:
            self.missing |= dict.fromkeys(names, "the energy counter went backwards")
        elif seconds < ENERGY_SECONDS:
            self.missing |= dict.fromkeys(names, f"a window of {seconds:.1f} s; {ENERGY_SECONDS:.0f} are needed")
        else:
            source = "NVML" if self._gpu else "RAPL"
            return dict(zip(names, (used / items, used / seconds, self.idle_watts, source), strict=True))
        return nothing

    def _idle(self) -> float | None:
        """Watts before anything has begun."""
        before = self._joules()
        if not before:
            return None
        start = time.monotonic()
        time.sleep(IDLE_SECONDS)
        used, seconds = self._used(before, self._joules()), time.monotonic() - start
        return used / seconds if used is not None and seconds else None

    def _joules(self) -> list[float]:
        """Counters of energy, of the GPU or of each package of CPUs; none where none can be read."""
        if self._gpu is not None:
            joules = self._gpu.joules
            return [] if joules is None else [joules]
        return self._rapl("energy_uj") if self._device.kind == "cpu" else []

    def _used(self, before: list[float], after: list[float]) -> float | None:
        """Joules between two readings; None where a counter went backwards. Those of CPUs begin anew at their range."""
        ranges = [0.0] * len(before) if self._gpu else self._rapl("max_energy_range_uj")
        if not len(before) == len(after) == len(ranges):
            return None
        used = [b - a if b >= a else b - a + most for a, b, most in zip(before, after, ranges, strict=True)]
        return None if min(used) < 0 else sum(used)

    def _rapl(self, file: str) -> list[float]:
        """Joules of each package; none where there are none, or only root may read them."""
        zones = [path for path in sorted(POWERCAP.glob("*")) if re.fullmatch(r"intel-rapl:\d+", path.name)]
        try:  # not 'psys', which is the whole platform, packages included
            packages = [zone for zone in zones if (zone / "name").read_text().startswith("package-")]
            return [int((package / file).read_text()) / 1e6 for package in packages]
        except OSError:
            return []

    def _cpu_seconds(self) -> tuple[float, float, float]:
        """(now, seconds that the usable CPUs have been busy, of which this process's); NaN where that is not told."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(each.ru_utime + each.ru_stime for each in usage)
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
        """Others' share of the usable CPUs' time between two readings, less what the kernel's ticks may be off."""
        wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
        if math.isnan(busy):
            return None
        others = busy - own - TICK_SECONDS * len(self._cpus)
        return max(0.0, others) / (max(wall, TICK_SECONDS) * len(self._cpus))

    def _cpu_clock(self) -> float | None:
        try:
            lines = (PROC / "cpuinfo").read_text().splitlines()
        except OSError:
            return None
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        mine = [clocks[number] for number in self._cpus if number < len(clocks)]
        return statistics.fmean(mine) if mine else None


def left_out(conditions: list[Conditions]) -> tuple[list[int], str]:
    """The numbers of the blocks that are left out, and how many for which reason."""
    numbers = [number for number, each in enumerate(conditions) if each.faults]
    reasons = Counter(fault for each in conditions for fault in each.faults)
    return numbers, "; ".join(f"{count} {reason}" for reason, count in reasons.items())
