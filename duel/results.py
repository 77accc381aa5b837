"""The results folder: who writes which file, and how the state of a run is told from them.

    results/results.csv            derived from the row files; any process may rebuild it, readers see it whole
    results/parity/                certificates that both sides compute the same (duel.certificate)
    results/weights/               what --weights gave, as safetensors files that both sides read
    results/runs/<run_id>/
        script.sh                  the text that was started
        launch.json                what the driver did to start it, and Slurm's last word on it; the driver's alone
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

import contextlib
import csv
import fcntl
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from duel import certificate, comparability
from duel.catalogue import VALIDATE
from duel.errors import UserError
from duel.record import COLUMNS, FAILED, FINISHED, LOST, QUEUED, RUNNING, SKIPPED, TERMINAL, Row

if TYPE_CHECKING:
    from duel.evidence import Evidence

RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
HEARTBEAT_SECONDS = 5.0
LOST_AFTER_SECONDS = 120.0
FORMAT = 1  # of status.json and launch.json; a larger one was written by a newer version


def utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def stamp() -> str:
    """What makes a run id unique, and sorts by time: UTC to 1/256 s, and 4 random hex digits."""
    now = time.time()
    return f"{time.strftime('%y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 256):02x}{os.urandom(2).hex()}"


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, whole and durable, or leave it as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(2).hex()}")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path, wait: bool, shared: bool = False) -> Iterator[TextIO | None]:
    """Hold the lock file ``path``; yields it, or None where it is not held (never, with ``wait``).

    ``shared``: beside others that share it, and nobody else.

    The kernel frees it when the last process that has this very file open is dead.
    """
    with open(path, "a") as file:
        held: TextIO | None = file
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = None
        yield held


def process_started(pid: int) -> str | None:
    """When process ``pid`` of this machine started, in a form to compare; None if it is not there (or a zombie).

    A bare pid is not enough: the kernel uses numbers again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # no /proc: macOS
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"


def this_process() -> dict[str, Any]:
    """Who owns a status: enough to ask later whether it still lives."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "started": process_started(os.getpid())}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty where there is none. Raises UserError where it is damaged or too new."""
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"its {path.name} is damaged") from error
    if not isinstance(stored, dict):
        raise UserError(f"its {path.name} is damaged")
    if stored.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"its {path.name} is of another version of Duel (format {stored['format']}; this one reads {FORMAT})"
        )
    return stored


