"""What AMD's management library (amdsmi) reports about the GPU that this process computes on.

The same as ``duel.measure.nvml`` has of NVIDIA's, each query by itself. Nothing of it has run on such a GPU: a stand-in
with the functions, keys and units of amdsmi 7.0.2 is what the tests ask.
"""

import os
from collections.abc import Callable
from typing import Any

# Clocks limited for these reasons are not comparable; the power limit (ppt) is normal.
THROTTLES = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "thermal",
    "active_vr_thrm": "voltage regulator hot",
    "active_hbm_thrm": "memory hot",
}


class AmdGpu:
    """A GPU that this process may use. ``open`` it."""

    source = "amdsmi"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self.failures: dict[str, str] = {}

    @classmethod
    def open(cls, name: str, index: int = 0) -> "AmdGpu":
        """Open the ``index``th of the GPUs that ROCm shows this process.

        Raises LookupError, with the reason, if amdsmi is not available or has no such GPU.
        """
        try:
            import amdsmi
        except ImportError as error:
            raise LookupError("amdsmi is not installed in this interpreter") from error
        except (OSError, KeyError) as error:  # it loads ROCm's library when it is imported
            raise LookupError(f"amdsmi: ROCm's library cannot be loaded ({error})") from error
        try:
            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
            chosen = _chosen(index)
            if chosen >= len(handles):
                raise LookupError(f"amdsmi: device {chosen} is not among {len(handles)}")
            found = str(amdsmi.amdsmi_get_gpu_asic_info(handles[chosen])["market_name"])
        except amdsmi.AmdSmiException as error:
            raise LookupError(f"amdsmi: {error}") from error
        if found not in name and name not in found:
            raise LookupError(f"amdsmi: device {chosen} is a {found}, not the {name} in use")
        return cls(amdsmi, handles[chosen])

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            found = ask()
        except self._library.AmdSmiException as error:
            self.failures[what] = f"amdsmi: {error}"
            return None
        if found == "N/A":  # its word for what this model does not report
            self.failures[what] = "amdsmi: not reported by this model"
            return None
        return found

    @property
    def uuid(self) -> str | None:
        found = self._ask("device_id", lambda: self._library.amdsmi_get_gpu_device_uuid(self._handle))
        return None if found is None else str(found)

    @property
    def driver(self) -> str | None:
        ask = self._library.amdsmi_get_gpu_driver_info
        found = self._ask("driver", lambda: ask(self._handle)["driver_version"])
        return None if found is None else str(found)

    @property
    def memory_bytes(self) -> int | None:
        """The device's total memory."""
        ask = self._library.amdsmi_get_gpu_vram_info
        found = self._ask("memory", lambda: ask(self._handle)["vram_size"])
        return None if found is None else int(found) * 2**20

    @property
    def clock_mhz(self) -> float | None:
        """The current clock of the compute units."""
        kind, ask = self._library.AmdSmiClkType.GFX, self._library.amdsmi_get_clock_info
        found = self._ask("clock_mhz", lambda: ask(self._handle, kind)["clk"])
        return None if found is None else float(found)

    @property
    def temperature_celsius(self) -> float | None:
        """The hottest spot's."""
        kind = self._library.AmdSmiTemperatureType.HOTSPOT
        now, ask = self._library.AmdSmiTemperatureMetric.CURRENT, self._library.amdsmi_get_temp_metric
        found = self._ask("temperature_celsius", lambda: ask(self._handle, kind, now))
        return None if found is None else float(found)

    @property
    def throttles(self) -> list[str] | None:
        """Why the clocks are limited at this moment."""
        found = self._ask("throttles", lambda: self._library.amdsmi_get_violation_status(self._handle))
        return None if found is None else [reason for key, reason in THROTTLES.items() if found.get(key) is True]

    @property
    def joules(self) -> float | None:
        """Energy used since the driver was loaded: a counter in units of its own resolution, microjoules."""
        found = self._ask("joules_per_item", lambda: self._library.amdsmi_get_energy_count(self._handle))
        return None if found is None else found["energy_accumulator"] * found["counter_resolution"] / 1e6

    @property
    def mig(self) -> bool | None:
        """Whether this is a slice of a GPU: partitions of AMD's are not told apart here."""
        return None

    @property
    def ecc_errors(self) -> int | None:
        """Uncorrected errors since the driver was loaded."""
        ask = self._library.amdsmi_get_gpu_total_ecc_count
        found = self._ask("ecc_errors", lambda: ask(self._handle)["uncorrectable_count"])
        return None if found is None else int(found)

    @property
    def own_bytes(self) -> int | None:
        """This process's memory on the device."""
        mine = [one for one in self._processes("device_process_bytes") or [] if one["pid"] == os.getpid()]
        return int(mine[0]["memory_usage"]["vram_mem"]) if mine and mine[0]["memory_usage"]["vram_mem"] else None

    @property
    def unknown(self) -> int | None:
        """Other processes on the device. If pids are a container's own, one of those it knows is this one."""
        processes = self._processes("unknown")
        if processes is None:
            return None
        others = [one for one in processes if one["pid"] != os.getpid()]
        return len(others) if len(others) < len(processes) else max(0, len(processes) - 1)

    def _processes(self, what: str) -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] | None = self._ask(
            what, lambda: list(self._library.amdsmi_get_gpu_process_list(self._handle))
        )
        return found


def _chosen(index: int) -> int:
    """Return the device that the ``index``th visible one is, among those that ROCR and then HIP leave."""
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        shown = [entry for entry in os.environ.get(variable, "").split(",") if entry.isdecimal()]
        index = int(shown[index]) if index < len(shown) else index
    return index
