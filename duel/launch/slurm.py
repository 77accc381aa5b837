"""Slurm as a scheduler: what a driver submits, what it finds of an earlier one, and what waits to be sent.

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
from duel.launch import intent, preflight, queue, reasons, sbatch, submit
from duel.launch.intent import Intent
from duel.launch.schema import Cluster, Target
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
        """Record what will be sent, create the folders, and send what Slurm takes now; returns the runs.

        The rest waits, after what waited before (``duel.launch.sender``).
        """
        with only_driver(results, say):
            name, launches = recover(launches, results, say)
            noted = intent.read(results, name) if name else None
            if noted is None:
                noted = _intent(launches)
                name = intent.new(results, noted)
            runs = submit.create(launches, results)
            noted = replace(noted, created=True, waits="")
            intent.write(results, name, noted)
            ahead = [earlier for earlier in intent.mine(results) if earlier < name]
            if ahead:
                wait(name, noted, "earlier submissions are sent first", results)
            else:
                send(name, noted, [launch.target for launch in launches], results, say)
        return runs


def _intent(launches: list[Launch]) -> Intent:
    passed = {name for launch in launches for name in launch.target.pass_variables}
    return Intent(
        {launch.run_id: launch.job for launch in launches},
        time.time(),
        user=queue.user(),
        cluster=queue.cluster_name(),
        passed={name: os.environ[name] for name in sorted(passed & set(os.environ))},
    )


def send(name: str, noted: Intent, targets: list[Target], results: Results, say: Say) -> None:
    """Send what Slurm takes now of the submission ``name``, which ends with its last run; else record why it waits.

    Needs ``only_driver``. ``targets`` are those of its runs, as ``Target.for_job`` made them.
    """
    try:
        sbatch.send([results.run(run_id) for run_id in noted.runs], targets, results, say, noted.passed)
        intent.end(results, name)
    except sbatch.NotNowError as error:
        wait(name, noted, str(error), results)
    except sbatch.UnclearError as error:
        raise UserError(f"{error}; the next command checks again") from error


def wait(name: str, noted: Intent, why: str, results: Results) -> None:
    """Record why the next job of a submission is not sent now."""
    intent.write(results, name, replace(noted, waits=why))


def recover(launches: list[Launch], results: Results, say: Say) -> tuple[str, list[Launch]]:
    """Return the unfinished submission of exactly these jobs, if any, and ``launches`` under its run ids; else an empty
    name and ``launches``.

    A submission of other jobs whose folders were not all created is settled: its driver died. Jobs that reached Slurm
    are recorded in their runs. What is another user's or another cluster's is left alone. Raises UserError if another
    version of Duel recorded a submission, or Slurm does not answer.
    """
    found = ""
    for name in intent.names(results):
        try:
            before = intent.read(results, name)
        except OtherVersion:
            raise
        except UserError as error:
            say(f"{error}; ignored: 'python main.py status' looks up each run by its name")
            intent.end(results, name)
            continue
        if before is None:
            continue
        if who := intent.whose(before):
            say(f"left alone: {len(before.runs)} jobs that {who} sends")
            continue
        runs = [results.run(run_id) for run_id in before.runs]
        if _all_cancelled(runs):
            intent.end(results, name)
        elif launches and not found and list(before.runs.values()) == [launch.job for launch in launches]:
            found = name
            adopt(before, results)
            say(f"continuing the submission of {len(runs)} jobs" + ("" if before.waits else ", which was interrupted"))
            launches = [_as(run_id, launch) for launch, run_id in zip(launches, before.runs, strict=True)]
        elif not before.created:
            _settle(adopt(before, results), say)
            if gone := [run_id for run_id in before.runs if not results.run(run_id).folder.exists()]:
                say(f"{len(gone)} more of that submission, such as {gone[0]}, had not begun: repeat its command")
            intent.end(results, name)
    return found, launches


def _settle(unsent: list[Run], say: Say) -> None:
    for run in unsent:
        run.settle(state=FAILED, cause="never submitted: the driver was interrupted", why=reasons.NEVER_RAN)
    if unsent:
        say(f"{len(unsent)} jobs of an interrupted submission were never sent: 'python main.py resubmit' sends them")


def adopt(noted: Intent, results: Results) -> list[Run]:
    """Record the jobs of those runs of a submission that were not known to be sent; returns the runs without one.

    What its driver left half-written is removed. Raises UserError if Slurm does not answer.
    """
    intent.tidy(results, noted)
    runs = [run for run in map(results.run, noted.runs) if run.folder.exists() and not _settled(run)]
    found, answer = sbatch.find(runs, noted.since) if runs else ({}, None)
    for run in runs:
        if run.id in found:
            there = noted.cluster or queue.cluster_name()
            run.write_launch(slurm_job_id=found[run.id].id, cluster=there, adopted="found after an interruption")
        elif answer is not None and not answer.controller:
            raise UserError(f"an interrupted submission cannot be resolved: {'; '.join(answer.notes)}")
    return [run for run in runs if run.id not in found]


def _all_cancelled(runs: list[Run]) -> bool:
    """Return whether all that was still to be sent of a submission has been cancelled in the meantime."""
    unsent = [run for run in runs if not run.folder.exists() or not intent.sent_or_refused(run)]
    return bool(unsent) and all(run.folder.exists() and run.stored_status().state == CANCELLED for run in unsent)


def _settled(run: Run) -> bool:
    """Return whether a run's job need not be looked up."""
    return intent.sent_or_refused(run) or run.stored_status().state == CANCELLED


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
