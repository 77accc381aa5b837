"""A run that was interrupted continues with what it has not measured, in its own records."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_pairs import sides

from duel import tree
from duel.catalogue import PAIRED
from duel.cli import main as cli
from duel.job import Job
from duel.launch import attempts, cluster, nodes, preflight, resubmit, state, submit
from duel.launch.attempts import Decision
from duel.launch.schema import Cluster
from duel.launch.submit import Before
from duel.launch.views import RunView
from duel.measure import supervisor
from duel.measure.sinks import MetricsWriter
from duel.record import Row
from duel.report import compare
from duel.report.pairs import outcomes
from duel.report.sessions import over_sessions
from duel.results import Results, Run
from duel.states import FAILED, FINISHED, QUEUED, RUNNING
from duel.status import LaunchRecord, Owner, SlurmWord, this_process
from duel.tries import counted

JOB = Job(PAIRED, "mnist", 1, "standard", "fp32", None, "local")
NOW = "2026-11-25T10:00:00Z"


def interrupted(results: Results, finished: int, why: str = "warned", job: Job = JOB) -> Run:
    """A run of four pairs that finished so many rows, was in the next one, and then ended."""
    run = results.run(job.run_id())
    record = LaunchRecord(job=job, pair="g", code=tree.digest(), slurm_job_id="41", earlier="17")
    run.create(job.rows(), owner=Owner(slurm_job_name=run.id), target="local", script="old", launch=record)
    run.write_status(state=RUNNING, started=NOW, slurm_job_id="41")
    for row in run.rows()[:finished]:
        run.write_row(row.replace(status=FINISHED, started=NOW, ended=NOW, throughput=1.0))
    if finished < len(run.rows()):
        row = run.read_row(finished)
        run.write_row(
            row.replace(status=FAILED, started=NOW, ended=NOW, cause="ended by SIGUSR2", why=why, partial="x")
        )
    run.settle(state=FAILED, cause="ended by SIGUSR2", why=why)
    return run


def decision(results: Results, *named: str) -> Decision:
    views = [state._own(run) for run in results.runs()]
    (found,) = resubmit.decide(views, views, set(named), None)
    return found


def continued(results: Results, run: Run) -> None:
    found = decision(results)
    assert found.continues
    assert found.job is not None
    target = cluster.load(ROOT / "cluster.yaml").targets["local"]
    launches = submit.plan([found.job], target, [Before(run.id, run.group, True)])
    assert submit.create(launches, results) == [run]
    stored = [path.read_text() for path in sorted(run.rows_folder.iterdir())]
    assert submit.create(launches, results) == [run]
    assert [path.read_text() for path in sorted(run.rows_folder.iterdir())] == stored, "once is enough"


def key(row: Row) -> tuple[str | None, int | None]:
    return row.framework, row.repeat


@pytest.mark.parametrize(("finished", "new", "left"), [(1, 2, 8), (2, 1, 6), (3, 2, 6), (7, 2, 2)])
def test_it_continues_at_the_first_pair_that_it_does_not_have(
    results: Results, finished: int, new: int, left: int
) -> None:
    run = interrupted(results, finished)
    before = run.rows()
    continued(results, run)
    rows = run.rows()
    assert rows[: finished + 1] == before[: finished + 1], "what was measured stays, and so does what was begun"
    assert len(rows) == 8 + new
    assert [key(row) for row in run.left()] == [key(row) for row in JOB.rows()][8 - left :], "in the planned order"
    assert {row.attempt for row in run.left()} == {2}
    assert all(row.started is None and row.status == QUEUED and row.run_id == run.id for row in run.left())
    launch = run.launch()
    assert (launch.slurm_job_id, launch.earlier, launch.pair) == ("", "17,41", "g")
    assert launch.job == dataclasses.replace(JOB, attempt=2)
    status = run.stored_status()
    assert (status.state, status.started, status.cause, status.slurm_job_id) == (QUEUED, "", "", "")
    assert run.script.read_text() != "old"


@pytest.mark.parametrize(
    ("finished", "why", "job"),
    [(0, "warned", JOB), (8, "warned", JOB), (3, "code", JOB), (3, "warned", dataclasses.replace(JOB, trials=8))],
)
def test_otherwise_it_is_another_attempt_or_none(results: Results, finished: int, why: str, job: Job) -> None:
    interrupted(results, finished, why, job)
    assert not decision(results).continues


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({}, "python main.py --benchmark mnist"),
        ({"preset": "trial", "trials": 8}, "python main.py tune"),
        ({"preset": "fit"}, "python main.py fit"),
        ({"use_case": 0}, "python main.py validate"),
    ],
)
def test_the_command_that_starts_over_is_one_that_is_taken(change: dict[str, Any], begins: str) -> None:
    job = dataclasses.replace(JOB, **change)
    assert job.command.startswith(begins)
    args = cli.parsed(shlex.split(job.command)[2:])[1]
    assert args.benchmark == (job.benchmark,)


def test_a_run_with_other_code_does_not_continue(results: Results) -> None:
    run = interrupted(results, 4)
    run.write_launch(code="other")
    assert not decision(results).continues


def test_it_continues_as_often_as_it_gets_further(results: Results) -> None:
    run = interrupted(results, 2)
    for done in (4, 6):
        continued(results, run)
        for row in run.left()[:2]:
            run.write_row(row.replace(status=FINISHED, started=NOW, ended=NOW))
        for row in run.left()[:1]:
            run.write_row(row.replace(status=FAILED, started=NOW, ended=NOW, why="warned"))
        run.write_status(state=RUNNING, started=NOW)
        run.settle(state=FAILED, why="warned", cause="ended by SIGUSR2")
        assert f"continues, {done} of 8 rows are measured" in decision(results).words
    continued(results, run)
    run.write_status(state=RUNNING, started=NOW)
    run.settle(state=FAILED, why="warned", cause="ended by SIGUSR2")
    assert not decision(results).continues, "this attempt has measured nothing"


def test_a_kill_while_it_is_prepared_or_before_it_is_sent_loses_no_row(results: Results) -> None:
    run = interrupted(results, 3)
    kept = run.rows()[:3]
    continued(results, run)
    run.settle(state=FAILED, cause="never submitted: the driver was interrupted", why="never ran")
    assert "continues, 2 of 8 rows are measured" in decision(results).words
    continued(results, run)
    assert run.rows()[:3] == kept
    assert [key(row) for row in run.left()] == [key(row) for row in JOB.rows()][2:]
    assert len(run.rows()) == 10, "what was prepared once is not appended again"
    run.write_status(state=FAILED, why="never ran")  # killed before its last write
    continued(results, run)
    assert len(run.rows()) == 10


def test_a_continued_run_is_finished_by_the_last_try_of_each_row(results: Results) -> None:
    run = interrupted(results, 3)
    continued(results, run)
    assert not supervisor._is_complete(run)
    for row in run.left():
        run.write_row(row.replace(status=FINISHED))
    assert supervisor._is_complete(run)
    assert supervisor._verdict(run.rows(), JOB)[0] == FINISHED
    assert [row.status for row in run.rows()].count(FAILED) == 1
    assert len(counted(run.rows())) == 8


def test_an_earlier_job_is_not_taken_for_the_one_that_continues(results: Results) -> None:
    run = interrupted(results, 2)
    continued(results, run)
    view = RunView(run, run.stored_status(), run.launch())
    jobs = [job_named(run.id, number) for number in ("17", "41")]
    assert state._job_of(view, {run.id: jobs}) is None
    assert state._job_of(view, {run.id: [*jobs, job_named(run.id, "52")]}) == job_named(run.id, "52")


def job_named(name: str, number: str) -> state.queue.SlurmJob:
    return state.queue.SlurmJob(number, name, state.queue.user(), "FAILED", "FAILED", "", "n1", "", "", "0:0")


def test_a_run_here_that_the_kernel_killed_is_not_told_of_slurms_options(results: Results) -> None:
    run = results.run(JOB.run_id())
    run.create(JOB.rows(), owner=this_process(), target="local", script="old", launch=LaunchRecord(job=JOB, pair="g"))
    run.settle(state=FAILED, cause="killed by signal 9", why="killed")
    found = decision(results)
    assert found.job is None
    assert found.words.endswith("; this machine's memory ran out: a smaller batch or size would help")


def allowed(found: Decision, described: Cluster, own: bool = False) -> Decision:
    (only,) = attempts.allowed([found], described, own)
    return only


def test_a_node_that_a_target_does_not_let_us_avoid_is_not_said_to_be_avoided(results: Results) -> None:
    run = interrupted(results, 0, why="infrastructure")
    run.write_launch(slurm=SlurmWord(state="NODE_FAIL", kind="ended", cause="infrastructure", nodes="n7"))
    found = decision(results)
    described = cluster.load(ROOT / "cluster.yaml")
    assert "; avoiding n7; attempt 2 of 3" in allowed(found, described).words
    shut = described.targets["local"].model_copy(update={"without": ["--exclude"]})
    described = described.model_copy(update={"targets": described.targets | {"local": shut}})
    words = allowed(found, described).words
    assert "; its target forbids --exclude, so it may run again on n7; attempt 2 of 3" in words
    assert allowed(found, described).job is not None


def test_pairs_before_and_after_an_interruption_are_two_sessions() -> None:
    """On another node each process has another device: within each part they must still be the same."""
    from test_comparability import judged

    names = {"group": "g", "run_id": "paired_mnist_1-1", "repeats": 4, "pair": "p"}
    rows = [dataclasses.replace(row, row=number, **names) for number, row in enumerate(sides([1.5, 1.51, 1.49, 1.5]))]
    moved = [
        dataclasses.replace(row, attempt=2, device_id="other", host="n2") if (row.repeat or 0) > 1 else row
        for row in rows
    ]
    (outcome,) = outcomes(judged(moved))
    assert [len(session) for session in outcome.sessions] == [2, 2]
    assert "repeats differ" not in outcome.why
    (merged,) = over_sessions([outcome])
    assert len(merged.sessions) == 2
    assert merged.indicative == pytest.approx(1.5, rel=0.01), "as two runs of two pairs have one"
    soon = [dataclasses.replace(row, attempt=2) if (row.repeat or 0) > 1 else row for row in rows]
    (outcome,) = outcomes(judged(soon))
    assert [len(session) for session in outcome.sessions] == [4], "within an hour on one host it is one session"
    assert outcome.found is not None


SITE = Cluster.model_validate(
    {
        "default": "site",
        "targets": {"site": {"scheduler": "slurm", "python": {"jax": "python3", "pytorch": "python3"}}},
    }
)


@pytest.mark.parametrize(
    ("others", "lines", "avoids"),
    [
        ((), [], False),
        (("n8",), [], True),
        (("n8",), ["--gres=gpu:1"], False),  # which n8 has not
        (("n8",), ["--nodelist=n7,n8"], False),  # both lists would overlap
        (("n8",), ["--nodelist=n8"], True),
    ],
)
def test_a_node_is_avoided_only_where_slurm_would_still_take_the_job(
    results: Results, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], lines: list[str], avoids: bool
) -> None:
    """By a stand-in for 'scontrol show': Slurm would refuse the job, and with it all others of the target."""
    run = interrupted(results, 0, why="infrastructure", job=dataclasses.replace(JOB, target="site"))
    run.write_launch(slurm=SlurmWord(state="NODE_FAIL", kind="ended", cause="infrastructure", nodes="n7"))
    members = [nodes.Node("n7", ("h100",), "DOWN", "", 8, 1000, "gpu:4")]
    members += [nodes.Node(name, ("h100",), "IDLE", "", 8, 1000, "") for name in others]
    target = SITE.targets["site"].model_copy(update={"directives": lines})
    monkeypatch.setattr(preflight, "partition_names", lambda lines: ["h100"])
    monkeypatch.setattr(nodes, "of_partitions", lambda names: members)
    monkeypatch.setattr(nodes, "expanded", lambda names: names.split(","))
    found = allowed(decision(results), SITE.model_copy(update={"targets": {"site": target}}))
    assert found.job is not None
    assert (found.job.changes == ("--exclude=n7",)) is avoids
    assert ("avoiding n7" in found.words) is avoids
    assert ("Slurm would refuse a job that avoids it, so it may run again on n7" in found.words) is not avoids


def test_a_doubled_time_limit_stays_within_its_partition_s(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    run = interrupted(results, 0, why="time limit", job=dataclasses.replace(JOB, target="site"))
    run.write_launch(slurm=SlurmWord(state="TIMEOUT", kind="ended", cause="time limit", limit="00:40:00"))
    own = SITE.targets["site"].model_copy(update={"directives": ["--time=00:40:00"]})
    for described in (SITE, SITE.model_copy(update={"targets": {"site": own}})):
        for most, expected in ((60.0, ("--time=01:00:00",)), (200.0, ("--time=01:20:00",))):
            monkeypatch.setattr(preflight, "most_minutes", lambda lines, most=most: most)
            found = allowed(decision(results), described)
            assert found.job is not None
            assert found.job.changes == expected
    found = allowed(decision(results), described, own=True)
    assert found.job is None, "a study keeps to the target's own limit"
    assert found.words.endswith("; not started: that was the longest that target 'site' allows")
    lifted = own.model_copy(update={"directives": ["--time=00:40:00", "--qos=long"]})
    monkeypatch.setattr(preflight, "most_minutes", lambda lines: 40.0)
    found = allowed(decision(results), SITE.model_copy(update={"targets": {"site": lifted}}))
    assert found.job is not None, "a QOS may lift the partition's limit"


def test_an_attempt_keeps_the_longer_time_limit_of_the_one_before(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node failed, so that the target's own limit, which the one before went beyond, was not the cause."""
    job = dataclasses.replace(JOB, target="site", attempt=2, changes=("--time=01:20:00",))
    interrupted(results, 0, why="infrastructure", job=job)
    own = SITE.targets["site"].model_copy(update={"directives": ["--time=00:40:00"]})
    described = SITE.model_copy(update={"targets": {"site": own}})
    for most, limit in ((240.0, "--time=01:20:00"), (60.0, "--time=01:00:00"), (30.0, "--time=00:30:00")):
        monkeypatch.setattr(preflight, "most_minutes", lambda lines, most=most: most)
        found = allowed(decision(results), described, own=True)
        assert found.job is not None
        assert found.job.changes == (limit,)


