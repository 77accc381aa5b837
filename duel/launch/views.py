"""One run, and all runs, at one moment: the state in their folders, corrected, and what Slurm reports."""

from dataclasses import dataclass, replace
from typing import Any

from duel.catalogue import BENCHMARKS, VALIDATE
from duel.job import Job
from duel.launch import queue
from duel.results import Run
from duel.states import LOST, TERMINAL
from duel.status import HAS_JOB, LaunchRecord, SlurmWord, Status, needs_slurm, plain, seconds


@dataclass
class RunView:
    """One run as it is now: the state in its folder, corrected, and what Slurm reports."""

    run: Run
    status: Status
    launch: LaunchRecord
    damaged: str = ""  # what is wrong with its launch.json
    slurm: SlurmWord | None = None
    note: str = ""  # what is known about a run that Slurm does not explain
    verdict: str = ""  # of its pair

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def state(self) -> str:
        return self.status.state

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def job(self) -> Job | None:
        return self.launch.job

    @property
    def slurm_job_id(self) -> str:
        return self.status.slurm_job_id or self.launch.slurm_job_id

    @property
    def user(self) -> str:
        return self.status.user or self.launch.user

    @property
    def in_slurm(self) -> bool:
        return bool(self.status.owner.slurm_job_name or self.slurm_job_id)

    @property
    def has_job(self) -> bool:
        """Whether Slurm still has its job, by its last word."""
        return self.slurm is not None and self.slurm.kind in HAS_JOB

    @property
    def is_over(self) -> bool:
        """Whether it has ended and does not go on: Slurm may begin the job of a training that it warned again."""
        return self.ended and not (self.trains and self.status.why == "warned" and self.has_job)

    @property
    def group(self) -> str:
        """Same as ``Run.group``, without reading launch.json again."""
        return self.launch.pair or self.id.partition("_")[2]

    @property
    def has_checkpoint(self) -> bool:
        return any((self.run.folder / "checkpoints").glob("*/step-*.npz"))

    @property
    def trains(self) -> bool:
        """Whether it is a training to accuracy, which goes on in the same run when Slurm begins its job again."""
        return self.job is not None and bool(self.job.dataset)

    @property
    def framework(self) -> str:
        return self.job.framework if self.job else self.id.partition("_")[0]

    @property
    def benchmark(self) -> str:
        """The benchmark; a run that was started by hand has it only in its id."""
        rest = self.id.partition("_")[2]
        named = [name for name in BENCHMARKS if rest.startswith(f"{name}_")]
        return self.job.benchmark if self.job else max(named, key=len, default="")

    @property
    def target(self) -> str:
        return self.job.target if self.job else self.status.target

    @property
    def is_validation(self) -> bool:
        return self.id.startswith(f"{self.framework}_{self.benchmark}_{VALIDATE}")

    @property
    def queued(self) -> float:
        """When it was queued, in s since 1970; 0 if its folder does not say."""
        return seconds(self.status.queued)

    def needs_slurm(self) -> bool:
        """Return whether Slurm may know more about the run than its folder says."""
        return needs_slurm(self.status, self.launch, self.slurm)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is expected of the run: it has ended, and Slurm need not be asked why."""
        return self.state in TERMINAL - {LOST} and not self.damaged and not self.needs_slurm()

    def change(self, **status: Any) -> None:
        self.status = replace(self.status, **status)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as one JSON object."""
        launch = plain(self.launch)
        found = launch | plain(self.status) | {"run_id": self.id, "state": self.state, "age": self.status.age}
        also: dict[str, Any] = {
            "slurm_job_id": self.slurm_job_id,
            "user": self.user,
            "damaged": self.damaged,
            "note": self.note,
        }
        also |= {"verdict": self.verdict, "slurm": plain(self.slurm) if self.slurm else None}
        return found | {name: value for name, value in also.items() if value}


@dataclass(frozen=True)
class Snapshot:
    """Every run, as it is now."""

    runs: list[RunView]
    by_hand: list[queue.SlurmJob]  # jobs of our scripts that wait and have no run yet
    notes: list[str]  # what could not be queried
    answer: queue.Answer | None  # Slurm's, if it was asked
    asked: float  # when, in s since 1970
    left_out: frozenset[str] = frozenset()  # settled runs that were not read

    def only(self, runs: list[RunView]) -> "Snapshot":
        """Return the same snapshot for these runs only."""
        return replace(self, runs=runs, by_hand=[])
