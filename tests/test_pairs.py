"""What pairs of one session come to, in figures and in words."""

import dataclasses
import math
from typing import Any

import pytest
from test_comparability import GOOD, OTHER, judged

from duel import kinds
from duel.comparability import NOT_COMPARABLE, partners
from duel.record import Row
from duel.report import itself, markdown, pairs, points, shares, waterfall
from duel.report.compare import standing
from duel.report.figure_data import label
from duel.report.itself import same_side
from duel.states import SKIPPED


def outcomes(rows: list[Row]) -> list[pairs.Outcome]:
    return pairs.outcomes(judged(rows))


def sides(ratios: list[float], **change: Any) -> list[Row]:
    rows = []
    for repeat, ratio in enumerate(ratios):
        rows.append(dataclasses.replace(GOOD, repeat=repeat, row=2 * repeat, throughput=100.0 * ratio))
        rows.append(dataclasses.replace(OTHER, repeat=repeat, row=2 * repeat + 1, **change))
    return rows


def test_a_ratio_comes_with_its_interval_the_noise_floor_and_a_verdict() -> None:
    (found,) = outcomes(sides([1.50, 1.52, 1.49, 1.51]))
    assert found.verdict.startswith("JAX is faster: JAX / PyTorch 1.505, 95 % interval within this session 1.4")
    assert "4 pairs, noise floor 1.0" in found.verdict
    assert found.short.endswith("] within this session")


def test_what_was_measured_again_is_said() -> None:
    rows = sides([1.5] * 4)
    more = [dataclasses.replace(rows[0], foreign_load=0.3), *rows]
    said = standing(outcomes(more), more)
    assert said[-1] == "not counted: 1 failed or disturbed, then measured again"
    assert "not counted" not in "".join(standing(outcomes(rows), rows))


@pytest.mark.parametrize(
    ("ratios", "kind"),
    [
        ([1.03, 0.97, 1.02, 0.99], "equal within 5 %"),
        ([1.018, 1.019, 1.017, 1.018], "equal within 5 %"),  # whatever the interval excludes
        ([1.2, 1.0, 1.1, 0.9], "undecided"),
        ([1.3, 1.3, 1.29, 1.31], "JAX is faster"),
        ([0.7, 0.7, 0.69, 0.71], "PyTorch is faster"),
        ([1.0, 1.01, 0.99, 0.55], "undecided: one process far off"),
    ],
)
def test_a_verdict_is_one_of_four(ratios: list[float], kind: str) -> None:
    (found,) = outcomes(sides(ratios))
    assert found.kind == kind


def test_a_process_far_off_is_named_with_its_figures() -> None:
    (found,) = outcomes(sides([1.0, 1.01, 0.99, 0.55]))
    (name,) = found.far
    assert name == "jax at place 4 of paired_mnist_1-a: 55, the others 99 to 101 images/s"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"throughput": math.nan}, "throughput nan"),
        ({"throughput": math.inf}, "throughput inf"),
        ({"throughput": 0.0}, "throughput 0.0"),
        ({"throughput": -1.0}, "throughput -1.0"),
        ({"throughput": None}, "throughput None"),
        ({"blocks": 1}, "1 of 1 blocks are left"),
    ],
)
def test_a_figure_that_is_none_makes_no_ratio_and_is_named(change: dict[str, Any], words: str) -> None:
    rows = judged(sides([1.5] * 4))
    rows[2] = dataclasses.replace(rows[2], **change)
    (found,) = pairs.outcomes(rows)
    assert found.verdict == f"no ratio: jax in paired_mnist_1-a, row 2: {words}"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([2], "pair 2 of 4 lacks a row"),
        ([2, 3], "pair 2 of 4 lacks a row"),
        ([6, 7], "pair 4 of 4 lacks a row"),
        ([0, 3], "pairs 1, 2 of 4 lack a row"),
    ],
)
def test_of_a_group_that_has_lost_rows_nothing_is_claimed(lost: list[int], words: str) -> None:
    rows = [dataclasses.replace(row, repeats=4) for row in sides([1.5] * 4)]
    (found,) = outcomes([row for row in rows if row.row not in lost])
    assert found.verdict == f"no ratio: {words}"


def test_one_pair_that_is_not_comparable_bars_all_of_them() -> None:
    """To leave it out would choose among results."""
    rows = sides([1.5, 1.5, 1.5, 1.5])
    rows[3] = dataclasses.replace(rows[3], weights_sha256="c" * 64)
    (found,) = outcomes(rows)
    assert found.found is None
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: weights_sha256 (aaaaaaaaaaaa | cccccccccccc)"


def test_what_neither_side_can_do_has_its_reason() -> None:
    rows = [dataclasses.replace(row, status=SKIPPED, cause="tf32 is supported on gpu only") for row in sides([1.5])]
    (found,) = outcomes(rows)
    assert found.verdict == "no ratio: skipped on both sides: tf32 is supported on gpu only"
    (found,) = outcomes([rows[0], sides([1.5])[1]])
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: status (jax: skipped: tf32 is supported on gpu only)"


