"""What is said of trainings to accuracy: verdicts over seeds, along the curves, and the figures of both sides."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from duel import comparability
from duel.catalogue import FRAMEWORKS
from duel.comparability import COMPARABLE
from duel.record import Row
from duel.report import figures, learned, training_table
from duel.results import Run
from duel.states import FINISHED, QUEUED


def row(framework: str, seed: int, top1: float, **columns: Any) -> Row:
    found = Row(run_id=framework, row=seed, framework=framework, benchmark="mnist", size="full", use_case=1)
    common = {"precision": "fp32", "dataset": "digits", "recipe": "r", "epochs": 2, "batch_size": 64, "seed": seed}
    common |= {"repeat": seed, "group": "g", "point": 0, "status": FINISHED, "comparable": COMPARABLE}
    return found.replace(**common | {"top1": top1, "trained_epochs": 2, "training_seconds": 1.0} | columns)


def sides(*apart: float) -> list[Row]:
    noise = (0.000, 0.002, -0.002, 0.001, -0.001)
    first = [row("jax", seed, 0.9 + noise[seed] + apart[seed]) for seed in range(len(apart))]
    return first + [row("pytorch", seed, 0.9 + noise[seed]) for seed in range(len(apart))]


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        ((0.001, -0.001, 0.002, -0.002, 0.0), "equivalent within 1 point"),
        ((0.03, 0.031, 0.029, 0.03, 0.032), "JAX is more accurate"),
        ((-0.03, -0.031, -0.029, -0.03, -0.032), "PyTorch is more accurate"),
        ((0.02, -0.03, 0.01, 0.04, -0.02), "undecided"),
        ((-0.0054, 0.0123, 0.03, 0.0477, 0.0654), "undecided"),  # the 90 % interval alone excludes 0
        ((0.001, -0.001, 0.002, -0.002), "no verdict, 4 of 5 seeds"),
    ],
)
def test_the_verdict_on_accuracies(apart: tuple[float, ...], said: str) -> None:
    assert said in learned.verdict(sides(*apart))


def test_seeds_of_another_version_leave_no_verdict() -> None:
    rows = sides(*[0.03, 0.031, 0.029, 0.03, 0.032])
    rows[4] = rows[4].replace(framework_version="0.12")
    assert learned.difference(rows) is None
    assert "no verdict, seeds differ: framework_version of jax" in learned.verdict(rows)


def test_times_have_their_unit_and_trainings_that_read_alike_their_group(tmp_path: Path) -> None:
    rows = [one.replace(group=group) for group in ("monday", "tuesday") for one in sides(*[0.0] * 5)]
    lines = {line[0]: line[1:] for line in training_table.table(rows[:10]).lines}
    assert lines["training time"] == ["1 s", "1 s"]
    assert lines["time of an epoch"] == ["0.5 s", "0.5 s"]
    texts = [text for text in training_table.verdicts(rows, tmp_path) if learned.EQUAL in text]
    assert [text.partition(": ")[0] for text in texts] == ["monday", "tuesday"]
    (alone,) = (text for text in training_table.verdicts(rows[:10], tmp_path) if learned.EQUAL in text)
    assert alone.startswith("mnist (full, fp32) on digits: ")


def test_trainings_to_a_target_are_told_by_how_many_reached_it_and_not_by_where_they_end(tmp_path: Path) -> None:
    rows = [
        one.replace(target_accuracy=0.9, trained_epochs=4 if one.framework == "jax" else 9, seconds_to_target=1.0)
        for one in sides(*[0.001] * 5)
    ]
    rows[9] = rows[9].replace(top1=0.8, seconds_to_target=None, missing={"seconds_to_target": "top-1 ended at 0.8000"})
    assert learned.difference(rows) is None
    said = learned.verdict(rows)
    assert "JAX 90.10 % (4 of 5 reached 90.00 %), PyTorch 88.02 % (3 of 5 reached 90.00 %); no verdict" in said
    found = training_table.table(rows)
    assert "no time to target: pytorch, seed 4: top-1 ended at 0.8000" in found.notes
    assert ["time to target", "1 s", ""] in found.lines
    assert "no time to target: pytorch, seed 4: top-1 ended at 0.8000" in training_table.verdicts(rows, tmp_path)[1]


def test_a_side_that_moved_between_machines_has_the_times_of_neither_shown(tmp_path: Path) -> None:
    moved = row("jax", 0, 0.9, training_seconds=None, missing={"training_seconds": "trained on several machines"})
    found = training_table.table([moved, row("pytorch", 0, 0.9)])
    assert "training time" not in {line[0] for line in found.lines}
    assert any(
        note.startswith("no times or energy: the sides of seed 0 ran on different machines") for note in found.notes
    )


def test_trainings_that_are_not_comparable_have_no_verdict() -> None:
    rows = [one.replace(comparable="NOT COMPARABLE: seen_sha256 (a | b)") for one in sides(0.0, 0.0, 0.0, 0.0, 0.0)]
    assert "NOT COMPARABLE: seen_sha256" in learned.verdict(rows)
    assert learned.difference(rows) is None


def test_sides_on_different_machines_are_compared_by_accuracy_alone() -> None:
    jax, pytorch = (row(name, 0, 0.9, host="a", device_id="0", cpus=8) for name in FRAMEWORKS)
    for column, other in (("host", "b"), ("device_id", "1"), ("cpus", 4)):
        there = pytorch.replace(**{column: other})
        assert f"{column} (" not in comparability.verdict(jax, there, lambda row: [])
        measured = (one.replace(recipe=None) for one in (jax, there))
        assert f"{column} (" in comparability.verdict(*measured, lambda row: [])
        shown = {line[0] for line in training_table.table([jax, pytorch]).lines}
        left = training_table.table([jax, there])
        assert shown - {line[0] for line in left.lines} == {"training time", "time of an epoch"}
        assert "no times or energy: the sides of seed 0 ran on different machines or devices" in left.notes
    waits = row(pytorch.framework, 0, 0.9).replace(status=QUEUED)
    assert "training time" in {line[0] for line in training_table.table([jax, waits]).lines}, "it has no machine yet"


def test_times_that_others_disturbed_are_not_compared(tmp_path: Path) -> None:
    jax, pytorch = (row(name, 0, 0.9, comparable=None) for name in FRAMEWORKS)
    for column, share, why in (("foreign_load", 0.46, "others took 46%"), ("disturbed_share", 0.4, "throttling or")):
        beside = pytorch.replace(**{column: share})
        assert comparability.disturbances(beside) == [], "its accuracy is the same"
        found = training_table.table([jax, beside])
        assert not {"training time", "time of an epoch"} & {line[0] for line in found.lines}
        assert any(f"no times or energy: disturbed trainings: PyTorch's seed 0 ({why}" in note for note in found.notes)
        assert "no times or energy" in training_table.verdicts([jax, beside], tmp_path)[1]


def test_what_a_training_took_is_told_by_epoch_and_without_waiting(tmp_path: Path) -> None:
    spent = {"training_seconds": 8.0, "training_joules": 100.0, "trained_per_second": 90.0, "waiting_share": 0.1}
    rows = [row(name, 0, 0.9, **spent) for name in FRAMEWORKS]
    told = {line[0]: line[1] for line in training_table.table(rows).lines}
    assert told["time of an epoch"].startswith("4")
    assert told["energy of an epoch"].startswith("50")
    assert told["the same without waiting"].startswith("100")
    (_, figures_of_both) = training_table.verdicts(rows, tmp_path)
    assert "time of an epoch: JAX 4" in figures_of_both
    unknown = [one.replace(waiting_share=None) for one in rows]
    assert "the same without waiting" not in {line[0] for line in training_table.table(unknown).lines}


def test_each_group_of_trainings_has_its_curves_in_the_report(tmp_path: Path) -> None:
    groups = ("first", "second")
    rows = [row("jax", 0, 0.9, run_id=f"jax-{group}", group=group, mode="default") for group in groups]
    epoch = {"number": 0, "step": 0, "held_out_loss": 2.3, "top1": 0.1, "seconds": 0.0}
    for one in rows:
        file = Run(tmp_path / "runs" / str(one.run_id)).curve_file(one)
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps([epoch, epoch | {"number": 1, "step": 9, "top1": 0.9, "seconds": 4.0}]))
    found = learned.curves(rows, tmp_path)
    assert [(record["group"], record["epoch"]) for record in found] == [
        *(("first", 0), ("first", 1), ("second", 0), ("second", 1))
    ]
    assert [record["run_id"] for record in found][::2] == ["jax-first", "jax-second"]
    panels = figures.learning(pd.DataFrame(found))
    assert panels[0].to_dict()["layer"][0]["encoding"]["x"]["field"] == "step"
    details = [layer["encoding"]["detail"] for panel in panels for layer in panel.to_dict()["layer"]]
    assert {tuple(each["field"] for each in detail) for detail in details} == {("seed", "group")}
    there = row("pytorch", 0, 0.9, run_id="pytorch-first", group="first", host="another machine")
    apart = [record["seconds"] for record in learned.curves([*rows, there], tmp_path)]
    assert apart == [None, None, 0.0, 4.0], "a figure would compare their times"
    moved = rows[0].replace(training_seconds=None, missing={"training_seconds": "trained on several machines"})
    alone = [record["seconds"] for record in learned.curves([moved, rows[1]], tmp_path)]
    assert alone == [None, None, 0.0, 4.0], "the other side has not even begun"


def test_energy_that_was_no_longer_read_is_not_counted_as_none(tmp_path: Path) -> None:
    one = row("jax", 0, 0.9)
    file = Run(tmp_path / "runs" / "jax").curve_file(one)
    file.parent.mkdir(parents=True)
    epoch = {"step": 0, "held_out_loss": 2.3, "top1": 0.1, "seconds": 1.0}
    for joules, curve in (([500, 400], [None, 500, 900]), ([500, None, 400], [None, 500, None, None])):
        read = [epoch | {"number": number, "joules": each} for number, each in enumerate([None, *joules])]
        file.write_text(json.dumps(read))
        assert [record["joules"] for record in learned.curves([one], tmp_path)] == curve


def test_a_training_of_a_benchmark_that_this_version_does_not_know_is_shown() -> None:
    found = training_table.table([row(name, 0, 0.9, benchmark="gone") for name in FRAMEWORKS])
    assert ["top-1 accuracy", "90.00 %", "90.00 %"] in found.lines
    assert "recipe: r" in found.notes


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (0.0, f"{learned.EQUAL} after 2 of 2 epochs, furthest apart after epoch 1, +0.04 [-0.10, +0.18] points"),
        (0.03, "; JAX is more accurate after epoch 1, +3.04 [+2.90, +3.18] points"),
        (-0.03, "; PyTorch is more accurate after epoch 1, -2.96 [-3.10, -2.82] points"),
    ],
)
def test_curves_that_part_on_the_way_are_named_though_they_end_alike(tmp_path: Path, apart: float, said: str) -> None:
    rows = sides(0.001, -0.001, 0.002, -0.002, 0.0)
    varies = (0.002, -0.002, 0.001, 0.001, 0.0)
    for one in rows:
        file = Run(tmp_path / "runs" / str(one.run_id)).curve_file(one)
        file.parent.mkdir(parents=True, exist_ok=True)
        after = 0.5 + (apart + varies[one.seed or 0] if one.framework == "jax" else 0.0)
        epoch = {"step": 1, "held_out_loss": 1.0, "seconds": 1.0}
        file.write_text(
            json.dumps([epoch | {"number": n, "top1": top1} for n, top1 in enumerate((0.1, after, one.top1))])
        )
    assert "equivalent" in learned.verdict(rows)
    (text,) = learned.on_the_way(rows, tmp_path)
    assert text.startswith("during training: ")
    assert text.endswith(said)
    assert text in training_table.verdicts(rows, tmp_path)
    assert learned.on_the_way(rows[1:], tmp_path) == [], "four seeds"
    lost = [one.replace(row=9, seed=9, repeat=9, status="failed", comparable=None) for one in (rows[0], rows[5])]
    assert learned.on_the_way([*rows, *lost], tmp_path) == [text]
    Run(tmp_path / "runs" / "jax").curve_file(rows[0]).unlink()
    assert learned.on_the_way(rows, tmp_path) == [], "the curves of four seeds"


def test_a_seed_that_is_barred_is_named_and_the_others_make_no_verdict_without_it() -> None:
    noise = (0.0, 0.001, -0.001, 0.0, 0.001, 0.0)
    rows = [row(name, seed, 0.9 + noise[seed]) for name in ("jax", "pytorch") for seed in range(6)]
    assert "equivalent within 1 point: JAX 90.02 %, PyTorch 90.02 %" in learned.verdict(rows)
    bad = [one.replace(comparable="NOT COMPARABLE: seen_sha256 (a | b)") if one.seed == 3 else one for one in rows]
    assert learned.verdict(bad).endswith("; seed 3 NOT COMPARABLE: seen_sha256 (a | b)")
    lost = [one.replace(status="failed", comparable=None, top1=0.1) if one.seed == 3 else one for one in rows]
    planned = [one.replace(repeats=6) for one in lost]
    for some in (planned, [one for one in planned if one.seed != 3]):
        assert learned.verdict(some).endswith("JAX 90.02 %, PyTorch 90.02 %; no verdict, 5 of 6 seeds")
        assert learned.difference(some) is None
    nan = [one.replace(why="diverged") if one.seed == 3 and one.framework == "jax" else one for one in lost]
    assert learned.verdict(nan).endswith("; no verdict, the loss of seed 3 diverged on one side or both")


def test_equivalence_is_claimed_wrongly_in_at_most_five_percent() -> None:
    """With a true difference of exactly one point."""
    chance = random.Random(1)
    claimed = 0
    for _ in range(1000):
        apart = [learned.POINT + chance.gauss(0, 0.003) for _ in range(5)]
        found = learned.difference(sides(*apart))
        assert found is not None
        claimed += found.verdict == learned.EQUAL
    assert claimed / 1000 < 0.065
