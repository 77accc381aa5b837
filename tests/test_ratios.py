"""The estimator on simulated runs of known ratio: it must cover it as often as it says."""

import math

import numpy as np
import pytest

from duel.report.ratios import Estimate, change, differs, estimate, noise_floor

SIMULATIONS = 4000
RATIO = 1.2
BETWEEN, WITHIN, BLOCKS = 0.01, 0.01, 50  # relative standard deviations, and blocks of which a process is the median


def processes(generator: np.random.Generator, count: int) -> np.ndarray:
    """(count,): medians of processes that differ among themselves, and whose blocks do."""
    means = 1 + BETWEEN * generator.standard_normal((count, 1))
    return np.median(means * (1 + WITHIN * generator.standard_normal((count, BLOCKS))), axis=1)


@pytest.mark.parametrize("pairs", [4, 10])
def test_the_interval_covers_the_true_ratio(pairs: int) -> None:
    generator = np.random.default_rng(pairs)
    covered = 0
    for _ in range(SIMULATIONS):
        logs = np.log(RATIO * processes(generator, pairs) / processes(generator, pairs))
        found = estimate(list(logs))
        covered += found.low <= RATIO <= found.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


@pytest.mark.parametrize("pairs", [4, 10])
def test_resampling_blocks_of_few_processes_would_not_cover_it(pairs: int) -> None:
    """Why the unit is a process: what docs/methodology.md says of the other way."""
    generator = np.random.default_rng(300 + pairs)
    covered, simulations = 0, 400
    for _ in range(simulations):
        means = 1 + BETWEEN * generator.standard_normal((2, pairs, 1))
        one, other = (means * (1 + WITHIN * generator.standard_normal((2, pairs, BLOCKS)))).reshape(2, -1)
        draws = [side[generator.integers(side.size, size=(200, side.size))].mean(1) for side in (RATIO * one, other)]
        low, high = np.quantile(draws[0] / draws[1], [0.025, 0.975])
        covered += low <= RATIO <= high
    assert covered / simulations < 0.4


@pytest.mark.parametrize("pairs", [4, 10])
def test_a_framework_differs_from_itself_in_at_most_five_of_a_hundred(pairs: int) -> None:
    generator = np.random.default_rng(100 + pairs)
    called = 0
    for _ in range(SIMULATIONS):
        one, other = processes(generator, pairs), processes(generator, pairs)
        same = [math.log(side[i] / side[i + 1]) for side in (one, other) for i in range(0, pairs - 1, 2)]
        called += differs(estimate(list(np.log(one / other))), noise_floor(same))
    binomial = 3 * math.sqrt(0.05 * 0.95 / SIMULATIONS)
    assert called / SIMULATIONS <= 0.05 + binomial


@pytest.mark.parametrize("pairs", [4, 10])
def test_a_large_difference_is_found(pairs: int) -> None:
    """Otherwise the test above would hold for a verdict that never says anything."""
    generator = np.random.default_rng(200 + pairs)
    called = 0
    for _ in range(200):
        one, other = RATIO * processes(generator, pairs), processes(generator, pairs)
        same = [math.log(side[i] / side[i + 1]) for side in (one, other) for i in range(0, pairs - 1, 2)]
        called += differs(estimate(list(np.log(one / other))), noise_floor(same))
    assert called >= 190


def test_the_interval_is_student_s() -> None:
    """Against the formula, with the quantile of a printed table: t(0.975, 3) = 3.182."""
    logs = [0.1, 0.2, 0.3, 0.2]
    half = 3.1824463 * np.std(logs, ddof=1) / 2
    found = estimate(logs)
    assert found.n == 4
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((0.2 - half, 0.2 + half))
    assert found.ratio == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("pairs", [4, 10])
def test_the_interval_of_a_change_covers_it_at_least_as_often_as_it_says(pairs: int) -> None:
    generator = np.random.default_rng(300 + pairs)
    covered = 0
    for _ in range(SIMULATIONS):
        before = np.log(processes(generator, pairs) / processes(generator, pairs))
        after = np.log(RATIO * processes(generator, pairs) / processes(generator, pairs))
        found = change(list(before), list(after))
        covered += found.low <= RATIO <= found.high
    assert 0.95 <= covered / SIMULATIONS < 1.0


def test_a_change_has_both_standard_errors_and_the_fewer_degrees_of_freedom() -> None:
    before, after = [0.1, 0.2, 0.3, 0.2], [0.5, 0.6, 0.55, 0.65, 0.7]
    found = change(before, after)
    half = 3.1824463 * math.sqrt(np.var(before, ddof=1) / 4 + np.var(after, ddof=1) / 5)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((0.4 - half, 0.4 + half))
    with pytest.raises(ValueError, match=r"1 ratios; at least two"):
        change(before, [0.1])


def test_one_pair_gives_no_interval() -> None:
    with pytest.raises(ValueError, match=r"1 ratios; at least two"):
        estimate([0.1])


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    found = estimate([math.log(2)] * 3)
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_noise_floor_is_the_same_in_both_directions() -> None:
    assert noise_floor([0.01, 0.02, -0.01]) == pytest.approx(noise_floor([-0.01, -0.02, 0.01]))
    assert noise_floor([0.01, 0.02, -0.01]) > 1


@pytest.mark.parametrize(
    ("ratio", "low", "high", "floor", "said"),
    [
        (1.2, 1.1, 1.3, 1.05, True),
        (0.8, 0.7, 0.9, 1.05, True),
        (1.2, 0.9, 1.5, 1.05, False),  # the interval has 1 in it
        (1.03, 1.01, 1.05, 1.05, False),  # within the noise
        (0.97, 0.95, 0.99, 1.05, False),
    ],
)
def test_a_difference_needs_both(ratio: float, low: float, high: float, floor: float, said: bool) -> None:
    assert differs(Estimate(ratio, low, high, 4), floor) is said
