"""Runs on many devices: their processes find each other, scale as they say, and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, Main, Site, clean_environment, interpreter, rows_of

from duel.catalogue import BENCHMARKS, FRAMEWORKS, PRODUCTS, USE_CASES, VALIDATE
from duel.cli import main as cli
from duel.job import Job
from duel.launch import cluster, plan
from duel.measure import attempt, ranks
from duel.measure import row as measuring
from duel.measure.device import Device, World
from duel.record import Row
from duel.results import Results, Run
from duel.states import FINISHED

SMOKE = ("--preset", "smoke", "--device", "cpu")


@pytest.mark.full
def test_training_on_two_devices_has_a_row_for_one_and_one_for_both(main: Main, checkout: Path) -> None:
    nobody = "http://127.0.0.1:9"  # a proxy, which gRPC would ask for 127.0.0.1
    said = main("--benchmark", "cifar10", "--use_case", "train_multi", *SMOKE, "--wait", http_proxy=nobody)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    assert [(row["framework"], row["device_count"], row["batch_size"]) for row in rows] == [
        (framework, *count) for framework in FRAMEWORKS for count in (("1", "8"), ("2", "16"))
    ]
    assert {row["status"] for row in rows} == {"finished"}
    assert {row["scaling"] for row in rows} == {"weak"}
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        assert alone["scaling_efficiency"] == alone["collective_seconds"] == ""
        assert "on one device" in alone["missing"]
        assert float(both["collective_seconds"]) > 0
        worth = float(both["throughput"]) / (2 * float(alone["throughput"]))
        assert float(both["scaling_efficiency"]) == pytest.approx(worth)
        assert both["cell"] != alone["cell"]
    # Both frameworks take the same samples on both devices, and learn the same from them.
    assert rows[1]["data_sha256"] == rows[3]["data_sha256"] != rows[0]["data_sha256"]
    assert all(float(row["loss_last"]) < float(row["loss_first"]) for row in rows)
    # Twice the samples over all devices, twice the learning rate.
    assert float(rows[1]["learning_rate"]) == pytest.approx(2 * float(rows[0]["learning_rate"]))
    assert float(rows[1]["loss_last"]) == pytest.approx(float(rows[3]["loss_last"]), rel=1e-4)
    assert list((checkout / "results").glob(".ranks-*")) == []


def test_strong_scaling_divides_one_batch(main: Main, checkout: Path) -> None:
    asked = ("--benchmark", "mnist", "--use_case", "4", "--scaling", "strong", "--products", "clipped_sum,norms")
    said = main(*asked, "--framework", "pytorch", *SMOKE, "--wait")
    assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    assert [(row["product"], row["device_count"], row["batch_size"], row["microbatch"]) for row in rows] == [
        (product, *count) for product in ("clipped_sum", "norms") for count in (("1", "16", "16"), ("2", "16", "8"))
    ]
    assert {row["data_sha256"] for row in rows} == {rows[0]["data_sha256"]}
    assert float(rows[1]["collective_seconds"]) > 0
    assert "stays where it is made" in rows[3]["missing"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rank_that_dies_ends_the_others_and_is_named(main: Main, checkout: Path, framework: str) -> None:
    timed, begins = checkout / "duel" / "measure" / "timed.py", "    losses = timing.opening_steps("
    text = timed.read_text()
    assert text.count(begins) == 1
    timed.write_text(text.replace(begins, f"    __import__('time').sleep(5)\n{begins}"))  # long enough to be seen
    asked = ("--benchmark", "mnist", "--use_case", "2", "--framework", framework, *SMOKE)
    assert main(*asked).returncode == 0
    (run,) = Results(checkout / "results").runs()
    deadline = time.monotonic() + 200
    while not (run.stored_status().row == 1 and str(run.stored_status().phase).startswith("training")):
        assert time.monotonic() < deadline, run.stored_status()
        time.sleep(0.05)
    killed = time.monotonic()
    os.kill(_measuring(run, rank=1), signal.SIGKILL)
    while (status := run.stored_status()).state == "running":
        assert time.monotonic() - killed < 60
        time.sleep(0.2)
    assert status.state == "failed"
    assert status.cause.startswith("rank 1: ended by SIGKILL")
    _, _, said = main("logs", run.id).stdout.partition("--- rank 1, the end of log.1.txt\n")
    assert "ended by SIGKILL" in said  # after what gloo prints
    assert [row.status for row in run.rows()] == ["finished", "failed"]
    assert _processes(run) == []


def test_what_one_rank_died_of_comes_before_what_others_say_of_it() -> None:
    """As recorded where rank 1 was killed before gloo had connected the two."""
    waited = "JaxRuntimeError: UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out"
    row = Row(cause=f"{waited} with key: cpu:gloo/0,2048/1 and duration: 29.999999627s")
    said = attempt._first_cause(row, 1, {1: "ended by SIGKILL"})
    assert said == (f"rank 1: ended by SIGKILL; rank 0: {row.cause}", "code")


def _processes(run: Run) -> list[list[str]]:
    """The command lines of all processes that measure for ``run``."""
    return [words for path in Path("/proc").glob("[0-9]*/cmdline") if str(run.folder) in (words := _words(path))]


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:  # ended meanwhile
        return []


def _measuring(run: Run, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _words(path)
        if str(run.folder) in words and words[words.index("--rank") + 1 :][:1] == [str(rank)]:
            return int(path.parent.name)
    raise AssertionError(f"no process of rank {rank}")


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_said(checkout: Path) -> None:
    launcher = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "DUEL_GATHER_SECONDS": "2"}
    command = [interpreter("pytorch"), "pytorch/run.py", "--benchmark", "mnist", "--use_case", "2", "--devices", "2"]
    said = subprocess.run(
        [*command, *SMOKE],
        cwd=checkout,
        env=clean_environment() | launcher | {"WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 1
    (run,) = Results(checkout / "results").runs()
    assert run.status().cause.startswith("rank 1 of 2 did not connect to ")
    assert run.status().cause.endswith("within 2 s")


def test_a_launcher_that_starts_another_number_of_tasks_is_told_which(checkout: Path) -> None:
    launcher = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}
    command = [interpreter("jax"), "jax/run.py", "--benchmark", "mnist", "--use_case", "2", "--devices", "2", *SMOKE]
    said = subprocess.run(
        command,
        cwd=checkout,
        env=clean_environment() | launcher,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 2
    assert "the job needs 2 tasks, one for each device; the target starts 3" in said.stdout


def test_an_error_that_is_passed_on_again_and_again_is_told_once() -> None:
    """As XLA's when a rank is gone; its end says that."""
    passed_on = "Error dispatching computation: " * 40
    told = measuring.describe(RuntimeError(f"INTERNAL: {passed_on}Read error [::1]:5552: Connection reset by peer"))
    assert told.startswith("RuntimeError: INTERNAL: Error dispatching computation: Read error")
    assert told.endswith("Connection reset by peer")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_port_that_is_taken_is_known_as_that(framework: str) -> None:
    """Each framework's own words, from a real collision."""
    code = "import sys; sys.path[:0] = [sys.argv[1]]; sys.path.append('.'); import devices\n"
    code += "from duel.measure.device import World\n"
    code += "devices.select('cpu', World(0, 2, 0, sys.argv[2]))"
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [interpreter(framework), "-c", code, framework, address],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode != 0
    assert ranks.port_taken(done.stdout + done.stderr), done.stderr


