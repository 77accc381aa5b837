"""Choose runs, follow them, print their logs and cancel them."""

import contextlib
import difflib
import os
import re
import signal
import subprocess
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from duel import files, terminal
from duel.catalogue import VALIDATE
from duel.errors import UserError
from duel.files import Damaged
from duel.launch import display, intent, queue, reasons, state
from duel.launch.views import RunView, Snapshot
from duel.options import FILTERS, has_selection
from duel.results import Results, Run
from duel.states import CANCELLED, FINISHED, LOST, QUEUED, SKIPPED, TERMINAL
from duel.table import archived

TERMINATE_SECONDS = 60.0
# The controller is shared by everyone: query it rarely, and even less often the longer it takes to answer.
SLURM_SECONDS, SLURM_SECONDS_MOST = 30.0, 120.0
FOLDER_SECONDS = 0.5
SETTLED_SECONDS = 300.0  # after so long settled runs are read again: another command may have continued one
MOST_VALID = 12  # values listed in an error: there may be hundreds of groups


def find(results: Results, name: str) -> Run:
    """Return the run ``name``, or the only one whose id begins with it. Otherwise raises UserError with similar ids."""
    runs = {run.id: run for run in results.runs()}
    if name in runs:
        return runs[name]
    begun = [run_id for run_id in runs if run_id.startswith(name)] if name else []
    if len(begun) == 1:
        return runs[begun[0]]
    if begun:
        raise UserError(f"{len(begun)} runs begin with {name!r}: {', '.join(begun[-5:])}")
    if (path := archived(results).get(name) or _archived_proof(results, name)) is not None:
        shown, into = os.path.relpath(path), os.path.relpath(results.folder / "runs")
        raise UserError(f"{name} is archived; to restore it: tar -xzf {shown} -C {into} {name}")
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "'python main.py status' lists them"
    raise UserError(f"no run {name!r} in {results.folder / 'runs'}; {hint}")


def _archived_proof(results: Results, name: str) -> Path | None:
    """Return the archive that has the validation ``name``, of which no table has rows."""
    if not re.search(f"_{VALIDATE}[_-]", name):
        return None
    for path in sorted((results.folder / "archive").glob("*.tar.gz")):
        # A damaged archive is not the one that was asked for, as far as anyone can tell.
        with contextlib.suppress(OSError, EOFError, tarfile.TarError), tarfile.open(path) as packed:
            if name in packed.getnames():
                return path
    return None


def select(runs: list[RunView], args: Namespace, results: Results) -> list[RunView]:
    """Return the runs that the options of a command choose: those named, or all that match every filter.

    Raises UserError if a name is unknown or nothing matches.
    """
    named = {find(results, name).id for name in args.runs}
    filters = {name: getattr(args, name) for name in FILTERS}
    filters = {name: value for name, value in filters.items() if value is not None}
    chosen = [
        seen
        for seen in runs
        if (not named or seen.id in named) and all(getattr(seen, name) == value for name, value in filters.items())
    ]
    if not chosen and (named or filters):
        asked = " ".join([*sorted(named), *(f"--{name} {value}" for name, value in filters.items())])
        if not runs:
            raise UserError(f"no run matches {asked}: there are no runs yet")
        valid = {name: sorted({str(getattr(seen, name)) for seen in runs}) for name in filters}
        there = "; ".join(f"{name}: {', '.join(values[-MOST_VALID:]) or 'none'}" for name, values in valid.items())
        raise UserError(f"no run matches {asked}" + (f"; available: {there}" if there else ""))
    return chosen


def to_upload(args: Namespace, results: Results) -> list[Run]:
    """Return the runs that ``args`` choose; without a choice, this user's. Raises UserError as ``select`` does."""
    chosen = select(state.look(results).runs, args, results)
    runs = [seen.run for seen in chosen]
    return runs if has_selection(args) else [run for run in runs if run.folder.stat().st_uid == os.getuid()]


