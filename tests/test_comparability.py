"""No ratio without a certificate: each thing that must be the same, or in order, is noticed and named."""

import dataclasses
import math
from typing import Any

import pytest

from duel import comparability
from duel.certificate import VERIFIED
from duel.comparability import ALIKE, COMPARABLE, NOT_COMPARABLE, judged, partners, verdict
from duel.modes import HANDICAPPED
from duel.record import FAILED, FINISHED, SKIPPED, Row
from duel.report import pairs
from duel.report.compare import verdicts

GOOD = Row(
    group="mnist_1-a",
    point=0,
    repeat=0,
    run_id="paired_mnist_1-a",
    status=FINISHED,
    framework="jax",
    benchmark="mnist",
    use_case=1,
    size="full",
    precision="fp32",
    mode="default",
    preset="standard",
    batch_size=64,
    host="node1",
    device_kind="gpu",
    device_id="GPU-1",
    weights_sha256="a" * 64,
    data_sha256="b" * 64,
    parity=VERIFIED,
    blocks=50,
    left_out_blocks=0,
    steady=True,
    rung=0,
    loss_first=2.5,
    clock_mhz=1980.0,
    throughput=100.0,
    compile_seconds=2.0,
    first_step_seconds=0.5,
    step_seconds_p50=0.01,
)
OTHER = dataclasses.replace(GOOD, framework="pytorch", compile_seconds=None)


def test_two_rows_that_agree_are_comparable_in_either_order() -> None:
    assert verdict(GOOD, OTHER) == verdict(OTHER, GOOD) == COMPARABLE


@pytest.mark.parametrize("name", ALIKE)
def test_whatever_differs_is_named_with_both_values(name: str) -> None:
    said = verdict(GOOD, dataclasses.replace(OTHER, **{name: "other"}))
    assert said.startswith(f"{NOT_COMPARABLE}: {name} (")
    assert said.endswith("| other)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parity": "unverified: no certificate"}, "parity (pytorch: unverified: no certificate)"),
        ({"steady": False}, "steady (pytorch: no steady state)"),
        ({"rung": HANDICAPPED}, "rung (pytorch: handicapped"),
        (
            {"blocks": 30, "left_out_blocks": 20, "left_out": "20 throttled (power brake)"},
            "left_out_blocks (pytorch: 20",
        ),
        ({"foreign_load": 0.2}, "foreign_load (pytorch: 20%)"),
        ({"restarts": 1}, "restarts (pytorch: 1)"),
        ({"status": FAILED, "cause": "out of memory"}, "status (pytorch: failed: out of memory)"),
        ({"clock_mhz": 1500.0}, "clock_mhz (1980 | 1500)"),
        ({"loss_first": 2.6}, "loss_first (2.5 | 2.6)"),
        ({"loss_first": math.nan}, "loss_first (2.5 | nan)"),
    ],
)
def test_what_is_not_in_order_bars_the_pair(change: dict[str, Any], words: str) -> None:
    said = verdict(GOOD, dataclasses.replace(OTHER, **change))
    assert said.startswith(f"{NOT_COMPARABLE}: {words}")


def test_what_both_sides_lack_is_said_once() -> None:
    said = verdict(*(dataclasses.replace(row, parity="unverified: no certificate") for row in (GOOD, OTHER)))
    assert said == f"{NOT_COMPARABLE}: parity (jax and pytorch: unverified: no certificate)"


def test_some_blocks_may_be_left_out_and_clocks_be_near() -> None:
    change = {"blocks": 40, "left_out_blocks": 10, "clock_mhz": 1800.0, "loss_first": 2.5001, "foreign_load": 0.01}
    assert verdict(GOOD, dataclasses.replace(OTHER, **change)) == COMPARABLE


def test_what_a_newcomer_gets_of_precision_is_never_compared() -> None:
    rows = [dataclasses.replace(row, precision="framework_default") for row in (GOOD, OTHER)]
    assert "framework_default is never compared" in verdict(*rows)


def test_partners_have_group_point_and_repeat_in_common_and_the_last_attempt_counts() -> None:
    first = dataclasses.replace(GOOD, status=FAILED)
    again = dataclasses.replace(GOOD, row=9, rung=1)
    others = [dataclasses.replace(GOOD, **{name: 7}) for name in ("point", "repeat")]
    others.append(dataclasses.replace(GOOD, group="other"))
    assert partners([first, *others, OTHER, again]) == [(again, OTHER)]


def test_rows_without_a_partner_stay_as_they_are() -> None:
    assert judged([GOOD]) == [GOOD]
    one, other = judged([GOOD, dataclasses.replace(OTHER, row=1)])
    assert one.comparable == other.comparable == COMPARABLE


