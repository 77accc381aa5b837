"""Hand scripts to Slurm through submitit, so that none is lost and none is submitted twice.

How sbatch fails was tested on Slurm 22.05: after 'Socket timed out' the job may well run, after 'Unable to contact
slurm controller' there is none.
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

# sbatch itself retries for up to 120 s if the queue is full.
SBATCH_SECONDS = 180
# A controller that was stopped first processes what it was sent; a job counts as missing only after this long.
SETTLING_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 30.0

_NOT_SENT = re.compile(r"Unable to contact slurm controller", re.IGNORECASE)

Say = Callable[[str], None]


class NoRoomError(Exception):
    """Slurm takes no more jobs now; the message names the limit."""


class ScriptExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, except that it submits the rendered script, with the run's id as job name.

    Both overridden methods are abstract in submitit's base class: its contract for plug-ins, unchanged from 1.0 to 1.5.
    """

    def __init__(self, folder: Path, run: Run, target: Target) -> None:
        super().__init__(folder=folder)
        self._run, self._target = run, target

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return files.read(self._run.script).decode()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        timeout = ["timeout", "--kill-after=10", str(SBATCH_SECONDS)]
        return command(self._target, [f"--job-name={self._run.id}", str(submission_file_path)], timeout)


class Script:
    """What submitit stores as the receipt of a submission: the script that was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        return subprocess.run(["bash", str(self.path)], check=False).returncode


def find(runs: Collection[Run], since: float) -> tuple[dict[str, queue.SlurmJob], queue.Answer]:
    """Return Slurm's jobs of ``runs`` by their names, submitted at or after ``since`` (s since 1970), and its answer.

    Jobs in which a run was interrupted before it continued are not among them.
    """
    earlier = {run.id: run.launch().earlier.split(",") for run in runs}

    def mine(jobs: list[queue.SlurmJob]) -> dict[str, queue.SlurmJob]:
        return {job.name: job for job in jobs if job.name in earlier and job.id not in earlier[job.name]}

    answer = queue.ask([state.user()], since, lambda jobs: mine(jobs).keys() == earlier.keys())
    return mine(answer.jobs), answer


def send(runs: list[Run], targets: list[Target], results: Results, say: Say) -> list[str]:
    """Submit each run's script, unless that was done; a run that sbatch refuses is set to failed, the others continue.

    ``targets`` are as ``Target.for_job`` made them, one for each run. Needs ``slurm.only_driver``. Returns sbatch's
    message for each run that it refused. Raises UserError if Slurm does not answer, and NoRoomError if it takes no more
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
            if message := _send(run, target, logs, say):
                refused.append(f"Slurm refused {run.id}: {message}")
    return refused


def decided(run: Run) -> bool:
    """Return whether nothing of a run is left to send: it was sent, refused, or cancelled before it could be."""
    return sent_or_refused(run) or run.stored_status().state != QUEUED


def sent_or_refused(run: Run) -> bool:
    try:
        launch = run.launch()
    except Damaged:
        return True  # 'status' shows it; it cannot be continued
    return bool(launch.slurm_job_id or launch.refused)


def _send(run: Run, target: Target, logs: Path, say: Say) -> str:
    """Submit one script; returns sbatch's message if it was refused, else an empty text.

    Raises NoRoomError if Slurm takes no more now, and UserError if it does not answer.
    """
    since, wait = time.time(), 5.0
    while True:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit also prints what it raises
                job = ScriptExecutor(logs, run, target).submit(Script(run.script))
        except (FailedJobError, FailedSubmissionError) as error:
            code = getattr(error.__cause__, "returncode", 0)
            message = " ".join(str(error).split()) or f"exit code {code}"
        else:
            run.write_launch(slurm_job_id=str(job.job_id), sent=utc(), cluster=queue.cluster_name())
            return ""
        if refusal.is_full(message):
            raise NoRoomError(refusal.full(message))
        reached = not (_NOT_SENT.search(message) or refusal.is_unconfigured(message))
        unclear = reached and (refusal.is_silence(message) or code in (0, 124, 137) or code < 0)
        if unclear:
            say(f"{run.id}: {message}. It may have been submitted anyway: looking for it")
        job_id = look_up(run, since, patient=unclear) if reached else ""
        if job_id:
            run.write_launch(slurm_job_id=job_id, sent=utc(), adopted=message, cluster=queue.cluster_name())
            say(f"{run.id} is job {job_id}")
            return ""
        # If sbatch succeeded but named no job, retrying it would not help.
        if reached and not (unclear and code):
            run.write_launch(refused=message)
            cause = f"never submitted: {message}" if unclear else f"Slurm refused it: {message}"
            run.settle(state=FAILED, cause=cause, why=reasons.NEVER_RAN)
            return message
        if time.time() - since + wait > PATIENCE_SECONDS:
            raise UserError(f"{run.id}: not sent, {message}; the same command sends it later")
        say(f"{run.id}: not sent, {message}; retrying in {wait:.0f} s")
        time.sleep(wait)
        wait = min(2 * wait, 60.0)


def look_up(run: Run, since: float, patient: bool) -> str:
    """Return the id of the job with this run's name; empty if Slurm has none.

    ``patient``: the job may just have been sent, and Slurm not have processed it yet. Raises UserError if Slurm does
    not answer: then it is unknown.
    """
    deadline, answered = time.time() + PATIENCE_SECONDS, False
    while True:
        found, answer = find([run], since)
        if run.id in found:
            return found[run.id].id
        if answer.controller and (answered or not patient):
            return ""
        if not answer.controller and time.time() > deadline:
            notes = "; ".join(answer.notes)
            raise UserError(f"{run.id}: whether it was submitted is unknown, {notes}; the same command checks again")
        answered = answer.controller
        time.sleep(SETTLING_SECONDS)


def _wait_for_room(run: Run, most: int, results: Results, say: Say) -> None:
    """Wait until fewer than ``most`` runs on the target of ``run`` are in Slurm's queue."""
    target = run.stored_status().target
    ours = {other.id for other in results.runs() if other.stored_status().target == target}
    announced = False
    while True:
        answer = queue.ask([state.user()], time.time(), lambda jobs: True)
        there = [job for job in answer.jobs if job.name in ours and reasons.judge(job).kind != reasons.ENDED]
        if answer.controller and len(there) < most:
            return
        if not announced:
            say(f"{len(there)} jobs are in Slurm, and the target allows {most} (max_jobs): waiting for one to end")
            announced = True
        time.sleep(POLL_SECONDS)
