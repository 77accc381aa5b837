"""The results folder: its files, and who writes them::

    results/results.csv            derived from the row files; any process may rebuild it, readers see it whole
    results/parity/                certificates that both sides compute the same (duel.certificate)
    results/tuned/                 the switches that ``--mode tuned`` sets on each device (duel.tuned)
    results/weights/               the weights from --weights, as safetensors files that both sides read
    results/runs/<run_id>/
        script.sh                  the text that was started
        launch.json                what the driver did to start it, and Slurm's last report; only the driver writes it
        status.json                what the run is doing; rewritten whole, by one owner at a time
        metrics.jsonl              one line per event, each by one write
        rows/<number>.json         one per measured point
        curves/, checkpoints/      <side>-<n>: the epochs of a training, and its newest two checkpoints
        evidence/<number>-<rank>.npz    what the row's program computed from known weights (duel.evidence)
        environment.json           device and CPUs; of each framework its interpreter, packages, variables
        log.txt                    what the job printed
        launcher.txt               what the script printed outside the job
        worker.txt                 errors of the process that started it on this machine; empty if there were none
        parity.npz                 for a validation: what this side computed, kept until it is compared
        wandb/                     Weights & Biases' own files

Files are replaced atomically in their own folder, so a kill at any moment leaves the old or the new content.
"""

import dataclasses
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel import files
from duel.errors import UserError
from duel.files import RUN_ID, Damaged, process_started, utc, write_atomically
from duel.record import Row
from duel.states import FAILED, FINISHED, LOST, QUEUED, SKIPPED, TERMINAL
from duel.status import LaunchRecord, Owner, Progress, Status, plain
from duel.tries import counted, interrupted, planned_as

