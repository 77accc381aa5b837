"""Handing scripts to Slurm through submitit, so that none is lost and none goes in twice.

Imported only for Slurm targets: submitit takes its time to import, and its executor needs ``srun``. What sbatch does
when things go wrong was tried on Slurm 22.05: after 'Socket timed out' the job may well run, after 'Unable to contact
slurm controller' there is none.
"""

import contextlib
import io
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from duel.errors import UserError
from duel.launch import queue, state
from duel.launch.cluster import Target
from duel.launch.preflight import command, environment
from duel.record import FAILED, QUEUED
from duel.results import Results, Run, locked, utc

# sbatch itself tries for up to 120 s where the queue is full.
SBATCH_SECONDS = 180
# A controller that was stopped works off what it was sent before; it gets this long before a job counts as not there.
SETTLING_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 30.0

_NOT_SENT = re.compile(r"Unable to contact slurm controller", re.IGNORECASE)
_UNCLEAR = re.compile(
    r"timed out|zero bytes|unexpected message|connection (failure|reset|aborted)|temporarily unable|transport",
    re.IGNORECASE,
)

Say = Callable[[str], None]


class ScriptExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, but Slurm gets the rendered script itself, under the run's id as job name.

    Both overridden methods are abstract in submitit's base class: its contract for plug-ins, unchanged from 1.0 to 1.5.
    """

    def __init__(self, folder: Path, run: Run, target: Target) -> None:
        super().__init__(folder=folder)
        self._run, self._target = run, target

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._run.script.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        words = ["timeout", "--kill-after=10", str(SBATCH_SECONDS)]
        return command(self._target, [f"--job-name={self._run.id}", str(submission_file_path)], words)


class Script:
    """What submitit keeps as the receipt of a submission: which script was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        return subprocess.run(["bash", str(self.path)], check=False).returncode


@contextlib.contextmanager
def only_driver(results: Results, say: Say) -> Iterator[None]:
    """Wait until no other driver submits, and keep others out.

    The lock is our standard input meanwhile: an sbatch that outlives us still holds it, so whoever comes next finds in
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


def find(names: Collection[str], since: float) -> tuple[dict[str, queue.SlurmJob], queue.Answer]:
    """The jobs of these names that Slurm knows, submitted at or after ``since`` (s since 1970), and its answer."""
    wanted = set(names)
    answer = queue.ask([state.user()], since, lambda jobs: wanted <= {job.name for job in jobs})
    return {job.name: job for job in answer.jobs if job.name in wanted}, answer


def send(runs: list[Run], targets: list[Target], results: Results, say: Say) -> list[str]:
    """Submit each run's script, unless that was done; a run that sbatch refuses is failed, the others go on.

    ``targets`` are as ``Target.for_job`` made them, one for each run. Needs ``only_driver``. Returns sbatch's own words
    for each that it refused. Raises UserError where Slurm does not answer: what was not sent then stays queued, and the
    same command goes on with it.
    """
    logs = results.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)  # submitit's receipts; Slurm's logs too
    refused = []
    for number, (run, target) in enumerate(zip(runs, targets, strict=True)):
        if _decided(run):
            continue
        if number:
            time.sleep(target.pause)
        with environment(target):
            if target.max_jobs:
                _wait_for_room(run, target.max_jobs, results, say)
                if _decided(run):
                    continue
            if words := _send(run, target, logs, say):
                refused.append(f"Slurm refused {run.id}: {words}")
    return refused


def _decided(run: Run) -> bool:
    """Whether a run is sent or refused already, or was cancelled before it could be."""
    launch = run.launch()
    return bool(launch.get("slurm_job_id") or launch.get("refused")) or run.stored_status().get("state") != QUEUED


def _send(run: Run, target: Target, logs: Path, say: Say) -> str:
    """Submit one script; returns sbatch's words where it refused, else the empty text."""
    since, wait = time.time(), 5.0
    while True:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats there what it raises
                job = ScriptExecutor(logs, run, target).submit(Script(run.script))
        except (FailedJobError, FailedSubmissionError) as error:
            code = getattr(error.__cause__, "returncode", 0)
            words = " ".join(str(error).split()) or f"exit code {code}"
        else:
            run.write_launch(slurm_job_id=str(job.job_id), sent=utc())
            return ""
        if _NOT_SENT.search(words):
            if time.time() - since + wait > PATIENCE_SECONDS:
                raise UserError(f"{run.id}: not sent, {words}; the same command goes on with it later")
            say(f"{run.id}: not sent, {words}; again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, 60.0)
            continue
        unclear = bool(_UNCLEAR.search(words)) or code in (0, 124, 137) or code < 0
        if unclear:
            say(f"{run.id}: {words}. It may have gone in all the same: looking for it")
        job_id = look_up(run, since, patient=unclear)
        if job_id:
            run.write_launch(slurm_job_id=job_id, sent=utc(), adopted=words)
            say(f"{run.id} is job {job_id}")
            return ""
        run.write_launch(refused=words)
        run.settle(state=FAILED, cause=f"never submitted: {words}" if unclear else f"Slurm refused it: {words}")
        return words


def look_up(run: Run, since: float, patient: bool) -> str:
    """The id of the job of this run's name; empty where Slurm has none.

    ``patient``: Slurm may have been sent the job a moment ago and not look at it yet. Raises UserError where Slurm does
    not answer: then nobody can tell.
    """
    deadline, answered = time.time() + PATIENCE_SECONDS, False
    while True:
        found, answer = find([run.id], since)
        if run.id in found:
            return found[run.id].id
        if answer.controller and (answered or not patient):
            return ""
        if not answer.controller and time.time() > deadline:
            notes = "; ".join(answer.notes)
            raise UserError(f"{run.id}: whether it went in cannot be told, {notes}; the same command looks again")
        answered = answer.controller
        time.sleep(SETTLING_SECONDS)


def _wait_for_room(run: Run, most: int, results: Results, say: Say) -> None:
    """Wait until fewer than ``most`` runs on the target of ``run`` are in Slurm's queue."""
    target = run.stored_status().get("target")
    ours = {other.id for other in results.runs() if other.stored_status().get("target") == target}
    said = False
    while True:
        answer = queue.ask([state.user()], time.time(), lambda jobs: True)
        there = [job for job in answer.jobs if job.name in ours and queue.judge(job).kind != queue.ENDED]
        if answer.controller and len(there) < most:
            return
        if not said:
            say(f"{len(there)} jobs are there, and the target takes {most} (max_jobs): waiting for one to end")
            said = True
        time.sleep(POLL_SECONDS)
