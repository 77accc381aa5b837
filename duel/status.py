"""status.json and launch.json as types: what a run is doing, and what was done to start it."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from duel.files import FORMAT, process_started
from duel.job import Job
from duel.states import LOST, QUEUED, RUNNING, STATES

LOST_AFTER_SECONDS = 120.0
HEARTBEAT_SECONDS = 5.0

# Why a run or a row did not finish. What is done about it hangs on this alone, never on the words beside it.
CAUSES = (
    "input",  # a mistake in what was asked for
    "disproved",  # it measured what it was not asked to measure
    "code",  # an error of the program
    "out of memory",
    "killed",  # by SIGKILL: where memory ran out, this is what the kernel does
    "told to end",  # by a signal; who sent it, and why, only Slurm knows
    "warned",  # Slurm's signal before a time limit or a preemption
    "time limit",
    "infrastructure",
    "preempted",
    "cancelled",
    "never ran",
    "completed",  # Slurm calls the job completed, and the run has not reported its end
)
State = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(STATES)})$")]
Why = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(CAUSES)})$")]
Second = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # since 1970, or of a duration


@dataclass(frozen=True)
class Owner:
    """Who holds a status: a process, or Slurm's queue."""

    host: str = ""
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    started: str | None = None  # as ``duel.files.process_started`` gives it
    slurm_job_name: str = ""  # waits in Slurm's queue under this name

    def alive(self, age: float) -> bool:
        """Whether it still holds the status, whose last report was ``age`` s ago."""
        if self.slurm_job_name:
            return True  # only Slurm can deny it
        if self.host == os.uname().nodename:
            return self.pid > 0 and process_started(self.pid) == str(self.started)
        return age < LOST_AFTER_SECONDS


def this_process() -> Owner:
    """Enough to ask later whether this process still lives."""
    return Owner(os.uname().nodename, os.getpid(), process_started(os.getpid()))


@dataclass(frozen=True)
class Progress:
    """How far a phase has come: of its steps, and what they give."""

    step: int | None = None
    loss: float | None = None
    done: int | None = None
    needed: int | None = None
    throughput: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Status:
    """What a run is doing. It is rewritten whole, by one owner at a time."""

    run_id: str = ""
    state: State = "lost"
    format: int = FORMAT
    queued: str = ""  # UTC, ISO 8601, as the other times
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
    cause: str = ""  # in words, of an end that is not ``finished``
    why: Why | None = None
    exit_code: int | None = None
    wandb: str = ""

    @property
    def age(self) -> float:
        """Seconds since its last report."""
        return max(0.0, time.time() - self.updated)

    def true(self) -> "Status":
        """The same, but ``lost`` where whoever held it has died."""
        if self.state not in (QUEUED, RUNNING) or self.owner.alive(self.age):
            return self
        doing = "started" if self.state == QUEUED else "ended"
        cause = f"the process that held it died before the run {doing}"
        return dataclasses.replace(self, state=LOST, cause=cause, why="infrastructure")


@dataclass(frozen=True)
class SlurmWord:
    """What Slurm last reported of a run's job, with what that means (``duel.launch.queue.Verdict``)."""

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
    """What the driver did to start a run. It is empty for a script that was started by hand."""

    format: int = FORMAT
    job: Job | None = None
    pair: str = ""  # what both sides have in common, through all attempts
    after: str = ""  # the run that this one is another attempt of
    code: str = ""  # digest of what jobs run
    user: str = ""
    cluster: str = ""  # Slurm's name of the cluster that took the job
    slurm_job_id: str = ""
    sent: str = ""
    adopted: str = ""  # why the job was looked for
    refused: str = ""  # sbatch's own words
    slurm: SlurmWord | None = None


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON has it, without what is empty."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(record)))
    return {name: value for name, value in found.items() if value not in (None, "", {})}
