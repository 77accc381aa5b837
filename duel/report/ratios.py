"""Ratios of paired measurements, and what may be concluded from them.

A process gives one number, two consecutive processes a pair, and the pairs of one point that ran within the same hour
a session. From three sessions on the unit is a session: the interval of a ratio is Student's t over their means, and
includes how much sessions differ. The pairs of one session only show what that hour was like. In simulations with
variation within processes, between them and between sessions, the first interval covers the true ratio as often as it
claims and the second does not, however many pairs there are (docs/methodology.md).
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from duel.catalogue import CLAIM_SESSIONS

CONFIDENCE = 0.95
EQUAL = 1.05  # two sides are equal if neither is more than this many times as fast
# A process is far off if it lies beyond the others of its side and session by this factor, and by this many times their
# range: about one in a thousand normal numbers does, and only if they vary by several percent.
FAR, FAR_SPANS = 1.1, 3.0


@dataclass(frozen=True)
class Estimate:
    """A ratio, its 95 % interval, and the number of logarithms it rests on."""

    ratio: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Pair:
    """The logarithm of a pair's ratio, and whether the first of its two sides ran first."""

    log: float
    first: bool


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % interval over ``sessions``, or only within them if there are fewer than ``CLAIM_SESSIONS``.

    ``p`` is the probability of such a ratio, or one further from 1, if the true one is 1. Over sessions, ``another`` is
    the 95 % prediction interval of one more, and ``spread`` the relative standard deviation of the sessions' ratios.
    """

    ratio: float
    low: float
    high: float
    sessions: int
    pairs: int
    p: float
    another: tuple[float, float] | None = None
    spread: float | None = None

    @property
    def within(self) -> bool:
        """Whether the interval says nothing about other sessions."""
        return self.another is None


def ratio(sessions: Sequence[Sequence[Pair]]) -> Ratio:
    """Return the ratio of the pairs of each session. Raises ValueError if too few to show how much they vary."""
    means = [mean(pairs) for pairs in sessions]
    middle, n, pairs = statistics.fmean(means), len(means), sum(map(len, sessions))
    if n < CLAIM_SESSIONS:
        error, freedom = _within(sessions)
        half = _quantile(freedom) * error
        return Ratio(*_exp(middle, half), n, pairs, _chance(middle, error, freedom))
    deviation = math.sqrt(_variance(means))
    error = deviation / math.sqrt(n)
    half = _quantile(n - 1) * error
    _, low, high = _exp(middle, half * math.sqrt(n + 1))  # t times the deviation times sqrt(1 + 1 / n)
    chance = _chance(middle, error, n - 1)
    return Ratio(*_exp(middle, half), n, pairs, chance, (low, high), math.expm1(deviation))


def chance_of_another(ratio: float, middle: float, another: tuple[float, float], sessions: int) -> float:
    """Return the two-sided p of the ``ratio`` of one more session, from the ratio of so many ``sessions`` and the
    prediction interval of another. It is below 5 % exactly outside that interval."""
    error = math.log(another[1] / another[0]) / 2 / _quantile(sessions - 1)
    return _chance(math.log(ratio / middle), error, sessions - 1)


def mean(pairs: Sequence[Pair]) -> float:
    """Return the mean of the logarithms of one session.

    The pairs in which one side ran first and those in which the other did count one half each: in the order A B B A,
    a quad, a drift adds to one what it takes from the other.
    """
    orders = _by_order(pairs)
    return statistics.fmean(statistics.fmean(logs) for logs in orders)


def _by_order(pairs: Sequence[Pair]) -> list[list[float]]:
    both = ([pair.log for pair in pairs if pair.first is first] for first in (True, False))
    return [logs for logs in both if logs]


def _within(sessions: Sequence[Sequence[Pair]]) -> tuple[float, int]:
    """Return the standard error of the mean of ``sessions``, and its degrees of freedom.

    It is estimated from how pairs of one session and order vary. Raises ValueError if no two pairs share both.
    """
    squares, freedom, variance = 0.0, 0, 0.0
    for pairs in sessions:
        orders = _by_order(pairs)
        for logs in orders:
            mean = statistics.fmean(logs)
            squares += sum((log - mean) ** 2 for log in logs)
            freedom += len(logs) - 1
            variance += 1 / (len(logs) * (len(orders) * len(sessions)) ** 2)
    if not freedom:
        raise ValueError(f"{sum(map(len, sessions))} pairs; at least two of one session and order are needed")
    return math.sqrt(variance * squares / freedom), freedom


def _exp(mean: float, half: float) -> tuple[float, float, float]:
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _chance(mean: float, error: float, freedom: int) -> float:
    """Return the two-sided p of Student's t."""
    from scipy import special

    if not error:
        return float(not mean)
    return 2 * float(special.stdtr(freedom, -abs(mean) / error))


