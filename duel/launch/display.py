"""What a run is doing, as text, and the table of all runs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from duel import terminal
from duel.launch import reasons
from duel.launch.queue import user
from duel.launch.state import RECENT
from duel.launch.views import RunView, Snapshot
from duel.states import QUEUED, RUNNING
from duel.status import SIGNALLED, Status

BAR_WIDTH = 16
PROGRESS_SECONDS = 60.0  # between two progress lines of one phase, if lines cannot be redrawn


def describe(seen: RunView) -> str:
    """Say briefly what a run is doing."""
    slurm = seen.slurm
    if seen.state == RUNNING:
        text = _doing(seen.status)
        unusual = slurm is not None and slurm.kind == reasons.ALIVE and slurm.state != "RUNNING"
        return f"{text}; its job {slurm.words}" if slurm and unusual else text
    if seen.state == QUEUED:
        if slurm and slurm.kind == reasons.ALIVE:
            return f"its job {slurm.words} on {slurm.nodes or 'its nodes'}; the run has not reported yet"
        if slurm:
            start = reasons.when(slurm.start, time.time())
            return slurm.words + (f"; {start}" if start and slurm.kind == reasons.WAITING else "")
        return seen.note or seen.status.phase or _session(seen) or "waits for its turn"
    text = seen.status.cause or seen.verdict
    explained = seen.status.why in SIGNALLED and slurm is not None and slurm.words and slurm.state != "RUNNING"
    return f"{text}: {slurm.words}" if slurm and explained else text


def _session(seen: RunView) -> str:
    """Say until when a run of a later session on this machine waits; empty once it is due."""
    if seen.job is None or not seen.job.delay:
        return ""
    try:
        start = datetime.fromisoformat(seen.status.queued) + timedelta(seconds=seen.job.delay)
        due = start.timestamp() <= time.time()
    except (ValueError, OverflowError):  # its records were edited
        return ""
    return "" if due else f"waits for its session; {reasons.when(start.astimezone().isoformat(), time.time())}"


def _doing(status: Status) -> str:
    """Return a run's phase, its progress, and how long the phase has lasted."""
    progress, text = status.progress, status.phase
    if progress.done is not None and progress.needed is not None:
        least = "" if progress.label else "at least "
        text += f": {progress.done} of {least}{progress.needed} steps"
        text += f", {progress.label}" if progress.label else ""
        text += f", {progress.throughput:.4g} {progress.unit}" if progress.throughput is not None else ""
    elif progress.step is not None:
        text += f": step {progress.step + 1}"
    text += f", loss {progress.loss:.4g}" if progress.loss is not None else ""
    part = f"{status.part}: " if status.part else ""
    gone = elapsed(status)
    return f"{part}{text}" + (f" ({duration(gone)})" if gone >= 1 else "")


def told(seen: RunView) -> str:
    """Say briefly what a run is doing and, of a phase whose pace is known, how long it still takes."""
    remaining = left(seen.status) if seen.state == RUNNING else None
    return describe(seen) + (f", {duration(remaining)} left" if remaining else "")


def elapsed(status: Status) -> float:
    """Return the seconds since the phase began, if known, else since the last report."""
    return max(0.0, time.time() - status.phase_started) if status.phase_started else status.age


def left(status: Status) -> float | None:
    """Return the seconds left in the phase at the pace so far; None if unknown."""
    progress = status.progress
    if not progress.done or not progress.needed or not status.phase_started:
        return None
    return max(0.0, elapsed(status) * (progress.needed - progress.done) / progress.done)


def duration(seconds: float) -> str:
    """Format seconds as 45 s, 3:05 min or 2:10 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def table(look: Snapshot, everything: bool = False) -> terminal.Table:
    """Return one line per run, of many the unfinished and the last; then the jobs started by hand, and notes."""
    shown = look.runs
    if not everything:
        recent = {seen.id for seen in look.runs[-RECENT:]}
        shown = [seen for seen in look.runs if not seen.ended or seen.id in recent]
    return _table(look, shown, told)


def live_table(look: Snapshot, most: int) -> terminal.Table:
    """Return the same with progress bars and the snapshot's age: at most ``most`` runs, running ones first."""
    places = {seen.id: place for place, seen in enumerate(look.runs)}
    # After the running ones the next to begin, then the latest to end.
    wanted = sorted(
        look.runs,
        key=lambda seen: (seen.ended, seen.state != RUNNING, -places[seen.id] if seen.ended else places[seen.id]),
    )
    chosen = {seen.id for seen in wanted[: min(most, max(RECENT, sum(not seen.ended for seen in wanted)))]}
    shown = _table(look, [seen for seen in look.runs if seen.id in chosen], lambda seen: bar(seen) + describe(seen))
    return replace(shown, notes=[*shown.notes, age(look)])


