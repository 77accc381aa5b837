"""AMD's GPUs through amdsmi: no such GPU is here, so a stand-in answers with its functions, keys and units (7.0.2)."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duel.measure import gpus
from duel.measure.amd import AmdGpu
from duel.measure.device import Device, World
from duel.measure.watch import Watch

NAME = "AMD Instinct MI300X"


class StandInError(Exception):
    """In the place of amdsmi.AmdSmiException."""


class StandIn(SimpleNamespace):
    """In the place of amdsmi; ``fails`` are the functions that raise, ``na`` those whose value is not reported."""

    AmdSmiException = StandInError
    AmdSmiClkType = SimpleNamespace(GFX=1)
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    def __init__(self) -> None:
        super().__init__(fails=set(), clock=2100, active={}, pids=[os.getpid()], microjoules=0.0)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("amdsmi") and name in object.__getattribute__(self, "fails"):

            def fail(*_: Any) -> None:
                raise StandInError("AMDSMI_STATUS_NOT_SUPPORTED")

            return fail
        return object.__getattribute__(self, name)

    def amdsmi_init(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["first", "second"]

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, str]:
        return {"market_name": NAME if handle == "first" else "AMD Instinct MI210"}

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return f"uuid-{handle}"

    def amdsmi_get_gpu_driver_info(self, handle: str) -> dict[str, str]:
        return {"driver_version": "6.14.14"}

    def amdsmi_get_gpu_vram_info(self, handle: str) -> dict[str, int]:
        return {"vram_size": 196592}

    def amdsmi_get_clock_info(self, handle: str, kind: int) -> dict[str, Any]:
        return {"clk": self.clock}

    def amdsmi_get_temp_metric(self, handle: str, kind: int, metric: int) -> int:
        return 61

    def amdsmi_get_violation_status(self, handle: str) -> dict[str, Any]:
        quiet = {"active_prochot_thrm": False, "active_socket_thrm": False, "active_hbm_thrm": "N/A"}
        return quiet | self.active

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        self.microjoules += 7e9
        return {"energy_accumulator": self.microjoules / 15.3, "counter_resolution": 15.3}

    def amdsmi_get_gpu_total_ecc_count(self, handle: str) -> dict[str, int]:
        return {"uncorrectable_count": 3}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[dict[str, Any]]:
        return [{"pid": pid, "memory_usage": {"vram_mem": 5 << 30}} for pid in self.pids]


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setitem(sys.modules, "amdsmi", found)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("duel.measure.watch.IDLE_SECONDS", 0.01)
    return found


def test_it_reports_what_nvml_does_in_the_same_units(amdsmi: StandIn) -> None:
    found = gpus.opened(NAME)
    assert isinstance(found, AmdGpu)
    assert (found.uuid, found.driver, found.source) == ("uuid-first", "6.14.14", "amdsmi")
    assert found.memory_bytes == 196592 * 2**20
    assert (found.clock_mhz, found.temperature_celsius, found.ecc_errors) == (2100, 61, 3)
    assert found.joules == pytest.approx(7000)
    assert (found.own_bytes, found.unknown, found.mig, found.throttles) == (5 << 30, 0, None, [])
    amdsmi.active = {"active_socket_thrm": True, "active_ppt_pwr": True}
    assert found.throttles == ["thermal"], "the power limit is normal"
    amdsmi.pids = [os.getpid(), 1, 2]
    assert found.unknown == 2


def test_the_device_is_the_one_that_the_launcher_leaves(amdsmi: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,0")
    assert gpus.opened("AMD Instinct MI210").uuid == "uuid-second"
    with pytest.raises(LookupError, match="device 1 is a AMD Instinct MI210, not the AMD Instinct MI300X in use"):
        gpus.opened(NAME)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert gpus.opened(NAME).uuid == "uuid-first", "the second of those that ROCR leaves"
    with pytest.raises(LookupError, match="device 7 is not among 2"):
        gpus.opened(NAME, 7)


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(LookupError, match="amdsmi is not installed in this interpreter"):
        gpus.opened(NAME)


def test_a_library_that_cannot_be_loaded_or_begun_is_a_reason(
    amdsmi: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    amdsmi.fails = {"amdsmi_init"}
    with pytest.raises(LookupError, match="amdsmi: AMDSMI_STATUS_NOT_SUPPORTED"):
        gpus.opened(NAME)
    monkeypatch.delitem(sys.modules, "amdsmi")
    (tmp_path / "amdsmi.py").write_text("raise OSError('libamd_smi.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=r"ROCm's library cannot be loaded \(libamd_smi.so"):
        gpus.opened(NAME)


@pytest.mark.parametrize(
    ("function", "column"),
    [
        ("amdsmi_get_clock_info", "clock_mhz"),
        ("amdsmi_get_temp_metric", "temperature_celsius"),
        ("amdsmi_get_energy_count", "joules_per_item"),
        ("amdsmi_get_gpu_total_ecc_count", "ecc_errors"),
        ("amdsmi_get_gpu_process_list", "device_process_bytes"),
    ],
)
def test_a_query_that_fails_takes_nothing_down(amdsmi: StandIn, function: str, column: str) -> None:
    amdsmi.fails = {function}
    watch = Watch(Device("gpu", NAME, 1), World())
    watch.begin()
    found = watch.columns([watch.block()], 10)
    assert found[column] is None
    assert "amdsmi: AMDSMI_STATUS_NOT_SUPPORTED" in found["missing"][column]
    others = {"clock_mhz", "temperature_celsius", "ecc_errors", "device_process_bytes"} - {column}
    assert all(found[name] is not None for name in others)


def test_what_a_model_does_not_report_is_said(amdsmi: StandIn) -> None:
    amdsmi.clock = "N/A"
    found = gpus.opened(NAME)
    assert found.clock_mhz is None
    assert found.failures["clock_mhz"] == "amdsmi: not reported by this model"


def test_an_answer_of_another_form_is_a_reason_too(amdsmi: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a version that calls its values something else."""
    monkeypatch.setattr(StandIn, "amdsmi_get_clock_info", lambda *_: {"cur_clk": 2100})
    found = gpus.opened(NAME)
    assert found.clock_mhz is None
    assert found.failures["clock_mhz"] == "amdsmi: KeyError: 'clk'"
    monkeypatch.setattr(StandIn, "amdsmi_get_temp_metric", lambda *_: "61 C")
    assert found.temperature_celsius is None
    assert found.failures["temperature_celsius"] == "amdsmi: ValueError: could not convert string to float: '61 C'"