def test_a_row_whose_port_was_taken_begins_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries = iter([{0: "RuntimeError: Address already in use"}, {1: "lost it: address already in use"}, {}])
    monkeypatch.setattr(attempt, "_try_row", lambda *_: next(tries))
    run, row = Run(tmp_path / "some"), Row(row=0, status=FINISHED)
    run.create([row])
    attempt.measure_row(run, row, None, None, None)  # of the others nothing is reached
    assert next(tries, None) is None


def test_every_device_here_has_processors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7, 1, 2, 3, 5})
    assert ranks.shares(2) == [[1, 2], [3, 5]]
    assert ranks.shares(6) == [[1, 2, 3, 5, 7]] * 6


@pytest.mark.parametrize("asked", [None, "tpu"])
def test_what_cannot_be_shared_out_among_processes_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str | None
) -> None:
    """With a stand-in for a framework that finds a TPU. If one was asked for, none is opened: another rank may have."""
    opened: list[str | None] = []
    found = Device("tpu", "TPU v5 lite", 4)
    tpu = SimpleNamespace(select=lambda kind, world: (opened.append(kind), found)[1], leave=lambda: None)
    monkeypatch.setitem(sys.modules, "devices", tpu)
    monkeypatch.setattr(measuring, "die_with_parent", lambda: None)
    planned = Job("jax", "mnist", 2, "smoke", "fp32", None, "here", devices_per_node=2)
    run = Results(tmp_path).run(planned.run_id())
    run.create(planned.rows(), target="here")
    assert measuring.measure(run, 1, tmp_path, asked, "0", World(0, 2, 0, "127.0.0.1:1")) == 0
    row = run.read_row(1)
    assert (row.status, row.device_kind, opened) == ("skipped", "tpu", [] if asked else [None])
    assert row.cause == "processes with one device each are supported on cpu and gpu only; this is a tpu"


@pytest.mark.parametrize(("visible", "own"), [(None, [0, 1, 2]), ("0,1,2,3", [0, 1, 2]), ("2", [0, 0, 0])])
def test_a_jax_process_takes_its_own_of_the_gpus_it_sees(visible: str | None, own: list[int]) -> None:
    code = "import sys; sys.path[:0] = ['jax']; sys.path.append('.'); import devices\n"
    code += "print([devices._local_device(rank) for rank in range(3)])"
    environment = clean_environment() | {"CUDA_VISIBLE_DEVICES": visible or ""}
    command = [interpreter("jax"), "-c", code]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=True)
    assert json.loads(said.stdout) == own


