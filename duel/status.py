"""Types of status.json and launch.json: what a run is doing, and what was done to start it."""

import calendar
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from duel.files import FORMAT, process_started
from duel.job import Job
from duel.states import LOST, QUEUED, RUNNING, STATES, TERMINAL

LOST_AFTER_SECONDS = 120.0
HEARTBEAT_SECONDS = 5.0
# Slurm keeps its record of a job for at least this long after its end; older ones are not queried again.
EXPLAIN_SECONDS = 7 * 24 * 3600.0
# The accounting learns of an end this late, at most: after an outage it is told what happened meanwhile.
LATE_SECONDS = 600.0
# ``why`` of a run that ended itself on a signal; only Slurm knows who sent it.
SIGNALLED = ("told to end", "warned")
# ``kind`` of Slurm's word on a job that it still has. That of an ended run may begin again.
HAS_JOB = ("waiting", "blocked", "alive")

# Why a run or a row did not finish. What is done about it depends on this alone, never on the text of the cause.
CAUSES = (
    "input",  # a mistake in the request
    "disproved",  # it did not measure what it was asked to
    "diverged",  # a training's loss is no number any more
    "code",  # an error of the program
    "out of memory",
    "killed",  # by SIGKILL, as the kernel does when memory runs out
    "told to end",  # by a signal; only Slurm knows who sent it, and why
    "warned",  # Slurm's signal before a time limit or a preemption
    "time limit",
    "infrastructure",
    "preempted",
    "cancelled",
    "never ran",
    "completed",  # Slurm calls the job completed, but the run has not reported its end
)
State = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(STATES)})$")]
Why = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(CAUSES)})$")]
Second = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # since 1970, or a duration


@dataclass(frozen=True)
class Owner:
    """The owner of a status: a process, or Slurm's queue."""

    host: str = ""
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    started: str | None = None  # as ``duel.files.process_started`` returns it
    slurm_job_name: str = ""  # the name under which the run waits in Slurm's queue

    def alive(self, age: float) -> bool:
        """Whether it still holds the status, last updated ``age`` s ago."""
        if self.slurm_job_name:
            return True  # only Slurm could tell otherwise
        if self.is_here:
            return self.pid > 0 and process_started(self.pid) == str(self.started)
        return age < LOST_AFTER_SECONDS

    @property
    def is_here(self) -> bool:
        return self.host == os.uname().nodename


def this_process() -> Owner:
    """Return enough to check later whether this process is still alive."""
    return Owner(os.uname().nodename, os.getpid(), process_started(os.getpid()))


@dataclass(frozen=True)
class Progress:
    """How far a phase has come: its steps, and what they yield."""

    step: int | None = None
    loss: float | None = None
    done: int | None = None
    needed: int | None = None
    throughput: float | None = None
    unit: str = ""
    label: str = ""  # of a training: its epoch, and the accuracy so far


@dataclass(frozen=True)
class Status:
    """What a run is doing. It is rewritten as a whole, by one owner at a time."""

    run_id: str = ""
    state: State = "lost"
    format: int = FORMAT
    queued: str = ""  # UTC, ISO 8601, like the other times
    started: str = ""
    ended: str = ""
    updated: Second = 0.0  # s since 1970
    owner: Owner = Owner()
    target: str = ""
    user: str = ""
    slurm_job_id: str = ""
    part: str = ""  # which row of how many
    phase: str = ""
    phase_started: Second = 0.0  # s since 1970
    row: int | None = None
    progress: Progress = Progress()
    cause: str = ""  # in words, for any end but ``finished``
    why: Why | None = None
    exit_code: int | None = None
    used: Second = 0.0  # s that a training took in the jobs before
    wandb: str = ""

    @property
    def age(self) -> float:
        """Seconds since its last update."""
        return max(0.0, time.time() - self.updated)

    def true(self) -> "Status":
        """Return the same status, but ``lost`` if its owner has died."""
        if self.state not in (QUEUED, RUNNING) or self.owner.alive(self.age):
            return self
        if self.state == QUEUED and self.owner.host and not self.owner.is_here:
            return self  # it reports nothing until it begins, and only its own host could tell otherwise
        doing = "started" if self.state == QUEUED else "ended"
        cause = f"the process that held it died before the run {doing}"
        return dataclasses.replace(self, state=LOST, cause=cause, why="infrastructure")


@dataclass(frozen=True)
class SlurmWord:
    """What Slurm last reported about a run's job, and what that means (``duel.launch.queue.Verdict``)."""

    state: str = ""
    kind: str = ""
    cause: Why | None = None
    words: str = ""
    nodes: str = ""
    start: str = ""
    reason: str = ""
    limit: str = ""


@dataclass(frozen=True)
class LaunchRecord:
    """What the driver did to start a run; empty for a script started by hand."""

    format: int = FORMAT
    job: Job | None = None
    pair: str = ""  # what both sides share, through all attempts
    after: str = ""  # the earlier attempt that this run follows
    code: str = ""  # digest of the code that jobs run
    user: str = ""
    cluster: str = ""  # Slurm's name for the cluster that took the job
    slurm_job_id: str = ""
    array: str = ""  # the name of the job array that it is in, '_' and its element
    earlier: str = ""  # Slurm jobs in which the run began and was interrupted, separated by commas
    sent: str = ""
    adopted: str = ""  # why the job was looked for
    refused: str = ""  # sbatch's message
    slurm: SlurmWord | None = None


def seconds(time_stamp: str) -> float:
    """Return a time of a status in s since 1970; 0 if it is none."""
    try:
        return float(calendar.timegm(time.strptime(time_stamp, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def needs_slurm(status: Status, launch: LaunchRecord, word: SlurmWord | None) -> bool:
    """Return whether Slurm, whose last ``word`` is known, may know more about a run than its folder says."""
    in_slurm = status.owner.slurm_job_name or status.slurm_job_id or launch.slurm_job_id
    if not in_slurm or not seconds(status.queued):
        return False
    if status.state in (QUEUED, RUNNING) or (status.state == LOST and not status.ended):
        return True
    if status.state == LOST:
        return time.time() - seconds(status.ended) < LATE_SECONDS
    unclear = status.why in SIGNALLED if word is None else word.kind in HAS_JOB
    return unclear and time.time() - seconds(status.ended) < EXPLAIN_SECONDS


def is_settled(status: Status, launch: LaunchRecord) -> bool:
    """Return whether nothing more is expected of a run: it has ended, and Slurm need not be asked why."""
    return status.state in TERMINAL - {LOST} and not needs_slurm(status, launch, launch.slurm)


def plain(record: Any) -> dict[str, Any]:
    """Return a record as JSON has it, without empty values."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(record))
    return {name: value for name, value in found.items() if value not in (None, "", {})}
