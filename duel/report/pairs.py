"""The outcome of pairs of rows: the ratio with its interval, the noise floor and the verdict."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from duel.catalogue import CLAIM_PAIRS, CLAIM_SESSIONS, FIT, FRAMEWORKS, PRESETS, SESSION_SECONDS, USE_CASES
from duel.comparability import COMPARABLE, NOT_COMPARABLE, no_figure, partners
from duel.record import Row
from duel.report import ratios
from duel.report.itself import ALIKE, changes, noise_floor
from duel.report.ratios import Pair, Ratio
from duel.states import TERMINAL

# The same in all repeats of one side, before and after an interruption; which of such devices it was need not be.
UNCHANGED = ("cell", *ALIKE)
EQUAL = f"equal within {round(100 * (ratios.EQUAL - 1))} %"
UNDECIDED = "undecided"
INDICATIVE = "indicative"
FASTER = "is faster"

Session = list[tuple[Row, Row]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one planned point of a pair: how fast JAX is, as a multiple of PyTorch.

    Each of ``sessions`` has its pairs in the order in which they ran. ``found`` and ``floor`` are None if no ratio can
    be claimed; ``why`` then gives the reason, and ``barred`` whether it is that the pairs are not comparable.
    Comparable pairs that are too few for a claim have an ``indicative`` ratio. ``far`` names the processes that are
    far off, ``apart`` what else was measured at this point but is not in the ratio.
    """

    sessions: list[Session]
    found: Ratio | None = None
    floor: float | None = None
    why: str = ""
    indicative: float | None = None
    barred: bool = False
    far: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        """The pairs of all sessions."""
        return [pair for session in self.sessions for pair in session]

    @property
    def row(self) -> Row:
        """One of the rows, for what all have in common: one that knows its pair, unless all failed before that."""
        return next((pair[side] for side in (0, 1) for pair in self.pairs if pair[side].pair), self.sessions[0][0][0])

    @property
    def last_start(self) -> str:
        """When the last of its rows started, empty if that is not known."""
        return max((row.started for pair in self.pairs for row in pair if row.started), default="")

    @property
    def benchmark(self) -> str:
        """The benchmark with its size and precision."""
        return f"{self.row.benchmark} ({self.row.size}, {self.row.precision})"

    @property
    def use_case(self) -> str:
        """The use case with its product, if it has one."""
        return USE_CASES[self.row.use_case or 0].name + (f", {self.row.product}" if self.row.product else "")

    @functools.cached_property
    def faster(self) -> str:
        """``JAX`` or ``PyTorch``; empty if neither is shown to be, or the sides are equal for all practical purposes.

        A process that is far off leaves it undecided unless all pairs, or all sessions, agree. Sessions of one pair
        each have no noise floor: the variation between processes is part of that between sessions.
        """
        if self.found is None or ratios.is_equal(self.found):
            return ""
        unanimous = min(self.units) > 0 or max(self.units) < 0
        if not ratios.differs(self.found, self.floor or 1.0) or (self.far and not unanimous):
            return ""
        return "JAX" if self.found.ratio > 1 else "PyTorch"

    @property
    def units(self) -> list[float]:
        """The logarithms whose mean is the ratio: of pairs or, from ``CLAIM_SESSIONS`` on, of sessions."""
        if self.found is None or self.found.within:
            return logs(self.pairs)
        return list(map(math.log, self.session_ratios))

    @functools.cached_property
    def session_ratios(self) -> list[float]:
        """JAX / PyTorch in each session."""
        return [math.exp(ratios.mean(_in_order(session))) for session in self.sessions]

    @property
    def kind(self) -> str:
        """The verdict without its figures or reasons."""
        if self.found is None:
            return INDICATIVE if self.indicative is not None else NOT_COMPARABLE if self.barred else "no ratio"
        if self.faster:
            return f"{self.faster} {FASTER}"
        if ratios.is_equal(self.found):
            return EQUAL
        count = "one process" if len(self.far) == 1 else f"{len(self.far)} processes"
        return f"{UNDECIDED}: {count} far off" if self.far else UNDECIDED

    @property
    def reach(self) -> str:
        """What the interval covers; empty if there is none."""
        if self.found is None:
            return ""
        if not self.found.within:
            return f"over {self.found.sessions} sessions"
        return "within this session" if self.found.sessions == 1 else f"within these {self.found.sessions} sessions"

    @property
    def verdict(self) -> str:
        """The verdict in brief, always with its basis."""
        if self.found is not None:
            return f"{self.kind}: {self.figures}"
        if self.indicative is not None:
            return f"{self.kind}: JAX / PyTorch {self.indicative:.3g} ({self._processes}, no interval: not a verdict)"
        return f"no ratio: {self.why}"

    @property
    def shown(self) -> bool:
        """Whether there is a ratio, claimed or indicative."""
        return self.found is not None or self.indicative is not None

    @property
    def short(self) -> str:
        """The verdict in one line of a table."""
        if self.shown:
            return f"{self.kind}: JAX / PyTorch {self.ratio} {self.reach}".rstrip()
        return self.why if self.barred else f"{self.kind}: {self.why}"

    @property
    def ratio(self) -> str:
        """JAX / PyTorch with its interval, if it has one; empty if there is no ratio."""
        if self.found is not None:
            return f"{self.found.ratio:.3f} [{self.found.low:.3f}, {self.found.high:.3f}]"
        return "" if self.indicative is None else f"{self.indicative:.3g}"

    @property
    def basis(self) -> str:
        """The basis of the verdict, or why there is none."""
        if self.found is not None:
            return f"{self.figures.partition(', ')[2]}. {COMPARABLE}"
        if self.indicative is not None:
            return f"indicative: {self._processes}, no interval: not a verdict"
        return self.verdict

    @property
    def _processes(self) -> str:
        """The basis of an indicative ratio."""
        n = len(self.pairs)
        if in_turn(self.pairs):
            return "one pair, measured in turn" if n == 1 else f"{n} pairs, measured in turn"
        return "one process each, not in turn" if n == 1 else f"{n} processes each, not in turn"

    @property
    def figures(self) -> str:
        found = self.found
        assert found is not None
        text = f"JAX / PyTorch {found.ratio:.3f}, 95 % interval {self.reach} {found.low:.3f} to {found.high:.3f}"
        if found.another is not None:
            low, high = found.another
            text += f", another session may show {low:.3f} to {high:.3f}, sessions vary by {found.spread:.1%}"
        floor = "not known" if self.floor is None else f"{self.floor:.3f}"
        return f"{text}, {found.pairs} pairs, noise floor {floor}"

    @property
    def break_even_steps(self) -> float | None:
        """Steps after which the side that starts slower and runs faster has caught up, by medians; None if never."""
        starts = [seconds for seconds in self.starts if seconds is not None]
        if self.found is None or len(starts) < len(FRAMEWORKS):
            return None
        each = [[row.step_seconds_p50 or math.nan for row in pair] for pair in self.pairs]
        steps = [statistics.median(side) for side in zip(*each, strict=True)]
        slower, gain = starts[0] - starts[1], steps[1] - steps[0]
        return slower / gain if gain and slower / gain > 0 else None

    @property
    def starts(self) -> list[float | None]:
        """Seconds until each side's first step is done, the median over its processes; None if one took no step."""
        each = [[(r.compile_seconds or 0.0) + (r.first_step_seconds or math.nan) for r in pair] for pair in self.pairs]
        return [None if math.isnan(sum(side)) else statistics.median(side) for side in zip(*each, strict=True)]


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Return an outcome for each group and planned point that both sides of judged ``rows`` have, in their order."""
    points: dict[tuple[str | None, int | None], Session] = {}
    rows = [row for row in rows if not row.recipe and row.preset != FIT]  # which have no throughput of timed blocks
    for pair in partners(rows):
        points.setdefault((pair[0].group, pair[0].point), []).append(pair)
    there: dict[tuple[str | None, int | None], set[int]] = {}
    for row in rows:
        there.setdefault((row.group, row.point), set()).add(row.repeat or 0)
    in_order = {where: sorted(pairs, key=lambda pair: pair[0].repeat or 0) for where, pairs in points.items()}
    return [outcome(pairs, there[where]) for where, pairs in in_order.items()]


def outcome(pairs: Session, there: set[int]) -> Outcome:
    """Return the outcome of the judged ``pairs`` of one point and group, in the order in which they ran.

    Some of the repeats that are ``there`` may have lost a side. A ratio is made of all pairs or of none: leaving out
    one that is not comparable would be choosing among results.
    """
    if why := _incomplete(pairs, there):
        return Outcome([pairs], why=why)
    barred = [one for one, _ in pairs if one.comparable != COMPARABLE]
    if barred:
        why = "; ".join(dict.fromkeys(map(_barred, barred)))
        return Outcome([pairs], why=why, barred=any(row.comparable for row in barred))
    if bad := [text for pair in pairs for row in pair if (text := no_figure(row))]:
        return Outcome([pairs], why="; ".join(bad))
    parts = _parts(pairs)
    moved = [name for part in parts for name in changes(part, ["device_id"])]
    if changed := changes(pairs, UNCHANGED) + moved:
        return Outcome([pairs], why=f"{COMPARABLE}, but repeats differ: {', '.join(changed)}")
    return claim(split(parts))


def _parts(pairs: Session) -> list[Session]:
    """Return the pairs of a group before and after each interruption: another hour, and maybe another node."""
    found: dict[int | None, Session] = {}
    for pair in pairs:
        found.setdefault(pair[0].attempt, []).append(pair)
    return list(found.values())


def claim(sessions: list[Session], apart: Sequence[str] = ()) -> Outcome:
    """Return the outcome of ``sessions`` of comparable pairs: an indicative one if they are too few or not in turn."""
    pairs = [pair for session in sessions for pair in session]
    weak = Outcome(sessions, why=_too_few(sessions), indicative=math.exp(statistics.fmean(logs(pairs))), apart=[*apart])
    if not in_turn(pairs) or (len(sessions) < CLAIM_SESSIONS and len(pairs) < CLAIM_PAIRS):
        return weak
    try:
        found = ratios.ratio([_in_order(session) for session in sessions])
    except ValueError:  # such as two sessions of two pairs each
        return weak
    far = [name for session in sessions for name in _far(session)]
    return Outcome(sessions, found, noise_floor(sessions), far=far, apart=list(apart))


def _too_few(sessions: list[Session]) -> str:
    """Return how many pairs and sessions there are, how many a claim takes, and how to measure them."""
    pairs = [pair for session in sessions for pair in session]
    preset = PRESETS.get(str(pairs[0][0].preset))
    claiming = [p.name for p in PRESETS.values() if p.pairs >= CLAIM_PAIRS]
    if preset is None or preset.name not in claiming:
        how = f"preset {' or '.join(claiming)}"
    else:
        how = "repeat the command in another hour" if in_turn(pairs) else "--paired"
    if how == "--paired" and len(pairs) >= CLAIM_PAIRS:
        return f"{COMPARABLE}, but one side was measured after the other, not in turn: --paired"
    there = f"{_counted(len(pairs), 'pair')} in {_counted(len(sessions), 'session')}"
    needed = f"{CLAIM_PAIRS} pairs in one session or {CLAIM_SESSIONS} sessions are needed"
    return f"{COMPARABLE}, but {there}; {needed}: {how}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def _in_order(session: Session) -> list[Pair]:
    return [Pair(log, _jax_first(*pair)) for log, pair in zip(logs(session), session, strict=True)]


def _incomplete(pairs: Session, there: set[int]) -> str:
    """Return why nothing can be concluded yet, or any more; empty if all pairs are there."""
    if unfinished := [row for pair in pairs for row in pair if row.status not in TERMINAL]:
        sides = dict.fromkeys(f"{row.framework} is {row.status}" for row in unfinished)
        return f"not finished yet: {', '.join(sides)}"
    planned = there | set(range(max(row.repeats or 0 for pair in pairs for row in pair)))
    lost = sorted(planned - {one.repeat or 0 for one, _ in pairs})
    if not lost:
        return ""
    places, several = ", ".join(str(repeat + 1) for repeat in lost), len(lost) > 1
    return f"pair{'s' * several} {places} of {len(planned)} lack{'s' * (not several)} a row"


def _barred(row: Row) -> str:
    """Return why a pair is barred; one that was skipped on both sides is not judged."""
    return str(row.comparable) if row.comparable else f"{row.status} on both sides: {row.cause}"


def logs(pairs: Session) -> list[float]:
    """Return the logarithm of each pair's ratio."""
    return [math.log((one.throughput or math.nan) / (other.throughput or math.nan)) for one, other in pairs]


