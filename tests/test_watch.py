"""Clocks, throttling, other processes and energy, by a stand-in for NVML: there is no GPU where these tests run."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvml_stand_in import NAME, StandIn

from duel.measure import watch as watching
from duel.measure.device import Device, World, gpu
from duel.measure.nvml import Gpu
from duel.measure.watch import Conditions, Watch, left_out

POWER_BRAKE, SOFTWARE_POWER_CAP = 0x80, 0x4


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(watching, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(watching, "PROC", tmp_path)  # what others do to this machine's CPUs is not for these tests
    return stand_in


def watch_gpu() -> Watch:
    return Watch(Device("gpu", NAME, 1), World())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds, which go on only where a test says so."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=lambda s: None))
    return now


def test_a_quiet_block_has_no_faults(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    nvml.throttles = SOFTWARE_POWER_CAP  # normal on an H100
    found = watch_gpu().block()
    assert found == Conditions(1980.0, 54.0, (), 0, None)
    assert found.faults == []


def test_a_throttled_block_is_marked_and_left_out(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    watch = watch_gpu()
    conditions = []
    for throttles in (0, POWER_BRAKE, 0, 0x20, 0x20):
        nvml.throttles = throttles
        conditions.append(watch.block())
    assert left_out(conditions) == ([1, 3, 4], "1 throttled (power brake); 2 throttled (software thermal)")


def test_a_block_with_a_new_memory_error_is_left_out(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    watch = watch_gpu()
    before = watch.block()
    nvml.ecc_errors += 1
    assert left_out([before, watch.block(), watch.block()]) == ([1], "1 uncorrected memory error")


def test_memory_errors_that_are_not_told_for_a_while_are_not_new_ones(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    watch = watch_gpu()
    conditions = [watch.block()]
    nvml.fails = {"nvmlDeviceGetTotalEccErrors"}
    conditions.append(watch.block())
    nvml.fails = set()
    assert left_out([*conditions, watch.block()]) == ([], "")
    nvml.ecc_errors += 1
    assert watch.block().faults == ["uncorrected memory error"]


def test_another_process_on_the_device_is_warned_of_and_its_blocks_are_left_out(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    nvml.processes = [os.getpid(), 1]
    watch = watch_gpu()
    assert watch.warning == f"1 other processes are on the {NAME}"
    assert watch.block().faults == ["another process on the device"]


def test_in_a_container_one_of_the_processes_is_this_one(nvml: StandIn) -> None:
    nvml.processes = [4711]
    assert Gpu.open(NAME).unknown == 0
    nvml.processes = [4711, 4712]
    assert Gpu.open(NAME).unknown == 1


def test_the_cpus_of_a_gpu_s_process_are_watched_too(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation a host that is busy holds up the device."""
    nvml.joules = iter([1000] * 9)
    watch = watch_gpu()
    readings = iter([(0.0, 0.0, 0.0), (1.0, 1.0 * len(watch._cpus), 0.5)])
    monkeypatch.setattr(Watch, "_cpu_seconds", lambda self: next(readings))
    watch.begin()
    assert watch.block().faults == ["other processes on the CPUs"]


def test_a_slice_of_a_gpu_is_known_by_what_cuda_calls_it_too(nvml: StandIn) -> None:
    """Where NVML shows the whole GPU, whose name is another."""
    watch = Watch(Device("gpu", f"{NAME} MIG 1g.10gb", 1), World())
    watch.begin()
    found = watch.columns([watch.block()], items=10)
    assert found["mig"] is True
    assert found["missing"]["joules_per_item"].startswith("the device is a MIG slice")
    assert watch.untold.startswith("throttling and other processes (NVML: device 0 is a NVIDIA H100 80GB HBM3, not")


