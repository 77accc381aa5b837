"""A stand-in for pynvml that replays recorded values.

It has the functions that Duel calls, with values as an H100 gave them (in the units of NVML: MHz, degrees Celsius,
millijoules, bytes), and can fail at any of them.
"""

import os
from types import SimpleNamespace
from typing import Any

NAME = "NVIDIA H100 80GB HBM3"


class StandInError(Exception):
    """In the place of pynvml.NVMLError."""


class StandIn(SimpleNamespace):
    """In the place of pynvml; ``fails`` are the functions that raise."""

    NVMLError = StandInError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE = 1, 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self) -> None:
        super().__init__(
            fails=set(), throttles=0, ecc_errors=7, processes=[os.getpid()], joules=iter(()), mig=0, clock=1980
        )

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "fails"):

            def fail(*_: Any) -> None:
                raise StandInError("Unknown Error")

            return fail
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's own names, here and below

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise StandInError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-0000": 0, "GPU-1111": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return NAME if handle == 0 else "NVIDIA L4"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle:04d}"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=85520809984)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return self.clock

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        return 54

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self.throttles

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=3_000_000_000) for pid in self.processes]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        return next(self.joules)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return self.mig, self.mig

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:  # noqa: N802
        return self.ecc_errors
