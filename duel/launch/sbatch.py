"""Hand scripts to Slurm through submitit, so that none is lost and none is submitted twice.

How sbatch fails was tested on Slurm 22.05: after 'Socket timed out' the job may well run, after 'Unable to contact
slurm controller' there is none.
"""

import contextlib
import io
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import submitit
from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError

from duel import index
from duel.files import utc
from duel.launch import array, intent, queue, reasons, refusal
from duel.launch.environment import environment
from duel.launch.preflight import command
from duel.launch.schema import Target
from duel.results import Results, Run
from duel.states import FAILED

# sbatch itself retries for up to 120 s if the queue is full.
SBATCH_SECONDS = 180
# A controller that was stopped first processes what it was sent; a job counts as missing only after this long.
SETTLING_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
# Calls of sbatch that overlap where a target has no pause between them: each waits for Slurm most of its time.
AT_ONCE = 8
STARTING_SECONDS = 0.5  # what is about to be started still gets this environment and the lock
DAY = 24 * 60  # minutes

_asking = threading.Lock()  # a controller that is slow is not asked by several calls at once
_NOT_SENT = re.compile(r"Unable to contact slurm controller", re.IGNORECASE)

Say = Callable[[str], None]


class NotNowError(Exception):
    """The next script cannot be sent now; the message says why."""


class FullError(NotNowError):
    """Slurm takes no more jobs now, or not so many at once."""


class UnclearError(Exception):
    """Whether the next script was sent is not known, because Slurm does not answer."""


class ScriptExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, except that it submits the rendered script itself, with the run's id as job name.

    submitit's executor for the local machine overrides the same method. Its Slurm executor first writes a script of its
    own, and keeps a link to it: two more files for each job, and a busy disk took a millisecond for each.
    """

    def __init__(self, folder: Path, name: str, script: Path, target: Target) -> None:
        super().__init__(folder=folder)
        self._name, self._script, self._target = name, script, target

    def _submit_command(self, _command: str) -> submitit.SlurmJob[object]:
        timeout = ["timeout", "--kill-after=10", str(SBATCH_SECONDS)]
        arguments = command(self._target, [f"--job-name={self._name}", str(self._script)], timeout)
        job_id = self._get_job_id_from_submission_command(CommandFunction(arguments, verbose=False)())
        return self.job_class(self.folder, job_id)


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
    launches = {run.id: run.launch() for run in runs}
    names = {array.of_run(run_id, launch): run_id for run_id, launch in launches.items()}

    def mine(jobs: list[queue.SlurmJob]) -> dict[str, queue.SlurmJob]:
        named = [(names[name], job) for job in jobs if (name := array.of_job(job)) in names]
        return {run_id: job for run_id, job in named if job.id not in launches[run_id].earlier.split(",")}

    answer = queue.ask([queue.user()], since, lambda jobs: mine(jobs).keys() == launches.keys())
    return mine(answer.jobs), answer


def send(
    runs: list[Run], targets: list[Target], results: Results, say: Say, passed: dict[str, str] | None = None
) -> None:
    """Submit each run's script, unless that was done; a run that sbatch refuses is set to failed, the others continue.

    Where the target has arrays, runs of one shape are submitted as one. ``targets`` are as ``Target.for_job`` made the
    one target of all runs, for each run; ``passed`` is as in ``environment``. Needs ``slurm.only_driver``. Raises
    NotNowError if the target or Slurm takes no more now, or Slurm does not answer: what was not sent then stays queued.
    """
    logs = results.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)  # submitit's receipts; Slurm's logs too
    left = [(run, target) for run, target in zip(runs, targets, strict=True) if not intent.decided(run)]
    if not left:
        return
    target, stopped = left[0][1], threading.Event()

    def one(batch: list[Run], target: Target) -> None:
        if sent := [run for run in batch if not intent.decided(run)]:  # some may have been cancelled meanwhile
            _send_what_fits(sent, target, logs, say, stopped)

    # Both are of the whole process, so not for each call. submitit also prints what it raises.
    with environment(target, passed), contextlib.redirect_stderr(io.StringIO()):
        try:
            _overlapping(one, _batches(left, results), 1 if target.pause else AT_ONCE, stopped)
        finally:
            if not stopped.is_set():  # else some may be under way; the next one who sends does it
                _clear(logs)


def _overlapping(
    one: Callable[[list[Run], Target], None],
    batches: Iterator[tuple[list[Run], Target]],
    at_once: int,
    stopped: threading.Event,
) -> None:
    """Call ``one`` for each of ``batches``, ``at_once`` of them at a time, until one raises; wait for those under way.

    Of several errors it raises the one that says most: what nobody expected, else UnclearError, and NotNowError only
    if there is no other: after it, nobody looks for jobs whose submission is unclear.
    ``stopped`` is set once a submission is, or by Ctrl-C: no call then begins, waits or looks for anything. After
    Ctrl-C an sbatch that was begun is left to itself (``slurm.only_driver``).
    """
    free, failed = threading.Semaphore(at_once - 1), list[BaseException]()
    threads: list[threading.Thread] = []

    def call(batch: list[Run], target: Target) -> None:
        try:
            one(batch, target)
        except BaseException as error:  # raised below, if it says the most of all
            failed.append(error)
            if isinstance(error, UnclearError):
                stopped.set()
        finally:
            free.release()

    try:
        try:
            for batch, target in batches:
                thread = threading.Thread(target=call, args=(batch, target), daemon=True)
                thread.start()
                threads.append(thread)
                free.acquire()
                if failed:
                    break
        except Exception as error:  # such as the target's limit: raised below, after the calls under way
            failed.append(error)
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        stopped.set()
        until = time.monotonic() + STARTING_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        raise
    for first in sorted(failed, key=lambda one: (isinstance(one, NotNowError), isinstance(one, UnclearError))):
        raise first


def _batches(left: list[tuple[Run, Target]], results: Results) -> Iterator[tuple[list[Run], Target]]:
    """Yield what one sbatch submits, when its target takes it. Raises NotNowError when that takes no more."""
    room: int | None = None
    for number, batch in enumerate(array.batches([run for run, _ in left], [target for _, target in left])):
        (run, target), fit = batch[0], [run for run, _ in batch]
        if target.hours is not None and not _is_open(target.hours):
            raise NotNowError(f"its target's hours begin at {target.hours[0] // 60:02d}:{target.hours[0] % 60:02d}")
        if number:
            time.sleep(target.pause)
        if target.max_jobs:
            room = _room(run, target.max_jobs, results) if room is None else room
            fit, room = fit[:room], max(0, room - len(fit))
        if fit:
            yield fit, target
        if len(fit) < len(batch):
            raise NotNowError(f"its target allows {target.max_jobs} jobs at once (max_jobs)")


def _is_open(hours: tuple[int, int]) -> bool:
    """Return whether it is between two times of day, in minutes; a span may contain midnight."""
    now = time.localtime()
    begin, end = hours
    return (now.tm_hour * 60 + now.tm_min - begin) % DAY < (end - begin) % DAY


def _send_what_fits(runs: list[Run], target: Target, logs: Path, say: Say, stopped: threading.Event) -> None:
    """Submit ``runs`` at once; if that is more than Slurm takes now, as many as it does. Raises NotNowError then.

    A limit on jobs counts the elements of an array, and Slurm refuses an array as a whole.
    """
    try:
        _send(runs, target, logs, say, stopped)
    except FullError:
        if len(runs) == 1:
            raise
        left, size = runs, 1
        while left:
            _send(left[:size], target, logs, say, stopped)
            left, size = left[size:], 2 * size


def _send(runs: list[Run], target: Target, logs: Path, say: Say, stopped: threading.Event) -> None:
    """Submit one script, or an array of several, or record sbatch's refusal. Raises NotNowError as ``send`` does."""
    if len(runs) > 1:
        name, script = array.write(runs, logs)
    else:
        name, script = runs[0].id, runs[0].script
        if runs[0].launch().array:  # of an array that Slurm refused
            runs[0].write_launch(array="")
    since, wait = time.time(), 5.0
    while True:
        if stopped.is_set():
            raise UnclearError(f"{name}: interrupted")
        try:
            job = ScriptExecutor(logs, name, script, target).submit(Script(script))
        except (FailedJobError, FailedSubmissionError) as error:
            code = getattr(error.__cause__, "returncode", 0)
            message = " ".join(str(error).split()) or f"exit code {code}"
        else:
            _record(runs, [str(job.job_id)] if len(runs) == 1 else [f"{job.job_id}_{n}" for n in range(len(runs))])
            return
        too_long = len(runs) > 1 and "job array specification" in message  # MaxArraySize
        if refusal.is_full(message) or too_long:
            if len(runs) > 1:
                script.unlink(missing_ok=True)
            raise FullError(f"Slurm takes no more jobs now ({refusal.full(message)})")
        reached = not (_NOT_SENT.search(message) or refusal.is_unconfigured(message))
        unclear = reached and (refusal.is_silence(message) or code in (0, 124, 137) or code < 0)
        if unclear:
            say(f"{name}: {message}. It may have been submitted anyway: looking for it")
        if ids := look_up(runs, since, unclear, stopped) if reached else []:
            _record(runs, ids, adopted=message)
            say(f"{name} is job {ids[0]}")
            return
        # If sbatch succeeded but named no job, retrying it would not help.
        if reached and not (unclear and code):
            cause = f"never submitted: {message}" if unclear else f"Slurm refused it: {message}"
            for run in runs:
                run.write_launch(refused=message)
                run.settle(state=FAILED, cause=cause, why=reasons.NEVER_RAN)
            return
        if time.time() - since + wait > PATIENCE_SECONDS:
            raise NotNowError(f"Slurm does not answer: {message}")
        say(f"{name}: not sent, {message}; retrying in {wait:.0f} s")
        stopped.wait(wait)
        wait = min(2 * wait, 60.0)