def to_compare(args: Namespace, results: Results) -> list[Run]:
    """Return the runs that ``args`` choose and the others of their groups; without a choice, those that the last
    command started. Validations measure nothing and are left out.

    Raises UserError as ``select`` does, and if there is nothing to compare.
    """
    runs = state.look(results).runs
    chosen = select(runs, args, results)
    measured = [seen for seen in runs if not seen.is_validation]
    if not measured:
        raise UserError("no runs yet; 'python main.py --benchmark resnet50 --use_case 1' starts two")
    if has_selection(args):
        groups = {seen.group for seen in chosen if not seen.is_validation}
        if not groups:
            raise UserError("a validation measures nothing; 'python main.py validate' shows what it proved")
    else:
        # Groups of one command differ in what they measure but end with the same stamp.
        last = measured[-1].group.partition("-")[2]
        groups = {seen.group for seen in measured if seen.group.partition("-")[2] == last}
    return [seen.run for seen in measured if seen.group in groups]


def follow(results: Results, runs: list[Run] | None, until: Callable[[Snapshot], bool], recent: bool = False) -> None:
    """Poll ``runs`` (or all of them), and Slurm only rarely, until ``until`` returns true for a snapshot.

    ``recent`` is as in ``state.look``.
    """
    look = state.look(results, runs, recent=recent)
    every, everything = SLURM_SECONDS, time.time()
    while not until(look):
        time.sleep(FOLDER_SECONDS)
        begun = time.time()
        ask = begun - look.asked >= every
        if ask and begun - everything >= SETTLED_SECONDS:
            look, everything = state.look(results, runs, recent=recent), begun
        else:
            look = state.look(results, runs, look, ask, recent)
        if ask:
            every = min(max(SLURM_SECONDS, 20 * (time.time() - begun)), SLURM_SECONDS_MOST)


def wait(runs: list[Run], results: Results) -> bool:
    """Follow ``runs`` to their end, in place on a terminal, else a line per change. True if all finished or skipped."""
    with display.live() as show:

        def until(look: Snapshot) -> bool:
            show(state.with_verdicts(look, results))
            return all(seen.is_over for seen in look.runs)

        follow(results, runs, until)
    return all(run.status().state in (FINISHED, SKIPPED) for run in runs)


def watch(results: Results, chosen: Callable[[Snapshot], Snapshot], recent: bool = False) -> None:
    """Show the runs that ``chosen`` selects until all have ended, as ``wait`` does; ``recent`` as in ``state.look``."""
    shown: list[Snapshot] = []
    with display.live() as show:

        def until(look: Snapshot) -> bool:
            try:
                look = chosen(look)
            except UserError:
                if not shown:
                    raise
                return True  # the last of those that were chosen, as by --state, is none any more
            shown.append(look)
            show(look)
            return all(seen.is_over for seen in look.runs) and not look.by_hand

        follow(results, None, until, recent)


def print_log(results: Results, run: Run, follow: bool) -> None:
    """Print a run's output so far; with ``follow``, continue until it ends."""
    offset, path, asked = 0, run.log, time.monotonic()
    while True:
        if follow and time.monotonic() - asked >= SLURM_SECONDS:  # a job may end without a word from the run
            state.look(results, [run])
            asked = time.monotonic()
        ended = _has_ended(run)
        best = _log(run)
        if best != path:
            path, offset = best, 0
        offset = _print_from(path, offset)
        if ended or not follow:
            break
        time.sleep(0.3)
    if offset == 0:
        terminal.warn(f"{run.id} has printed nothing yet" if not ended else f"{run.id} printed nothing")


def _has_ended(run: Run) -> bool:
    """Whether it has, by its folder. A job elsewhere that has not reported for long may be alive: Slurm knows that."""
    status = run.status()
    silent = status.state == LOST and not status.ended and status.slurm_job_id and not status.owner.is_here
    return status.state in TERMINAL and not silent


def _log(run: Run) -> Path:
    """Return the most complete log: Slurm's, with Slurm's own messages; else the run's output; else that of bash."""
    job_id = run.status().slurm_job_id
    with contextlib.suppress(Damaged):
        job_id = job_id or run.launch().slurm_job_id
    paths = [state.slurm_log(run, job_id)] if job_id else []
    return next((path for path in [*paths, run.log] if path.exists()), run.launcher_log)


def _print_from(path: Path, offset: int) -> int:
    """Print ``path`` from byte ``offset`` on, without control characters on a terminal, and return the new offset."""
    try:
        text = files.read(path, files.LOG_BYTES)[offset:]
    except FileNotFoundError:
        return offset
    terminal.show_file(text)
    return offset + len(text)


