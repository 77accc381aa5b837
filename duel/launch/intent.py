"""Submissions to Slurm that are under way: a file each in results/queue, from before the first folder of their runs is
made until each run is sent, refused or cancelled.

So whoever sends next knows what waits, and what a driver that died had begun. Users, and clusters, that share a results
folder each send their own.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from duel import files
from duel.errors import UserError
from duel.files import FORMAT, RUN_ID, Damaged, locked, stamp, write_atomically
from duel.job import Job
from duel.launch import queue
from duel.results import Results, Run
from duel.states import QUEUED
from duel.status import Second


@dataclass(frozen=True)
class Intent:
    """One submission."""

    runs: dict[str, Job]  # by run id, in the order in which they are sent
    since: Second  # s since 1970: when it began
    created: bool = False  # all folders are there: whoever comes next goes on sending
    waits: str = ""  # why the next one is not sent now; empty if it is about to be
    user: str = ""  # who sends it
    cluster: str = ""  # Slurm's name of the one that it is for; empty: it did not say
    passed: dict[str, str] | None = None  # its targets' pass_variables, as they were in the submitting shell
    format: int = FORMAT


def names(results: Results) -> list[str]:
    """Return the submissions that are under way, oldest first."""
    found = results.queue.glob("*.json")
    return sorted(path.stem for path in found if not path.name.startswith(".") and not path.is_dir())


def read(results: Results, name: str) -> Intent | None:
    """Return a submission; None if it has ended. Raises Damaged, or OtherVersion if another version recorded it."""
    try:
        intent = files.read_record(results.queue / f"{name}.json", Intent)
    except FileNotFoundError:
        return None
    if not intent.runs or not all(map(RUN_ID.fullmatch, intent.runs)):
        raise Damaged(f"{name}.json is damaged: it names no runs, or what cannot be one")
    return intent


def new(results: Results, intent: Intent) -> str:
    """Record a new submission; returns its name."""
    results.queue.mkdir(parents=True, exist_ok=True)
    name = stamp()
    write(results, name, intent)
    return name


def write(results: Results, name: str, intent: Intent) -> None:
    text = json.dumps(asdict(intent)) + "\n"
    if len(text) > files.RECORD_BYTES:
        raise UserError(f"{len(intent.runs)} scripts at once are too many to record: submit them in parts")
    write_atomically(results.queue / f"{name}.json", text)


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


def whose(intent: Intent) -> str:
    """Return who sends a submission if that is nobody here: another user, or us on another cluster; else empty."""
    if intent.user not in ("", queue.user()):
        return f"user {intent.user}"
    return f"a sender on the cluster {intent.cluster}" if queue.elsewhere(intent.cluster) else ""


def mine(results: Results) -> dict[str, Intent]:
    """Return the submissions that are ours to send, by name."""
    return {name: intent for name, intent in waiting(results).items() if not whose(intent)}


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


def lock(results: Results) -> Path:
    """Return what the one who sends our submissions to this cluster holds, with a word on who that is."""
    name = re.sub("[^A-Za-z0-9._-]", "_", f"{queue.user()}-{queue.cluster_name().lower()}")
    return results.queue / f".sender-{name}.lock"


def sender(results: Results) -> str:
    """Return who sends our submissions that wait, such as "process 12 on login1"; empty if nobody does."""
    path = lock(results)
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
