"""The jobs of a study: what is missing of it, cut to the targets' time limits, with what that takes."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from duel import files, terminal
from duel.catalogue import USE_CASES
from duel.errors import UserError
from duel.job import Job
from duel.launch import directives, estimate, progress, resubmit, state, submit
from duel.launch.attempts import Decision, allowed, most_minutes
from duel.launch.estimate import UNCERTAIN, Estimate, Known
from duel.launch.progress import DONE, MISSING, NEVER, NOT_COMPARABLE, OTHER_CODE, SAME_SESSION, WAITING, Progress
from duel.launch.schema import Cluster, Target
from duel.launch.study import Study, grouped
from duel.results import Results, Run
from duel.table import merge, read_rows
from duel.terminal import Table

LEAST_MINUTES = 10.0  # shorter limits, and differences between them, gain nothing in a queue
NEW = (NEVER, SAME_SESSION, OTHER_CODE)  # reasons for a new run
AGAIN = (*NEW, NOT_COMPARABLE)  # if asked for: whatever keeps the rows from being comparable may still be so

Say = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A job, and what it takes. ``again``: it is the next attempt at a run; one that continues takes less."""

    job: Job
    estimate: Estimate
    devices: int  # that the allocation has
    again: Decision | None = None
    most_minutes: float | None = None  # the time limit

    @property
    def device_hours(self) -> float:
        return self.estimate.seconds * self.devices / 3600

    @property
    def most_device_hours(self) -> float:
        """What it may take: up to its limit, if nothing like it was measured on such a device."""
        whole = self.most_minutes if self.estimate.source in UNCERTAIN else None
        return self.device_hours if whole is None else max(self.device_hours, whole * self.devices / 60)

    @property
    def is_too_long(self) -> bool:
        """Whether its limit ends before it does."""
        return self.most_minutes is not None and self.most_minutes * 60 < self.estimate.seconds


def planned(
    points: Sequence[Progress], cluster: Cluster, known: Known, reasons: Collection[str] = NEW
) -> list[Planned]:
    """Return the jobs of all points that are missing for one of ``reasons``, by default those that need a new run.

    Each is within its target's limit as far as points are.
    """
    found = []
    missing = [one.point for one in points if one.state == MISSING and one.why in reasons]
    missing.sort(key=lambda point: point.session)  # the first sessions of all points, then the second ones
    for whole in grouped(missing):
        target = cluster.targets[whole.target]
        most = most_minutes(whole, target)
        room = None if most is None else (most * 60 - estimate.MORE_SECONDS) / estimate.MARGIN
        for job in estimate.parts(whole, room, known):
            takes = known.job(job)
            found.append(Planned(_limited(job, target, takes, most), takes, _devices(job, target), most_minutes=most))
    return found


def _devices(job: Job, target: Target) -> int:
    return int(target.allocation(job)["devices"])


