"""Bring to Weights & Biases what runs could not upload themselves, from a machine that reaches its server."""

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

HEADER_BYTES = 7  # what wandb writes at once; the first records follow some 15 s later
REQUEST_SECONDS = {"GRAPHQL": 10, "FILE_STREAM": 30, "FILE_TRANSFER": 30}
RETRIES = 2  # by itself wandb tries for a week
UPLOAD_SECONDS = 900
HOPELESS = ("API key", "API_KEY", "giving up after", "Timed out")  # wandb's words for: no key, no answer


def sync(runs: list[Run], say: Callable[[str], None]) -> bool:
    """Upload what ``runs`` have on disk and the server has not, one line each; whether all went well.

    Runs that still go on are uploaded as far as they are written (wandb writes every 15 s) and called failed by W&B
    until the upload after their end. Each upload is of the whole file, under the same id and with the same steps, so
    that W&B shows nothing twice. What has been uploaded to its end is left alone.

    Raises UserError where there is no key or no server answers: the other runs would fare no better.
    """
    well = True
    for run in runs:
        # Beside an offline run, an online one is an attempt that failed before it held anything.
        offline = sorted(run.folder.glob("wandb/offline-run-*/*.wandb"))
        found = offline or sorted(run.folder.glob("wandb/run-*/*.wandb"))
        if not found:
            say(f"{run.id}: nothing to upload")
        for file in found:
            well = _bring(run, file, say) and well
    return well


def _bring(run: Run, file: Path, say: Callable[[str], None]) -> bool:
    """Upload one file if need be. Returns whether that went well."""
    online = not file.parent.name.startswith("offline-")
    # Both before the upload: what is written during it is not part of it.
    ended, size = run.status().state in TERMINAL, file.stat().st_size
    if not file.is_file():
        say(f"{run.id}: damaged: {file.name} is no regular file")
        return False
    mark = file.with_name(f"{file.name}.synced")
    if online and (not ended or _confirmed(file.parent / "logs" / "debug-internal.log")):
        say(f"{run.id}: nothing to upload, it is online")
        return True
    if _mark(mark) == str(size):
        say(f"{run.id}: uploaded before")
        return True
    if size <= HEADER_BYTES:
        say(f"{run.id}: nothing to upload yet")
        return True
    confirmed, said = _upload(file)
    # wandb leaves its mark whether or not the server took the data, and its 'wandb clean' deletes what is marked.
    mark.unlink(missing_ok=True)
    if any(words in said for words in HOPELESS) and not confirmed:
        raise UserError(
            f"{run.id}: not uploaded: {said}; it needs a key ('.venv/driver/bin/python -m wandb login' stores one) "
            "and a server that answers from here"
        )
    if not confirmed:
        say(f"{run.id}: not uploaded: {said}")
    elif not ended:
        say(f"{run.id}: uploaded as far as it is written; it goes on, so call again")
    else:
        mark.write_text(str(size))
        say(f"{run.id}: uploaded" + (f", but: {said}" if said else ""))
    return confirmed


def _mark(mark: Path) -> str:
    """How much was uploaded before; empty where that is not known."""
    try:
        return files.read(mark).decode(errors="replace")
    except (FileNotFoundError, Damaged):
        return ""


def _upload(file: Path) -> tuple[bool, str]:
    """Have wandb upload ``file``. Returns whether the server confirmed its end, and what wandb complains of."""
    limits = {f"WANDB__{name}_TIMEOUT_SECONDS": str(seconds) for name, seconds in REQUEST_SECONDS.items()}
    limits |= {f"WANDB__{name}_RETRY_MAX": str(RETRIES) for name in REQUEST_SECONDS}
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", str(file)]
    with tempfile.TemporaryDirectory() as folder:
        # Login nodes often have WANDB_MODE=offline for the sake of the jobs.
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
    """Whether the server has confirmed the end of a run, by the log of the wandb that uploaded it.

    wandb itself does not tell: it reports success, and exits with 0, where the server turned the data down.
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
