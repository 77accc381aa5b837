"""Submissions to Slurm that are under way: a file each in results/queue, from before the first folder of their runs is
made until each run is sent, refused or cancelled.

So whoever sends next knows what waits, and what a driver that died had begun.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass

from duel import files
from duel.files import FORMAT, Damaged, locked, stamp, write_atomically
from duel.job import Job
from duel.results import Results, Run
from duel.states import QUEUED
from duel.status import Second

LOCK = ".sender.lock"  # held by the one who sends what waits, with a word on who that is


@dataclass(frozen=True)
class Intent:
    """One submission."""

    runs: dict[str, Job]  # by run id, in the order in which they are sent
    since: Second  # s since 1970: when it began
    created: bool = False  # all folders are there: whoever comes next goes on sending
    waits: str = ""  # why the next one is not sent now; empty if it is about to be
    format: int = FORMAT


def names(results: Results) -> list[str]:
    """Return the submissions that are under way, oldest first."""
    return sorted(path.stem for path in results.queue.glob("*.json") if not path.name.startswith("."))


def read(results: Results, name: str) -> Intent | None:
    """Return a submission; None if it has ended. Raises Damaged, or OtherVersion if another version recorded it."""
    try:
        return files.read_record(results.queue / f"{name}.json", Intent)
    except FileNotFoundError:
        return None


def new(results: Results, intent: Intent) -> str:
    """Record a new submission; returns its name."""
    results.queue.mkdir(parents=True, exist_ok=True)
    name = stamp()
    write(results, name, intent)
    return name


def write(results: Results, name: str, intent: Intent) -> None:
    write_atomically(results.queue / f"{name}.json", json.dumps(asdict(intent), indent=1) + "\n")


def end(results: Results, name: str) -> None:
    (results.queue / f"{name}.json").unlink()


def waiting(results: Results) -> dict[str, Intent]:
    """Return the submissions that can be read, by name: what waits, for those who only look."""
    found = {}
    for name in names(results):
        try:
            intent = read(results, name)
        except Damaged:  # whoever sends next says so
            continue
        if intent is not None:
            found[name] = intent
    return found


def tidy(results: Results, intent: Intent) -> None:
    """Remove what a driver that was killed left half-written; the caller keeps other drivers out."""
    half_written = [*results.queue.glob(".*.json.*")]
    for run in map(results.run, intent.runs):
        half_written += run.folder.glob(f".{run.launch_file.name}.*")  # nobody but drivers writes it
    for path in half_written:
        path.unlink(missing_ok=True)
    for path in (results.folder / "runs").glob(".*"):
        if path.name[1:].rpartition(".")[0] in intent.runs:
            shutil.rmtree(path, ignore_errors=True)


def sender(results: Results) -> str:
    """Return who sends what waits, such as "process 12 on login1"; empty if nobody does.

    What waits in somebody else's folder is theirs to send.
    """
    if results.queue.exists() and (uid := results.queue.stat().st_uid) != os.getuid():
        return f"its owner (user {uid})"
    path = results.queue / LOCK
    if not path.exists():
        return ""
    with locked(path, wait=False) as free:
        return "" if free else files.read(path).decode(errors="replace")


def decided(run: Run) -> bool:
    """Return whether nothing of a run is left to send: it was sent, refused, or cancelled before it could be."""
    return sent_or_refused(run) or run.stored_status().state != QUEUED


def sent_or_refused(run: Run) -> bool:
    try:
        launch = run.launch()
    except Damaged:
        return True  # 'status' shows it; it cannot be continued
    return bool(launch.slurm_job_id or launch.refused)