def test_one_run_that_its_target_takes_no_more_leaves_the_others(results: Results) -> None:
    interrupted(results, 0, why="infrastructure", job=dataclasses.replace(JOB, target="site", devices_per_node=4))
    found = allowed(decision(results), SITE)
    assert found.job is None
    assert "; not started: target 'site' has at most 1 device per node, but 4 were asked for" in found.words


def test_slurm_is_asked_once_about_all_jobs_of_a_partition(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(preflight, "partition_names", lambda lines: ["h100"])
    monkeypatch.setattr(nodes, "of_partitions", lambda names: asked.append(names) or [])
    monkeypatch.setattr(nodes, "expanded", lambda names: names.split(","))
    run = interrupted(results, 0, why="infrastructure", job=dataclasses.replace(JOB, target="site"))
    run.write_launch(slurm=SlurmWord(state="NODE_FAIL", kind="ended", cause="infrastructure", nodes="n7"))
    attempts.allowed([decision(results)] * 3, SITE)
    assert asked == [["h100"]]


def test_a_training_goes_on_with_the_switches_that_it_began_with(results: Results) -> None:
    """Though a search may have found others since, or the ladder would begin again: its checkpoints are of these."""
    job = dataclasses.replace(JOB, mode="tuned", dataset="digits")
    run = interrupted(results, 0, job=job)
    for row in run.rows():
        run.write_row(row.replace(rung=1, switches="donation=on", tuning="the best of 8 by x"))
    run.reopen(job.rows(), "again", this_process())
    (first, *_) = run.left()
    assert first.recipe
    assert (first.rung, first.switches, first.tuning) == (1, "donation=on", "the best of 8 by x")


def test_losses_are_compared_between_the_frameworks_alone(tmp_path: Path) -> None:
    """Not between two attempts of a paired run, and of each side only those of its first row."""
    runs = [
        Run(tmp_path / name) for name in ("paired_mnist_1-a", "paired_mnist_1-b", "jax_mnist_1-c", "pytorch_mnist_1-c")
    ]
    for run, loss in zip(runs, (1.0, 1.0, 1.0, 2.0), strict=True):
        run.folder.mkdir()
        for row in (0, 1):
            MetricsWriter(run.metrics)("loss", row=row, step=1, loss=loss * (1 + 9 * row))
    assert compare.curve_remark(runs[:2]) == []
    (said,) = compare.curve_remark(runs[2:])
    assert said == "Relative loss difference: 5.0e-01 at step 1, at most 5.0e-01 in the first 1 steps."