@pytest.mark.parametrize(
    ("ratios", "change", "stands_on", "there", "how"),
    [
        ([1.5], {}, "one pair, measured in turn", "1 pair in 1 session", "repeat the command in another hour"),
        ([1.5], {"run_id": "other"}, "one process each, not in turn", "1 pair in 1 session", "--paired"),
        ([1.5, 6.0], {}, "2 pairs, measured in turn", "2 pairs in 1 session", "repeat the command in another hour"),
        ([1.5, 6.0], {"run_id": "other"}, "2 processes each, not in turn", "2 pairs in 1 session", "--paired"),
    ],
)
def test_too_few_pairs_make_an_indicative_ratio_and_no_claim(
    ratios: list[float], change: dict[str, str], stands_on: str, there: str, how: str
) -> None:
    (found,) = outcomes(sides(ratios, **change))
    ratio = "1.5" if len(ratios) == 1 else "3"  # the geometric mean
    assert found.verdict == f"indicative: JAX / PyTorch {ratio} ({stands_on}, no interval: not a verdict)"
    assert (found.found, found.faster, found.short) == (None, "", f"indicative: JAX / PyTorch {ratio}")
    assert found.why == f"COMPARABLE, but {there}; 4 pairs in one session or 3 sessions are needed: {how}"


def test_pairs_of_a_preset_that_claims_nothing_need_another_preset() -> None:
    (found,) = outcomes([row.replace(preset="smoke") for row in sides([1.5])])
    assert found.why.endswith("are needed: preset standard or publication")


def test_pairs_that_are_not_comparable_have_no_indicative_ratio_either() -> None:
    (found,) = outcomes(sides([1.5], weights_sha256="c" * 64))
    assert not found.shown
    assert found.short == found.why == f"{NOT_COMPARABLE}: weights_sha256 (aaaaaaaaaaaa | cccccccccccc)"


def test_the_noise_floor_is_made_of_as_many_pairs_of_one_side_with_itself() -> None:
    rows = sides([1.0, 1.1, 1.0, 1.1])
    jax, pytorch = same_side(partners(rows))
    assert jax == pytest.approx([-math.log(1.1), -math.log(1.1)])
    assert pytorch == pytest.approx([0.0, 0.0])


def test_repeats_of_a_side_must_have_been_alike() -> None:
    rows = sides([1.5] * 4)
    rows[4] = dataclasses.replace(rows[4], packages_sha256="d" * 64)
    (found,) = outcomes(rows)
    assert found.verdict == "no ratio: COMPARABLE, but repeats differ: packages_sha256 of jax"


@pytest.mark.parametrize("name", ["packages_sha256", "code_sha256", "switches", "framework_version", "cpus"])
def test_a_run_that_continued_otherwise_than_it_began_makes_no_ratio(name: str) -> None:
    """As after 'make envs' or 'tune': each part is alike within itself."""
    rows = [row.replace(attempt=1 + (row.repeat or 0) // 4) for row in sides([1.5] * 8)]
    changed = [row.replace(**{name: "other"}) if row.attempt == 2 else row for row in rows]
    (found,) = outcomes(changed)
    assert found.verdict == f"no ratio: COMPARABLE, but repeats differ: {name} of jax, {name} of pytorch"
    (moved,) = outcomes([row.replace(device_id="another") if row.attempt == 2 else row for row in rows])
    assert moved.found is not None


def test_a_slower_start_is_made_up_for_after_some_steps() -> None:
    (found,) = outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.02))
    assert found.break_even_steps == pytest.approx(2.0 / 0.01)
    (never,) = outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.005))
    assert never.break_even_steps is None


def test_a_side_that_took_no_step_has_no_time_until_its_first() -> None:
    rows = [row.replace(first_step_seconds=None) if row.framework == "jax" else row for row in sides([2.0] * 4)]
    (found,) = outcomes(rows)
    assert (found.starts[0], found.break_even_steps) == (None, None)
    assert found.starts[1] is not None


def test_nothing_that_sessions_must_share_is_forgotten() -> None:
    versions = "code_sha256 framework_version python_version packages_sha256"
    assert set(itself.ALIKE) == {*f"{versions} switches variables execution device_name mig driver cpus".split()}


def test_a_difference_within_the_noise_floor_is_none() -> None:
    """The machine is a third faster every other time, for both sides of a pair."""
    rows = [
        row.replace(throughput=(row.throughput or 0.0) * (1.0, 1.3)[(row.repeat or 0) % 2])
        for row in sides([1.1, 1.101, 1.099, 1.1])
    ]
    (found,) = outcomes(rows)
    assert found.found is not None
    assert found.found.low > 1.05
    assert (found.floor or 0.0) > 1.1
    assert found.kind == "undecided"


def test_points_that_read_alike_are_told_apart_by_what_differs() -> None:
    there = [row.replace(nodes=1, target="h100") for row in sides([1.5, 1.52, 1.49, 1.51])]
    elsewhere = [row.replace(group="other", run_id="other", nodes=2) for row in there]
    found = points.lines(outcomes(there + elsewhere))
    assert [line.besides for line in found] == ["nodes 1", "nodes 2"]
    assert [line.besides for line in points.lines(outcomes(there))] == [""]


def test_one_device_that_several_are_compared_with_is_named_and_no_result_of_many() -> None:
    (found,) = points.lines(outcomes([row.replace(use_case=2, device_count=1) for row in sides([1.5] * 4)]))
    assert found.is_baseline
    assert label(found).endswith(", 1 device")
    (many,) = points.lines(outcomes([row.replace(use_case=2, device_count=2) for row in sides([1.5] * 4)]))
    assert not many.is_baseline


def test_a_benchmark_of_another_version_is_shown_without_what_is_not_known_of_it() -> None:
    rows = [
        row.replace(benchmark="gone", mode=mode, group=mode, run_id=mode)
        for mode in ("default", "tuned")
        for row in sides([1.5, 1.52, 1.49, 1.51])
    ]
    found = outcomes(rows)
    assert waterfall.steps(found) == []
    assert shares.remedy(kinds.IDLE, rows[1]) == ""
    lines = points.lines(found)
    assert [line.benchmark for modes in markdown.leading(lines) for line in modes.values()] == ["gone", "gone"]
