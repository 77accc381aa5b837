"""How far each framework differs from itself, which shows how far a ratio of the two can be trusted.

Consecutive processes of one side and session measured the same thing: whatever their ratio shows is noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from duel.catalogue import CLAIM_SESSIONS, FRAMEWORKS
from duel.record import Row
from duel.report import ratios
from duel.report.ratios import Estimate


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
