"""No ratio without a certificate: each thing that must be the same, or in order, is noticed and named."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duel import comparability, table
from duel.certificate import DISPROVED, VERIFIED
from duel.comparability import ALIKE, COMPARABLE, NOT_COMPARABLE, partners
from duel.evidence import Evidence, disagreements, sha256
from duel.modes import HANDICAPPED
from duel.record import Row
from duel.results import Results
from duel.states import FAILED, FINISHED

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
    throughput_unit="images/s",
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
        (
            {"evidence_sha256": None, "missing": {"evidence_sha256": "1 of 2 ranks have recorded it"}},
            "evidence (pytorch: 1 of 2 ranks have recorded it)",
        ),
        ({"steady": False}, "steady (pytorch: no steady state)"),
        ({"rung": HANDICAPPED}, "rung (pytorch: handicapped"),
        (
            {"blocks": 30, "left_out_blocks": 20, "left_out": "20 throttled (power brake)"},
            "left_out_blocks (pytorch: 20",
        ),
        ({"foreign_load": 0.2}, "foreign_load (pytorch: 20%)"),
        (
            {"waited_seconds": 0.11},
            "waited_seconds (pytorch: a step takes 0.11 s when waited for, 0.01 s within",
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


@pytest.mark.parametrize(
    ("within", "beyond", "words"),
    [
        ({"waited_seconds": 1.9e-3, "step_seconds_p50": 1e-5}, {"waited_seconds": 2.1e-3}, "waited_seconds ("),
        ({"blocks": 70, "left_out_blocks": 30}, {"blocks": 69, "left_out_blocks": 31}, "left_out_blocks ("),
        ({"foreign_load": 0.049}, {"foreign_load": 0.051}, "foreign_load ("),
        ({"clock_mhz": 1980 / 1.149}, {"clock_mhz": 1980 / 1.151}, "clock_mhz ("),
        ({"accuracy": 0.881}, {"accuracy": 0.879}, "accuracy ("),
        ({"held_out_loss_before": 2.3002}, {"held_out_loss_before": 2.3003}, "held_out_loss_before ("),
    ],
)
def test_each_bound_is_where_it_is(within: dict[str, Any], beyond: dict[str, Any], words: str) -> None:
    good = dataclasses.replace(GOOD, held_out_loss_before=2.3)
    other = dataclasses.replace(OTHER, held_out_loss_before=2.3)
    assert verdict(good, dataclasses.replace(other, **within)) == COMPARABLE
    assert words in verdict(good, dataclasses.replace(other, **within | beyond))


@pytest.mark.parametrize(
    ("precision", "accuracy", "loss"), [("tf32", 0.03, 1e-2), ("bf16", 0.05, 3e-2), ("fp16", 0.03, 1e-2)]
)
def test_lower_precisions_may_be_further_apart(precision: str, accuracy: float, loss: float) -> None:
    sides = [dataclasses.replace(row, precision=precision, held_out_loss_before=2.0) for row in (GOOD, OTHER)]
    for share, barred in ((0.99, False), (1.01, True)):
        other = sides[1].replace(accuracy=0.9 - share * accuracy, held_out_loss_before=2.0 / (1 + share * loss))
        said = verdict(sides[0], other)
        assert ("accuracy (" in said) == ("held_out_loss_before (" in said) == barred, said


def test_a_training_that_slurm_began_again_is_compared() -> None:
    for recipe, barred in ((None, True), ("r", False)):
        sides = [dataclasses.replace(row, recipe=recipe, restarts=1) for row in (GOOD, OTHER)]
        assert ("restarts (" in verdict(*sides)) == barred


def test_the_side_that_rounding_moves_less_sets_the_bound() -> None:
    whole = evidence()[0].passes["before"]
    moved = {name: array * 1.05 for name, array in whole.items()}
    for policy, error in (("fp32", 1.01), ("bf16", 1.06)):
        passes = {f"{when}, moved 1": moved for when in ("before", "after")}
        noisy = evidence(**passes | {"after": {name: array * error for name, array in whole.items()}})
        both = [dataclasses.replace(side, policy=policy) for side in (evidence()[0], noisy[0])]
        for sides in (both, both[::-1]):
            (text,) = [text for text in disagreements(*([one] for one in sides)) if "losses" in text]
            assert text.startswith("losses after the clock (apart by"), text
        assert "moments/fc.weight after" in str(disagreements(*([one] for one in both)))


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


def test_both_sides_are_held_against_the_higher_ceilings_of_their_device() -> None:
    """A framework whose own product is slow is no nearer to what the machine can do."""
    ceilings = {"step_flops": 1000, "arithmetic_intensity": 10.0, "step_seconds_p50": 1.0}
    one = dataclasses.replace(
        GOOD, row=0, matmul_flops_per_second=2000.0, copy_bytes_per_second=100.0, mfu=0.5, bound="memory", **ceilings
    )
    other = dataclasses.replace(
        OTHER, row=1, matmul_flops_per_second=4000.0, copy_bytes_per_second=500.0, mfu=0.25, bound="compute", **ceilings
    )
    assert [(row.mfu, row.bound) for row in judged([one, other])] == [(0.25, "compute")] * 2
    assert [row.matmul_flops_per_second for row in judged([one, other])] == [2000.0, 4000.0]
    elsewhere = [dataclasses.replace(other, **{name: "other"}) for name in ("group", "host", "device_id", "precision")]
    before = dataclasses.replace(other, evidence_sha256=None, comparable=COMPARABLE, mfu=0.9)
    assert [judged([one, row])[0].mfu for row in elsewhere] == [0.5] * 4
    assert judged([before])[0].mfu == 0.9


def test_every_field_that_is_compared_is_a_column() -> None:
    assert set(comparability.ALIKE) <= {field.name for field in dataclasses.fields(Row)}


def test_nothing_that_must_agree_is_forgotten() -> None:
    """By a list of its own: what the code no longer compares would otherwise no longer be tested."""
    point = "benchmark use_case size precision mode batch_size product microbatch scaling preset learning_rate recipe"
    machine = "target host device_kind device_name device_id device_count nodes cpus mig driver"
    data = "dataset parameters weights_sha256 data_sha256 seen_sha256 seed loss_steps target_accuracy"
    assert set(comparability.ALIKE) == {*f"{point} {machine} {data} code_sha256 git_sha".split()}


def test_of_batches_up_to_a_target_only_the_epochs_that_both_trained_are_compared() -> None:
    one, other = (dataclasses.replace(row, recipe="r", target_accuracy=0.9) for row in (GOOD, OTHER))
    for seen, alike in (("a b c", True), ("a", True), ("a x", False)):
        said = verdict(dataclasses.replace(one, seen_sha256="a b"), dataclasses.replace(other, seen_sha256=seen))
        assert ("seen_sha256" not in said) is alike
        assert alike or "seen_sha256 (epoch 2: b | x)" in said
    every = dataclasses.replace(one, target_accuracy=None, seen_sha256="a b")
    said = verdict(every, dataclasses.replace(other, target_accuracy=None, seen_sha256="a b c"))
    assert "seen_sha256 (a b | a b c)" in said


def test_every_rank_is_compared() -> None:
    bad = evidence() + evidence(after=off("losses", 1e-3))
    assert disagreements(evidence() * 2, evidence() * 2) == []
    (text,) = disagreements(evidence() * 2, bad)
    assert text.startswith("rank 1: ")


def test_evidence_that_was_changed_is_refused_though_it_can_be_read(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    run = results.run("jax_mnist_1-x")
    file = run.evidence_file(0, 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(evidence()[0].to_bytes())
    row = Row(run_id=run.id, row=0, evidence_sha256=sha256([file.read_bytes()]))
    assert len(table.evidence(row, results)) == 1
    file.write_bytes(evidence(curve=[9.0, 9.0])[0].to_bytes())
    with pytest.raises(ValueError, match="was changed since"):
        table.evidence(row, results)