def test_on_several_devices_only_the_first_is_asked(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    assert Watch(Device("gpu", NAME, 1), World(0, 2)).untold == "conditions on the other ranks"


def test_energy_is_the_counter_s_difference(nvml: StandIn, clock: SimpleNamespace) -> None:
    readings = iter([(0.0, 1_000_000), (2.0, 1_140_000), (2.0, 1_140_000), (22.0, 7_140_000)])

    def read(handle: int) -> int:
        clock.seconds, joules = next(readings)
        return joules

    object.__setattr__(nvml, "nvmlDeviceGetTotalEnergyConsumption", read)
    watch = watch_gpu()
    watch.begin()
    found = watch.columns([watch.block()], items=3000)
    assert (found["joules_per_item"], found["mean_watts"], found["energy_source"]) == (2.0, 300.0, "NVML")
    assert found["idle_watts"] == 70.0
    assert found["device_process_bytes"] == 3_000_000_000


@pytest.mark.parametrize(
    ("joules", "seconds", "words"),
    [
        ([9_000_000, 9_000_000, 9_000_000, 5_000], 20.0, "the energy counter went backwards"),
        ([1_000, 1_000, 1_000, 2_000], 4.0, "a window of 4.0 s; 10 are needed"),
    ],
)
def test_energy_that_cannot_be_told_is_empty_with_its_reason(
    nvml: StandIn, clock: SimpleNamespace, joules: list[int], seconds: float, words: str
) -> None:
    nvml.joules = iter(joules)
    watch = watch_gpu()
    watch.begin()
    clock.seconds = seconds
    found = watch.columns([watch.block()], items=10)
    assert found["joules_per_item"] is None
    assert found["missing"]["joules_per_item"] == words
    assert found["missing"]["mean_watts"] == words


def test_a_slice_of_a_gpu_has_no_energy_of_its_own(nvml: StandIn) -> None:
    nvml.joules, nvml.mig = iter([1000] * 9), 1
    watch = watch_gpu()
    watch.begin()
    found = watch.columns([watch.block()], items=10)
    assert found["mig"] is True
    assert found["missing"]["joules_per_item"] == "the device is a MIG slice, the counter is the whole GPU's"


def test_a_counter_of_one_device_is_not_the_energy_of_several(nvml: StandIn, clock: SimpleNamespace) -> None:
    nvml.joules = iter([1000, 1000, 1000, 9_001_000])
    watch = Watch(Device("gpu", NAME, 1), World(0, 2))
    watch.begin()
    clock.seconds = 20.0
    found = watch.columns([watch.block()], items=10)
    assert found["joules_per_item"] is None
    assert found["missing"]["joules_per_item"] == "measured on one device"
    assert watch.least_seconds == 0.0


FUNCTIONS = [
    *("ClockInfo", "Temperature", "CurrentClocksThrottleReasons", "ComputeRunningProcesses"),
    *("TotalEnergyConsumption", "MigMode", "TotalEccErrors"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nvml_that_fails_midway_is_a_reason_and_no_end(nvml: StandIn, function: str) -> None:
    nvml.joules = iter([1000] * 9)
    watch = watch_gpu()
    watch.begin()
    nvml.fails = {f"nvmlDeviceGet{function}"}
    conditions = [watch.block()]
    found = watch.columns(conditions, items=10)
    empty = {name for name, value in found.items() if value is None}
    assert empty <= set(found["missing"])
    columns = {"ClockInfo": "clock_mhz", "Temperature": "temperature_celsius", "TotalEccErrors": "ecc_errors"}
    columns |= {"TotalEnergyConsumption": "joules_per_item", "MigMode": "mig"}
    columns |= {"ComputeRunningProcesses": "device_process_bytes"}
    if function in columns:
        assert found["missing"][columns[function]] == "NVML: Unknown Error"
    untold = {"CurrentClocksThrottleReasons": "throttling", "ComputeRunningProcesses": "other processes"}
    assert watch.untold == (f"{untold[function]} (NVML: Unknown Error)" if function in untold else "")


@pytest.mark.parametrize("gone", ["module", "nvmlInit", "nvmlDeviceGetHandleByIndex", "other device"])
def test_without_nvml_the_columns_say_so(nvml: StandIn, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    if gone == "module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif gone == "other device":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    else:
        nvml.fails = {gone}
    watch = watch_gpu()
    watch.begin()
    found = watch.columns([watch.block()], items=10)
    for name in ("clock_mhz", "clock_mhz_lowest", "joules_per_item", "device_process_bytes"):
        assert found[name] is None
        assert found["missing"][name].startswith("NVML: ")
    assert watch.device_id is None
    assert watch.untold.startswith("throttling and other processes (NVML: ")
    assert gpu(NAME, 1, "9.0") == Device("gpu", NAME, 1, compute_capability="9.0")


def test_an_older_nvml_without_a_query_is_a_reason(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StandIn, "nvmlDeviceGetMigMode")
    found = Gpu.open(NAME)
    assert found.mig is None
    assert found.failures["mig"].startswith("NVML: AttributeError: ")
    monkeypatch.delattr(StandIn, "NVMLError")
    nvml.fails = {"nvmlDeviceGetUUID"}
    assert found.uuid is None
    assert found.failures["device_id"] == "NVML: StandInError: Unknown Error"
    assert found.clock_mhz == 1980


def test_the_device_is_found_where_cuda_shows_it(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gpu.open(NAME).uuid == "GPU-0000"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1111,GPU-0000")
    assert Gpu.open(NAME, 1).uuid == "GPU-0000"
    assert gpu(NAME, 1, "9.0").memory_bytes is None  # the first one shown is the other
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = gpu(NAME, 1, "9.0")
    assert (found.driver, found.memory_bytes) == ("580.65.06", 85520809984)


def test_a_training_on_several_devices_or_a_slice_has_no_energy(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    assert watch_gpu().counters() == [1.0]
    assert Watch(Device("gpu", NAME, 1), World(0, 2)).counters() == []
    nvml.mig = 1
    assert watch_gpu().counters() == []


def test_clocks_and_temperatures_of_blocks_are_summed_up(nvml: StandIn) -> None:
    nvml.joules = iter([1000] * 9)
    blocks = [Conditions(1980.0, 60.0), Conditions(1200.0, 83.0), Conditions(1900.0, 70.0)]
    found = watch_gpu().columns(blocks, items=1)
    assert (found["clock_mhz"], found["clock_mhz_lowest"], found["temperature_celsius"]) == (1900.0, 1200.0, 83.0)
