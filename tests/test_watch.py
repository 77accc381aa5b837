"""Clocks, throttling, other processes and energy, by a stand-in for NVML: there is no GPU where these tests run."""

import os
import subprocess
import sys
import time
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


CPU = Device("cpu", "some processor", 1)


def test_a_foreign_load_on_the_cpus_is_seen() -> None:
    """The load: a process that does nothing but compute."""
    watch = Watch(CPU, World())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as load:
        watch.begin()
        time.sleep(1.0)
        block = watch.block()
        load.kill()
    assert block.foreign_load is not None
    assert block.foreign_load > watching.FOREIGN_LOAD
    assert block.faults == ["other processes on the CPUs"]
    assert left_out([Conditions(), block]) == ([1], "1 other processes on the CPUs")
    assert watch.columns([block], items=1)["foreign_load"] == block.foreign_load


def test_this_process_s_own_load_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process's own clock: other processes may be there while tests run."""
    watch = Watch(CPU, World())
    before = watch._cpu_seconds()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = watch._cpu_seconds()
    assert after[2] - before[2] == pytest.approx(0.3, rel=0.1)
    assert watch._load((0.0, 0.0, 0.0), (0.3, 0.3, 0.3)) == 0.0


def test_ranks_of_this_row_that_share_its_cpus_are_not_others() -> None:
    """By a process with the world's address on its command line, as each rank has it."""
    burn = "import sys, time\nsys.stdin.readline()\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    address = "127.0.0.1:98765"
    command = [sys.executable, "-c", burn, "--rank", "1", "--meet", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin
        assert peer.stdout
        watches = [Watch(CPU, World(0, 2, 0, where)) for where in (address, "127.0.0.1:98764")]
        before = [watch._cpu_seconds()[2] for watch in watches]
        peer.stdin.write("\n")
        peer.stdin.flush()
        peer.stdout.readline()
        shared, alone = (watch._cpu_seconds()[2] - since for watch, since in zip(watches, before, strict=True))
        assert shared - alone == pytest.approx(0.5, abs=0.1)
        last = watches[0]._cpu_seconds()[2]
        assert watching._sharing(World(0, 2, 0, address), []) == []  # of other CPUs
        peer.communicate("\n")
    assert watches[0]._cpu_seconds()[2] >= last  # it has ended; its seconds are not given back


def test_foreign_load_is_what_the_kernel_counts_beyond_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(CPU, World())
    watch._cpus = [0, 1]
    # (now, busy seconds of both CPUs, of which ours): 2 s, in which both were busy, half of it ours
    watch._before = (10.0, 100.0, 50.0)
    monkeypatch.setattr(watch, "_cpu_seconds", lambda: (12.0, 104.0, 52.0))
    found = watch.block()
    assert found.foreign_load == pytest.approx((2.0 - 2 * watching.TICK_SECONDS) / 4)
    assert found.faults == ["other processes on the CPUs"]


def test_the_kernel_s_own_figures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text(
        "cpu  900 0 0 0 0 0 0 0 0 0\n"
        "cpu0 100 10 20 5000 7 1 2 3 50 0\n"  # user nice system idle iowait irq softirq steal guest
        "cpu1 200 0 0 5000 0 0 0 0 0 0\n"
        "cpu2 999 0 0 5000 0 0 0 0 0 0\n"
    )
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 2000.0\ncpu MHz\t\t: 2400.0\ncpu MHz\t\t: 9000.0\n")
    monkeypatch.setattr(watching, "PROC", tmp_path)
    watch = Watch(CPU, World())
    watch._cpus = [0, 1]
    _, busy, own = watch._cpu_seconds()
    assert busy == pytest.approx((136 + 200) / os.sysconf("SC_CLK_TCK"))
    assert own > 0
    assert watch._cpu_clock() == 2200.0


def rapl(folder: Path, *readings: int, most: int = 262_143_328_850) -> None:
    for package, reading in enumerate(readings):
        path = folder / f"intel-rapl:{package}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "name").write_text(f"package-{package}\n")
        (path / "energy_uj").write_text(f"{reading}\n")
        (path / "max_energy_range_uj").write_text(f"{most}\n")
        (folder / f"intel-rapl:{package}:0").mkdir(exist_ok=True)  # a part of the package, which is counted with it


def test_energy_of_cpus_is_that_of_all_packages_and_counters_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(watching, "POWERCAP", tmp_path)
    monkeypatch.setattr(Watch, "_cpu_seconds", lambda self: (0.0, 0.0, 0.0))
    monkeypatch.setattr(watching, "IDLE_SECONDS", 0.0)
    rapl(tmp_path, 10_000_000, 262_000_000_000, 5_000_000)
    (tmp_path / "intel-rapl:2" / "name").write_text("psys\n")  # the whole platform, on laptops
    watch = Watch(CPU, World())
    watch.begin()
    clock.seconds = 20.0
    for package, reading in enumerate((310_000_000, 100_000_000)):  # the second has passed its range
        (tmp_path / f"intel-rapl:{package}" / "energy_uj").write_text(f"{reading}\n")
    found = watch.columns([watch.block()], items=100)
    used = 300 + (262_143.328850 - 262_000 + 100)
    assert found["joules_per_item"] == pytest.approx(used / 100)
    assert found["mean_watts"] == pytest.approx(used / 20)
    assert found["energy_source"] == "RAPL"


def test_energy_counters_that_only_root_may_read_are_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POWERCAP", tmp_path)
    rapl(tmp_path, 10)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    watch = Watch(CPU, World())
    watch.begin()
    found = watch.columns([watch.block()], items=1)
    assert found["missing"]["joules_per_item"].startswith("no energy counter can be read here")
