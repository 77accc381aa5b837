"""Watching runs: their states, their progress, their logs, and ending them. Everything is read from the disk."""

import difflib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duel.errors import UserError
from duel.record import CANCELLED, FINISHED, QUEUED, RUNNING, SKIPPED, TERMINAL
from duel.results import Results, Run

SHOWN = 20
TERMINATE_SECONDS = 60.0


def find(results: Results, name: str) -> Run:
    """The run called ``name``, or the only one whose id begins so. Raises UserError with near ids otherwise."""
    runs = {run.id: run for run in results.runs()}
    if name in runs:
        return runs[name]
    begun = [run_id for run_id in runs if run_id.startswith(name)] if name else []
    if len(begun) == 1:
        return runs[begun[0]]
    if begun:
        raise UserError(f"{len(begun)} runs begin with {name!r}: {', '.join(begun[-5:])}")
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.4)
    hint = f"near: {', '.join(near)}" if near else "'python main.py status' lists them"
    raise UserError(f"no run {name!r} in {results.folder / 'runs'}; {hint}")


def describe(status: dict[str, Any]) -> str:
    """What a run is doing, in a few words."""
    if status["state"] == RUNNING:
        words = status.get("phase", "")
        if words == "measuring" and "done" in status:
            words += f": {status['done']} steps of at least {status['needed']}"
            words += f", {status['throughput']:.4g} {status['unit']}, loss {status['loss']:.4g}"
        elif words.startswith("training") and "loss" in status:
            words += f": step {status['step'] + 1}, loss {status['loss']:.4g}"
        return f"{words} ({status['age']:.0f} s ago)"
    if status["state"] == QUEUED:
        return status.get("phase") or "waits for its turn"
    return status.get("cause") or ""


def table(statuses: list[dict[str, Any]]) -> str:
    """One line a run, the last ones of many."""
    if not statuses:
        return "no runs yet; 'python main.py --benchmark resnet50 --use_case 1' starts two"
    alive = [status for status in statuses if status["state"] not in TERMINAL]
    shown = [s for s in statuses if s in alive or s in statuses[-SHOWN:]]
    width = max(len(status["run_id"]) for status in shown)
    lines = [f"{'run':{width}}  state"]
    lines += [f"{s['run_id']:{width}}  {s['state']:9}  {describe(s)}".rstrip() for s in shown]
    if len(shown) < len(statuses):
        lines.append(f"({len(statuses) - len(shown)} older ones: 'python main.py status --json' has all)")
    return "\n".join(lines)


def wait(runs: list[Run], say: Callable[[str], None]) -> bool:
    """Follow ``runs`` to their end, saying what changes. True if all of them finished."""
    said: dict[str, tuple[str, float]] = {}
    while True:
        statuses = [run.status() for run in runs]
        for status in statuses:
            words = f"{status['run_id']}  {status['state']:9}  {describe(status)}".rstrip()
            before, when = said.get(status["run_id"], ("", 0.0))
            # A new phase is said at once, progress within one every ten seconds.
            key = f"{status['state']} {status.get('phase')}"
            if key != before or (status["state"] == RUNNING and time.monotonic() - when > 10):
                said[status["run_id"]] = (key, time.monotonic())
                say(words)
        if all(status["state"] in TERMINAL for status in statuses):
            return all(status["state"] in (FINISHED, SKIPPED) for status in statuses)
        time.sleep(0.3)


def print_log(run: Run, follow: bool) -> None:
    """Print what the run has printed; with ``follow`` until it ends."""
    path = run.log if run.log.exists() else run.launcher_log
    offset = 0
    while True:
        ended = run.status()["state"] in TERMINAL
        if path == run.launcher_log and run.log.exists():
            path, offset = run.log, 0
        offset = _print_from(path, offset)
        if ended or not follow:
            break
        time.sleep(0.3)
    if offset == 0:
        print(f"{run.id} has printed nothing yet" if not ended else f"{run.id} printed nothing", file=sys.stderr)


def _print_from(path: Path, offset: int) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while chunk := file.read(1 << 16):
                sys.stdout.buffer.write(chunk)
                offset += len(chunk)
    except FileNotFoundError:
        pass
    sys.stdout.flush()
    return offset


def cancel(run: Run) -> str:
    """End a run; returns what happened, in words. Raises UserError where it cannot be ended from here."""
    status = run.status()
    if status["state"] in TERMINAL:
        return f"{run.id} is {status['state']} already"
    owner = status["owner"]
    if "slurm_job_name" in owner:
        subprocess.run(["scancel", f"--name={owner['slurm_job_name']}"], check=True)
        run.settle(state=CANCELLED, cause="cancelled before it started")
        return f"{run.id} cancelled before it started"
    if owner["host"] != os.uname().nodename:
        raise UserError(f"{run.id} runs on {owner['host']}; cancel it there")
    if status["state"] == QUEUED and not status.get("phase"):
        run.settle(state=CANCELLED, cause="cancelled before it started")
        return f"{run.id} cancelled before it started"
    os.kill(owner["pid"], signal.SIGTERM)
    until = time.monotonic() + TERMINATE_SECONDS
    while run.status()["state"] not in TERMINAL:
        if time.monotonic() > until:
            raise UserError(f"{run.id}: process {owner['pid']} has not ended {TERMINATE_SECONDS:.0f} s after SIGTERM")
        time.sleep(0.1)
    return f"{run.id} {run.status()['state']}"
