"""Handing scripts to Slurm through submitit, so that none is lost and none goes in twice.

Imported only for Slurm targets: submitit takes its time to import, and its executor needs ``srun``. What sbatch does
when things go wrong was tried on Slurm 22.05: after 'Socket timed out' the job may well run, after 'Unable to contact
slurm controller' there is none.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from duel import files, terminal
from duel.errors import UserError
from duel.files import FORMAT, Damaged, locked, utc, write_atomically
from duel.job import Job
from duel.launch import preflight, queue, reasons, state, submit
from duel.launch.environment import environment
from duel.launch.preflight import command
from duel.launch.schema import Cluster, Target
from duel.launch.submit import Launch
from duel.record import FAILED, QUEUED
from duel.results import Results, Run

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


class Slurm:
    """Starts scripts as Slurm's jobs (``duel.launch.submit.Scheduler``)."""

    def check(self, launches: list[Launch]) -> None:
        """Raises UserError where Slurm's own commands are missing."""
        # srun: submitit's executor asks for it. A command that the target's own lines bring along is not there yet.
        target = launches[0].target
        needed = ["srun", *([] if target.setup.submit else [shlex.split(target.submit)[0]])]
        missing = [name for name in needed if shutil.which(name) is None]
        if missing:
            name, gone = launches[0].job.target, " and no ".join(missing)
            raise UserError(f"target {name!r} needs Slurm, and there is no {gone} here; 'local' does without")

    def preview(self, launches: list[Launch], cluster: Cluster) -> None:
        """Show what Slurm would do with them. Raises UserError for what it would refuse."""
        terminal.show(preflight.plan(launches, cluster))

    def start(self, launches: list[Launch], results: Results, say: Say) -> list[Run]:
        """Write down what is to be sent, make the folders, send; returns the runs."""
        with only_driver(results, say):
            launches = recover(launches, results, say)
            jobs = {launch.run_id: asdict(launch.job) for launch in launches}
            intent = {"format": FORMAT, "since": time.time(), "runs": jobs}
            if not results.intent.exists():
                write_atomically(results.intent, json.dumps(intent, indent=1) + "\n")
            runs = submit.create(launches, results)
            refused = send(runs, [launch.target for launch in launches], results, say)
            results.intent.unlink()  # all are decided
        if refused:
            raise UserError("\n".join(refused))
        return runs


def recover(launches: list[Launch], results: Results, say: Say) -> list[Launch]:
    """``launches``, under the run ids of an interrupted submission of exactly these jobs if there is one.

    Any other that was interrupted is settled. Runs whose job went in get to know of it in either case. Raises UserError
    where the note of it comes from another version, or Slurm cannot be asked.
    """
    try:
        intent = files.read_object(results.intent)
        planned = {str(run_id): files.fitting(job, Job, "a job") for run_id, job in dict(intent["runs"]).items()}
        since, version = float(intent["since"]), intent["format"]
        runs = [results.run(run_id) for run_id in planned]
    except FileNotFoundError:
        return launches
    except (ValueError, KeyError, TypeError, AttributeError):  # UserError is a ValueError
        say(f"{results.intent} is damaged and left out: 'python main.py status' looks for each run by its name")
        results.intent.unlink()
        return launches
    if version != FORMAT:
        raise UserError(f"{results.intent}: of another version of Duel (format {version}; this one reads {FORMAT})")
    open_runs = [run for run in runs if run.folder.exists() and not _settled(run)]
    found, answer = find([run.id for run in open_runs], since) if open_runs else ({}, None)
    for run in open_runs:
        if run.id in found:
            run.write_launch(slurm_job_id=found[run.id].id, adopted="found after an interruption")
        elif answer is not None and not answer.controller:
            raise UserError(f"an interrupted submission cannot be sorted out: {'; '.join(answer.notes)}")
    if launches and list(planned.values()) == [launch.job for launch in launches]:
        say(f"going on with the submission of {len(launches)} jobs that was interrupted")
        return [_as(run_id, launch) for launch, run_id in zip(launches, planned, strict=True)]
    unsent = [run for run in open_runs if run.id not in found]
    for run in unsent:
        run.settle(state=FAILED, cause="never submitted: the driver was interrupted before", why=reasons.NEVER_RAN)
    if unsent:
        say(f"{len(unsent)} jobs of an interrupted submission were never sent: 'python main.py resubmit' sends them")
    results.intent.unlink()
    return launches


def _as(run_id: str, launch: Launch) -> Launch:
    """``launch`` under another run id, and so in another group unless it follows an earlier attempt."""
    group = launch.group if launch.after else run_id.removeprefix(f"{launch.job.framework}_")
    return replace(launch, run_id=run_id, group=group)


def _settled(run: Run) -> bool:
    try:
        launch = run.launch()
    except Damaged:
        return True  # 'status' shows it; nobody can go on with it
    return bool(launch.slurm_job_id or launch.refused)


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
    return _settled(run) or run.stored_status().state != QUEUED


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
            run.write_launch(slurm_job_id=str(job.job_id), sent=utc(), cluster=queue.cluster_name())
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
            run.write_launch(slurm_job_id=job_id, sent=utc(), adopted=words, cluster=queue.cluster_name())
            say(f"{run.id} is job {job_id}")
            return ""
        run.write_launch(refused=words)
        cause = f"never submitted: {words}" if unclear else f"Slurm refused it: {words}"
        run.settle(state=FAILED, cause=cause, why=reasons.NEVER_RAN)
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
