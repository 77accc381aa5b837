"""Load and energy of CPUs, as the kernel reports them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_watch import clock

from duel.measure import probes
from duel.measure import watch as watching
from duel.measure.device import Device, World
from duel.measure.watch import Conditions, Watch, left_out

__all__ = ["clock"]  # the fixture

CPU = Device("cpu", "some processor", 1)


def test_a_foreign_load_on_the_cpus_is_seen() -> None:
    """The load: a process that does nothing but compute."""
    watch = Watch(CPU, World())
    watch._cpus = watch._cpus[:2]  # of many, one busy one is a small share
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as load:
        os.sched_setaffinity(load.pid, watch._cpus)
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
    assert watch.least_seconds == watching.ENERGY_SECONDS


def test_energy_counters_that_only_root_may_read_are_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POWERCAP", tmp_path)
    rapl(tmp_path, 10)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    watch = Watch(CPU, World())
    watch.begin()
    found = watch.columns([watch.block()], items=1)
    assert found["missing"]["joules_per_item"].startswith("no energy counter can be read here")
    assert watch.least_seconds == 0.0


HIDDEN = "cpu family\t: 25\nmodel\t\t: {}\nmodel name\t: {}\nflags\t\t: fpu avx2\n\nmodel\t: 0\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (HIDDEN.format(1, "AMD EPYC"), "AMD EPYC (family 25, model 1)"),
        (HIDDEN.format(17, "AMD EPYC"), "AMD EPYC (family 25, model 17)"),
        (HIDDEN.format(17, "AMD EPYC 9B14"), "AMD EPYC 9B14"),
        (HIDDEN.format(85, "Intel(R) Xeon(R) CPU @ 2.20GHz"), "Intel(R) Xeon(R) CPU @ 2.20GHz (family 25, model 85)"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "aarch64 (implementer 0x41, part 0xd40)"),
        ("", "aarch64"),
    ],
)
def test_a_cpu_whose_name_hides_its_generation_is_told_by_it(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a virtual machine's; the others are made up after it."""
    monkeypatch.setattr(probes, "CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(probes, "platform", SimpleNamespace(processor=str, machine=lambda: "aarch64"))
    assert probes.cpu_name() == "aarch64"  # no such file: not Linux
    (tmp_path / "cpuinfo").write_text(text)
    assert probes.cpu_name() == name
