"""What NVIDIA's management library reports about the GPU that this process computes on.

Every query may fail by itself, on some device or driver or midway: then it returns None and ``failures`` has NVML's
message.
"""

import os
from collections.abc import Callable
from typing import Any

# Clocks throttled for these reasons are not comparable. Software power capping, 0x4, is normal.
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class Gpu:
    """A GPU that this process may use. ``open`` it."""

    source = "NVML"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self.failures: dict[str, str] = {}

    @classmethod
    def open(cls, name: str, index: int = 0) -> "Gpu":
        """Open the ``index``th of the GPUs that CUDA shows this process, in PCI bus order.

        Raises LookupError, with the reason, if NVML is not available or has no GPU called ``name`` at that index.
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
            raise LookupError(f"NVML: device {chosen} is a {found}, not the {name} in use")
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
        """The device's total memory."""
        found = self._ask("memory", lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle))
        return None if found is None else int(found.total)

    @property
    def clock_mhz(self) -> float | None:
        """The current clock of the multiprocessors."""
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
        """Why the clocks are throttled at this moment."""
        bits = self._ask("throttles", lambda: self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if bits is None else [reason for bit, reason in THROTTLES.items() if bits & bit]

    @property
    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        ask = self._library.nvmlDeviceGetTotalEnergyConsumption
        millijoules = self._ask("joules_per_item", lambda: ask(self._handle))
        return None if millijoules is None else millijoules / 1e3

    @property
    def mig(self) -> bool | None:
        """Whether this is a slice of a GPU; also None for a GPU that cannot be sliced."""
        mode = self._ask("mig", lambda: self._library.nvmlDeviceGetMigMode(self._handle)[0])
        return None if mode is None else bool(mode == self._library.NVML_DEVICE_MIG_ENABLE)

    @property
    def ecc_errors(self) -> int | None:
        """Uncorrected errors since the driver was loaded."""
        kind, since = self._library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._library.NVML_VOLATILE_ECC
        ask = self._library.nvmlDeviceGetTotalEccErrors
        found = self._ask("ecc_errors", lambda: ask(self._handle, kind, since))
        return None if found is None else int(found)

    @property
    def own_bytes(self) -> int | None:
        """This process's memory on the device, CUDA's own included."""
        mine = [process for process in self._processes("device_process_bytes") or [] if process.pid == os.getpid()]
        return int(mine[0].usedGpuMemory) if mine and mine[0].usedGpuMemory else None

    @property
    def unknown(self) -> int | None:
        """Other processes on the device. If pids are a container's own, one of those NVML knows is this one."""
        processes = self._processes("unknown")
        if processes is None:
            return None
        others = [process for process in processes if process.pid != os.getpid()]
        return len(others) if len(others) < len(processes) else max(0, len(processes) - 1)

    def _processes(self, what: str) -> list[Any] | None:
        ask = self._library.nvmlDeviceGetComputeRunningProcesses
        found: list[Any] | None = self._ask(what, lambda: list(ask(self._handle)))
        return found
