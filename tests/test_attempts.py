"""A row's attempts: what is tried again, what is said meanwhile, and the environment that each process gets."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_paired import CACHES

from duel import profile, variables
from duel.catalogue import FRAMEWORKS, PAIRED
from duel.evidence import sha256
from duel.job import Job
from duel.launch import display
from duel.measure import attempt, ranks, supervisor, timing
from duel.measure.sinks import MetricsReader, MetricsWriter
from duel.record import Row
from duel.results import Results, Run
from duel.states import FAILED, FINISHED, RUNNING
from duel.status import this_process

CRASHING = """
import json, sys
folder, number = sys.argv[sys.argv.index("--run_folder") + 1], int(sys.argv[sys.argv.index("--row") + 1])
path = f"{folder}/rows/{number:03d}.json"
row = json.load(open(path))
row["device_kind"] = "gpu"
if row["rung"] < SURVIVES:
    print("E0000 gemm_fusion_autotuner: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    row |= {"status": "failed", "cause": "XlaRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"}
else:
    row |= {"status": "finished"}
json.dump(row, open(path, "w"))
"""


@pytest.mark.parametrize(("survives", "rungs"), [(0, [0]), (1, [0, 1]), (4, [0, 1, 3, 4]), (9, [0, 1, 3, 4])])
def test_a_crash_while_autotuning_is_retried_rung_by_rung(tmp_path: Path, survives: int, rungs: list[int]) -> None:
    """By a stand-in for JAX on a GPU that crashes: each rung is a process and a row of its own."""
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING.replace("SURVIVES", str(survives)))
    run = Run(tmp_path / "runs" / "jax_vit_b16_1-x")
    planned = Job("jax", "vit_b16", 1, "smoke", "fp32", None, "local").rows()
    run.create(planned)
    team = attempt.Team(run, 1, Results(tmp_path), {"jax": [sys.executable, str(script)]}, [], False)
    attempt.measure_row(run, run.rows()[0], team, MetricsReader(run.metrics), None)
    team.close()
    rows = run.rows()
    assert [row.rung for row in rows] == rungs
    assert [row.status for row in rows[:-1]] == [FAILED] * (len(rungs) - 1)
    assert rows[-1].status == (FAILED if survives == 9 else FINISHED)


# Stands in for a row beside which others are busy, QUIET attempts long.
DISTURBED = """
import json, sys
folder, number = sys.argv[sys.argv.index("--run_folder") + 1], int(sys.argv[sys.argv.index("--row") + 1])
path = f"{folder}/rows/{number:03d}.json"
load = 0.3 if number < QUIET else 0.01
row = json.load(open(path)) | {"status": "STATUS", "foreign_load": load}
json.dump(row, open(path, "w"))
"""


@pytest.mark.parametrize(
    ("preset", "quiet", "again", "status", "rows"),
    [
        ("standard", 0, 4, FINISHED, 1),
        ("standard", 2, 4, FINISHED, 3),
        ("standard", 9, 4, FINISHED, 5),
        ("standard", 9, 0, FINISHED, 1),
        ("standard", 9, 4, FAILED, 1),
    ],
)
def test_a_row_that_others_disturb_is_measured_again(
    tmp_path: Path, preset: str, quiet: int, again: int, status: str, rows: int
) -> None:
    script = tmp_path / "disturbed.py"
    script.write_text(DISTURBED.replace("QUIET", str(quiet)).replace("STATUS", status))
    run = Run(tmp_path / "runs" / "jax_mnist_1-x")
    run.create(Job("jax", "mnist", 1, preset, "fp32", None, "local").rows())
    team = attempt.Team(run, 1, Results(tmp_path), {"jax": [sys.executable, str(script)]}, [], False)
    peace = attempt.measure_row(run, run.rows()[0], team, MetricsReader(run.metrics), None, again)
    team.close()
    found = run.rows()
    assert len(found) == rows
    assert len({(row.framework, row.repeat, row.point) for row in found}) == 1
    assert peace == (quiet < rows or status == FAILED)


def test_a_new_phase_is_not_told_with_the_figures_of_the_row_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "paired_mnist_1-x")
    run.create(Job("jax", "mnist", 1, "smoke", "fp32", None, "local").rows(), owner=this_process())
    run.write_status(state=RUNNING, owner=this_process(), part="row 2 of 8, jax")
    emit, reader = MetricsWriter(run.metrics), MetricsReader(run.metrics)

    def told() -> str:
        attempt._pass_on(run, reader, None)
        return display._doing(run.status()).partition(" (")[0]

    emit("phase", row=0, phase="measuring")
    emit("block", row=0, step=34, done=34, needed=50, throughput=9734.0, unit="images/s", loss=0.5)
    assert told() == "row 2 of 8, jax: measuring: 34 of at least 50 steps, 9734 images/s, loss 0.5"
    emit("phase", row=1, phase="training the 9 opening steps")
    assert told() == "row 2 of 8, jax: training the 9 opening steps"
    emit("loss", row=1, step=0, loss=2.5)
    assert told() == "row 2 of 8, jax: training the 9 opening steps: step 1, loss 2.5"
    assert told() == "row 2 of 8, jax: training the 9 opening steps: step 1, loss 2.5"  # nothing new since


def test_a_crash_of_another_kind_is_not_retried(tmp_path: Path) -> None:
    base = Row(framework="jax", device_kind="gpu", status=FAILED)
    assert attempt._autotuner_crashed(base, f"...{attempt.CRASH}...")
    for row in (
        base.replace(framework="pytorch"),
        base.replace(device_kind="cpu"),
        base.replace(compile_seconds=3.0),  # it was measuring already
        base.replace(status=FINISHED),
    ):
        assert not attempt._autotuner_crashed(row, attempt.CRASH)
    assert attempt._autotuner_crashed(base.replace(compile_seconds=3.0, recipe="r"), attempt.CRASH), (
        "evaluation's program"
    )
    assert not attempt._autotuner_crashed(base, "RESOURCE_EXHAUSTED: out of memory")


def test_a_number_of_threads_that_one_side_alone_would_obey_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA knows no OMP_NUM_THREADS, PyTorch no NPROC."""
    names = ("OMP_NUM_THREADS", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "MKL_NUM_THREADS", "PJRT_NPROC")
    for name in (*names, "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    assert not set(names) & set(ranks.environment("/tmp/some"))
    assert "OMPI_COMM_WORLD_RANK" in ranks.environment("/tmp/some")
    proof = ranks.environment("/tmp/some", timed=False)
    assert set(names) <= set(proof)
    assert proof["OMP_WAIT_POLICY"] == "passive"


def test_caches_are_of_each_process_alone_and_proxies_are_left_out() -> None:
    found = ranks.environment("/tmp/some")
    assert {name: found[name] for name in CACHES} == {name: f"/tmp/some/{name.lower()}" for name in CACHES}
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_what_other_nodes_wrote_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS lists a folder as it was up to a minute ago."""
    run, row = Run(tmp_path / "runs" / "some"), Row(row=0, device_count=2, status=FINISHED)
    run.create([row])
    files = [run.evidence_file(0, rank) for rank in range(2)]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"evidence")
    listed = iter([files[:1], files[:1], files])
    monkeypatch.setattr(Run, "evidence_files", lambda self, number: next(listed))
    monkeypatch.setattr(attempt, "POLL_SECONDS", 0.0)
    assert attempt._sealed(run, row, 60.0).evidence_sha256 == sha256([b"evidence"] * 2)
    monkeypatch.setattr(Run, "evidence_files", lambda self, number: files[:1])
    found = attempt._sealed(run, row, 0.0)
    assert (found.evidence_sha256, found.missing["evidence_sha256"]) == (None, "1 of 2 ranks have recorded it")


# Stands in for a measuring process that profiles a row: it fails, but for another tool's sake it runs.
PROFILED = """
import sys
assert "--profile" in sys.argv
sys.exit(0 if "--untraced" in sys.argv else 3)
"""


@pytest.fixture
def profiled(tmp_path: Path) -> tuple[Run, attempt.Team]:
    """A run with a finished row of each side, and processes that fail to profile them."""
    script = tmp_path / "profiled.py"
    script.write_text(PROFILED)
    run = Run(tmp_path / "runs" / "paired_mnist_1-x")
    run.create(Job("paired", "mnist", 1, "smoke", "fp32", None, "local").rows())
    for row in run.rows():
        run.write_row(row.replace(status=FINISHED, device_count=1))
    commands = {framework: [sys.executable, str(script)] for framework in FRAMEWORKS}
    return run, attempt.Team(run, 1, Results(tmp_path), commands, [], False)


@pytest.mark.parametrize(
    ("tool", "why"), [("/nowhere/nsys profile", "No such file"), ("nsys 'profile", "No closing quotation")]
)
def test_a_tool_that_cannot_be_started_is_said_and_the_next_row_is_profiled(
    profiled: tuple[Run, attempt.Team],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tool: str,
    why: str,
) -> None:
    run, team = profiled
    monkeypatch.setenv(variables.PROFILER, tool)
    before = run.rows()
    for row in before:
        attempt.profile_row(run, row, team)
    team.close()
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith(f"profile: {tool}: ")]
    assert [why in line for line in said] == [True, True]
    assert run.rows() == before
    assert [profile.path(run.folder, number).is_file() for number in (0, 1)] == [True, True]


def test_a_run_is_alive_while_it_is_profiled(
    profiled: tuple[Run, attempt.Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another host, one whose status is two minutes old is lost."""
    run, team = profiled
    monkeypatch.setattr(attempt, "HEARTBEAT_SECONDS", 0.1)
    ages: list[float] = []
    write = Run.write_status

    def counted(self: Run, **fields: object) -> None:
        ages.append(self.stored_status().age)
        write(self, **fields)

    monkeypatch.setattr(Run, "write_status", counted)
    script = Path(team._commands["jax"][1])
    script.write_text("import time\ntime.sleep(1.0)\n")
    attempt.profile_row(run, run.rows()[0], team)
    assert len(ages) > 4
    monkeypatch.setattr(attempt, "SILENCE_SECONDS", 0.3)
    script.write_text("import time\ntime.sleep(60.0)\n")
    attempt.profile_row(run, run.rows()[0], team)
    team.close()
    found = profile.read(run.folder, 0)
    assert found is not None
    assert found.why == "it took more than 0 s"


def test_a_profile_that_fails_says_why_and_another_tool_still_gets_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "profiled.py"
    script.write_text(PROFILED)
    monkeypatch.setenv(variables.PROFILER, 'sh -c \'echo "$@" > {output}; exec "$@"\' tool')
    run = Run(tmp_path / "runs" / "jax_mnist_1-x")
    run.create(Job("jax", "mnist", 1, "smoke", "fp32", None, "local").rows())
    run.write_row(run.read_row(0).replace(status=FINISHED, device_count=1))
    team = attempt.Team(run, 1, Results(tmp_path), {"jax": [sys.executable, str(script)]}, [], False)
    before = run.rows()
    attempt.profile_row(run, before[0], team)
    team.close()
    found = profile.read(run.folder, 0)
    assert found is not None
    assert "3" in found.why
    assert "--untraced" in (run.folder / "profiles" / "000" / "profiler").read_text()
    assert run.rows() == before


def test_a_torn_line_of_metrics_is_passed_over_and_the_next_event_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    reader = MetricsReader(file)
    MetricsWriter(file)("loss", row=0, step=1)
    with open(file, "a") as torn:
        torn.write('{"event": "loss", "ro')  # a full disk, or a kill
    MetricsWriter(file)("loss", row=0, step=2)
    assert [event["step"] for event in reader()] == [1, 2]


def test_only_what_makes_a_claim_or_a_choice_is_measured_again() -> None:
    def retries(lost: set[int | None], **change: Any) -> int:
        work = object.__new__(supervisor._Work)
        work._job = dataclasses.replace(Job(PAIRED, "mnist", 1, "standard", "fp32", None, "local"), **change)
        return work._retries(Row(point=3), lost)

    assert retries(set()) == retries({2}) == 4
    assert retries({3}) == retries(set(), preset="smoke") == retries(set(), framework="jax") == 0
    assert [retries(set(range(lost)), trials=8) for lost in range(4)] == [2, 2, 2, 0]  # then the machine is busy


def test_efficiency_is_relative_to_as_many_devices_alone() -> None:
    alone = Row(framework="jax", repeat=0, point=0, status=FINISHED, throughput=100.0)
    many = Row(framework="jax", repeat=0, point=1, device_count=2, throughput=160.0)
    others = [alone.replace(framework="pytorch", throughput=1.0), alone.replace(repeat=1, throughput=1.0)]
    assert attempt._with_efficiency(many, [*others, alone, *others, many]).scaling_efficiency == pytest.approx(0.8)
    found = attempt._with_efficiency(many.replace(attempt=2), [alone.replace(attempt=1), many])
    assert found.scaling_efficiency is None
    assert found.missing["scaling_efficiency"] == "the row on one device is of before an interruption"


def test_the_first_all_reduce_which_sets_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], iter([9.0, *[0.1] * (timing.COLLECTIVES // 2 + 1), *[0.5] * timing.COLLECTIVES])
    work: Any = SimpleNamespace(all_reduce=lambda: None)
    work.synchronize = lambda handle: now.__setitem__(0, now[0] + next(seconds))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert timing.time_collective(work) == pytest.approx(0.1)
