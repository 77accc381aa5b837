"""The results folder: who writes which file, and what a run's folder says::

    results/results.csv            derived from the row files; any process may rebuild it, readers see it whole
    results/parity/                certificates that both sides compute the same (duel.certificate)
    results/tuned/                 which switches ``--mode tuned`` turns on a device (duel.tuned)
    results/weights/               what --weights gave, as safetensors files that both sides read
    results/runs/<run_id>/
        script.sh                  the text that was started
        launch.json                what the driver did to start it, and Slurm's last report; the driver's alone
        status.json                what the run is doing; rewritten whole, by one owner at a time
        metrics.jsonl              one line per event, each by one write
        rows/<number>.json         one per measured point
        evidence/<number>-<rank>.npz    what the row's program computed from known weights (duel.evidence)
        environment.json           packages, device, git, variables
        log.txt                    what the job printed
        launcher.txt               what the script printed before and around it
        worker.txt                 errors of the process that started it on this machine; empty if there were none
        parity.npz                 of a validation: what this side computed, until it was compared
        wandb/                     Weights & Biases' own files

Files are replaced atomically in their own folder, so a kill at any instant leaves the old or the new text.
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

NOBODY = Owner()
_ROW_FILE = re.compile(r"[0-9]{3,6}\.json")
_HALF_MADE = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9._-]*\.[0-9]{1,9}")  # as ``Run.create`` calls it
MOST_LOSS = 1e300  # an integer beyond it is no float; NaN is left out, too
NOBODY = Owner()  # holds a run until somebody says so
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
        """Those of all ranks of row ``number``, in order."""
        found = [
            path
            for path in (self.folder / "evidence").glob(f"{number:03d}-*.npz")
            if re.fullmatch(r"[0-9]{3,}-[0-9]{1,9}", path.stem)
        ]
        return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))

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
        """Make the folder with all its planned rows, whole or not at all.

        A folder that exists already is an error (OSError).
        """
        new = Run(self.folder.with_name(f".{self.id}.{os.getpid()}"))
        status = Status(self.id, QUEUED, queued=utc(), updated=time.time(), owner=owner, target=target)
        try:
            new.rows_folder.mkdir(parents=True)
            # Plainly: nobody looks until the folder has its name.
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

    def write_row(self, row: Row) -> None:
        assert row.row is not None
        write_atomically(self.row_file(row.row), row.to_json())

    def read_row(self, number: int) -> Row:
        """Raises Damaged where its file is no row."""
        path = self.row_file(number)
        row = Row.from_dict(files.read_object(path), path.name)
        if (row.run_id, row.row) != (self.id, number):
            raise Damaged(f"{path.name} is damaged: it is row {row.row} of {row.run_id}")
        return row

    def write_status(self, **fields: Any) -> None:
        """Change ``fields`` in status.json. Only the run's owner of the moment calls this."""
        changed = dataclasses.replace(self.stored_status(), **fields, updated=time.time())
        write_atomically(self.status_file, _text(dataclasses.replace(changed, run_id=self.id)))

    def write_launch(self, **fields: Any) -> None:
        """Change ``fields`` in launch.json. Only the driver calls this. Raises Damaged where it is."""
        write_atomically(self.launch_file, _text(dataclasses.replace(self.launch(), **fields)))

    def launch(self) -> LaunchRecord:
        """launch.json; empty for a script started by hand. Raises Damaged where it is, or is another version's."""
        try:
            return files.read_record(self.launch_file, LaunchRecord)
        except FileNotFoundError:
            return LaunchRecord()

    @property
    def group(self) -> str:
        """What both sides of a pair have in common, through all attempts; by hand the id without its framework."""
        try:
            pair = self.launch().pair
        except Damaged:  # which 'status' shows; no reason not to measure
            pair = ""
        return pair or self.id.partition("_")[2]

    def settle(self, **status: Any) -> None:
        """Write the run's end, and that of each row which has none yet."""
        self.write_status(ended=utc(), phase="", progress=Progress(), **status)
        for row in self.rows():
            ran = row.started is not None
            self.write_row(row.replace(ended=row.ended or utc()) if ran else row)

    def stored_status(self) -> Status:
        """status.json as it is; ``lost`` where there is none, or it is damaged."""
        try:
            stored = files.read_record(self.status_file, Status)
        except FileNotFoundError:
            return Status(self.id, LOST, cause="damaged: its folder holds no status.json", why="infrastructure")
        except Damaged as error:  # not ours to repair, and no reason to hide the other runs
            return Status(self.id, LOST, cause=f"damaged: {error}", why="infrastructure")
        return dataclasses.replace(stored, run_id=self.id)

    def status(self) -> Status:
        """status.json made true: a state whose owner has died is ``lost``."""
        return self.stored_status().true()

    def rows(self) -> list[Row]:
        """All planned rows, made true: a row that is not at its end although its run is takes the run's state."""
        status = self.status()
        rows = []
        try:
            names = sorted(name for name in os.listdir(self.rows_folder) if _ROW_FILE.fullmatch(name))
        except OSError:  # there is none, or no folder
            names = []
        for name in names:
            number = int(name.partition(".")[0])
            try:
                row = self.read_row(number)
            except FileNotFoundError:  # gone since, or a link to nowhere
                continue
            except Damaged as error:
                row = Row(run_id=self.id, row=number, status=LOST, cause=f"damaged: {error}", why="infrastructure")
            if status.state in TERMINAL and row.status not in TERMINAL:
                state = FAILED if status.state in (FINISHED, SKIPPED) else status.state
                row = row.replace(status=state, cause=status.cause or "its run ended without it", why=status.why)
            rows.append(row)
        return rows

    def events(self) -> tuple[list[dict[str, Any]], int]:
        """The lines of metrics.jsonl, and how many could not be read (a kill can tear the last one)."""
        events, torn = [], 0
        try:
            text = files.read(self.metrics, files.LOG_BYTES).decode(errors="replace")
        except (FileNotFoundError, Damaged):
            return [], 0
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
            else:
                torn += 1
        return events, torn

    def losses(self) -> list[float]:
        """The opening losses that metrics.jsonl has."""
        found = [event.get("loss") for event in self.events()[0] if event["event"] == "loss"]
        return [float(loss) for loss in found if isinstance(loss, int | float) and abs(loss) < MOST_LOSS]


