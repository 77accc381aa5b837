"""Measure a published set again: what that takes, and whether each point agrees with what was published."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from duel import terminal
from duel.catalogue import MANY
from duel.errors import UserError
from duel.job import Job
from duel.launch import manage, submit
from duel.launch.schema import Cluster
from duel.record import Row
from duel.report.command import again, job_of
from duel.report.figure_data import anchor, label, work
from duel.report.pairs import Outcome, outcomes
from duel.report.points import Line
from duel.report.records import Records
from duel.results import Results, Run
from duel.table import merge
from duel.terminal import Table

AGREES, DIFFERS, OPEN = "agrees", "differs", "no statement"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """A published point, and the job that measures it again in one session."""

    outcome: Outcome
    line: Line
    job: Job

    @property
    def name(self) -> str:
        return f"{work(self.line)}, {label(self.line)}, {self.line.mode}"

    @property
    def seconds(self) -> float:
        """Estimated duration of the job, from that of its published pairs."""
        each = [_seconds(row.started, row.ended) for pair in self.outcome.pairs for row in pair]
        return sum(each) / len(self.outcome.pairs) * (self.job.pairs or 1)


def points(records: Records, names: Sequence[str], target: str | None) -> list[Point]:
    """Return the points of ``records`` with the ids ``names``, or all with a ratio; on ``target`` if that is given.

    Raises UserError for an unknown id.
    """
    found = []
    for outcome, line in records.found:
        alone = outcome.row.use_case in MANY and (line.devices or 1) == 1  # measured along with those on many devices
        if line.ratio is not None and not alone:
            rows = [row for pair in outcome.pairs for row in pair]
            pairs = max(map(len, outcome.sessions))
            job = dataclasses.replace(job_of(rows), pairs=pairs)
            found.append(Point(outcome, line, dataclasses.replace(job, target=target or job.target)))
    known = {anchor(point.line): point for point in found}
    for name in names:
        if name not in known:
            how = f"'main.py reproduce {records.name} --dry_run' lists them"
            raise UserError(f"--point {name!r}: not in {records.name}; {how}")
    return [known[name] for name in names] if names else found


def show(records: Records, chosen: Sequence[Point]) -> None:
    """Show what would be measured, by which commands, and how long that takes."""
    lines = []
    for point in chosen:
        command = again(point.outcome, None)
        lines.append([anchor(point.line), point.name, f"{point.seconds / 60:.1f}", command])
    rows = [row for point in chosen for pair in point.outcome.pairs for row in pair]
    versions = [f"{row.framework} {row.framework_version}" for row in _one_of_each(rows)]
    versions += [f"Python {version}" for version in _values(rows, "python_version")]
    commits = ", ".join(_values(rows, "git_sha"))
    notes = [
        f"{sum(point.seconds for point in chosen) / 3600:.1f} hours on {', '.join(_values(rows, 'device_name'))}",
        f"published with {', '.join(versions)}",
        f"at commit {commits}: 'git checkout' it, then 'make envs', for the same code and versions",
    ]
    terminal.show(Table(["point", "what", "minutes", "command"], lines, notes, right=[2], title=[f"{records.name}:"]))


def reproduce(chosen: Sequence[Point], cluster: Cluster, results: Results, say: Say) -> bool:
    """Measure ``chosen`` and report whether each point agrees. Return True unless one differs."""
    by_target: dict[str, list[Point]] = {}
    for point in chosen:
        by_target.setdefault(point.job.target, []).append(point)
    runs: list[Run] = []
    for mine in by_target.values():
        runs += submit.launch([point.job for point in mine], cluster, results, say)
    manage.wait(runs, results)
    rows = merge(results)
    verdicts = []
    lines = []
    for point, run in zip([point for mine in by_target.values() for point in mine], runs, strict=True):
        mine_now = outcomes([row for row in rows if row.run_id == run.id])
        now = next((one for one in mine_now if one.row.device_count == point.outcome.row.device_count), None)
        ratio, verdict = judge(point, now)
        verdicts.append(verdict.partition(":")[0])
        published = f"{point.line.ratio:.3f}" if point.line.ratio else ""
        if point.line.another_low is not None:
            published += f", another session {point.line.another_low:.3f} to {point.line.another_high:.3f}"
        lines.append([point.name, published, ratio, verdict])
    counts = {word: verdicts.count(word) for word in (AGREES, DIFFERS, OPEN)}
    title = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    terminal.show(Table(["point", "published", "here", "verdict"], lines, [], title=[title]))
    return DIFFERS not in verdicts


def judge(point: Point, now: Outcome | None) -> tuple[str, str]:
    """Return the ratio of the new session, and whether it lies in the published prediction interval."""
    if now is None or not now.shown:
        return "", f"{OPEN}: {now.why if now else 'nothing was measured'}"
    ratio = now.session_ratios[0]
    other = {str(row.device_name) for pair in now.pairs for row in pair} - {point.line.device_name}
    where = f" (on {', '.join(sorted(other))})" if other else ""
    if point.line.another_low is None or point.line.another_high is None:
        return f"{ratio:.3f}", f"{OPEN}: it was published from too few sessions{where}"
    agrees = point.line.another_low <= ratio <= point.line.another_high
    return f"{ratio:.3f}", (AGREES if agrees else DIFFERS) + where


def _seconds(started: str | None, ended: str | None) -> float:
    if not started or not ended:
        return 0.0
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()


def _values(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(row, column)) for row in rows))


def _one_of_each(rows: Sequence[Row]) -> list[Row]:
    return list({(row.framework, row.framework_version): row for row in rows}.values())
