"""A training whose job Slurm begins again is one job's at a time, and its hours are those of all its lives."""

import dataclasses
import time
from pathlib import Path

import pytest

from duel import tree
from duel.errors import UserError
from duel.files import utc
from duel.job import Job
from duel.launch import display, manage, queue, reasons, resubmit, state
from duel.launch.reasons import SlurmJob
from duel.launch.views import RunView, Snapshot
from duel.measure import continuing, supervisor
from duel.results import Results, Run
from duel.states import CANCELLED, FAILED, LOST, QUEUED, RUNNING
from duel.status import LOST_AFTER_SECONDS, LaunchRecord, Owner, this_process

JOB = Job("jax", "mnist", 1, "standard", "fp32", None, "local", dataset="digits", epochs=2, max_hours=2.0)
BEGUN = time.time() - 7200


@pytest.fixture
def training(results: Results) -> Run:
    """A training that ran for an hour on another machine as job 41, wrote a checkpoint, and was heard of no more."""
    run = results.run(JOB.run_id())
    record = LaunchRecord(job=JOB, pair="g", code=tree.digest(), user=queue.user(), slurm_job_id="41")
    run.create(JOB.rows(), owner=Owner(slurm_job_name=run.id), target="local", script="old", launch=record)
    there = Owner(host="elsewhere", pid=7)
    run.write_status(state=RUNNING, started=utc(BEGUN), user=queue.user(), slurm_job_id="41", owner=there)
    run.write_row(run.read_row(0).replace(status=RUNNING, started=utc(BEGUN)))
    silent(run, time.time() - BEGUN - 3600)
    folder = run.folder / "checkpoints" / "jax-0"
    folder.mkdir(parents=True)
    (folder / "step-000000014.npz").write_bytes(b"x")
    return run


def silent(run: Run, seconds: float) -> None:
    """Make the last report of ``run`` that old."""
    text = run.status_file.read_text()
    updated = run.stored_status().updated
    run.status_file.write_text(text.replace(str(updated), str(time.time() - seconds)))
    assert run.stored_status().age == pytest.approx(seconds, abs=5)


def seen_with(run: Run, slurm: str) -> RunView:
    """The run, where Slurm says ``slurm`` of its job."""
    seen = state._own(run)
    job = SlurmJob("41", run.id, queue.user(), slurm, slurm, "", "", "", "1:00:00")
    state._explain(seen, job, queue.Answer([job], [], True, True), False)
    return seen


def test_what_left_the_queue_during_an_outage_of_the_accounting_is_retried_by_name_alone(training: Run) -> None:
    """It may have been cancelled, or met its limit."""
    silent(training, 86400)
    seen = state._own(training)
    state._explain(seen, None, queue.Answer([], ["sacct: no answer"], controller=True, accounting=False), False)
    assert (seen.state, training.stored_status().state) == (LOST, RUNNING)
    (decision,) = decided(seen)
    assert decision.job is None
    assert "why it ended is not known until the accounting answers" in decision.words
    assert decided(seen, training.id)[0].continues


def decided(seen: RunView, *named: str) -> list[resubmit.Decision]:
    return resubmit.decide([seen], [seen], set(named), None)


def test_what_slurm_has_requeued_after_a_nodes_death_is_not_sent_again(training: Run) -> None:
    (alone,) = decided(state._own(training))
    assert alone.continues, "without Slurm's word it is lost, and goes on"
    seen = seen_with(training, "PENDING")
    assert seen.state == QUEUED
    assert not decided(seen)
    (named,) = decided(seen, training.id)
    assert (named.job, named.words) == (None, "is queued")


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ("PENDING", "Slurm begins its job again, which goes on from the last checkpoint"),
        ("COMPLETING", "its job has not ended yet: ask again once it has"),
    ],
)
def test_what_was_preempted_is_not_sent_by_name_while_its_job_is_there(training: Run, slurm: str, said: str) -> None:
    training.settle(state=CANCELLED, cause="ended by SIGTERM", why="told to end")
    (alone,) = decided(state._own(training), training.id)
    assert alone.continues
    (decision,) = decided(seen_with(training, slurm), training.id)
    assert decision.job is None
    assert decision.words.endswith(said)