def _alive(owner: dict[str, Any], age: float) -> bool:
    if "slurm_job_name" in owner:
        return True  # waiting in Slurm's queue: only Slurm can say otherwise
    if owner.get("host") == os.uname().nodename:
        return process_started(int(owner["pid"])) == str(owner["started"])
    return age < LOST_AFTER_SECONDS


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
        found = (self.folder / "evidence").glob(f"{number:03d}-*.npz")
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
        self, rows: list[Row], script: str | None = None, launch: dict[str, Any] | None = None, **status: Any
    ) -> None:
        """Make the folder with all its planned rows, whole or not at all.

        A folder that exists already is an error (OSError).
        """
        new = Run(self.folder.with_name(f".{self.id}.{os.getpid()}"))
        status |= {"run_id": self.id, "state": QUEUED, "queued": utc(), "updated": time.time(), "format": FORMAT}
        try:
            new.rows_folder.mkdir(parents=True)
            # Plainly: nobody looks until the folder has its name.
            for number, row in enumerate(rows):
                text = row.replace(run_id=self.id, row=number, status=QUEUED).to_json()
                new.row_file(number).write_text(text, newline="")
            new.status_file.write_text(json.dumps(status, indent=1) + "\n")
            if launch is not None:
                new.launch_file.write_text(json.dumps(launch | {"format": FORMAT}, indent=1) + "\n")
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
        return Row.from_json(self.row_file(number).read_text())

    def write_status(self, **fields: Any) -> None:
        """Merge ``fields`` into status.json. Only the run's owner of the moment calls this."""
        merged = self.stored_status() | fields | {"updated": time.time(), "format": FORMAT}
        write_atomically(self.status_file, json.dumps(merged, indent=1) + "\n")

    def write_launch(self, **fields: Any) -> None:
        """Merge ``fields`` into launch.json. Only the driver calls this. Raises UserError where it is damaged."""
        merged = self.launch() | fields | {"format": FORMAT}
        write_atomically(self.launch_file, json.dumps(merged, indent=1) + "\n")

    def launch(self) -> dict[str, Any]:
        """launch.json; empty for a script started by hand. Raises UserError where it is damaged or too new."""
        return _read_json(self.launch_file)

    def settle(self, **status: Any) -> None:
        """Write the run's end, and that of each row which has none yet."""
        self.write_status(ended=utc(), phase="", **status)
        for row in self.rows():
            ran = row.started is not None
            self.write_row(row.replace(ended=row.ended or utc()) if ran else row)

    def stored_status(self) -> dict[str, Any]:
        """status.json as it is; empty where there is none, ``lost`` where it is damaged."""
        try:
            return _read_json(self.status_file)
        except UserError as error:  # not ours to repair, and no reason to hide the other runs
            return {"state": LOST, "cause": str(error)}

    def status(self) -> dict[str, Any]:
        """status.json made true: a state whose owner has died is ``lost``. Adds ``age`` (s) since its last word."""
        stored = {"run_id": self.id, "state": LOST, "cause": "its folder holds no status"} | self.stored_status()
        stored["age"] = max(0.0, time.time() - stored.get("updated", 0.0))
        if stored["state"] in (QUEUED, RUNNING) and not _alive(stored.get("owner", {}), stored["age"]):
            doing = "started" if stored["state"] == QUEUED else "ended"
            stored |= {"state": LOST, "cause": f"the process that held it died before the run {doing}"}
        return stored

    def rows(self) -> list[Row]:
        """All planned rows, made true: a row that is not at its end although its run is takes the run's state."""
        status = self.status()
        rows = []
        for path in sorted(self.rows_folder.glob("*.json")):
            try:
                row = Row.from_json(path.read_text())
            except ValueError:
                row = Row(run_id=self.id, row=int(path.stem), status=LOST, cause=f"its {path.name} is damaged")
            if status["state"] in TERMINAL and row.status not in TERMINAL:
                state = FAILED if status["state"] in (FINISHED, SKIPPED) else status["state"]
                row = row.replace(status=state, cause=status.get("cause") or "its run ended without it")
            rows.append(row)
        return rows

    def events(self) -> tuple[list[dict[str, Any]], int]:
        """The lines of metrics.jsonl, and how many could not be read (a kill can tear the last one)."""
        events, torn = [], 0
        try:
            text = self.metrics.read_text(errors="replace")
        except FileNotFoundError:
            return [], 0
        for line in text.splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                torn += 1
        return events, torn


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; none where there is none. Raises UserError where it is not one of ours."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            if not {"run_id", "row", "missing"} <= set(header):
                raise UserError(f"{path}: not a table of rows; delete it and run 'python main.py collect'")
            return [Row.from_csv(texts) for texts in reader]
    except FileNotFoundError:
        return []


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write ``rows`` to a CSV file, whole or not at all."""
    text = io.StringIO(newline="")
    # All quoted: a bare carriage return inside a text would otherwise end the line for readers.
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    writer.writerows(row.to_csv() for row in rows)
    write_atomically(path, text.getvalue())


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
            entries = os.scandir(self.folder / "runs")
            found = [Run(Path(entry.path)) for entry in entries if RUN_ID.fullmatch(entry.name) and entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda run: _by_time(run.id))

    def read_csv(self) -> list[Row]:
        """The rows of results.csv. Raises UserError where it is not one of ours."""
        return read_rows(self.csv)

    def merge(self, wait: bool = True) -> list[Row]:
        """Bring results.csv up to date with the runs' folders and return its rows.

        Runs all of whose rows the CSV already holds at their end are not read again. Without ``wait`` the call does
        nothing where another process is merging: whoever merges next finds what it left out.
        """
        with locked(self.folder / ".results.lock", wait) as held:
            if not held:
                return []
            before = self.read_csv()
            known: dict[str, list[Row]] = {}
            for row in before:
                known.setdefault(str(row.run_id), []).append(row)
            at_end = TERMINAL - {LOST}  # a lost run may yet speak again
            settled = {run_id for run_id, rows in known.items() if all(row.status in at_end for row in rows)}
            unsettled = [run for run in self.runs() if run.id not in settled]
            known |= {run.id: run.rows() for run in unsettled}
            in_order = [row for run_id in sorted(known, key=_by_time) for row in known[run_id]]
            proved = [self.with_parity(row) for row in in_order if row.use_case != VALIDATE]  # which measures nothing
            rows = comparability.judged(proved, self.evidence)
            if rows != before or not self.csv.exists():
                write_rows(self.csv, rows)
            return rows

    def evidence(self, row: Row) -> "list[Evidence]":
        """What ``row``'s program computed from known weights, of each rank.

        Raises ValueError where it is not there, or not what the row recorded.
        """
        from duel.evidence import Evidence, sha256

        run = self.run(str(row.run_id))
        files = run.evidence_files(row.row or 0)
        if not files:
            raise ValueError(f"there is none in runs/{run.id}/evidence")
        data = [file.read_bytes() for file in files]
        if sha256(data) != row.evidence_sha256:
            raise ValueError(f"runs/{run.id}/evidence was changed since: its hash is not the row's evidence_sha256")
        return [Evidence.from_bytes(each) for each in data]

    def with_parity(self, row: Row) -> Row:
        """A finished row that was not verified when it ended may be now."""
        if row.status != FINISHED or row.parity == certificate.VERIFIED:
            return row
        return row.replace(parity=certificate.verdict(row, self.folder))


def _by_time(run_id: str) -> tuple[str, str]:
    """Sorts run ids by their stamp, the part behind the first '-'."""
    return run_id.partition("-")[2], run_id