def sides(ratios: list[float], **change: Any) -> list[Row]:
    rows = []
    for repeat, ratio in enumerate(ratios):
        rows.append(dataclasses.replace(GOOD, repeat=repeat, row=2 * repeat, throughput=100.0 * ratio))
        rows.append(dataclasses.replace(OTHER, repeat=repeat, row=2 * repeat + 1, **change))
    return rows


def test_a_ratio_comes_with_its_interval_the_noise_floor_and_a_verdict() -> None:
    (found,) = pairs.outcomes(sides([1.50, 1.52, 1.49, 1.51]))
    assert found.verdict.startswith("JAX is faster: JAX / PyTorch 1.505, 95 % interval 1.4")
    assert "4 pairs, noise floor 1.0" in found.verdict


def test_what_was_measured_again_is_said() -> None:
    rows = sides([1.5] * 4)
    more = [dataclasses.replace(rows[0], foreign_load=0.3), *rows]
    said = verdicts(pairs.outcomes(more), more)
    assert said[-1] == "  not counted: 1 that failed or were disturbed, and were measured again"
    assert "not counted" not in "".join(verdicts(pairs.outcomes(rows), rows))


def test_within_the_noise_there_is_no_difference() -> None:
    (found,) = pairs.outcomes(sides([1.03, 0.97, 1.02, 0.99]))
    assert found.verdict.startswith("no difference shown: ")


def test_one_pair_that_is_not_comparable_bars_all_of_them() -> None:
    """To leave it out would choose among results."""
    rows = sides([1.5, 1.5, 1.5, 1.5])
    rows[3] = dataclasses.replace(rows[3], weights_sha256="c" * 64)
    (found,) = pairs.outcomes(rows)
    assert found.found is None
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: weights_sha256 (aaaaaaaaaaaa | cccccccccccc)"


def test_what_neither_side_can_do_has_its_reason() -> None:
    rows = [dataclasses.replace(row, status=SKIPPED, cause="tf32 exists on gpu only") for row in sides([1.5])]
    (found,) = pairs.outcomes(rows)
    assert found.verdict == "no ratio: skipped on both sides: tf32 exists on gpu only"
    (found,) = pairs.outcomes([rows[0], sides([1.5])[1]])
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: status (jax: skipped: tf32 exists on gpu only)"


def test_too_few_pairs_make_no_ratio_and_it_is_said_what_would() -> None:
    (found,) = pairs.outcomes(sides([1.5]))
    assert found.verdict == (
        "no ratio: COMPARABLE, but 1 pair; 4 are needed: --paired and preset standard or publication"
    )


def test_the_noise_floor_is_made_of_as_many_pairs_of_one_side_with_itself() -> None:
    rows = sides([1.0, 1.1, 1.0, 1.1])
    one_sided = pairs._same_side(partners(rows))
    assert one_sided == pytest.approx([-math.log(1.1), -math.log(1.1), 0.0, 0.0])


def test_repeats_of_a_side_must_have_been_alike() -> None:
    rows = sides([1.5] * 4)
    rows[4] = dataclasses.replace(rows[4], packages_sha256="d" * 64)
    (found,) = pairs.outcomes(rows)
    assert found.verdict == "no ratio: COMPARABLE, but repeats differ: packages_sha256 of jax"


def test_over_several_benchmarks_the_geometric_mean_counts_each_once() -> None:
    def measured(benchmark: str, point: int, ratio: float) -> list[Row]:
        change = {"benchmark": benchmark, "group": benchmark, "point": point}
        return [dataclasses.replace(row, **change) for row in sides([ratio] * 4)]

    rows = [*measured("mnist", 0, 2.0), *measured("mnist", 1, 8.0), *measured("gcn", 0, 1.0), *measured("bert", 0, 2.0)]
    ((name, found),) = pairs.over_benchmarks(pairs.outcomes(rows)).items()
    assert name == "train_single, full, fp32, default"
    assert (found.ratio, found.n) == (pytest.approx(2.0), 3)  # the third root of 4 times 1 times 2
    assert found.low < 1 < found.high
    assert pairs.over_benchmarks(pairs.outcomes(rows[:-8])) == {}


def test_a_slower_start_is_made_up_for_after_some_steps() -> None:
    (found,) = pairs.outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.02))
    assert found.break_even_steps == pytest.approx(2.0 / 0.01)
    (never,) = pairs.outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.005))
    assert never.break_even_steps is None


def test_every_field_that_is_compared_is_a_column() -> None:
    assert set(comparability.ALIKE) <= {field.name for field in dataclasses.fields(Row)}