@pytest.fixture
def requeued(results: Results) -> Run:
    """A measurement whose job Slurm took away and, as the site enforces, began again: it waits."""
    job = dataclasses.replace(JOB, dataset=None, epochs=None, max_hours=None)
    run = results.run(job.run_id())
    record = LaunchRecord(job=job, pair="g", code=tree.digest(), user=queue.user(), slurm_job_id="41")
    run.create(job.rows(), owner=Owner(slurm_job_name=run.id), target="local", script="old", launch=record)
    run.write_status(state=RUNNING, started=utc(BEGUN), user=queue.user(), slurm_job_id="41")
    assert seen_with(run, "PENDING").status.why == reasons.PREEMPTED
    return run


def test_a_measurement_that_slurm_begins_again_is_not_sent_again(requeued: Run, results: Results) -> None:
    seen = state._own(requeued)
    assert seen.needs_slurm(), "its job is still there"
    for word, said in (("PENDING", "in a new run"), ("RUNNING", "its job has not ended yet: ask again once it has")):
        (decision,) = decided(seen_with(requeued, word))
        assert decision.job is None
        assert decision.words.endswith(said)
    new = results.run(JOB.run_id().replace("jax_mnist_1_digits_epochs_2", "jax_mnist_1"))
    assert new.id.partition("-")[0] == requeued.id.partition("-")[0]
    new.create([], owner=Owner(slurm_job_name=new.id))
    new.write_status(slurm_job_id="41")
    seen = seen_with(requeued, "COMPLETED")
    assert not seen.needs_slurm()
    both = [seen, state._own(new)]
    assert resubmit.decide([seen], both, set(), None) == []
    (decision,) = resubmit.decide([seen], both, {seen.id}, None)
    assert decision.words == f"was followed by {new.id}"
    (alone,) = decided(seen)
    assert alone.job is not None, "nothing of a new run is known"


def test_a_run_that_waited_for_a_week_is_explained_after_its_end(training: Run) -> None:
    training.write_status(queued=utc(time.time() - 8 * 24 * 3600))
    training.settle(state=CANCELLED, cause="ended by SIGTERM", why="told to end")
    assert state._own(training).needs_slurm()
    training.write_status(ended=utc(time.time() - 8 * 24 * 3600))
    assert not state._own(training).needs_slurm()


