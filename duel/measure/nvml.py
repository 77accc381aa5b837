"""What NVIDIA's management library reports about the GPU that this process computes on.

Every query may fail by itself, on some device, driver or version of the library, or midway: then it returns None and
``failures`` has the reason. None takes a measurement down.
"""

import os
from collections.abc import Callable
from typing import Any

# Clocks throttled for these reasons are not comparable. Software power capping, 0x4, is normal.
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
Query = Callable[[Any, Any], Any]  # of the library and its handle


class Gpu:
    """A GPU that this process may use. ``open`` it."""

    source, error = "NVML", "NVMLError"  # the library, and the class of its own errors

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
            by_index = chosen.isdigit()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(chosen)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(chosen)
            )
            found = pynvml.nvmlDeviceGetName(handle)
        except Exception as error:  # whatever it raises, work goes on without it, and its columns say why
            raise LookupError(cls._said(error, pynvml)) from error
        found = found.decode() if isinstance(found, bytes) else str(found)
        if found != name:
            raise LookupError(f"NVML: device {chosen} is a {found}, not the {name} in use")
        return cls(pynvml, handle)

    @classmethod
    def _said(cls, error: Exception, library: Any) -> str:
        own = isinstance(error, getattr(library, cls.error, ()))  # another version may call its errors something else
        return f"{cls.source}: {error}" if own else f"{cls.source}: {type(error).__name__}: {error}"

    def _ask(self, what: str, query: Query) -> Any:
        try:
            return query(self._library, self._handle)
        except Exception as error:  # whatever it raises becomes the reason for an empty column
            self.failures[what] = self._said(error, self._library)
            return None

    @property
    def uuid(self) -> str | None:
        found = self._ask("device_id", lambda nvml, handle: nvml.nvmlDeviceGetUUID(handle))
        return found.decode() if isinstance(found, bytes) else found

    @property
    def driver(self) -> str | None:
        found = self._ask("driver", lambda nvml, handle: nvml.nvmlSystemGetDriverVersion())
        return found.decode() if isinstance(found, bytes) else found

    @property
    def memory_bytes(self) -> int | None:
        """The device's total memory."""
        found: int | None = self._ask("memory", lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        return found

    @property
    def clock_mhz(self) -> float | None:
        """The current clock of the multiprocessors."""
        found = self._ask("clock_mhz", lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return None if found is None else float(found)

    @property
    def temperature_celsius(self) -> float | None:
        found = self._ask(
            "temperature_celsius",
            lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )
        return None if found is None else float(found)

    @property
    def throttles(self) -> list[str] | None:
        """Why the clocks are throttled at this moment."""
        bits = self._ask("throttles", lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return None if bits is None else [reason for bit, reason in THROTTLES.items() if bits & bit]

    @property
    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        found: float | None = self._ask(
            "joules_per_item", lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        )
        return found

    @property
    def mig(self) -> bool | None:
        """Whether this is a slice of a GPU; also None for a GPU that cannot be sliced."""
        found: bool | None = self._ask(
            "mig", lambda nvml, handle: bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        )
        return found

    @property
    def ecc_errors(self) -> int | None:
        """Uncorrected errors since the driver was loaded."""
        found: int | None = self._ask("ecc_errors", self._uncorrected)
        return found

    @staticmethod
    def _uncorrected(nvml: Any, handle: Any) -> int:
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))

    @property
    def own_bytes(self) -> int | None:
        """This process's memory on the device, the framework's own context included."""
        found = self._ask("device_process_bytes", self._processes) or []
        return next((int(used) for pid, used in found if pid == os.getpid() and used), None)

    @property
    def unknown(self) -> int | None:
        """Other processes on the device. If pids are a container's own, one of those it knows is this one."""
        found = self._ask("unknown", self._processes)
        if found is None:
            return None
        others = [pid for pid, _ in found if pid != os.getpid()]
        return len(others) if len(others) < len(found) else max(0, len(found) - 1)

    @staticmethod
    def _processes(nvml: Any, handle: Any) -> list[tuple[int, int | None]]:
        """Return the processes on the device and the bytes of each."""
        return [(one.pid, one.usedGpuMemory) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
