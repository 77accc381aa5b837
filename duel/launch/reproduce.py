"""Measure a published set again: what that takes, and whether each point agrees with what was published."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duel import terminal
from duel.catalogue import BENCHMARKS, MANY, PRESETS
from duel.errors import UserError
from duel.job import Job
from duel.launch import manage, submit
from duel.launch.schema import Cluster
from duel.record import Row
from duel.report import ratios
from duel.report.command import job_of, spelled
from duel.report.figure_data import anchor, label, work
from duel.report.pairs import Outcome, outcomes
from duel.report.points import NOT_ALONE, Line
from duel.report.records import Records, seconds
from duel.results import Results, Run
from duel.table import merge
from duel.terminal import Table

AGREES, DIFFERS, OPEN = "agrees", "differs", "no statement"
CHANCE = 1 - ratios.CONFIDENCE  # of a session that differs although nothing has changed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """A published point, and the job that measures it again in one session. Points kept apart have the same job."""

    outcome: Outcome
    line: Line
    job: Job

    @property
    def name(self) -> str:
        return f"{work(self.line)}, {label(self.line)}, {self.line.mode}"

    @property
    def seconds(self) -> float:
        """Estimated duration of the job, from that of the published pairs."""
        pairs = self.outcome.pairs
        return sum(seconds(row) for pair in pairs for row in pair) / len(pairs) * PRESETS[self.job.preset].pairs


@dataclass(frozen=True)
class Judged:
    """A new session of a point: its ratio, and the ``p`` of one that far from the published ratio, or ``why`` there is
    no such p. ``elsewhere`` says how it was measured otherwise."""

    ratio: str = ""
    p: float | None = None
    why: str = ""
    elsewhere: str = ""


def points(records: Records, names: Sequence[str], target: str | None) -> list[Point]:
    """Return the points of ``records`` with the ids ``names``, or all with a ratio; on ``target`` if that is given.

    Raises UserError for an unknown id, for what this version cannot measure, or if no point has a ratio.
    """
    found = []
    for outcome, line in records.found:
        alone = outcome.row.use_case in MANY and (line.devices or 1) == 1  # measured along with those on many devices
        if line.ratio is not None and not alone:
            job = job_of([row for pair in outcome.pairs for row in pair])
            found.append(Point(outcome, line, dataclasses.replace(job, target=target or job.target)))
    if not found:
        raise UserError(f"no point of {records.name} has a ratio yet; 'main.py report --name {records.name}' says why")
    known = {anchor(point.line): point for point in found}
    for name in names:
        if name not in known:
            how = f"'main.py reproduce {records.name} --dry_run' lists them"
            raise UserError(f"--point {name!r}: not in {records.name}; {how}")
    chosen = [known[name] for name in names] if names else found
    for name in (point.job.benchmark for point in chosen):
        if name not in BENCHMARKS:
            raise UserError(f"{records.name}: this version has no benchmark {name!r}; valid: {', '.join(BENCHMARKS)}")
    return chosen


def show(records: Records, chosen: Sequence[Point]) -> None:
    """Show what would be measured, by which commands, and how long that takes."""
    lines = []
    for point in chosen:
        measured = [row for pair in point.outcome.pairs for row in pair]
        commits = ", ".join(sha[:12] for sha in _values(measured, "git_sha"))
        minutes = f"{point.seconds / 60:.1f}"
        lines.append([anchor(point.line), point.name, minutes, commits, spelled(point.job, None)])
    rows = [row for point in chosen for pair in point.outcome.pairs for row in pair]
    versions = [f"{row.framework} {row.framework_version}" for row in _one_of_each(rows)]
    versions += [f"Python {version}" for version in _values(rows, "python_version")]
    hours = sum({point.job: point.seconds for point in chosen}.values()) / 3600
    notes = [
        f"{hours:.1f} hours on {', '.join(_values(rows, 'device_name'))}",
        f"published with {', '.join(versions)}",
        "docs/reproduce.md says how to get the code of a commit, and these versions",
    ]
    terminal.show(
        Table(["point", "what", "minutes", "commit", "command"], lines, notes, right=[2], title=[f"{records.name}:"])
    )


def reproduce(chosen: Sequence[Point], cluster: Cluster, results: Results, say: Say) -> int:
    """Measure ``chosen`` and report whether each point agrees.

    Return 1 if one differs among all of them, 2 if there is no statement on any, else 0.
    """
    by_target: dict[str, list[Job]] = {}
    for job in dict.fromkeys(point.job for point in chosen):
        by_target.setdefault(job.target, []).append(job)
    runs: dict[Job, Run] = {}
    for jobs in by_target.values():
        runs |= zip(jobs, submit.launch(jobs, cluster, results, say), strict=True)
    manage.wait(list(runs.values()), results)
    rows = merge(results)
    found = []
    for point in chosen:
        now = outcomes([row for row in rows if row.run_id == runs[point.job].id])
        here = (one for one in now if one.row.device_count == point.outcome.row.device_count)
        found.append(judge(point, next(here, None)))
    said = verdicts([one.p for one in found])
    terminal.show(_table(chosen, found, said))
    return 1 if DIFFERS in said else 2 if {*said} == {OPEN} else 0


def judge(point: Point, now: Outcome | None) -> Judged:
    """Return how the ratio of the new session compares with the published prediction interval."""
    if now is None or not now.shown:
        return Judged(why=now.why if now else "nothing was measured")
    ratio, line = now.session_ratios[0], point.line
    found = Judged(f"{ratio:.3f}", elsewhere=_elsewhere(point.outcome, now))
    if line.ratio is None or line.another_low is None or line.another_high is None:
        return dataclasses.replace(found, why="it was published from too few sessions")
    another = (line.another_low, line.another_high)
    return dataclasses.replace(found, p=ratios.chance_of_another(ratio, line.ratio, another, line.sessions))


def verdicts(chances: Sequence[float | None]) -> list[str]:
    """Return the verdict on each point by its p, None where there is none.

    A point differs if its new session is outside the published prediction interval. As some of many points are by
    chance alone, one that Holm's correction for all of them does not confirm has a mark, and fails nothing.
    """
    adjusted = iter(ratios.holm([p for p in chances if p is not None]))
    found = []
    for p in chances:
        if p is None:
            found.append(OPEN)
            continue
        among_all = next(adjusted)
        found.append(AGREES if p >= CHANCE else DIFFERS if among_all < CHANCE else DIFFERS + NOT_ALONE)
    return found


def _table(chosen: Sequence[Point], found: Sequence[Judged], said: Sequence[str]) -> Table:
    lines = []
    for point, one, verdict in zip(chosen, found, said, strict=True):
        published = f"{point.line.ratio:.3f}" if point.line.ratio else ""
        if point.line.another_low is not None:
            published += f", another session {point.line.another_low:.3f} to {point.line.another_high:.3f}"
        lines.append([point.name, published, one.ratio, _with_reason(verdict, one)])
    counts = {word: said.count(word) for word in (AGREES, DIFFERS, DIFFERS + NOT_ALONE, OPEN)}
    title = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    judged = len(said) - counts[OPEN]
    notes = [f"chance alone: about {CHANCE * judged:.1f} of {judged} outside their intervals"] if judged else []
    if counts[DIFFERS + NOT_ALONE]:
        mark = f"{DIFFERS}{NOT_ALONE}: for this point alone, not among all {judged}, by Holm's correction"
        notes.append(f"{mark}; the exit code counts only {DIFFERS!r} without it")
    return Table(["point", "published", "here", "verdict"], lines, notes, title=[title])


def _with_reason(verdict: str, one: Judged) -> str:
    text = f"{verdict}: {one.why}" if one.why else verdict
    return f"{text} ({one.elsewhere})" if one.elsewhere else text


_OTHERS = {"code_sha256": "other code", "switches": "other switches", "cpus": "another number of CPUs"}


def _elsewhere(before: Outcome, now: Outcome) -> str:
    """Return on which other device, and with which other versions, ``now`` was measured; empty if with the same."""
    old, new = ([row for pair in outcome.pairs for row in pair] for outcome in (before, now))
    devices = set(_values(new, "device_name")) - set(_values(old, "device_name"))
    texts = [f"on {', '.join(sorted(devices))}"] if devices else []
    known = {(row.framework, row.framework_version) for row in old}
    others = [row for row in _one_of_each(new) if (row.framework, row.framework_version) not in known]
    versions = [f"{row.framework} {row.framework_version}" for row in others]
    pythons = set(_values(new, "python_version")) - set(_values(old, "python_version"))
    versions += [f"Python {version}" for version in sorted(pythons)]
    for column, what in _OTHERS.items():
        versions += [what] if set(_values(new, column)) - set(_values(old, column)) else []
    return ", ".join([*texts, *([f"with {', '.join(versions)}"] if versions else [])])


def _values(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(row, column)) for row in rows))


def _one_of_each(rows: Sequence[Row]) -> list[Row]:
    return list({(row.framework, row.framework_version): row for row in rows}.values())