def _clear(logs: Path) -> None:
    """Remove what submitit leaves of submissions that failed; while a queue is full, one does every half minute."""
    for path in logs.glob(f"{32 * '[0-9a-f]'}.pkl"):
        with contextlib.suppress(OSError):  # another user's, in a folder that is shared
            path.unlink(missing_ok=True)


def _record(runs: list[Run], ids: list[str], **launch: str) -> None:
    for run, job_id in zip(runs, ids, strict=True):
        run.write_launch(slurm_job_id=job_id, sent=utc(), cluster=queue.cluster_name(), **launch)


def look_up(runs: list[Run], since: float, patient: bool, stopped: threading.Event) -> list[str]:
    """Return the ids of the jobs of ``runs``, which one sbatch was to submit; empty if Slurm has none.

    ``patient``: they may just have been sent, and Slurm not have processed it yet. Raises UnclearError if Slurm does
    not answer, or ``stopped`` is set meanwhile.
    """
    deadline, answered = time.time() + PATIENCE_SECONDS, False
    while True:
        with _asking:
            if stopped.is_set():
                raise UnclearError(f"{runs[0].id}: whether it was submitted is unknown: interrupted")
            found, answer = find(runs, since)
        if len(found) == len(runs):
            return [found[run.id].id for run in runs]
        if answer.controller and (answered or not patient):
            return []
        if not answer.controller and time.time() > deadline:
            raise UnclearError(f"{runs[0].id}: whether it was submitted is unknown: {'; '.join(answer.notes)}")
        answered = answer.controller
        stopped.wait(SETTLING_SECONDS)


def _room(run: Run, most: int, results: Results) -> int:
    """Return how many more jobs the target of ``run`` allows, of which ``most`` may be in Slurm's queue."""
    target, settled = run.stored_status().target, index.load(results).settled
    others = [other for other in results.runs() if other.id not in settled and other.stored_status().target == target]
    ours = {array.of_run(other.id, other.launch()) for other in others}
    answer = queue.ask([queue.user()], time.time(), lambda jobs: True)
    if not answer.controller:
        raise NotNowError(f"Slurm does not answer: {'; '.join(answer.notes)}")
    there = [job for job in answer.jobs if array.of_job(job) in ours and reasons.judge(job).kind != reasons.ENDED]
    return max(0, most - len(there))
