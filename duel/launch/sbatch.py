"""Handing scripts to Slurm through submitit, so that none is lost and none goes in twice.

What sbatch does when things go wrong was tried on Slurm 22.05: after 'Socket timed out' the job may well run, after
'Unable to contact slurm controller' there is none.
"""

import contextlib
import io
import re
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from duel import files
from duel.errors import UserError
from duel.files import Damaged, utc
from duel.launch import queue, reasons, refusal, state
from duel.launch.environment import environment
from duel.launch.preflight import command
from duel.launch.schema import Target
from duel.results import Results, Run
from duel.states import FAILED, QUEUED

# sbatch itself tries for up to 120 s where the queue is full.
SBATCH_SECONDS = 180
# A controller that was stopped works off what it was sent before; it gets this long before a job counts as not there.
SETTLING_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 30.0

_NOT_SENT = re.compile(r"Unable to contact slurm controller", re.IGNORECASE)

Say = Callable[[str], None]


class NoRoomError(Exception):
    """Slurm has as many jobs as it takes now; the text says which limit that is."""


class ScriptExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, but Slurm gets the rendered script itself, under the run's id as job name.

    Both overridden methods are abstract in submitit's base class: its contract for plug-ins, unchanged from 1.0 to 1.5.
    """

    def __init__(self, folder: Path, run: Run, target: Target) -> None:
        super().__init__(folder=folder)
        self._run, self._target = run, target

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return files.read(self._run.script).decode()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        words = ["timeout", "--kill-after=10", str(SBATCH_SECONDS)]
        return command(self._target, [f"--job-name={self._run.id}", str(submission_file_path)], words)


class Script:
    """What submitit keeps as the receipt of a submission: which script was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        return subprocess.run(["bash", str(self.path)], check=False).returncode


def find(names: Collection[str], since: float) -> tuple[dict[str, queue.SlurmJob], queue.Answer]:
    """The jobs of these names that Slurm knows, submitted at or after ``since`` (s since 1970), and its answer."""
    wanted = set(names)
    answer = queue.ask([state.user()], since, lambda jobs: wanted <= {job.name for job in jobs})
    return {job.name: job for job in answer.jobs if job.name in wanted}, answer


def send(runs: list[Run], targets: list[Target], results: Results, say: Say) -> list[str]:
    """Submit each run's script, unless that was done; a run that sbatch refuses is failed, the others go on.

    ``targets`` are as ``Target.for_job`` made them, one for each run. Needs ``slurm.only_driver``. Returns sbatch's own
    words for each that it refused. Raises UserError where Slurm does not answer, and NoRoomError where it takes no more
    now: what was not sent then stays queued.
    """
    logs = results.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)  # submitit's receipts; Slurm's logs too
    refused = []
    for number, (run, target) in enumerate(zip(runs, targets, strict=True)):
        if decided(run):
            continue
        if number:
            time.sleep(target.pause)
        with environment(target):
            if target.max_jobs:
                _wait_for_room(run, target.max_jobs, results, say)
                if decided(run):
                    continue
            if words := _send(run, target, logs, say):
                refused.append(f"Slurm refused {run.id}: {words}")
    return refused


def decided(run: Run) -> bool:
    """Whether nothing is left to send of a run: it was sent, refused, or cancelled before it could be."""
    return sent_or_refused(run) or run.stored_status().state != QUEUED


def sent_or_refused(run: Run) -> bool:
    try:
        launch = run.launch()
    except Damaged:
        return True  # 'status' shows it; nobody can go on with it
    return bool(launch.slurm_job_id or launch.refused)


def _send(run: Run, target: Target, logs: Path, say: Say) -> str:
    """Submit one script; returns sbatch's words where it refused, else the empty text.

    Raises NoRoomError where Slurm takes no more now, and UserError where it does not answer.
    """
    since, wait = time.time(), 5.0
    while True:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats there what it raises
                job = ScriptExecutor(logs, run, target).submit(Script(run.script))
        except (FailedJobError, FailedSubmissionError) as error:
            code = getattr(error.__cause__, "returncode", 0)
            words = " ".join(str(error).split()) or f"exit code {code}"
        else:
            run.write_launch(slurm_job_id=str(job.job_id), sent=utc(), cluster=queue.cluster_name())
            return ""
        if refusal.is_full(words):
            raise NoRoomError(refusal.full(words))
        reached = not (_NOT_SENT.search(words) or refusal.is_unconfigured(words))
        unclear = reached and (refusal.is_silence(words) or code in (0, 124, 137) or code < 0)
        if unclear:
            say(f"{run.id}: {words}. It may have gone in all the same: looking for it")
        job_id = look_up(run, since, patient=unclear) if reached else ""
        if job_id:
            run.write_launch(slurm_job_id=job_id, sent=utc(), adopted=words, cluster=queue.cluster_name())
            say(f"{run.id} is job {job_id}")
            return ""
        # Of an sbatch that ended well and named no job, there is no more to be had the next time.
        if reached and not (unclear and code):
            run.write_launch(refused=words)
            cause = f"never submitted: {words}" if unclear else f"Slurm refused it: {words}"
            run.settle(state=FAILED, cause=cause, why=reasons.NEVER_RAN)
            return words
        if time.time() - since + wait > PATIENCE_SECONDS:
            raise UserError(f"{run.id}: not sent, {words}; the same command goes on with it later")
        say(f"{run.id}: not sent, {words}; again in {wait:.0f} s")
        time.sleep(wait)
        wait = min(2 * wait, 60.0)


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
            raise UserError(f"{run.id}: whether it was submitted is unknown, {notes}; the same command looks again")
        answered = answer.controller
        time.sleep(SETTLING_SECONDS)


def _wait_for_room(run: Run, most: int, results: Results, say: Say) -> None:
    """Wait until fewer than ``most`` runs on the target of ``run`` are in Slurm's queue."""
    target = run.stored_status().target
    ours = {other.id for other in results.runs() if other.stored_status().target == target}
    said = False
    while True:
        answer = queue.ask([state.user()], time.time(), lambda jobs: True)
        there = [job for job in answer.jobs if job.name in ours and reasons.judge(job).kind != reasons.ENDED]
        if answer.controller and len(there) < most:
            return
        if not said:
            say(f"{len(there)} jobs are there, and the target takes {most} (max_jobs): waiting for one to end")
            said = True
        time.sleep(POLL_SECONDS)
