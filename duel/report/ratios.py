"""Ratios of paired measurements, and what may be said of them.

The unit is a process: one number each, in pairs that ran one after the other on one device. The estimate is the
geometric mean of the pairs' ratios with Student's t interval on their logarithms. In simulations with variation within
and between processes it covers the true ratio as often as it says; resampling of iterations does not, however many
there are (docs/methodology.md).
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio, its 95 % interval, and the number of pairs (or of benchmarks) that it stands on."""

    ratio: float
    low: float
    high: float
    n: int


def estimate(logs: Sequence[float]) -> Estimate:
    """Of the logarithms of ratios, at least two. Raises ValueError for fewer."""
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} ratios; at least two are needed for an interval")
    mean = statistics.fmean(logs)
    half = _quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """By what factor a ratio has changed, of its logarithms ``before`` and ``after``, which do not come in pairs.

    Of the standard errors of both, with the fewer degrees of freedom: the interval is rather too wide than too narrow.
    Raises ValueError for fewer than two of either.
    """
    fewest = min(len(before), len(after))
    if fewest < 2:
        raise ValueError(f"{fewest} ratios; at least two are needed for an interval")
    mean = statistics.fmean(after) - statistics.fmean(before)
    error = math.sqrt(sum(statistics.variance(logs) / len(logs) for logs in (before, after)))
    half = _quantile(fewest - 1) * error
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), fewest)


@functools.cache
def _quantile(freedom: int) -> float:
    """Student's, for a two-sided interval with so many degrees of freedom."""
    from scipy import special  # here, so that 'status' loads it only where there is a ratio to show

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def noise_floor(logs: Sequence[float]) -> float:
    """The largest ratio that a side has to itself, at 95 %: of the logarithms of ratios of one side's processes.

    Which of two processes is divided by which is a matter of taste: so both directions count.
    """
    found = estimate(logs)
    return max(found.high, 1 / found.low)


def differs(found: Estimate, floor: float) -> bool:
    """Whether there is a difference: the interval excludes 1, and the ratio is beyond the noise floor."""
    return not found.low <= 1.0 <= found.high and max(found.ratio, 1 / found.ratio) > floor