def test_a_command_waits_on_for_a_training_that_slurm_may_begin_again(
    training: Run, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned(training)
    assert not seen_with(training, "RUNNING").is_over
    assert seen_with(training, "TIMEOUT").is_over
    training.write_launch(slurm=None)
    looks = [look_at(training, word) for word in ("COMPLETING", "PENDING", "TIMEOUT")]
    taken: list[Snapshot] = []
    monkeypatch.setattr(manage, "follow", lambda _, __, until: next(x for x in looks if taken.append(x) or until(x)))
    assert not manage.wait([training], results)
    assert taken == looks


def look_at(run: Run, word: str) -> Snapshot:
    return Snapshot([seen_with(run, word)], [], [], None, 0.0)


def test_an_old_answer_says_that_the_job_of_a_training_is_still_there(
    training: Run, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned(training)
    job = SlurmJob("41", training.id, queue.user(), "RUNNING", "RUNNING", "", "", "", "1:00:00")
    before = Snapshot([], [], [], queue.Answer([job], [], True, None), time.time())
    (seen,) = state.look(results, before=before).runs
    assert not seen.is_over


def test_what_has_not_reported_for_long_is_not_over_while_slurm_has_its_job(requeued: Run, results: Results) -> None:
    """As rank 0 does while a container is unpacked on the other nodes, or a suspended job."""
    requeued.write_status(state=RUNNING, owner=Owner(host="elsewhere", pid=7), cause="", why=None, ended="")
    silent(requeued, 2 * LOST_AFTER_SECONDS)
    assert requeued.status().state == LOST
    assert not manage._has_ended(requeued)
    job = SlurmJob("41", requeued.id, queue.user(), "RUNNING", "RUNNING", "", "", "", "1:00:00")
    before = Snapshot([], [], [], queue.Answer([job], [], True, True), time.time())
    (seen,) = state.look(results, before=before).runs
    assert (seen.state, seen.is_over) == (RUNNING, False)


@pytest.mark.parametrize(("word", "calls"), [("PENDING", [["41"]]), ("COMPLETING", [[]])])
def test_what_slurm_has_requeued_can_be_cancelled(
    training: Run, results: Results, monkeypatch: pytest.MonkeyPatch, word: str, calls: list[list[str]]
) -> None:
    training.settle(state=CANCELLED, cause="ended by SIGTERM", why="told to end")
    asked: list[list[str]] = []
    monkeypatch.setattr(state, "look", lambda *_: look_at(training, word))
    monkeypatch.setattr(manage, "_scancel", lambda runs: asked.append([run.slurm_job_id for run in runs]))
    said: list[str] = []
    assert manage.cancel(results, [training], said.append)
    assert asked[:1] == calls
    if word == "PENDING":
        assert said == [f"{training.id} was cancelled; its job, which Slurm had requeued, is cancelled"]
        assert training.status().why == reasons.CANCELLED
        (decision,) = decided(seen_with(training, "CANCELLED"), training.id)
        assert decision.continues, "by its name alone"
    else:
        assert said == [f"{training.id} is already cancelled"]


def test_what_another_host_holds_is_not_taken_from_it(results: Results) -> None:
    run = results.run(dataclasses.replace(JOB, dataset=None, epochs=None, max_hours=None).run_id())
    record = LaunchRecord(job=JOB, pair="g", code=tree.digest(), user=queue.user())
    run.create(JOB.rows(), owner=Owner("elsewhere", 7, "7"), target="local", script="old", launch=record)
    silent(run, 3600)
    (seen,) = state.look(results).runs
    assert (seen.state, display.describe(seen)) == (QUEUED, "held on elsewhere")
    run.write_status(state=RUNNING, started=utc())
    silent(run, 3600)
    (decision,) = decided(state._own(run), run.id)
    assert decision.job is None
    assert decision.words.endswith("only elsewhere, where it ran, knows whether it has ended: resubmit it there")


@pytest.mark.parametrize(
    ("note", "settled"), [("Slurm accounting storage is disabled", True), ("Connection refused", False)]
)
def test_while_the_accounting_does_not_answer_no_end_is_recorded(training: Run, note: str, settled: bool) -> None:
    seen = state._own(training)
    answer = queue.Answer([], [f"the accounting is unavailable: {note}"], True, False)
    state._explain(seen, None, answer, False)
    assert seen.state == LOST
    assert bool(training.stored_status().ended) == settled
    if not settled:
        assert state._own(training).needs_slurm()
        assert seen_with(training, "TIMEOUT").status.why == reasons.TIME_LIMIT


def test_an_accounting_that_is_late_still_explains_a_run_that_was_lost(training: Run) -> None:
    nothing = queue.Answer([], [], True, True)
    state._explain(state._own(training), None, nothing, False)
    lost = training.stored_status()
    assert (lost.state, bool(lost.ended)) == (LOST, True)
    seen = state._own(training)
    assert seen.needs_slurm()
    state._explain(seen, None, nothing, False)
    assert training.stored_status() == lost, "or it would be asked for for ever"
    training.write_status(ended=utc(time.time() - 700))
    assert not state._own(training).needs_slurm()
    assert seen_with(training, "TIMEOUT").status.why == reasons.TIME_LIMIT
    assert training.stored_status().state == FAILED


def restarted(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("DUEL_SLURM_JOB_ID", job)


def test_a_job_that_begins_again_leaves_alone_what_another_one_goes_on_with(
    training: Run, results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training.write_status(slurm_job_id="42", owner=this_process())
    restarted(monkeypatch, "41")
    monkeypatch.setenv("DUEL_RUN_ID", training.id)
    before = training.stored_status()
    assert supervisor._open_run(JOB, results, "new") is None
    assert f"job 42 goes on with the training {training.id}" in capsys.readouterr().out
    assert training.stored_status() == before
    assert results.runs() == [training], "nor does it begin another"
    restarted(monkeypatch, "42")
    monkeypatch.setenv("DUEL_RUN_ID", training.id)
    assert supervisor._open_run(JOB, results, "new") == training


def test_the_hours_of_a_life_that_a_node_ended_are_counted(training: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(monkeypatch, "41")
    assert continuing.take_up(JOB, training, "new")
    status = training.stored_status()
    assert status.state == QUEUED
    assert status.used == pytest.approx(3600, abs=10), "up to its last report, not until it began again"


def warned(run: Run) -> None:
    """As its supervisor leaves it before it asks for a requeue."""
    checkpoint = next((run.folder / "checkpoints").glob("*/*"))
    assert checkpoint.stat().st_mtime > BEGUN
    run.write_status(owner=this_process(), used=3600.0)
    run.settle(state=FAILED, cause="ended by SIGUSR2", why="warned", exit_code=140)


@pytest.mark.parametrize(
    ("lines", "said", "becomes"),
    [
        (None, "scontrol requeue failed: No such file or directory; 'python main.py resubmit' goes on", FAILED),
        ("exec /bin/sleep 9", "scontrol requeue has not answered for 0.5 s; 'python main.py resubmit' goes on", FAILED),
        ("echo Job is held >&2; exit 1", "scontrol requeue failed: Job is held; 'python main.py resubmit'", FAILED),
        ("exit 0", "Slurm begins the job again, 1 of 2 hours are used", QUEUED),
    ],
)
def test_a_run_is_queued_only_if_slurm_has_agreed(
    training: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, said: str, becomes: str
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(continuing, "REQUEUE_SECONDS", 0.5 if "sleep" in (lines or "") else 60.0)
    if lines is not None:
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.write_text(f"#!/bin/sh\n{lines}\n")
        scontrol.chmod(0o755)
    warned(training)
    before = training.stored_status()
    assert continuing.requeue(JOB, training, "new", "41").startswith(said)
    after = training.stored_status()
    assert after.state == becomes
    if becomes == FAILED:
        assert dataclasses.replace(after, updated=before.updated) == before
    else:
        assert (after.started, after.owner) == ("", Owner(slurm_job_name=training.id))


def test_nothing_is_cancelled_if_something_can_only_be_cancelled_elsewhere(results: Results) -> None:
    first, other = (results.run(JOB.run_id(stamp)) for stamp in ("261127-000000-00aaaa", "261127-000000-00bbbb"))
    first.create(JOB.rows(), owner=this_process(), target="local", script="x")
    other.create(JOB.rows(), owner=Owner("elsewhere", 7, "7"), target="local", script="x")
    with pytest.raises(UserError, match="runs on elsewhere; cancel it there"):
        manage.cancel(results, [first, other], print)
    assert first.stored_status().state == QUEUED


def test_watching_ends_when_the_last_of_those_chosen_is_none_any_more(results: Results) -> None:
    run = results.run(JOB.run_id())
    run.create(JOB.rows(), owner=this_process(), target="local", script="x")
    turns = iter([True, False])

    def chosen(look: Snapshot) -> Snapshot:
        if not next(turns):
            raise UserError("no run matches --state queued")
        return look

    manage.watch(results, chosen)
    turns = iter([False])
    with pytest.raises(UserError, match="no run matches"):
        manage.watch(results, chosen)