def _limited(job: Job, target: Target, takes: Estimate, most: float | None) -> Job:
    """Return ``job`` with the time limit to ask for: what it takes and some more, never above the target's own.

    What is not known well enough keeps the target's.
    """
    if target.scheduler == "local" or "--time" in target.without or takes.source in UNCERTAIN:
        return job
    least = directives.minutes(directives.value(target.for_job(job).directives, "--time-min") or "") or 0.0
    steps = -(-takes.limit_minutes // LEAST_MINUTES)  # whole: only jobs that ask for as much are of one array
    minutes = max(LEAST_MINUTES * steps, least)
    return replace(job, changes=(f"--time={directives.limit(min(minutes, most or minutes))}",))


def told(jobs: Sequence[Job], cluster: Cluster, results: Results) -> list[str]:
    """Return how long ``jobs`` take that are no study's, and how many of them cannot end within their limits.

    How long a training takes is not known before it trains.
    """
    times, found = known(results), []
    for job in jobs:
        if job.dataset:
            continue
        target, takes = cluster.targets[job.target], times.job(job)
        takes = replace(takes, seconds=takes.seconds * (job.trials or 1))  # no mode is measured less than once
        found.append(Planned(job, takes, _devices(job, target), most_minutes=most_minutes(job, target)))
    if not found:
        return []
    unsure = any(one.estimate.source in UNCERTAIN or one.job.trials for one in found)
    least = "at least" if unsure else "about"
    texts = [f"{least} {sum(one.device_hours for one in found):.2g} device-hours"]
    if long := sum(one.is_too_long for one in found):
        how = "'resubmit' goes on with the rows left; 'main.py study' cuts jobs to the limit"
        texts.append(f"{long} of {len(jobs)} scripts take longer than their target's limit: {how}")
    return texts


def within(found: Sequence[Planned], budget: float | None) -> list[Planned]:
    """Return the first jobs that ``budget`` device-hours pay for. Raises UserError if that is none."""
    if budget is None:
        return list(found)
    kept, spent = [], 0.0
    for one in found:
        if spent + one.most_device_hours <= budget:
            kept.append(one)
            spent += one.most_device_hours
    if found and not kept:
        least = min(one.most_device_hours for one in found)
        raise UserError(f"--budget {budget:g}h: the smallest job may take {least:.2g} device-hours")
    return kept


def table(found: Sequence[Planned], title: str) -> Table:
    """Return what would be started, a line for each benchmark, use case, mode and target."""
    groups: dict[tuple[str, ...], list[Planned]] = {}
    for one in found:
        job = one.job
        key: tuple[str, ...] = (
            job.benchmark,
            f"{job.use_case} {USE_CASES[job.use_case].name}",
            job.mode,
            job.precision,
            job.target,
        )
        groups.setdefault(key, []).append(one)
    lines = []
    for key, some in groups.items():
        rows = sum(len(one.job.rows()) for one in some)
        hours = sum(one.device_hours for one in some)
        sources = ", ".join(dict.fromkeys(one.estimate.source for one in some))
        lines.append([*key, str(len(some)), str(rows), f"{hours:.2f}", sources])
    notes = [f"{len(found)} scripts, {sum(one.device_hours for one in found):.1f} device-hours"]
    for target in dict.fromkeys(one.job.target for one in found):
        hours = sum(one.estimate.seconds for one in found if one.job.target == target) / 3600
        notes.append(f"{target}: {hours:.1f} h if its jobs run one after the other")
    if unsure := sum(one.estimate.source in UNCERTAIN for one in found):
        notes.append(f"of {unsure} scripts that is the least: nothing like them was measured on such a device")
    if long := sum(one.is_too_long for one in found):
        notes.append(f"{long} scripts take longer than their target's limit: 'resume' goes on with the rows left")
    head = ["benchmark", "use case", "mode", "precision", "target", "scripts", "rows", "device-hours", "estimate"]
    return Table(head, lines, notes, right=[5, 6, 7], title=[title])


def status(planned: Study, found: Sequence[Progress], results: Results) -> Table:
    """Return what is done of a study, of each point that is not, why, and what its ended runs asked for and used."""
    counts = {kind: sum(one.state == kind for one in found) for kind in (DONE, WAITING, MISSING)}
    title = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    left = [one for one in found if one.state != DONE]
    ids = dict.fromkeys(one.run_id for one in found if one.run_id)
    lines = [[_what(one.point), one.state, one.why or one.run_id] for one in left]
    head = ["point", "state", "why"] if lines else []
    return Table(
        head, lines, _used([results.run(name) for name in ids]), title=[f"{planned.name}: {len(found)} points, {title}"]
    )


def _used(runs: Sequence[Run]) -> list[str]:
    """Return for each target how much of the time that ended runs asked for they used."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        status = run.stored_status()
        asked = directives.minutes(directives.value(resubmit.directives_of(run), "--time") or "")
        if asked and status.started and status.ended:
            begin, end = map(datetime.fromisoformat, (status.started, status.ended))
            spans.setdefault(status.target, []).append((asked / 60, (end - begin).total_seconds() / 3600))
    return [
        f"{target}: {len(some)} runs asked for {sum(a for a, _ in some):.1f} h and used {sum(u for _, u in some):.1f} h"
        for target, some in spans.items()
    ]


def _what(point: Job) -> str:
    parts = [point.framework, point.benchmark, USE_CASES[point.use_case].name]
    parts += [point.size] if point.size else []
    parts += [f"batch {size}" for size in point.batch_sizes] + list(point.products)
    parts += [point.precision, point.mode, point.target]
    return ", ".join([*parts, f"session {point.session}"] if point.session > 1 else parts)


def known(results: Results) -> Known:
    """Return what all records say of how long rows take: results.csv and every published set."""
    rows = merge(results)
    for file in sorted((results.folder / "published").glob("*/results.csv")):
        # A set's targets have the names of another machine's: none of its rows is one of a target here.
        rows += [replace(row, target=f"{file.parent.name}: {row.target}") for row in read_rows(file, strict=False)]
    return Known(rows)


def carry_out(study: Study, action: str, budget: float | None, cluster: Cluster, results: Results, say: Say) -> None:
    """Show what is missing of ``study`` and, unless ``action`` is to plan it, start that.

    Of two that do so at once, the second finds what the first has started.
    """
    with contextlib.ExitStack() as stack:
        if action != "plan":
            results.folder.mkdir(exist_ok=True)
            stack.enter_context(files.locked(results.folder / ".study.lock", wait=True))
        points, times = progress.of(study, results), known(results)
        found = planned(points, cluster, times, AGAIN if action == "resume" else NEW)
        if action == "resume":
            found = [*unfinished(points, cluster, times, results, say), *found]
        found = within(found, budget)
        terminal.show(table(found, f"{study.name}: {study.about}"))
        if action != "plan":
            submit_all(found, cluster, results, say)
            say(f"'python main.py study {study.name} status' shows what is done")


def submit_all(found: Sequence[Planned], cluster: Cluster, results: Results, say: Say) -> None:
    """Start the jobs of ``found``, target by target."""
    new = [one.job for one in found if one.again is None]
    for target in dict.fromkeys(job.target for job in new):
        submit.launch([job for job in new if job.target == target], cluster, results, say)
    resubmit.start([one.again for one in found if one.again], cluster, results, say)


def unfinished(points: Sequence[Progress], cluster: Cluster, known: Known, results: Results, say: Say) -> list[Planned]:
    """Return the next attempts at what ended unfinished, with more time or memory where that was missing."""
    ids = {one.run_id for one in points if one.state == MISSING and one.run_id}
    look = state.look(results)
    ended = [seen for seen in look.runs if seen.id in ids]
    decided = resubmit.decide(ended, look.runs, set(), None)
    decisions = allowed(decided, cluster, own=True)
    for decision in decisions:
        say(f"{decision.seen.id}: {decision.words}")
    due: dict[str, int] = {}  # sessions of one point stay apart
    for one in points:
        if one.state == MISSING:
            due[one.run_id] = max(one.point.delay, due.get(one.run_id, 0))
    found = []
    for decision in decisions:
        if decision.job:
            job = replace(decision.job, delay=due.get(decision.seen.id, 0))
            target = cluster.targets[job.target]
            asked = directives.minutes(directives.value(job.changes, "--time") or "")
            most = most_minutes(job, target) if asked is None else asked
            found.append(Planned(job, known.job(job), _devices(job, target), replace(decision, job=job), most))
    return found
