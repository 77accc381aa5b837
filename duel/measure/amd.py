"""What AMD's management library (amdsmi) reports about the GPU that this process computes on.

The same queries as ``duel.measure.nvml`` has. Nothing of it has run on such a GPU: a stand-in
with the functions, keys and units of amdsmi 7.0.2 is what the tests ask.
"""

import os
from typing import Any

from duel.measure.nvml import Gpu, Query

# Clocks limited for these reasons are not comparable; the power limit (ppt) is normal.
THROTTLES = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "thermal",
    "active_vr_thrm": "voltage regulator hot",
    "active_hbm_thrm": "memory hot",
}
NOTHING = "N/A"  # the library's word for what a model does not report


class AmdGpu(Gpu):
    """A GPU that this process may use. ``open`` it."""

    source, error = "amdsmi", "AmdSmiException"

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
        chosen = _chosen(index)
        try:
            amdsmi.amdsmi_init()
            handles = dict(enumerate(amdsmi.amdsmi_get_processor_handles()))
            if chosen in handles:
                found = str(amdsmi.amdsmi_get_gpu_asic_info(handles[chosen])["market_name"])
        except Exception as error:  # whatever it raises, work goes on without it, and its columns say why
            raise LookupError(cls._said(error, amdsmi)) from error
        if chosen not in handles:
            raise LookupError(f"amdsmi: device {chosen} is not among {len(handles)}")
        if found not in name and name not in found:
            raise LookupError(f"amdsmi: device {chosen} is a {found}, not the {name} in use")
        return cls(amdsmi, handles[chosen])

    def _ask(self, what: str, query: Query) -> Any:
        found = super()._ask(what, query)
        if found == NOTHING:
            self.failures[what] = "amdsmi: not reported by this model"
            return None
        return found

    @property
    def uuid(self) -> str | None:
        found: str | None = self._ask("device_id", lambda smi, handle: smi.amdsmi_get_gpu_device_uuid(handle))
        return found

    @property
    def driver(self) -> str | None:
        found: str | None = self._ask(
            "driver", lambda smi, handle: smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]
        )
        return found

    @property
    def memory_bytes(self) -> int | None:
        """The device's total memory."""
        found = self._ask("memory", lambda smi, handle: _number(smi.amdsmi_get_gpu_vram_info(handle)["vram_size"]))
        return None if found is None else int(found) * 2**20

    @property
    def clock_mhz(self) -> float | None:
        """The current clock of the compute units."""
        found: float | None = self._ask(
            "clock_mhz", lambda smi, handle: _number(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)["clk"])
        )
        return found

    @property
    def temperature_celsius(self) -> float | None:
        """The hottest spot's."""
        found: float | None = self._ask("temperature_celsius", self._hottest)
        return found

    @staticmethod
    def _hottest(smi: Any, handle: Any) -> Any:
        kind, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return _number(smi.amdsmi_get_temp_metric(handle, kind, now))

    @property
    def throttles(self) -> list[str] | None:
        """Why the clocks are limited at this moment."""
        found = self._ask("throttles", lambda smi, handle: dict(smi.amdsmi_get_violation_status(handle)))
        return None if found is None else [reason for key, reason in THROTTLES.items() if found.get(key) is True]

    @property
    def joules(self) -> float | None:
        """Energy used since the driver was loaded: a counter in units of its own resolution, microjoules."""
        found: float | None = self._ask("joules_per_item", self._counted)
        return found

    @staticmethod
    def _counted(smi: Any, handle: Any) -> float:
        found = smi.amdsmi_get_energy_count(handle)
        return float(found["energy_accumulator"] * found["counter_resolution"] / 1e6)

    @property
    def mig(self) -> bool | None:
        """Whether this is a slice of a GPU: partitions of AMD's are not told apart here."""
        return None

    @staticmethod
    def _uncorrected(smi: Any, handle: Any) -> int:
        return int(smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"])

    @staticmethod
    def _processes(smi: Any, handle: Any) -> list[tuple[int, int | None]]:
        found = [(one["pid"], one["memory_usage"]["vram_mem"]) for one in smi.amdsmi_get_gpu_process_list(handle)]
        return [(pid, used if isinstance(used, int) else None) for pid, used in found]


def _number(answer: Any) -> Any:
    return answer if answer == NOTHING else float(answer)


def _chosen(index: int) -> int:
    """Return the device that the ``index``th visible one is, among those that ROCR and then HIP leave."""
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        shown = [entry for entry in os.environ.get(variable, "").split(",") if entry.isdecimal()]
        index = int(shown[index]) if index < len(shown) else index
    return index