_ROW_FILE = re.compile(r"[0-9]{3,6}\.json")
_HALF_MADE = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9._-]*\.[0-9]{1,9}")  # as ``Run.create`` names it
NOBODY = Owner()  # until a run has an owner
LITTER_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Run:
    """One run's folder."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def script(self) -> Path:
        return self.folder / "script.sh"

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def launch_file(self) -> Path:
        return self.folder / "launch.json"

    @property
    def rows_folder(self) -> Path:
        return self.folder / "rows"

    def row_file(self, number: int) -> Path:
        return self.rows_folder / f"{number:03d}.json"

    def evidence_file(self, number: int, rank: int) -> Path:
        return self.folder / "evidence" / f"{number:03d}-{rank}.npz"

    def evidence_files(self, number: int) -> list[Path]:
        """Return the files of all ranks of row ``number``, in order."""
        there = (self.folder / "evidence").glob(f"{number:03d}-*.npz")
        found = [path for path in there if re.fullmatch(r"[0-9]{3,}-[0-9]{1,9}", path.stem)]
        return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))

    def curve_file(self, row: Row) -> Path:
        return self.folder / "curves" / f"{row.framework}-{row.repeat}.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def parity(self) -> Path:
        return self.folder / "parity.npz"

    @property
    def launcher_log(self) -> Path:
        return self.folder / "launcher.txt"

    def create(
        self,
        rows: list[Row],
        *,
        owner: Owner = NOBODY,
        target: str = "",
        script: str | None = None,
        launch: LaunchRecord | None = None,
    ) -> None:
        """Create the folder with all its planned rows, or nothing at all.

        Raises OSError if the folder already exists.
        """
        new = Run(self.folder.with_name(f".{self.id}.{os.getpid()}"))
        status = Status(self.id, QUEUED, queued=utc(), updated=time.time(), owner=owner, target=target)
        try:
            new.rows_folder.mkdir(parents=True)
            # Not atomically: nobody reads them until the folder has its final name.
            for number, row in enumerate(rows):
                text = row.replace(run_id=self.id, row=number, status=QUEUED).to_json()
                new.row_file(number).write_text(text, newline="")
            new.status_file.write_text(_text(status))
            if launch is not None:
                new.launch_file.write_text(_text(launch))
            if script is not None:
                new.script.write_text(script)
            os.rename(new.folder, self.folder)
        except BaseException:
            shutil.rmtree(new.folder, ignore_errors=True)
            raise

    def reopen(self, planned: list[Row], script: str, owner: Owner, **launch: Any) -> None:
        """Prepare an interrupted run to continue with what it has not measured, and change ``launch`` in launch.json.

        Rows that ended stay as they are. One that was interrupted, and the finished half of its pair, which another
        hour or node would not be compared with, are measured again as new rows; of a training, only the one.
        A kill at any moment leaves the run interrupted, so that this can be repeated.
        """
        rows = self.rows()
        last = {planned_as(row): row for row in rows}
        open_pairs = {planned_as(row)[1:] for row in last.values() if interrupted(row) and not row.recipe}
        self.write_status(why="never ran")  # if nothing follows: this attempt, which launch.json counts, was not sent
        if launch:
            self.write_launch(**launch)
        write_atomically(self.script, script)
        number = len(rows)
        for row in planned:
            before = last[planned_as(row)]
            if not interrupted(before) and (planned_as(row)[1:] not in open_pairs or before.status != FINISHED):
                continue
            place = before.row if before.started is None else number
            number += place == number
            if row.recipe:  # its checkpoints are of these
                row = row.replace(rung=before.rung, switches=before.switches, tuning=before.tuning)
            self.write_row(row.replace(run_id=self.id, row=place, status=QUEUED))
        again = {"state": QUEUED, "queued": utc(), "started": "", "ended": "", "cause": "", "why": None}
        self.write_status(**again, exit_code=None, slurm_job_id="", owner=owner)

    def left(self) -> list[Row]:
        """Return the rows to measure, in the planned order."""
        return [row for row in counted(self.rows()) if row.status not in TERMINAL]

    def write_row(self, row: Row) -> None:
        assert row.row is not None
        write_atomically(self.row_file(row.row), row.to_json())

    def read_row(self, number: int) -> Row:
        """Read a row from its file. Raises Damaged if the file does not hold it."""
        path = self.row_file(number)
        row = Row.from_dict(files.read_object(path), path.name)
        if (row.run_id, row.row) != (self.id, number):
            raise Damaged(f"{path.name} is damaged: it is row {row.row} of {row.run_id}")
        return row

    def write_status(self, **fields: Any) -> None:
        """Change ``fields`` in status.json. Only the run's current owner calls this."""
        changed = dataclasses.replace(self.stored_status(), **fields, updated=time.time())
        write_atomically(self.status_file, _text(dataclasses.replace(changed, run_id=self.id)))

    def write_launch(self, **fields: Any) -> None:
        """Change ``fields`` in launch.json. Only the driver calls this. Raises Damaged if the file is."""
        write_atomically(self.launch_file, _text(dataclasses.replace(self.launch(), **fields)))

    def launch(self) -> LaunchRecord:
        """Return launch.json; empty for a script started by hand. Raises Damaged if damaged or of another version."""
        try:
            return files.read_record(self.launch_file, LaunchRecord)
        except FileNotFoundError:
            return LaunchRecord()

    @property
    def group(self) -> str:
        """What both sides of a pair share, through all attempts; for a run by hand, its id without the framework."""
        try:
            pair = self.launch().pair
        except Damaged:  # 'status' shows it; no reason not to measure
            pair = ""
        return pair or self.id.partition("_")[2]

    def settle(self, **status: Any) -> None:
        """Write the end of the run, and of each row that has none yet."""
        self.write_status(ended=utc(), phase="", progress=Progress(), **status)
        for row in self.rows():
            ran = row.started is not None
            self.write_row(row.replace(ended=row.ended or utc()) if ran else row)

    def stored_status(self) -> Status:
        """Return status.json as it is; ``lost`` if it is missing or damaged."""
        try:
            stored = files.read_record(self.status_file, Status)
        except FileNotFoundError:
            return Status(self.id, LOST, cause="damaged: its folder holds no status.json", why="infrastructure")
        except Damaged as error:  # not ours to repair, and no reason to hide the other runs
            return Status(self.id, LOST, cause=f"damaged: {error}", why="infrastructure")
        return dataclasses.replace(stored, run_id=self.id)

    def status(self) -> Status:
        """Return status.json brought up to date: ``lost`` if its owner has died."""
        return self.stored_status().true()

    def rows(self) -> list[Row]:
        """Return all planned rows, brought up to date: a row without an end takes the state of its ended run."""
        status = self.status()
        rows = []
        try:
            names = sorted(name for name in os.listdir(self.rows_folder) if _ROW_FILE.fullmatch(name))
        except OSError:  # missing, or not a folder
            names = []
        for name in names:
            number = int(name.partition(".")[0])
            try:
                row = self.read_row(number)
            except FileNotFoundError:  # removed since, or a dangling link
                continue
            except Damaged as error:
                row = Row(run_id=self.id, row=number, status=LOST, cause=f"damaged: {error}", why="infrastructure")
            if status.state in TERMINAL and row.status not in TERMINAL:
                state = FAILED if status.state in (FINISHED, SKIPPED) else status.state
                row = row.replace(status=state, cause=status.cause or "its run ended without it", why=status.why)
            rows.append(row)
        return rows

    def events(self) -> tuple[list[dict[str, Any]], int]:
        """Return the events in metrics.jsonl, and how many lines could not be read."""
        try:
            return files.events(files.read(self.metrics, files.LOG_BYTES).decode(errors="replace"))
        except (FileNotFoundError, Damaged):
            return [], 0