def _table(look: Snapshot, shown: Sequence[RunView], detail: Callable[[RunView], str]) -> terminal.Table:
    notes = [f"damaged: {seen.id}: {seen.damaged.removeprefix('damaged: ')}" for seen in look.runs if seen.damaged]
    notes += [f"not known: {note}" for note in look.notes]
    if not look.runs and not look.by_hand:
        text = "no runs yet; 'python main.py --benchmark resnet50 --use_case 1' starts two"
        return terminal.Table([], [], [text, *notes])
    shared = any(seen.user not in ("", user()) for seen in shown)
    lines = [[s.id, word(s), s.slurm_job_id or "-", *([s.user or "-"] if shared else []), detail(s)] for s in shown]
    for job in look.by_hand:
        meaning = f"{reasons.judge(job).words}; its run begins when the job starts"
        lines.append([f"{job.name} (by hand)", QUEUED, job.id, *([job.user] if shared else []), meaning])
    if more := len(look.runs) + len(look.left_out) - len(shown):
        notes.insert(0, f"({more} more: 'python main.py status --all' shows all)")
    return terminal.Table(["run", "state", "job", *(["user"] if shared else []), ""], lines, notes)


def word(seen: RunView) -> str:
    """Return the state of a run; a job that will never start by itself stands out."""
    blocked = seen.state == QUEUED and seen.slurm is not None and seen.slurm.kind == reasons.BLOCKED
    return "BLOCKED" if blocked else seen.state


def age(look: Snapshot) -> str:
    """Return the time and, if runs depend on it, the age of Slurm's answer."""
    now = time.strftime("%H:%M:%S")
    if look.answer is None or not (look.by_hand or any(seen.in_slurm for seen in look.runs)):
        return now
    return f"{now}; Slurm was asked {time.time() - look.asked:.0f} s ago"


def bar(seen: RunView) -> str:
    """Return a bar of how much of the measurement is done, and the time left; empty if unknown."""
    progress, remaining = seen.status.progress, left(seen.status)
    if seen.state != RUNNING or not progress.done or not progress.needed:
        return ""
    full = min(BAR_WIDTH, round(BAR_WIDTH * progress.done / progress.needed))
    ahead = f" {duration(remaining)} left" if remaining else ""
    return f"{'━' * full}{'╌' * (BAR_WIDTH - full)}{ahead}  "


Show = Callable[[Snapshot], None]


@contextlib.contextmanager
def live(phases: bool = True) -> Iterator[Show]:
    """Yield a function that shows a snapshot of the runs: redrawn in place on a terminal, else a line per change.

    Without ``phases`` only the beginning of a run counts as a change, and nothing of it stays on the terminal. What is
    printed meanwhile appears above.
    """
    if not terminal.can_redraw():
        yield _Changes(phases)
        return
    from rich.live import Live

    console = terminal.console()
    with Live(console=console, auto_refresh=False, transient=not phases) as drawn:

        def show(look: Snapshot) -> None:
            most = console.height
            while True:
                shown = live_table(look, most).rich(console.width)
                if most <= 1 or len(console.render_lines(shown)) < console.height:
                    break
                most -= 1
            drawn.update(shown, refresh=True)

        yield show


class _Changes:
    """Prints what has changed since the last snapshot."""

    def __init__(self, phases: bool) -> None:
        self._phases = phases
        self._before: dict[str, tuple[object, float]] = {}

    def __call__(self, look: Snapshot) -> None:
        for seen in look.runs:
            status = seen.status
            news: tuple[object, ...] = (seen.state,)
            if self._phases:
                news += (status.part, status.phase, seen.slurm.reason if seen.slurm else "")
            before, when = self._before.get(seen.id, (None, 0.0))
            progressed = self._phases and status.progress.done and time.monotonic() - when > PROGRESS_SECONDS
            if news == before and not (seen.state == RUNNING and progressed):
                continue
            self._before[seen.id] = (news, time.monotonic())
            if self._phases:
                terminal.say(f"{seen.id}  {seen.state:9}  {told(seen)}".rstrip())
            elif seen.state == RUNNING:
                terminal.say(f"computing: {seen.id}")
