"""No ratio without a certificate: each thing that must be the same, or in order, is noticed and named."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from duel import comparability
from duel.certificate import DISPROVED, VERIFIED
from duel.comparability import ALIKE, COMPARABLE, NOT_COMPARABLE, partners
from duel.evidence import Evidence
from duel.modes import HANDICAPPED
from duel.record import Row
from duel.report import pairs
from duel.report.compare import standing
from duel.states import FAILED, FINISHED, SKIPPED

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
    evidence_sha256="e" * 64,
    parity=VERIFIED,
    blocks=50,
    left_out_blocks=0,
    steady=True,
    rung=0,
    loss_first=2.5,
    accuracy=0.9,
    clock_mhz=1980.0,
    throughput=100.0,
    compile_seconds=2.0,
    first_step_seconds=0.5,
    step_seconds_p50=0.01,
)
OTHER = dataclasses.replace(GOOD, framework="pytorch", compile_seconds=None)


def evidence(curve: list[float] | None = None, **passes: Any) -> list[Evidence]:
    """Of one rank, two quantities in both passes, which move by 1e-6 with the weights; ``passes`` replace them."""
    whole = {"losses": np.array([1.0, 1.0, *[0.0] * 7]), "moments/fc.weight": np.array([2.0, 2.0, *[0.0] * 7])}
    moved = {name: array * (1 + 1e-6) for name, array in whole.items()}
    found = {"before": whole, "before, moved 1": moved, "after": whole, "after, moved 1": moved}
    shapes = {"losses": (2,), "moments/fc.weight": (3, 4)}
    curve = curve or [2.5, 2.4]
    return [Evidence("fp32", found | passes, shapes, curve=curve, moved_curve=curve)]


def alike(row: Row) -> list[Evidence]:
    return evidence()


def verdict(one: Row, other: Row) -> str:
    return comparability.verdict(one, other, alike)


def judged(rows: list[Row]) -> list[Row]:
    return comparability.judged(rows, alike)


def outcomes(rows: list[Row]) -> list[pairs.Outcome]:
    return pairs.outcomes(judged(rows))


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
        ({"parity": f"{DISPROVED}bn1"}, "parity (pytorch: disproved: bn1)"),
        ({"evidence_sha256": None}, "evidence (pytorch: not proved this way"),
        ({"steady": False}, "steady (pytorch: no steady state)"),
        ({"rung": HANDICAPPED}, "rung (pytorch: handicapped"),
        (
            {"blocks": 30, "left_out_blocks": 20, "left_out": "20 throttled (power brake)"},
            "left_out_blocks (pytorch: 20",
        ),
        ({"foreign_load": 0.2}, "foreign_load (pytorch: 20%)"),
        (
            {"waited_seconds": 0.11},
            "waited_seconds (pytorch: a step takes 0.11 s where it is waited for, 0.01 s within",
        ),
        ({"restarts": 1}, "restarts (pytorch: 1)"),
        ({"status": FAILED, "cause": "out of memory"}, "status (pytorch: failed: out of memory)"),
        ({"clock_mhz": 1500.0}, "clock_mhz (1980 | 1500)"),
        ({"accuracy": 0.85}, "accuracy (0.900 | 0.850)"),
        ({"variables": '{"target": {"XLA_FLAGS": "a"}}'}, "variables (XLA_FLAGS: not set | a)"),
        (
            {"variables": '{"unnamed": {"XLA_FLAGS": "a"}}'},
            "variables (pytorch: XLA_FLAGS has no name: neither the target nor a switch sets it); variables (XLA_FLAGS",
        ),
    ],
)
def test_what_is_not_in_order_bars_the_pair(change: dict[str, Any], words: str) -> None:
    said = verdict(GOOD, dataclasses.replace(OTHER, **change))
    assert said.startswith(f"{NOT_COMPARABLE}: {words}")


def test_what_both_sides_lack_is_said_once() -> None:
    said = verdict(*(dataclasses.replace(row, steady=False) for row in (GOOD, OTHER)))
    assert said == f"{NOT_COMPARABLE}: steady (jax and pytorch: no steady state)"


def test_a_missing_certificate_bars_nothing() -> None:
    assert (
        verdict(*(dataclasses.replace(row, parity="unverified: no certificate") for row in (GOOD, OTHER))) == COMPARABLE
    )


def off(name: str, by: float) -> dict[str, np.ndarray]:
    (good,) = evidence()
    return {
        what: array + np.array([0.0, by, *[0.0] * 7]) if what == name else array
        for what, array in good.passes["after"].items()
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            evidence(after=off("moments/fc.weight", 1e-3)),
            "evidence (moments/fc.weight after the clock (apart by 5.0e-04, bound 1e-05))",
        ),
        (evidence(after=off("losses", 1e-3)), "evidence (losses after the clock (apart by 1.0e-03, bound 1e-05))"),
        (evidence() * 2, "evidence (ranks (1 | 2))"),
        (
            evidence(curve=[2.5, 2.6]),
            "opening losses (apart by 4.1e-02 to step 2, rounding moves them by 0e+00; 2.4 | 2.6)",
        ),
        (
            evidence(curve=[math.nan, 2.4]),
            "opening losses (apart by nan to step 1, rounding moves them by 0e+00; 2.5 | nan)",
        ),
        (evidence(after={}), "evidence (losses after the clock"),
    ],
)
def test_evidence_that_differs_bars_the_pair_and_names_the_tensor(wrong: list[Evidence], words: str) -> None:
    if not wrong[0].passes["after"]:
        del wrong[0].passes["after"]
        words = "evidence (nothing was recorded after the clock)"
    said = comparability.verdict(GOOD, OTHER, lambda row: wrong if row.framework == "pytorch" else evidence())
    assert said == f"{NOT_COMPARABLE}: {words}"


def test_rounding_is_no_difference_and_what_it_hides_is_not_proved() -> None:
    near = evidence(after=off("moments/fc.weight", 1e-6))
    assert comparability.verdict(GOOD, OTHER, lambda row: near if row.framework == "jax" else evidence()) == COMPARABLE
    (good,) = evidence()
    moved = {name: array * 1.5 for name, array in good.passes["before"].items()}
    blind = evidence(**{"before, moved 1": moved})
    assert "rounding alone moves it by 50%" in comparability.verdict(GOOD, OTHER, lambda row: blind)


def test_evidence_that_is_not_there_or_was_changed_bars_the_pair() -> None:
    def gone(row: Row) -> list[Evidence]:
        raise ValueError("there is none in runs/x/evidence")

    said = comparability.verdict(GOOD, OTHER, gone)
    assert said.startswith(f"{NOT_COMPARABLE}: evidence (jax: there is none in runs/x/evidence); evidence (pytorch:")


def test_records_of_before_keep_their_verdict() -> None:
    rows = [
        dataclasses.replace(row, row=n, evidence_sha256=None, comparable="COMPARABLE")
        for n, row in enumerate((GOOD, OTHER))
    ]
    assert judged(rows) == rows
    mixed = [rows[0], dataclasses.replace(OTHER, row=1)]
    assert all("not proved this way" in str(row.comparable) for row in judged(mixed))


def test_some_blocks_may_be_left_out_and_clocks_be_near() -> None:
    change = {"blocks": 40, "left_out_blocks": 10, "clock_mhz": 1800.0, "accuracy": 0.905, "foreign_load": 0.01}
    assert verdict(GOOD, dataclasses.replace(OTHER, **change)) == COMPARABLE


def test_variables_that_both_sides_share_bar_nothing_and_one_that_differs_is_named_alone() -> None:
    shared = dataclasses.replace(GOOD, variables='{"target": {"CXX": "g++", "NCCL_ALGO": "Ring"}}')
    other = dataclasses.replace(OTHER, variables=shared.variables)
    assert verdict(shared, other) == COMPARABLE
    other = dataclasses.replace(OTHER, variables='{"target": {"CXX": "' + "g" * 90 + '", "NCCL_ALGO": "Ring"}}')
    assert verdict(shared, other) == f"{NOT_COMPARABLE}: variables (CXX: g++ | {'g' * 59}…)"


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
    (found,) = outcomes(sides([1.50, 1.52, 1.49, 1.51]))
    assert found.verdict.startswith("JAX is faster: JAX / PyTorch 1.505, 95 % interval 1.4")
    assert "4 pairs, noise floor 1.0" in found.verdict


def test_what_was_measured_again_is_said() -> None:
    rows = sides([1.5] * 4)
    more = [dataclasses.replace(rows[0], foreign_load=0.3), *rows]
    said = standing(outcomes(more), more)
    assert said[-1] == "not counted: 1 that failed or were disturbed, and were measured again"
    assert "not counted" not in "".join(standing(outcomes(rows), rows))


def test_within_the_noise_there_is_no_difference() -> None:
    (found,) = outcomes(sides([1.03, 0.97, 1.02, 0.99]))
    assert found.verdict.startswith("no difference shown: ")


def test_one_pair_that_is_not_comparable_bars_all_of_them() -> None:
    """To leave it out would choose among results."""
    rows = sides([1.5, 1.5, 1.5, 1.5])
    rows[3] = dataclasses.replace(rows[3], weights_sha256="c" * 64)
    (found,) = outcomes(rows)
    assert found.found is None
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: weights_sha256 (aaaaaaaaaaaa | cccccccccccc)"


def test_what_neither_side_can_do_has_its_reason() -> None:
    rows = [dataclasses.replace(row, status=SKIPPED, cause="tf32 exists on gpu only") for row in sides([1.5])]
    (found,) = outcomes(rows)
    assert found.verdict == "no ratio: skipped on both sides: tf32 exists on gpu only"
    (found,) = outcomes([rows[0], sides([1.5])[1]])
    assert found.verdict == f"no ratio: {NOT_COMPARABLE}: status (jax: skipped: tf32 exists on gpu only)"


@pytest.mark.parametrize(
    ("ratios", "change", "stands_on"),
    [
        ([1.5], {}, "one pair, measured in turn"),
        ([1.5], {"run_id": "other"}, "one process each, not in turn"),
        ([1.5, 6.0], {}, "2 pairs, measured in turn"),
        ([1.5, 6.0], {"run_id": "other"}, "2 processes each, not in turn"),
    ],
)
def test_too_few_pairs_make_an_indicative_ratio_and_no_claim(
    ratios: list[float], change: dict[str, str], stands_on: str
) -> None:
    (found,) = outcomes(sides(ratios, **change))
    ratio = "1.5" if len(ratios) == 1 else "3"  # the geometric mean
    assert found.verdict == f"indicative: JAX / PyTorch {ratio} ({stands_on}, no interval: not a verdict)"
    assert (found.found, found.faster, found.short) == (None, "", f"indicative: JAX / PyTorch {ratio}")
    assert found.why.endswith("4 are needed: --paired and preset standard or publication")


def test_pairs_that_are_not_comparable_have_no_indicative_ratio_either() -> None:
    (found,) = outcomes(sides([1.5], weights_sha256="c" * 64))
    assert not found.shown
    assert found.short == found.why == f"{NOT_COMPARABLE}: weights_sha256 (aaaaaaaaaaaa | cccccccccccc)"


def test_the_noise_floor_is_made_of_as_many_pairs_of_one_side_with_itself() -> None:
    rows = sides([1.0, 1.1, 1.0, 1.1])
    one_sided = pairs._same_side(partners(rows))
    assert one_sided == pytest.approx([-math.log(1.1), -math.log(1.1), 0.0, 0.0])


def test_repeats_of_a_side_must_have_been_alike() -> None:
    rows = sides([1.5] * 4)
    rows[4] = dataclasses.replace(rows[4], packages_sha256="d" * 64)
    (found,) = outcomes(rows)
    assert found.verdict == "no ratio: COMPARABLE, but repeats differ: packages_sha256 of jax"


def test_over_several_benchmarks_the_geometric_mean_counts_each_once() -> None:
    def measured(benchmark: str, point: int, ratio: float) -> list[Row]:
        change = {"benchmark": benchmark, "group": benchmark, "point": point}
        return [dataclasses.replace(row, **change) for row in sides([ratio] * 4)]

    rows = [*measured("mnist", 0, 2.0), *measured("mnist", 1, 8.0), *measured("gcn", 0, 1.0), *measured("bert", 0, 2.0)]
    ((name, found),) = pairs.over_benchmarks(outcomes(rows)).items()
    assert name == "train_single, full, fp32, default"
    assert (found.ratio, found.n) == (pytest.approx(2.0), 3)  # the third root of 4 times 1 times 2
    assert found.low < 1 < found.high
    assert pairs.over_benchmarks(outcomes(rows[:-8])) == {}


def test_a_slower_start_is_made_up_for_after_some_steps() -> None:
    (found,) = outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.02))
    assert found.break_even_steps == pytest.approx(2.0 / 0.01)
    (never,) = outcomes(sides([2.0, 2.1, 2.0, 2.1], step_seconds_p50=0.005))
    assert never.break_even_steps is None


def test_every_field_that_is_compared_is_a_column() -> None:
    assert set(comparability.ALIKE) <= {field.name for field in dataclasses.fields(Row)}