def cancel(results: Results, runs: list[Run], say: Callable[[str], None]) -> bool:
    """Cancel runs, reporting what happened to each. Return False if one has not ended in time.

    Raises UserError for a run that can only be cancelled elsewhere.
    """
    ending: list[RunView] = []
    again: list[RunView] = []
    for seen in state.look(results, runs).runs:
        if seen.ended and not _is_requeued(seen):
            say(f"{seen.id} is already {seen.state}")
            continue
        _refuse_elsewhere(seen)
        (again if seen.ended else ending).append(seen)
    _scancel(again)
    for seen in again:
        say(f"{seen.id} was {seen.state}; its job, which Slurm had requeued, is cancelled")
        if seen.trains:  # it would have gone on
            _settle_unstarted(seen.run, "cancelled before it continued")
    waiting = {run_id for noted in intent.waiting(results).values() if noted.waits for run_id in noted.runs}
    in_slurm = [seen for seen in ending if seen.in_slurm]
    for seen in ending:
        if not seen.in_slurm:
            _end_here(seen)
    unsent = [seen for seen in in_slurm if not seen.slurm_job_id and seen.id in waiting]
    for seen in unsent:  # first: this needs no Slurm
        _settle_unstarted(seen.run)
    _scancel([seen for seen in in_slurm if seen not in unsent])
    for seen in in_slurm:
        # If its job starts anyway, it finds this and exits.
        if seen.run.stored_status().state == QUEUED:
            _settle_unstarted(seen.run)
    until = time.monotonic() + TERMINATE_SECONDS
    while (alive := [s.run for s in ending if not _has_ended(s.run)]) and time.monotonic() < until:
        time.sleep(0.1)
    for seen in ending:
        status = seen.run.status()
        before = ": cancelled before it started" if status.state == CANCELLED and not status.started else ""
        late = f" has not ended within {TERMINATE_SECONDS:.0f} s" if seen.run in alive else ""
        say(f"{seen.id}{late or ' ' + status.state + before}")
    return not alive


def _is_requeued(seen: RunView) -> bool:
    """Whether Slurm will begin the job of a run again that has ended, as after a preemption."""
    waits = seen.slurm is not None and seen.slurm.kind in (reasons.WAITING, reasons.BLOCKED)
    return waits and seen.state not in (FINISHED, SKIPPED)


def _settle_unstarted(run: Run, cause: str = "cancelled before it started") -> None:
    run.settle(state=CANCELLED, cause=cause, why=reasons.CANCELLED)


def _refuse_elsewhere(seen: RunView) -> None:
    """Raise UserError for a run that can only be cancelled elsewhere."""
    host = seen.status.owner.host
    if seen.in_slurm and queue.elsewhere(seen.launch.cluster):
        raise UserError(f"{seen.id} is on the cluster {seen.launch.cluster}; cancel it there")
    if not seen.in_slurm and host != os.uname().nodename:
        raise UserError(f"{seen.id} runs on {host or 'an unknown machine'}; cancel it there")


def _end_here(seen: RunView) -> None:
    """Ask a run on this machine to end. Raises UserError for another user's."""
    if seen.state == QUEUED and not seen.status.phase:
        _settle_unstarted(seen.run)
        return
    try:
        os.kill(seen.status.owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise UserError(f"{seen.id} is another user's") from None


def _scancel(runs: list[RunView]) -> None:
    """Ask Slurm to cancel the jobs of ``runs``. Raises UserError with scancel's message.

    A job with an unknown id is found by its name, among its user's jobs only: others may have one of that name.
    """
    ids = [seen.slurm_job_id for seen in runs if seen.slurm_job_id]
    calls = [ids] if ids else []
    # An element of an array whose job is not known yet finds its run cancelled when it begins.
    unknown = [seen for seen in runs if not (seen.slurm_job_id or seen.launch.array)]
    calls += [[f"--name={seen.id}", f"--user={seen.user or queue.user()}"] for seen in unknown]
    for arguments in calls:
        try:
            asked = subprocess.run(["scancel", *arguments], capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            raise UserError("Slurm does not answer: scancel timed out after 60 s; try again later") from None
        except OSError as error:
            raise UserError(f"scancel: {error.strerror}; cancel it where Slurm is available") from error
        message = " ".join(asked.stderr.split())
        # A job that has ended in the meantime is no reason to stop: its run's folder records how it ended.
        if asked.returncode and not ("Invalid job id" in message or "already complet" in message):
            raise UserError(f"scancel: {message or f'exit code {asked.returncode}'}")