MANY = """
    nodes: 2
    devices_per_node: [1, 2]
"""


def many(site: Site) -> None:
    lines = ("--nodes={nodes}", "--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1", "--mem=4G")
    site.target("--partition=cpu", "--time=00:30:00", *lines, more=MANY)


@pytest.mark.parametrize(("nodes", "devices"), [pytest.param("1", "2", marks=pytest.mark.full), ("2", "1")])
def test_many_devices_under_slurm(site: Site, nodes: str, devices: str) -> None:
    many(site)
    asked = ("--benchmark", "graphnet", "--use_case", "2", "--nodes", nodes, "--devices", devices)
    site.main(*asked, *SMOKE, "--wait")
    rows = rows_of(site.folder)
    assert {row["status"] for row in rows} == {"finished"}
    assert len(rows) == len(FRAMEWORKS) * 2
    assert sorted((row["device_count"], row["nodes"]) for row in rows) == [("1", "1")] * 2 + [("2", nodes)] * 2
    assert len({row["slurm_job_id"] for row in rows}) == 2


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["resnet50", "gpt2", "graphnet"])
def test_all_five_use_cases_on_one_node_and_on_two(site: Site, benchmark: str) -> None:
    many(site)
    site.main("--benchmark", benchmark, "--use_case", "all", "--devices", "2", *SMOKE, "--wait")
    site.main("--benchmark", benchmark, "--use_case", "2,4", "--nodes", "2", "--devices", "1", *SMOKE, "--wait")
    rows = rows_of(site.folder)
    assert {row["status"] for row in rows} == {"finished"}
    each = {"1": 1, "3": len(PRODUCTS), "5": 2, "2": 2 * 2, "4": 2 * 2 * len(PRODUCTS)}
    for framework in FRAMEWORKS:
        found = [row["use_case"] for row in rows if row["framework"] == framework]
        assert {use_case: found.count(use_case) for use_case in each} == each


@pytest.mark.full
def test_everything_runs_here_in_forty_minutes(main: Main, checkout: Path) -> None:
    begun = time.monotonic()
    said = main("--benchmark", "all", "--use_case", "all", *SMOKE, "--wait", timeout=3600)
    assert said.returncode == 0, said.stdout[-5000:] + said.stderr
    assert time.monotonic() - begun < 40 * 60
    rows = rows_of(checkout)
    assert {row["status"] for row in rows} == {"finished"}
    found = sorted((row["benchmark"], row["use_case"], row["framework"]) for row in rows)
    each = {1: 1, 2: 2, 3: len(PRODUCTS), 4: 2 * len(PRODUCTS), 5: 2}
    assert found == sorted(
        (benchmark, str(use_case), framework)
        for benchmark in BENCHMARKS
        for use_case in USE_CASES
        if use_case != VALIDATE
        for framework in FRAMEWORKS
        for _ in range(each[use_case])
    )


def test_the_plan_comes_first(main: Main, checkout: Path) -> None:
    said = main("--benchmark", "mnist,gnn", "--use_case", "1,inference,4", *SMOKE, "--dry_run")
    assert said.returncode == 0, said.stderr
    plan, _, _ = said.stdout.partition("\n# slurm_scripts/")
    *table, hours = plan.splitlines()
    assert re.fullmatch(r"(about|at least) [\d.]+ device-hours", hours)
    lines = [line.split("  ") for line in table]
    assert [[word.strip() for word in line if word] for line in lines] == [
        ["benchmark", "use case", "mode", "frameworks", "devices", "rows"],
        *(
            [benchmark, use_case, "default", "jax, pytorch", devices, rows]
            for benchmark in ("mnist", "graphnet")
            for use_case, devices, rows in (
                ("1 train_single", "1", "2"),
                ("5 inference", "1", "4"),
                ("4 per_sample_gradients_multi", "2", "12"),
            )
        ),
        ["36 rows in 12 scripts"],
    ]
    assert json.dumps(sorted(path.name for path in (checkout / "slurm_scripts").glob("*.sh"))).count("jax_") == 6


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ("max,8 --scaling weak", (640, 8)),
        ("max,8 --scaling strong", (1280, 8)),
        ("max --dataset digits", (1280,)),
    ],
)
def test_the_largest_batch_of_each_device_makes_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(plan, "_largest", lambda *_: 640)
    words = f"--benchmark mnist --use_case 2 --devices 2 --framework jax --batch_sizes {more}".split()
    (job,) = plan.jobs(cli.parsed(words)[1], cluster.load(ROOT / "cluster.yaml"), Results(tmp_path))
    assert job.batch_sizes == sizes
