"""Choosing runs, following them, reading their logs and ending them."""

import difflib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duel.catalogue import BENCHMARKS, VALIDATE
from duel.errors import UserError
from duel.launch import queue, state
from duel.options import FILTERS, has_selection
from duel.record import CANCELLED, FINISHED, QUEUED, RUNNING, SKIPPED, TERMINAL
from duel.results import Results, Run

TERMINATE_SECONDS = 60.0
# A controller serves everyone: it is asked seldom, and more seldom the longer it takes.
SLURM_SECONDS, SLURM_SECONDS_MOST = 30.0, 120.0
FOLDER_SECONDS = 0.5
MOST_VALID = 12  # values that an error lists: there may be hundreds of groups


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


def select(statuses: list[dict[str, Any]], args: Namespace, results: Results) -> list[dict[str, Any]]:
    """The statuses of the runs that the options of a command choose: those named, or all that fit every filter.

    Raises UserError where a name is no run's, or nothing fits.
    """
    named = {find(results, name).id for name in args.runs}
    filters = {name: getattr(args, f"only_{name}") for name in FILTERS}
    filters = {name: value for name, value in filters.items() if value is not None}
    chosen = [
        status
        for status in statuses
        if (not named or status["run_id"] in named)
        and all(_facts(status).get(name) == value for name, value in filters.items())
    ]
    if not chosen and (named or filters):
        asked = " ".join([*sorted(named), *(f"--{name} {value}" for name, value in filters.items())])
        valid = {name: sorted({str(_facts(status).get(name)) for status in statuses}) for name in filters}
        there = "; ".join(f"{name}: {', '.join(values[-MOST_VALID:]) or 'none'}" for name, values in valid.items())
        raise UserError(f"no run fits {asked}" + (f"; there are {there}" if there else ""))
    return chosen


def to_compare(args: Namespace, results: Results) -> list[Run]:
    """The runs that ``args`` choose and the others of their groups; without a choice those that were started last,
    by one command. A validation measures nothing and is left out.

    Raises UserError as ``select`` does, and where there is nothing to compare.
    """
    statuses = state.look(results).statuses
    chosen = select(statuses, args, results)
    measured = [status for status in statuses if not _is_validation(status)]
    if not measured:
        raise UserError("no runs yet; 'python main.py --benchmark resnet50 --use_case 1' starts two")
    if has_selection(args):
        groups = {_group(status) for status in chosen if not _is_validation(status)}
        if not groups:
            raise UserError("a validation measures nothing; 'python main.py validate' says what it proved")
    else:
        # Groups of one command differ in what they measure, and end with the same stamp.
        last = _group(measured[-1]).partition("-")[2]
        groups = {_group(status) for status in measured if _group(status).partition("-")[2] == last}
    return [results.run(status["run_id"]) for status in measured if _group(status) in groups]


def _group(status: dict[str, Any]) -> str:
    """As ``duel.job.group``, without reading launch.json again."""
    return str(status.get("pair") or status["run_id"].partition("_")[2])


def _is_validation(status: dict[str, Any]) -> bool:
    facts = _facts(status)
    return str(status["run_id"]).startswith(f"{facts['framework']}_{facts['benchmark']}_{VALIDATE}")


def _facts(status: dict[str, Any]) -> dict[str, Any]:
    """What runs are chosen by. A run that was started by hand has it in its id alone."""
    job = status.get("job") or {}
    framework, _, rest = status["run_id"].partition("_")
    named = [name for name in BENCHMARKS if rest.startswith(f"{name}_")]
    benchmark = max(named, key=len, default="")
    said = {"framework": framework, "benchmark": benchmark, "target": status.get("target"), "group": _group(status)}
    return said | {name: job[name] for name in said if name in job} | {"state": status["state"]}


def follow(results: Results, runs: list[Run] | None, until: Callable[[state.Look], bool]) -> None:
    """Look at ``runs`` (or all) again and again, at Slurm seldom, until ``until`` has seen enough."""
    seen = state.look(results, runs)
    every = SLURM_SECONDS
    while not until(seen):
        time.sleep(FOLDER_SECONDS)
        fresh = time.time() - seen.asked < every
        if not fresh:
            begun = time.time()
            seen = state.look(results, runs)
            every = min(max(SLURM_SECONDS, 20 * (time.time() - begun)), SLURM_SECONDS_MOST)
        else:
            seen = state.look(results, runs, before=seen)


