"""How far each framework differs from itself, which shows how far a ratio of the two can be trusted.

Consecutive processes of one side and session measured the same thing: whatever their ratio shows is noise. So did those
of two modes in which a framework has the same switches, as it has in ``tuned`` where ``default`` was the fastest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from duel.catalogue import CLAIM_SESSIONS, FRAMEWORKS
from duel.record import Row
from duel.report import ratios
from duel.report.ratios import Estimate

# What processes of one point have in common; sessions that differ in it are kept apart.
VERSIONS = ("code_sha256", "framework_version", "python_version", "packages_sha256")
DEVICE = ("device_name", "mig", "driver")
ALIKE = (*VERSIONS, "switches", "variables", "execution", *DEVICE, "cpus")


@dataclass(frozen=True)
class Itself:
    """A framework's ratio to itself at one point, over ``sessions``."""

    framework: str
    found: Estimate
    sessions: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1, which happens by chance in 5 % of cases."""
        return not self.found.low <= 1.0 <= self.found.high


def surroundings(pair: tuple[Row, Row]) -> tuple[object, ...]:
    """Return device, code and versions of both sides, which all modes that are compared must have in common.

    Without the number of CPUs, which the switch ``threads`` changes.
    """
    return tuple(getattr(row, name) for row in pair for name in (*VERSIONS, *DEVICE))


def changes(pairs: Sequence[tuple[Row, Row]], columns: Sequence[str]) -> list[str]:
    """Return which of ``columns`` differ among the rows of a side."""
    return [
        f"{name} of {side[0].framework}"
        for side in zip(*pairs, strict=True)
        for name in columns
        if len({getattr(row, name) for row in side}) > 1
    ]


def across(one: Sequence[Sequence[Row]], other: Sequence[Sequence[Row]], framework: str) -> Itself | None:
    """Compare a framework with itself by its rows in two modes with the same switches, session by session.

    Return None if anything that makes them alike differs, there are too few sessions for a claim, or one mode was
    measured before the other.
    """
    rows = [row for sessions in (one, other) for session in sessions for row in session]
    alike = len({tuple(getattr(row, name) for name in ALIKE) for row in rows}) == 1
    if not alike or min(len(one), len(other)) < CLAIM_SESSIONS or not overlap(one, other):
        return None
    try:
        pairs = _nearest(one, other)
    except (ValueError, TypeError):  # a time is damaged, or without its zone
        return None
    means = [level(first) - level(second) for first, second in pairs]
    return Itself(framework, ratios.estimate(means), len(means)) if len(means) >= CLAIM_SESSIONS else None


Sessions = Sequence[Sequence[Row]]


def _nearest(one: Sessions, other: Sessions) -> list[tuple[Sequence[Row], Sequence[Row]]]:
    """Return each session of the mode with fewer, beside the nearest in time of the other mode, unless that is taken.

    Raises ValueError, or TypeError, if a time cannot be read.
    """
    if len(one) == len(other):
        return list(zip(one, other, strict=True))
    if len(one) > len(other):
        return [(first, second) for second, first in _nearest(other, one)]
    left = list(other)
    found = []
    for first in one:
        second = min(left, key=lambda session: abs(_began(session) - _began(first)))
        left.remove(second)
        found.append((first, second))
    return found


def _began(session: Sequence[Row]) -> datetime:
    return min(datetime.fromisoformat(str(row.started)) for row in session)


def overlap(one: Sequence[Sequence[Row]], other: Sequence[Sequence[Row]]) -> bool:
    """Return whether the times of two modes' sessions overlap: if not, what the machine did later looks like a mode."""
    times = [[row.started for session in each for row in session if row.started] for each in (one, other)]
    return all(times) and min(times[0]) < max(times[1]) and min(times[1]) < max(times[0])


def level(session: Sequence[Row]) -> float:
    """Return the mean logarithm of the throughput of ``session``."""
    return math.fsum(math.log(row.throughput or math.nan) for row in session) / len(session)


def same_side(pairs: Sequence[tuple[Row, Row]]) -> list[list[float]]:
    """Return log ratios of consecutive processes, each used once, for each side of the pairs of one session."""
    found = []
    for side in zip(*pairs, strict=True):
        numbers = [row.throughput or math.nan for row in side]
        found.append([math.log(a / b) for a, b in zip(numbers[::2], numbers[1::2], strict=False)])
    return found


def noise_floor(sessions: Sequence[Sequence[tuple[Row, Row]]]) -> float | None:
    """Return the noise floor of both sides together, None if no session has two pairs."""
    logs = [log for session in sessions for side in same_side(session) for log in side]
    return ratios.noise_floor(logs) if len(logs) > 1 else None


def itself(sessions: Sequence[Sequence[tuple[Row, Row]]]) -> list[Itself]:
    """Compare each framework with itself, over the sessions with two pairs; none if these are too few for a claim."""
    sides = zip(*(same_side(session) for session in sessions), strict=True)
    found = []
    for framework, each in zip(FRAMEWORKS, sides, strict=True):
        means = [math.fsum(logs) / len(logs) for logs in each if logs]
        if len(means) >= CLAIM_SESSIONS:
            found.append(Itself(framework, ratios.estimate(means), len(means)))
    return found
