"""What a driver is about to submit to Slurm: recorded before its first sbatch, removed once all of it is settled.

So the next driver knows of a submission that died at any point, or that Slurm accepted only in part.
"""

import json
from dataclasses import asdict, dataclass

from duel import files
from duel.files import FORMAT, Damaged, write_atomically
from duel.job import Job
from duel.results import Results
from duel.status import Second


@dataclass(frozen=True)
class Intent:
    """One submission."""

    runs: dict[str, Job]  # by run id, in the order in which they are sent
    since: Second  # s since 1970: when it began
    waits: str = ""  # why Slurm takes no more of them now; empty if no such refusal was seen
    format: int = FORMAT


def read(results: Results) -> Intent | None:
    """Return the submission that is under way or was interrupted; None if there is none.

    Raises Damaged, or OtherVersion if another version of Duel recorded it.
    """
    try:
        return files.read_record(results.intent, Intent)
    except FileNotFoundError:
        return None


def seen(results: Results) -> Intent:
    """Return the same, or one without runs if there is none or it cannot be read: ``slurm.recover`` reports that."""
    try:
        return read(results) or Intent({}, 0.0)
    except Damaged:
        return Intent({}, 0.0)


def write(results: Results, intent: Intent) -> None:
    write_atomically(results.intent, json.dumps(asdict(intent), indent=1) + "\n")
