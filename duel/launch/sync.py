"""Upload to Weights & Biases what runs could not, from a machine that reaches its server."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from duel import files
from duel.errors import UserError
from duel.files import Damaged
from duel.results import Run
from duel.states import TERMINAL

HEADER_BYTES = 7  # wandb writes these immediately; the first records follow some 15 s later
REQUEST_SECONDS = {"GRAPHQL": 10, "FILE_STREAM": 30, "FILE_TRANSFER": 30}
RETRIES = 2  # by default wandb retries for a week
UPLOAD_SECONDS = 900
HOPELESS = ("API key", "API_KEY", "giving up after", "Timed out")  # in wandb's messages: no key, no answer


def sync(runs: list[Run], say: Callable[[str], None]) -> bool:
    """Upload what ``runs`` have on disk and the server lacks, with a line for each; returns whether all succeeded.

    Of unfinished runs, what is written so far is uploaded (wandb writes every 15 s), and W&B shows them as failed
    until the upload after their end. Each upload covers the whole file, under the same id and with the same steps, so
    that W&B shows nothing twice. What has been uploaded completely is skipped.

    Raises UserError if there is no key or no server answers: the other runs would fare no better.
    """
    well = True
    for run in runs:
        # Next to an offline run, an online one is an attempt that failed before it recorded anything.
        offline = sorted(run.folder.glob("wandb/offline-run-*/*.wandb"))
        found = offline or sorted(run.folder.glob("wandb/run-*/*.wandb"))
        if not found:
            say(f"{run.id}: nothing to upload")
        for file in found:
            well = _bring(run, file, say) and well
    return well


def _bring(run: Run, file: Path, say: Callable[[str], None]) -> bool:
    """Upload one file if necessary. Returns whether that succeeded."""
    online = not file.parent.name.startswith("offline-")
    if not file.is_file():
        say(f"{run.id}: damaged: {file.name} is not a regular file")
        return False
    # Both are read before the upload, which does not include what is written during it.
    ended, size = run.status().state in TERMINAL, file.stat().st_size
    mark = file.with_name(f"{file.name}.synced")
    if online and (not ended or _confirmed(file.parent / "logs" / "debug-internal.log")):
        say(f"{run.id}: nothing to upload, it is online")
        return True
    if _mark(mark) == str(size):
        say(f"{run.id}: already uploaded")
        return True
    if size <= HEADER_BYTES:
        say(f"{run.id}: nothing to upload yet")
        return True
    confirmed, complaint = _upload(file)
    # wandb leaves its mark whether or not the server accepted the data, and 'wandb clean' deletes what is marked.
    mark.unlink(missing_ok=True)
    if any(phrase in complaint for phrase in HOPELESS) and not confirmed:
        raise UserError(
            f"{run.id}: not uploaded: {complaint}; it needs a key ('.venv/driver/bin/python -m wandb login' stores "
            "one) and a server that answers from here"
        )
    if not confirmed:
        say(f"{run.id}: not uploaded: {complaint}")
    elif not ended:
        say(f"{run.id}: uploaded what is written so far; it is still running, so sync again later")
    else:
        mark.write_text(str(size))
        say(f"{run.id}: uploaded" + (f", but: {complaint}" if complaint else ""))
    return confirmed


def _mark(mark: Path) -> str:
    """Return how many bytes were uploaded before; empty if unknown."""
    try:
        return files.read(mark).decode(errors="replace")
    except (FileNotFoundError, Damaged):
        return ""


def _upload(file: Path) -> tuple[bool, str]:
    """Have wandb upload ``file``. Returns whether the server confirmed its end, and wandb's complaint."""
    limits = {f"WANDB__{name}_TIMEOUT_SECONDS": str(seconds) for name, seconds in REQUEST_SECONDS.items()}
    limits |= {f"WANDB__{name}_RETRY_MAX": str(RETRIES) for name in REQUEST_SECONDS}
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", str(file)]
    with tempfile.TemporaryDirectory() as folder:
        # Login nodes often have WANDB_MODE=offline on behalf of the jobs.
        environment = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_SILENT")}
        environment |= limits | {"WANDB_DIR": folder, "TMPDIR": folder, "WANDB_ERROR_REPORTING": "false"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=UPLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"not done within {UPLOAD_SECONDS} s"
        confirmed = any(_confirmed(log) for log in Path(folder).glob("wandb/logs/debug-sync.*.log"))
    complaints = [line for line in done.stdout.splitlines() if "error" in line.lower() and "logs at" not in line]
    complaint = complaints[0] if complaints else "" if confirmed else "wandb gives no reason"
    return confirmed, complaint.removeprefix("wandb: ").removeprefix("ERROR ").removeprefix("Error: ")


def _confirmed(log: Path) -> bool:
    """Return whether the server has confirmed the end of a run, by the log of the wandb that uploaded it.

    wandb itself does not show it: it reports success, and exits with 0, even if the server rejected the data.
    """
    ending = False
    try:
        lines = files.read(log, files.LOG_BYTES).decode(errors="replace").splitlines()
    except (FileNotFoundError, Damaged):
        return False
    for line in lines:
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, RecursionError):  # torn by a kill
            continue
        if record.get("msg") == "filestream: sending request":
            ending = bool(record.get("complete"))
        elif record.get("msg") == "filestream: request sent" and ending:
            return True
    return False
