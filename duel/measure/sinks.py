"""Where a run's numbers go while it works: its own metrics.jsonl first, Weights & Biases second.

metrics.jsonl is the record of truth: the measured process appends each line by one write. Weights & Biases runs in the
supervising process, which reads those lines; it cannot slow a step down, and a crash of the measured process loses
nothing of it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from duel.record import Row


class MetricsWriter:
    """Appends events to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
        written = os.write(self._file, line.encode())
        if written != len(line):
            raise OSError(f"metrics.jsonl: wrote {written} of {len(line)} bytes; the disk is full")


class MetricsReader:
    """Reads the events that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def __call__(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


class WandbSink:
    """One Weights & Biases run per Duel run; offline without a key, absent without the package.

    ``note`` says in one line what it does.
    """

    def __init__(self, folder: Path, rows: list[Row], environment: dict[str, Any]) -> None:
        self._run: Any = None
        self._last = 0.0
        row = rows[0]
        try:
            import wandb
        except ImportError:
            self.note = "Weights & Biases: not installed in this interpreter; metrics.jsonl has everything"
            return
        # Decided before init: a run that turns offline afterwards is a known open bug of wandb.
        asked = os.environ.get("WANDB_MODE")
        mode: Any = asked or ("online" if wandb.login(prompt=False) else "offline")
        settings = wandb.Settings(init_timeout=60, finish_timeout=60, console="off", silent=True)
        group = str(row.run_id).partition("_")[2]  # the run id without the framework: both sides of a pair share it
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "duel"),
                id=row.run_id,
                name=row.run_id,
                group=group,
                job_type=row.framework,
                tags=[str(row.framework), str(row.benchmark), f"use_case_{row.use_case}", str(row.target)],
                config={"rows": [_known(row) for row in rows], "environment": environment, "run_folder": str(folder)},
                dir=folder,
                mode=mode,
                resume="allow",
                settings=settings,
            )
        except (wandb.Error, OSError) as error:
            self.note = f"Weights & Biases: not used, {type(error).__name__}: {error}; metrics.jsonl has everything"
            return
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        where = self._run.url or f"{mode} ({'as asked' if asked else 'no key'})"
        if mode == "offline":
            python, files = (os.path.relpath(path) for path in (sys.executable, folder / "wandb"))
            where += f"; to watch: {python} -m wandb leet {files}"
        self.note = f"Weights & Biases: {where}"

    def log(self, events: list[dict[str, Any]]) -> None:
        """Stream events; blocks at most about once a second."""
        if self._run is None:
            return
        for event in events:
            prefix = f"row{event['row']}/" if event["row"] else ""
            if event["event"] == "loss":
                self._run.log({"step": event["step"], f"{prefix}loss": event["loss"]})
            elif event["event"] == "block" and event["time"] - self._last >= 1.0:
                self._last = event["time"]
                names = ("loss", "throughput", "step_seconds")
                self._run.log({"step": event["step"]} | {f"{prefix}{name}": event[name] for name in names})

    def finish(self, rows: list[Row], exit_code: int) -> None:
        if self._run is None:
            return
        for row in rows:
            prefix = f"row{row.row}/" if row.row else ""
            self._run.summary.update({f"{prefix}{name}": value for name, value in _known(row).items()})
        # Known only now: the job finds its accelerator itself.
        self._run.tags += tuple({row.device_kind for row in rows if row.device_kind})
        self._run.finish(exit_code=exit_code)


def _known(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.to_dict().items() if value is not None and name != "missing"}