def holm(chances: Sequence[float]) -> list[float]:
    """Return each of ``chances`` adjusted for all of them, so that all below 5 % hold together.

    Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    adjusted, most = [0.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        most = max(most, min(1.0, (len(chances) - rank) * chances[place]))
        adjusted[place] = most
    return adjusted


def is_equal(found: Ratio | Estimate) -> bool:
    """Return whether the whole interval is within ``EQUAL``."""
    return found.low >= 1 / EQUAL and found.high <= EQUAL


def differs(found: Ratio | Estimate, floor: float) -> bool:
    """Return whether there is a difference: the interval excludes 1, and the ratio is beyond the noise floor."""
    return not found.low <= 1.0 <= found.high and max(found.ratio, 1 / found.ratio) > floor


def far_off(logs: Sequence[float]) -> list[int]:
    """Return which processes of one side and session, given the logarithms of their figures, are far from the rest."""
    places = []
    for place, log in enumerate(logs):
        others = [*logs[:place], *logs[place + 1 :]]
        if len(others) >= 2:
            low, high = min(others), max(others)
            away = max(low - log, log - high)
            if away > max(math.log(FAR), FAR_SPANS * (high - low)):
                places.append(place)
    return places


def estimate(logs: Sequence[float]) -> Estimate:
    """Return the estimate from at least two logarithms of ratios, in any order. Raises ValueError for fewer."""
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} ratios; at least two are needed for an interval")
    mean = statistics.fmean(logs)
    half = _quantile(len(logs) - 1) * math.sqrt(_variance(logs) / len(logs))
    return Estimate(*_exp(mean, half), len(logs))


def change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the factor by which a ratio has changed, from its unpaired logarithms ``before`` and ``after``.

    It combines both standard errors with the smaller number of degrees of freedom: the interval is too wide rather
    than too narrow. Raises ValueError for fewer than two of either.
    """
    fewest = min(len(before), len(after))
    if fewest < 2:
        raise ValueError(f"{fewest} ratios; at least two are needed for an interval")
    mean = statistics.fmean(after) - statistics.fmean(before)
    error = math.sqrt(sum(_variance(logs) / len(logs) for logs in (before, after)))
    return Estimate(*_exp(mean, _quantile(fewest - 1) * error), fewest)


def _variance(values: Sequence[float]) -> float:
    """Return the variance with n - 1. The standard library's uses fractions, and takes seconds for a large set."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@functools.cache
def _quantile(freedom: int) -> float:
    """Return Student's t for a two-sided interval with ``freedom`` degrees of freedom."""
    from scipy import special  # here, so that 'status' loads it only if there is a ratio to show

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def noise_floor(logs: Sequence[float]) -> float:
    """Return the largest ratio of a side to itself, at 95 %, from the logarithms of ratios of one side's processes.

    Which of two processes is divided by the other is arbitrary, so both directions count.
    """
    found = estimate(logs)
    return max(found.high, 1 / found.low)
