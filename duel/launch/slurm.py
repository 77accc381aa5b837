"""Slurm as a scheduler: what a driver submits, what it finds of an earlier one, and what waits for room.

Imported only for Slurm targets: submitit is slow to import, and its executor needs ``srun``.
"""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from duel import terminal
from duel.errors import UserError
from duel.files import OtherVersion, locked
from duel.launch import intent, preflight, reasons, sbatch, submit
from duel.launch.intent import Intent
from duel.launch.schema import Cluster
from duel.launch.submit import Launch
from duel.results import Results, Run
from duel.states import CANCELLED, FAILED

Say = Callable[[str], None]


class Slurm:
    """Starts scripts as Slurm jobs (``duel.launch.submit.Scheduler``)."""

    def check(self, launches: list[Launch]) -> None:
        """Raise UserError if Slurm's commands are missing."""
        # srun: submitit's executor needs it. A command provided by the target's set-up lines is not available yet.
        target = launches[0].target
        needed = ["srun", *([] if target.setup.submit else [shlex.split(target.submit)[0]])]
        missing = [name for name in needed if shutil.which(name) is None]
        if missing:
            name, gone = launches[0].job.target, " and no ".join(missing)
            raise UserError(f"target {name!r} needs Slurm, but there is no {gone} here; 'local' does not need it")

    def preview(self, launches: list[Launch], cluster: Cluster) -> None:
        """Show what Slurm would do with the launches. Raises UserError for what it would refuse."""
        terminal.show(preflight.plan(launches, cluster))

    def start(self, launches: list[Launch], results: Results, say: Say) -> list[Run]:
        """Record what will be sent, create the folders, and send; returns the runs."""
        with only_driver(results, say):
            launches = recover(launches, results, say)
            noted = Intent({launch.run_id: launch.job for launch in launches}, time.time())
            if not results.intent.exists():
                intent.write(results, noted)
            runs = submit.create(launches, results)
            try:
                refused = sbatch.send(runs, [launch.target for launch in launches], results, say)
            except sbatch.NoRoomError as full:
                raise UserError(_left_waiting(runs, results, str(full))) from full
            results.intent.unlink()  # each was sent, refused or cancelled
        if refused:
            raise UserError("\n".join(refused))
        return runs


def _left_waiting(runs: list[Run], results: Results, limit: str) -> str:
    """Record why Slurm takes no more of ``runs`` now; returns this as text, with its refusals. The intent stays."""
    noted = intent.read(results)
    assert noted is not None
    intent.write(
        results, replace(noted, waits=f"Slurm takes no more jobs now ({limit}); the same command sends it later")
    )
    records = [run.launch() for run in runs]
    refused = [f"Slurm refused {run.id}: {r.refused}" for run, r in zip(runs, records, strict=True) if r.refused]
    sent, waiting = sum(bool(r.slurm_job_id) for r in records), sum(not sbatch.decided(run) for run in runs)
    message = (
        f"{sent} of {len(runs)} were sent; Slurm takes no more now ({limit}): the same command, or 'python main.py "
        f"resubmit', sends the other {waiting} later ('max_jobs' in cluster.yaml makes main.py wait for room)"
    )
    return "\n".join([*refused, message])


def recover(launches: list[Launch], results: Results, say: Say) -> list[Launch]:
    """Return ``launches``, under the run ids of an earlier submission of exactly these jobs if that was incomplete.

    Any other interrupted submission is settled. Either way, jobs that reached Slurm are recorded in their runs. Raises
    UserError if another version of Duel wrote the intent, Slurm is unavailable, or other jobs wait for room.
    """
    try:
        before = intent.read(results)
        runs = [results.run(run_id) for run_id in before.runs] if before else []
    except OtherVersion:
        raise
    except UserError as error:
        say(f"{error}; ignored: 'python main.py status' looks up each run by its name")
        results.intent.unlink()
        return launches
    if before is None:
        return launches
    if _all_cancelled(runs):
        results.intent.unlink()
        return launches
    unsent = _adopt([run for run in runs if run.folder.exists() and not _settled(run)], before.since)
    if launches and list(before.runs.values()) == [launch.job for launch in launches]:
        say(f"continuing the submission of {len(launches)} jobs" + ("" if before.waits else ", which was interrupted"))
        intent.write(results, replace(before, waits=""))
        return [_as(run_id, launch) for launch, run_id in zip(launches, before.runs, strict=True)]
    if before.waits and unsent:
        raise UserError(
            f"{len(unsent)} jobs of an earlier command wait until Slurm takes them: 'python main.py resubmit' sends "
            f"them, 'python main.py cancel RUN' drops one (see 'python main.py status'); then repeat this command"
        )
    for run in unsent:
        run.settle(state=FAILED, cause="never submitted: the driver was interrupted", why=reasons.NEVER_RAN)
    if unsent:
        say(f"{len(unsent)} jobs of an interrupted submission were never sent: 'python main.py resubmit' sends them")
    results.intent.unlink()
    return launches


def _adopt(runs: list[Run], since: float) -> list[Run]:
    """Record in ``runs`` their jobs, submitted at or after ``since`` (s since 1970); returns the runs without one."""
    found, answer = sbatch.find(runs, since) if runs else ({}, None)
    for run in runs:
        if run.id in found:
            run.write_launch(slurm_job_id=found[run.id].id, adopted="found after an interruption")
        elif answer is not None and not answer.controller:
            raise UserError(f"an interrupted submission cannot be resolved: {'; '.join(answer.notes)}")
    return [run for run in runs if run.id not in found]


def send_waiting(cluster: Cluster, results: Results, say: Say) -> None:
    """Send what an earlier command left because Slurm took no more, under the same run ids.

    Raises UserError if it still takes no more.
    """
    waiting = intent.seen(results)
    jobs = list(waiting.runs.values())
    if waiting.waits and not _all_cancelled([results.run(run_id) for run_id in waiting.runs]):
        submit.launch(jobs, cluster, results, say)
        say(f"all {len(jobs)} jobs of that submission have been sent")


def _all_cancelled(runs: list[Run]) -> bool:
    """Return whether all that was still to be sent of a submission has been cancelled in the meantime."""
    unsent = [run for run in runs if not run.folder.exists() or not sbatch.sent_or_refused(run)]
    return bool(unsent) and all(run.folder.exists() and run.stored_status().state == CANCELLED for run in unsent)


def _settled(run: Run) -> bool:
    """Return whether a run's job need not be looked up."""
    return sbatch.sent_or_refused(run) or run.stored_status().state == CANCELLED


def _as(run_id: str, launch: Launch) -> Launch:
    """Return ``launch`` under another run id, and so in another group unless it follows an earlier attempt."""
    group = launch.group if launch.after or launch.continues else run_id.removeprefix(f"{launch.job.framework}_")
    return replace(launch, run_id=run_id, group=group)


@contextlib.contextmanager
def only_driver(results: Results, say: Say) -> Iterator[None]:
    """Wait until no other driver submits, and keep others out.

    Meanwhile the lock is our standard input: an sbatch that outlives us still holds it, so the next driver finds in
    Slurm what it has sent.
    """
    results.folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(locked(results.driver_lock, wait=False))
        if lock is None:
            say(f"another main.py is submitting ({results.driver_lock} is locked): waiting for it")
            lock = stack.enter_context(locked(results.driver_lock, wait=True))
        assert lock is not None
        before = os.dup(0)
        os.dup2(lock.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)