def _text(record: Any) -> str:
    return json.dumps(plain(record), indent=1) + "\n"


@dataclass(frozen=True)
class Results:
    """The whole folder."""

    folder: Path

    @property
    def csv(self) -> Path:
        return self.folder / "results.csv"

    @property
    def device_lock(self) -> Path:
        """Held by the one run that may measure outside Slurm: two at once would share the cores and void both.

        Small proofs, of which nothing is timed, share it.
        """
        return self.folder / ".measuring.lock"

    @property
    def driver_lock(self) -> Path:
        """Held by the one driver that submits."""
        return self.folder / ".submitting.lock"

    @property
    def intent(self) -> Path:
        """What the driver is about to submit, and in what order; gone once all of it is."""
        return self.folder / ".submitting.json"

    def run(self, run_id: str) -> Run:
        """The folder of ``run_id``. Raises UserError for what cannot be a run id."""
        if not RUN_ID.fullmatch(run_id):
            raise UserError(
                f"run id {run_id!r}: 1 to 96 letters, digits, '.', '_' and '-' are valid, no '-' or '.' first"
            )
        return Run(self.folder / "runs" / run_id)

    def runs(self) -> list[Run]:
        """Every run, oldest first."""
        try:
            names = [name for name in os.listdir(self.folder / "runs") if RUN_ID.fullmatch(name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [Run(self.folder / "runs" / name) for name in sorted(names, key=by_time)]
        return [run for run in found if os.path.isdir(run.folder)]  # False for a link to itself, where Path may raise

    def remove_litter(self) -> None:
        """Remove what a driver that was killed within ``Run.create`` has left.

        A process of another machine may have the number of a dead one here: what is younger than a day is left.
        """
        try:
            entries = [entry for entry in os.scandir(self.folder / "runs") if _HALF_MADE.fullmatch(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            pid = int(entry.name.rpartition(".")[2])
            try:
                old = time.time() - entry.stat(follow_symlinks=False).st_mtime > LITTER_SECONDS
            except FileNotFoundError:  # it has its name by now
                continue
            if old and entry.is_dir(follow_symlinks=False) and process_started(pid) is None:
                shutil.rmtree(entry.path, ignore_errors=True)


def by_time(run_id: str) -> tuple[str, str]:
    """Sorts run ids by their stamp, the part behind the first '-'."""
    return run_id.partition("-")[2], run_id