def _text(record: Any) -> str:
    return json.dumps(plain(record), indent=1) + "\n"


@dataclass(frozen=True)
class Results:
    """The whole results folder."""

    folder: Path

    @property
    def csv(self) -> Path:
        return self.folder / "results.csv"

    @property
    def device_lock(self) -> Path:
        """Held by the one run that may measure outside Slurm: two at once would share the cores and invalidate both.

        Small proofs, in which nothing is timed, share it.
        """
        return self.folder / ".measuring.lock"

    @property
    def driver_lock(self) -> Path:
        """Held by the one driver that is submitting."""
        return self.folder / ".submitting.lock"

    @property
    def queue(self) -> Path:
        """What is to be submitted to Slurm (``duel.launch.intent``)."""
        return self.folder / "queue"

    def run(self, run_id: str) -> Run:
        """Return the folder of ``run_id``. Raises UserError if it cannot be a run id."""
        if not RUN_ID.fullmatch(run_id):
            raise UserError(
                f"run id {run_id!r}: must be 1 to 96 letters, digits, '.', '_' and '-', not starting with '-' or '.'"
            )
        return Run(self.folder / "runs" / run_id)

    def names(self) -> list[str]:
        """Return the id of every run, oldest first."""
        try:
            # The kind of each is in the folder's own listing: nothing is asked about ten thousand runs one by one.
            entries = list(os.scandir(self.folder / "runs"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((e.name for e in entries if RUN_ID.fullmatch(e.name) and _is_folder(e)), key=by_time)

    def runs(self) -> list[Run]:
        """Return every run, oldest first."""
        return [Run(self.folder / "runs" / name) for name in self.names()]

    def remove_litter(self) -> None:
        """Remove what a driver that was killed within ``Run.create`` left behind.

        A pid that is dead here may be alive on another machine, so anything younger than a day stays.
        """
        try:
            entries = [entry for entry in os.scandir(self.folder / "runs") if _HALF_MADE.fullmatch(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            pid = int(entry.name.rpartition(".")[2])
            try:
                old = time.time() - entry.stat(follow_symlinks=False).st_mtime > LITTER_SECONDS
            except FileNotFoundError:  # it has its final name by now
                continue
            if old and entry.is_dir(follow_symlinks=False) and process_started(pid) is None:
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def by_time(run_id: str) -> tuple[str, str]:
    """Sort key for run ids: the time stamp, which follows the first '-'."""
    return run_id.partition("-")[2], run_id