def in_turn(pairs: Session) -> bool:
    """Return whether one run measured both sides of each pair."""
    return all(one.run_id == other.run_id for one, other in pairs)


def _jax_first(one: Row, other: Row) -> bool:
    """Return whether JAX's row was measured first, by the plan if the times are not known."""
    if one.started and other.started and one.started != other.started:
        return one.started < other.started
    return (one.repeat or 0) % 2 == 0


def _far(session: Session) -> list[str]:
    """Return the processes of ``session`` that are far from all others of their side, with their figures."""
    names = []
    for side in zip(*session, strict=True):
        figures = [row.throughput or math.nan for row in side]
        for place in ratios.far_off([math.log(figure) for figure in figures]):
            row, others = side[place], [f for n, f in enumerate(figures) if n != place]
            near = f"{min(others):.4g} to {max(others):.4g} {row.throughput_unit}"
            names.append(
                f"{row.framework} at place {place + 1} of {row.run_id}: {figures[place]:.4g}, the others {near}"
            )
    return names


def split(groups: Sequence[Session]) -> list[Session]:
    """Return the pairs of ``groups`` as sessions: groups within ``SESSION_SECONDS`` of each other on a host are one."""
    sessions: list[Session] = []
    for pairs in sorted(groups, key=_start):
        for session in sessions:
            if _follows(session, pairs):
                session += pairs
                break
        else:
            sessions.append([*pairs])
    return sessions


def _follows(before: Session, after: Session) -> bool:
    """Return whether ``after`` is of the same session; this is assumed if the times cannot be read."""
    if before[0][0].host != after[0][0].host:
        return False
    end = max((row.ended or row.started or "" for pair in before for row in pair), default="")
    try:
        gap = datetime.fromisoformat(_start(after)) - datetime.fromisoformat(end)
    except (ValueError, TypeError):
        return True
    return gap < timedelta(seconds=SESSION_SECONDS)


def _start(pairs: Session) -> str:
    """Return when ``pairs`` started, in UTC as rows have it: texts of one form sort by time."""
    return min((row.started for pair in pairs for row in pair if row.started), default="")