def wait(runs: list[Run], results: Results, say: Callable[[str], None]) -> bool:
    """Follow ``runs`` to their end, saying what changes. True if all of them finished."""
    said: dict[str, tuple[str, float]] = {}

    def until(seen: state.Look) -> bool:
        for status in seen.statuses:
            words = f"{status['run_id']}  {status['state']:9}  {state.describe(status)}".rstrip()
            before, when = said.get(status["run_id"], ("", 0.0))
            # A new phase is said at once, progress within one every ten seconds.
            news = [status.get(name) for name in ("state", "part", "phase")]
            key = f"{news} {status.get('slurm', {}).get('reason')}"
            if key != before or (status["state"] == RUNNING and time.monotonic() - when > 10):
                said[status["run_id"]] = (key, time.monotonic())
                say(words)
        return all(status["state"] in TERMINAL for status in seen.statuses)

    follow(results, runs, until)
    return all(run.status()["state"] in (FINISHED, SKIPPED) for run in runs)


def watch(results: Results, show: Callable[[state.Look], state.Look]) -> None:
    """Show every run, anew each second, until all that ``show`` has shown, and returns, have ended."""

    def until(seen: state.Look) -> bool:
        shown = show(seen)
        time.sleep(1.0)
        return all(status["state"] in TERMINAL for status in shown.statuses) and not shown.by_hand

    follow(results, None, until)


def print_log(run: Run, follow: bool) -> None:
    """Print what the run has printed; with ``follow`` until it ends."""
    offset, path = 0, run.log
    while True:
        status = run.status()
        ended = status["state"] in TERMINAL
        best = _log(run, status)
        if best != path:
            path, offset = best, 0
        offset = _print_from(path, offset)
        if ended or not follow:
            break
        time.sleep(0.3)
    if offset == 0:
        print(f"{run.id} has printed nothing yet" if not ended else f"{run.id} printed nothing", file=sys.stderr)


def _log(run: Run, status: dict[str, Any]) -> Path:
    """The file that has most of it: Slurm's log, which holds its own words too; what the run printed; what bash did."""
    job_id = status.get("slurm_job_id") or run.launch().get("slurm_job_id")
    paths = [state.slurm_log(run, job_id)] if job_id else []
    return next((path for path in [*paths, run.log] if path.exists()), run.launcher_log)


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


def cancel(results: Results, runs: list[Run], say: Callable[[str], None]) -> bool:
    """End runs, saying what happened to each. False where one cannot be ended from here, or has not ended in time."""
    statuses = {status["run_id"]: status for status in state.look(results, runs).statuses}
    told = []
    for run in runs:
        status = statuses[run.id]
        if status["state"] in TERMINAL:
            say(f"{run.id} is {status['state']} already")
        elif _in_slurm(status) or _tell(run, status):
            told.append(run)
    in_slurm = [run for run in told if _in_slurm(statuses[run.id])]
    ids = [statuses[run.id]["slurm_job_id"] for run in in_slurm if statuses[run.id].get("slurm_job_id")]
    if ids:
        _scancel(ids)
    for run in in_slurm:
        if not statuses[run.id].get("slurm_job_id"):
            _scancel([f"--name={run.id}"])
        # Its job, if it begins all the same, finds this and ends.
        if run.stored_status().get("state") == QUEUED:
            run.settle(state=CANCELLED, cause="cancelled before it started", why=queue.CANCELLED)
    until = time.monotonic() + TERMINATE_SECONDS
    while (alive := [run for run in told if run.status()["state"] not in TERMINAL]) and time.monotonic() < until:
        time.sleep(0.1)
    for run in told:
        status = run.status()
        before = ": cancelled before it started" if "before it started" in status.get("cause", "") else ""
        waiting = f" has not ended {TERMINATE_SECONDS:.0f} s after it was told to" if run in alive else ""
        say(f"{run.id}{waiting or ' ' + status['state'] + before}")
    return not alive


def _in_slurm(status: dict[str, Any]) -> bool:
    return "slurm_job_name" in status.get("owner", {}) or bool(status.get("slurm_job_id"))


def _tell(run: Run, status: dict[str, Any]) -> bool:
    """Tell a run on this machine to end."""
    owner = status["owner"]
    if owner["host"] != os.uname().nodename:
        raise UserError(f"{run.id} runs on {owner['host']}; cancel it there")
    if status["state"] == QUEUED and not status.get("phase"):
        run.settle(state=CANCELLED, cause="cancelled before it started")
    else:
        os.kill(owner["pid"], signal.SIGTERM)
    return True


def _scancel(arguments: list[str]) -> None:
    """Raises UserError with scancel's own words."""
    try:
        asked = subprocess.run(["scancel", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise UserError("Slurm does not answer: scancel has not ended within 60 s; try again later") from None
    except OSError as error:
        raise UserError(f"scancel: {error.strerror}; cancel where Slurm is") from error
    words = " ".join(asked.stderr.split())
    # A job that has ended meanwhile is no reason to stop: what became of it is in its folder.
    if asked.returncode and not ("Invalid job id" in words or "already complet" in words):
        raise UserError(f"scancel: {words or f'exit code {asked.returncode}'}")
