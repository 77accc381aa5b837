"""The estimator on simulated runs of known ratio: it must cover it as often as it says."""

import math

import numpy as np
import pytest

from duel.report.ratios import (
    Estimate,
    Pair,
    Ratio,
    change,
    differs,
    estimate,
    far_off,
    holm,
    is_equal,
    noise_floor,
    ratio,
)

SIMULATIONS = 4000
RATIO = 1.2
BETWEEN, WITHIN, BLOCKS = 0.01, 0.01, 50  # relative standard deviations, and blocks of which a process is the median


def processes(generator: np.random.Generator, count: int) -> np.ndarray:
    """(count,): medians of processes that differ among themselves, and whose blocks do."""
    means = 1 + BETWEEN * generator.standard_normal((count, 1))
    return np.median(means * (1 + WITHIN * generator.standard_normal((count, BLOCKS))), axis=1)


def sessions(generator: np.random.Generator, count: int, pairs: int, effect: float, drift: float) -> list[list[Pair]]:
    """Of a true ratio ``RATIO``: each session multiplies it by its own factor, and a machine that gets slower by
    ``drift`` from a process to the next meets the sides in the order A B B A."""
    found = []
    for _ in range(count):
        own = math.log(RATIO) + effect * generator.standard_normal()
        noise = np.log(processes(generator, pairs) / processes(generator, pairs))
        found.append([Pair(own + n - drift * (-1) ** place, place % 2 == 0) for place, n in enumerate(noise)])
    return found


@pytest.mark.parametrize("effect", [0.0, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("pairs", [1, 4])
def test_the_interval_over_sessions_covers_the_true_ratio(count: int, pairs: int, effect: float) -> None:
    """And the other interval what one more session shows."""
    generator = np.random.default_rng([count, pairs, round(100 * effect)])
    covered, seen, simulations = 0, 0, SIMULATIONS // 2
    for _ in range(simulations):
        found = ratio(sessions(generator, count, pairs, effect, 0.0))
        assert found.another is not None
        covered += found.low <= RATIO <= found.high
        (one_more,) = sessions(generator, 1, pairs, effect, 0.0)
        seen += found.another[0] <= math.exp(np.mean([pair.log for pair in one_more])) <= found.another[1]
    assert 0.93 <= covered / simulations <= 0.97
    assert 0.93 <= seen / simulations <= 0.97


@pytest.mark.parametrize("drift", [0.0, 0.02])
@pytest.mark.parametrize("pairs", [4, 10])
def test_within_one_session_the_interval_covers_the_ratio_of_that_session(pairs: int, drift: float) -> None:
    """Whatever the drift: in A B B A it adds to one pair what it takes from the next."""
    generator = np.random.default_rng(pairs)
    covered = 0
    for _ in range(SIMULATIONS):
        found = ratio(sessions(generator, 1, pairs, 0.0, drift))
        assert found.within
        covered += found.low <= RATIO <= found.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


def test_two_sessions_say_only_what_they_were_like() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(SIMULATIONS):
        found = ratio(sessions(generator, 2, 4, 0.0, 0.0))
        assert found.within
        covered += found.low <= RATIO <= found.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


@pytest.mark.parametrize(("pairs", "most"), [(4, 0.8), (10, 0.6)])
def test_one_session_does_not_cover_what_others_show(pairs: int, most: float) -> None:
    """Why the unit of what is published is a session; more pairs make it worse."""
    generator = np.random.default_rng(pairs)
    covered = 0
    for _ in range(SIMULATIONS):
        found = ratio(sessions(generator, 1, pairs, 0.02, 0.0))
        covered += found.low <= RATIO <= found.high
    assert covered / SIMULATIONS < most


def test_the_interval_over_sessions_is_student_s_of_their_means() -> None:
    """Against the formula, with quantiles of a printed table: t(0.975, 2) = 4.303."""
    found = ratio([[Pair(0.1, True), Pair(0.3, False)], [Pair(0.3, True)], [Pair(0.4, False), Pair(0.4, True)]])
    deviation = float(np.std([0.2, 0.3, 0.4], ddof=1))
    half = 4.3026527 * deviation / math.sqrt(3)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((0.3 - half, 0.3 + half))
    assert (found.ratio, found.sessions, found.pairs) == (pytest.approx(math.exp(0.3)), 3, 5)
    another = 4.3026527 * deviation * math.sqrt(4 / 3)
    assert found.another == pytest.approx((math.exp(0.3 - another), math.exp(0.3 + another)))
    assert found.spread == pytest.approx(math.exp(0.1) - 1)
    assert found.p == pytest.approx(0.0351, abs=1e-4)  # t = 5.196


def test_each_order_counts_alike_however_often_it_was_measured() -> None:
    found = ratio([[Pair(0.1, True), Pair(0.1, True), Pair(0.1, True), Pair(0.3, False)]] * 3)
    assert math.log(found.ratio) == pytest.approx(0.2)


def test_too_few_pairs_give_no_interval() -> None:
    for pairs in ([[Pair(0.1, True)]], [[Pair(0.1, True), Pair(0.1, False)]] * 2):
        with pytest.raises(ValueError, match=r"pairs; at least two of one session and order are needed"):
            ratio(pairs)


def test_holm_s_chances_are_those_of_his_procedure() -> None:
    """Each times the number that are left, and never below one before: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("ratios", "places"),
    [
        ([1.0, 1.01, 0.99, 1.8], [3]),
        ([0.5, 1.0, 1.01, 0.99], [0]),
        ([1.0, 1.01, 0.99, 1.08], []),  # a few percent are no reason
        ([1.0, 1.3, 0.9, 1.8], []),  # where all vary, none is far off
        ([1.0, 1.0, 1.8, 1.8], []),
        ([1.0, 1.8], []),
        ([], []),
    ],
)
def test_a_process_is_far_off_where_the_others_are_near_each_other(ratios: list[float], places: list[int]) -> None:
    assert far_off([math.log(value) for value in ratios]) == places


@pytest.mark.parametrize(
    ("low", "high", "equal"), [(1.011, 1.024, True), (0.96, 1.04, True), (0.94, 1.0, False), (0.99, 1.06, False)]
)
def test_equal_are_those_whose_whole_interval_is_within_five_percent(low: float, high: float, equal: bool) -> None:
    assert is_equal(Ratio(1.0, low, high, 3, 12, 0.5)) is equal


@pytest.mark.parametrize("pairs", [4, 10])
def test_resampling_blocks_of_few_processes_would_not_cover_it(pairs: int) -> None:
    """Why the unit is a process: blocks of one process share its conditions."""
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
        found = ratio([[Pair(log, place % 2 == 0) for place, log in enumerate(np.log(one / other))]])
        called += differs(found, noise_floor(same))
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
        found = ratio([[Pair(log, place % 2 == 0) for place, log in enumerate(np.log(one / other))]])
        called += differs(found, noise_floor(same))
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
