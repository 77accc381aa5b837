"""What NVIDIA's management library says of the GPU that this process computes on.

Every question may fail by itself, on some device or driver or midway: then its answer is None and ``failures`` has
NVML's words.
"""

import os
from collections.abc import Callable
from typing import Any

# Clocks that are held down for these reasons are no clocks to compare at. Software power capping, 0x4, is normal.
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class Gpu:
    """The first GPU that this process may use. ``open`` it."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self.failures: dict[str, str] = {}

    @classmethod
    def open(cls, name: str, index: int = 0) -> "Gpu":
        """The ``index``th of the GPUs that CUDA shows this process, in the order of the PCI bus.

        Raises LookupError, with what is wrong, where NVML is not there or has no GPU called ``name`` at that place.
        """
        try:
            import pynvml
        except ImportError as error:
            raise LookupError("NVML: nvidia-ml-py is not installed in this interpreter") from error
        try:
            pynvml.nvmlInit()
            shown = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
            chosen = shown[index] if index < len(shown) else str(index)
            by_index = chosen.isdecimal()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(chosen)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(chosen)
            )
            found = pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML: {error}") from error
        found = found.decode() if isinstance(found, bytes) else str(found)
        if found != name:
            raise LookupError(f"NVML: device {chosen} is a {found}, and not the {name} that is computed on")
        return cls(pynvml, handle)

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._library.NVMLError as error:
            self.failures[what] = f"NVML: {error}"
            return None

    @property
    def uuid(self) -> str | None:
        found = self._ask("device_id", lambda: self._library.nvmlDeviceGetUUID(self._handle))
        return found.decode() if isinstance(found, bytes) else found

    @property
    def driver(self) -> str | None:
        found = self._ask("driver", self._library.nvmlSystemGetDriverVersion)
        return found.decode() if isinstance(found, bytes) else found

    @property
    def memory_bytes(self) -> int | None:
        """What the device has."""
        found = self._ask("memory", lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle))
        return None if found is None else int(found.total)

    @property
    def clock_mhz(self) -> float | None:
        """Of the multiprocessors, now."""
        kind = self._library.NVML_CLOCK_SM
        found = self._ask("clock_mhz", lambda: self._library.nvmlDeviceGetClockInfo(self._handle, kind))
        return None if found is None else float(found)

    @property
    def temperature_celsius(self) -> float | None:
        kind = self._library.NVML_TEMPERATURE_GPU
        ask = self._library.nvmlDeviceGetTemperature
        found = self._ask("temperature_celsius", lambda: ask(self._handle, kind))
        return None if found is None else float(found)

    @property
    def throttles(self) -> list[str] | None:
        """Why the clocks are held down just now."""
        bits = self._ask("throttles", lambda: self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if bits is None else [words for bit, words in THROTTLES.items() if bits & bit]

    @property
    def joules(self) -> float | None:
        """Since the driver was loaded."""
        ask = self._library.nvmlDeviceGetTotalEnergyConsumption
        millijoules = self._ask("joules_per_item", lambda: ask(self._handle))
        return None if millijoules is None else millijoules / 1e3

    @property
    def mig(self) -> bool | None:
        """Whether this is a slice of a GPU; None, too, of a GPU that cannot be cut into any."""
        mode = self._ask("mig", lambda: self._library.nvmlDeviceGetMigMode(self._handle)[0])
        return None if mode is None else bool(mode == self._library.NVML_DEVICE_MIG_ENABLE)

    @property
    def ecc_errors(self) -> int | None:
        """Uncorrected ones since the driver was loaded."""
        kind, since = self._library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._library.NVML_VOLATILE_ECC
        ask = self._library.nvmlDeviceGetTotalEccErrors
        found = self._ask("ecc_errors", lambda: ask(self._handle, kind, since))
        return None if found is None else int(found)

    @property
    def own_bytes(self) -> int | None:
        """Memory of this process on the device, CUDA's own included."""
        mine = [process for process in self._processes("device_process_bytes") or [] if process.pid == os.getpid()]
        return int(mine[0].usedGpuMemory) if mine and mine[0].usedGpuMemory else None

    @property
    def unknown(self) -> int | None:
        """Other processes on the device. Where pids are a container's own, one of those that NVML knows is this one."""
        processes = self._processes("unknown")
        if processes is None:
            return None
        others = [process for process in processes if process.pid != os.getpid()]
        return len(others) if len(others) < len(processes) else max(0, len(processes) - 1)

    def _processes(self, what: str) -> list[Any] | None:
        ask = self._library.nvmlDeviceGetComputeRunningProcesses
        found: list[Any] | None = self._ask(what, lambda: list(ask(self._handle)))
        return found
