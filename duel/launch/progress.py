"""What of a study is measured, and what is missing and why."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from duel import certificate
from duel.catalogue import BENCHMARKS, MANY, PAIRED, PRESETS, WEAK
from duel.job import SEED, Job
from duel.launch import state
from duel.launch.study import Study
from duel.launch.views import RunView
from duel.record import Row
from duel.report.pairs import Outcome, outcomes
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.states import FINISHED
from duel.table import merge, read_rows

DONE, WAITING, MISSING = "done", "waiting or running", "missing"
# Why a session is missing although no run of it waits or failed.
NEVER = "never started"
SAME_SESSION = "within an hour of another session, so both are one"
OTHER_CODE = "measured with other code, versions or switches, which do not join one ratio"
NOT_COMPARABLE = "its rows are not comparable: 'main.py compare' says why"


@dataclass(frozen=True)
class Progress:
    """Where a point stands: ``state`` is ``DONE``, ``WAITING`` or ``MISSING``, with the reason if it is not done.

    ``run_id`` is the last run that is to measure it, empty if there is none; ``counted`` are the runs whose rows count.
    """

    point: Job
    state: str
    why: str = ""
    run_id: str = ""
    counted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Measured:
    """What the records have of a point: so many sessions, in the ``counted`` runs, the last of which ended then."""

    sessions: int = 0
    counted: frozenset[str] = frozenset()
    ended: str = ""
    barred: frozenset[str] = frozenset()  # runs of the same code whose pairs have no ratio


def of(study: Study, results: Results) -> list[Progress]:
    """Return where each point stands: done if there are rows of it, or so many sessions, by whatever command.

    Rows of other code do not count, as they would not join the same ratio.
    """
    rows = merge(results)
    kept = results.folder / "published" / study.name / "results.csv"  # what an earlier checkout measured of it
    known = {(row.run_id, row.row) for row in rows}
    rows += [row for row in read_rows(kept, strict=False) if (row.run_id, row.row) not in known]
    rows = [row for row in rows if row.benchmark in BENCHMARKS and row.code_sha256 == _code(row)]
    groups = outcomes(rows)
    merged = over_sessions(groups)
    runs: dict[Job, RunView] = {}  # the last one of each session of a point
    for seen in state.look(results).runs:  # which settles what has ended without a report
        for point in seen.job.points if seen.job is not None and seen.job.trials is None else ():
            runs[point.identity] = seen
    points: dict[Job, list[Job]] = {}
    for point in study.points:
        points.setdefault(dataclasses.replace(point.identity, session=1), []).append(point)
    found: dict[Job, Progress] = {}
    for first, sessions in points.items():
        measured = _measured(first, rows, groups, merged)
        found |= {one.point.identity: one for one in _of_sessions(sessions, measured, runs)}
    return [found[point.identity] for point in study.points]


def _measured(point: Job, rows: Sequence[Row], groups: Sequence[Outcome], merged: Sequence[Outcome]) -> _Measured:
    if point.framework != PAIRED:
        mine = [r for r in rows if r.status == FINISHED and r.framework == point.framework and is_of(point, r)]
        repeats = Counter(run_id for run_id, _ in {(str(row.run_id), row.repeat) for row in mine})
        whole = frozenset(name for name, count in repeats.items() if count >= PRESETS[point.preset].repeats)
        return _Measured(min(1, len(whole)), whole)
    barred = _runs_of(row for one in groups if not one.shown and is_of(point, one.row) for row in _rows(one))
    shown = [one for one in merged if one.shown and is_of(point, one.row)]
    if not shown:
        return _Measured(barred=barred)
    newest = _rows(shown[-1])  # the others are of other versions or switches
    ended = max(row.ended or "" for row in newest)
    return _Measured(len(shown[-1].sessions), _runs_of(newest), ended, barred)


def _rows(found: Outcome) -> list[Row]:
    return [row for pair in found.pairs for row in pair]


def _runs_of(rows: Iterable[Row]) -> frozenset[str]:
    return frozenset(str(row.run_id) for row in rows)


def _of_sessions(points: Sequence[Job], measured: _Measured, runs: Mapping[Job, RunView]) -> list[Progress]:
    """Return where the sessions of one point stand: as many are missing as the records lack, whichever were measured.

    These are first those whose own run waits, then those whose own run failed; each begins as long after the one before
    as planned.
    """
    ranked = sorted(points, key=lambda point: (_rank(runs.get(point.identity), measured), -point.session))
    missing = ranked[: max(0, len(points) - measured.sessions)]
    last = max(points, key=lambda point: point.session)
    spacing = last.delay / max(1, last.session - 1)
    since = datetime.now(UTC) - datetime.fromisoformat(measured.ended) if measured.ended else timedelta.max
    delay, found = max(0.0, spacing - since.total_seconds()), []
    for point in sorted(points, key=lambda point: point.session):
        seen = runs.get(point.identity)
        state, why = DONE, ""
        if point in missing:
            state, why = (WAITING, seen.state) if seen and not seen.ended else (MISSING, _why(seen, measured))
            point, delay = dataclasses.replace(point, delay=round(delay)), delay + spacing
        found.append(Progress(point, state, why, seen.id if seen else "", measured.counted))
    return found


def _rank(last: RunView | None, measured: _Measured) -> int:
    """Return how soon a session whose last run is ``last`` counts as one of those that are missing."""
    if last is None:
        return 2
    if last.id in measured.counted:
        return 3
    return 2 if last.state == FINISHED else 1 if last.ended else 0


def _why(last: RunView | None, measured: _Measured) -> str:
    """Return why a session is missing of which no run waits; ``last`` is its last run."""
    if last is None:
        return NEVER
    if last.id in measured.counted:
        return SAME_SESSION
    if last.state != FINISHED:
        return last.status.cause or last.state
    return NOT_COMPARABLE if last.id in measured.barred else OTHER_CODE


def is_of(point: Job, row: Row) -> bool:
    """Return whether ``row`` measures ``point``, in whichever session."""
    wanted: dict[str, object] = {"size": point.size or PRESETS[point.preset].size}
    wanted |= {"weights": point.weights or f"seed {SEED}"}
    wanted |= {
        name: getattr(point, name) for name in ("benchmark", "use_case", "preset", "precision", "mode", "target")
    }
    if point.batch_sizes:  # rows have the batch over all devices
        whole = point.use_case not in MANY or point.scaling != WEAK
        wanted["batch_size"] = point.batch_sizes[0] * (1 if whole else point.ranks)
    wanted |= {"product": point.products[0]} if point.products else {}
    wanted |= {"microbatch": point.microbatch} if point.microbatch else {}
    if point.use_case in MANY:
        wanted |= {"nodes": point.nodes, "device_count": point.ranks, "scaling": point.scaling}
    return row.recipe is None and all(getattr(row, name) == value for name, value in wanted.items())


def _code(row: Row) -> str:
    return certificate.code_sha256(str(row.benchmark), str(row.size))
