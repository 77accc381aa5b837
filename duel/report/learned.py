"""Trainings to accuracy: both sides' accuracy, time and energy, and whether their accuracies are equivalent.

One training's accuracy varies with its seed by more than what is asked here, so a verdict needs several seeds, each
trained by both sides from the same weights on the same batches.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duel.catalogue import FRAMEWORKS
from duel.comparability import COMPARABLE, FOREIGN_LOAD, LEFT_OUT, machines_apart, partners
from duel.files import Damaged, fitting, read
from duel.record import Row
from duel.report import ratios
from duel.report.figure_data import Record
from duel.report.itself import VERSIONS, changes
from duel.results import Run
from duel.states import FINISHED
from duel.terminal import warn
from duel.tries import counted

POINT = 0.01  # accuracies within it of each other are equivalent
FEWEST_SEEDS = 5
EQUIVALENT = 0.90  # confidence of the interval that must lie within it: two one-sided tests at 5 % (Schuirmann 1987)
CHANCE = 1 - ratios.CONFIDENCE  # of a difference that is claimed and not there
EQUAL, UNDECIDED = "equivalent within 1 point", "undecided"
NAMES = {"jax": "JAX", "pytorch": "PyTorch"}


@dataclass(frozen=True)
class Epoch:
    """What is read of an epoch in a training's curve."""

    number: int
    step: int
    held_out_loss: float
    top1: float
    seconds: float
    loss: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Difference:
    """JAX's held-out top-1 accuracy minus PyTorch's, over seeds: the mean and its 90 % interval, shares of 1.

    ``p`` is that of a t-test for a difference, which is claimed below 5 %.
    """

    mean: float
    low: float
    high: float
    seeds: int
    p: float

    @property
    def verdict(self) -> str:
        if self.low >= -POINT and self.high <= POINT:
            return EQUAL
        if self.p < CHANCE:
            return f"{'JAX' if self.mean > 0 else 'PyTorch'} is more accurate"
        return UNDECIDED


def is_training(rows: Sequence[Row]) -> bool:
    return any(row.recipe for row in rows)


def difference(rows: Sequence[Row]) -> Difference | None:
    """Return the difference over seeds; None for fewer than ``FEWEST_SEEDS``, or if a pair is lost or not comparable.

    Leaving that pair out would be choosing among results. Trainings that end at a target all end near it, and those of
    other versions are of another program.
    """
    pairs = [pair for pair in partners(rows) if pair[0].comparable]
    barred = any(one.comparable != COMPARABLE or one.target_accuracy for one, _ in pairs)
    if barred or len(pairs) < _planned(rows) or _changed(pairs):
        return None
    return _over([one.top1 - other.top1 for one, other in pairs if one.top1 is not None and other.top1 is not None])


def _changed(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """Return what differs between the trainings of one side, which should differ in their seeds alone."""
    return changes(pairs, [*VERSIONS, "switches", "execution"])


def _planned(rows: Sequence[Row]) -> int:
    return max(row.repeats or 0 for row in rows)


def _over(apart: Sequence[float]) -> Difference | None:
    """Return the difference over seeds, each of which is ``apart`` by so much."""
    if len(apart) < FEWEST_SEEDS:
        return None
    from scipy import special

    mean = statistics.fmean(apart)
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    half = float(special.stdtrit(len(apart) - 1, (1 + EQUIVALENT) / 2)) * error
    p = 2 * float(special.stdtr(len(apart) - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, len(apart), p)


def verdict(rows: Sequence[Row]) -> str:
    """Return the outcome in one sentence."""
    what, sides = what_of(rows[0]), sides_of(rows)
    if not sides:
        return f"{what}: no training has finished"
    pairs = [pair for pair in partners(rows) if pair[0].comparable]
    found = difference(rows)
    if diverged := sorted({str(row.seed) for row in counted(rows) if row.why == "diverged"}):
        names = f"seed{'s' * (len(diverged) > 1)} {', '.join(diverged)}"
        return f"{what}: {_reached(sides)}; no verdict, the loss of {names} diverged on one side or both"
    if found is not None:
        reached = _reached({name: [pair[place] for pair in pairs] for place, name in enumerate(FRAMEWORKS)})
        return f"{what}: {found.verdict}: {reached}, difference {_points(found)}, 90 %, {found.seeds} seeds"
    reached = _reached(sides)
    barred = [one for one, _ in pairs if one.comparable != COMPARABLE]
    if barred:
        seeds = ", ".join(str(one.seed) for one in barred)
        return f"{what}: {reached}; seed{'s' * (len(barred) > 1)} {seeds} {barred[0].comparable}"
    if len(sides) < len(FRAMEWORKS):
        return f"{what}: {reached}; nothing to compare"
    if rows[0].target_accuracy:
        return f"{what}: {reached}; no verdict on accuracies, which end at a target"
    if changed := _changed(pairs):
        return f"{what}: {reached}; no verdict, seeds differ: {', '.join(changed)}"
    planned = _planned(rows)
    more = "" if planned >= FEWEST_SEEDS else f" (--seeds {FEWEST_SEEDS})"
    return f"{what}: {reached}; no verdict, {len(pairs)} of {max(planned, FEWEST_SEEDS)} seeds{more}"


def _reached(sides: dict[str, list[Row]]) -> str:
    return ", ".join(f"{NAMES[name]} {percent(mean(mine, 'top1'))}{_of_target(mine)}" for name, mine in sides.items())


def _of_target(rows: Sequence[Row]) -> str:
    """Say how many trainings of one side came to their target, if they had one."""
    target = rows[0].target_accuracy
    there = sum((row.top1 or 0.0) >= target for row in rows) if target else 0
    return f" ({there} of {len(rows)} reached {percent(target)})" if target else ""


def on_the_way(rows: Sequence[Row], folder: Path) -> list[str]:
    """Return in a sentence whether the two sides' curves agree after each epoch, if there is a verdict on their ends.

    The curves are in the runs in ``folder``; epochs that not all seeds have on both sides are left out. A difference is
    named if Holm's correction for all epochs confirms it.
    """
    ends = difference(rows)
    if ends is None:
        return []
    compared = [row for pair in partners(rows) if pair[0].comparable for row in pair]
    reached: dict[int, dict[int, dict[str, float]]] = {}
    for record in curves(compared, folder):
        of_epoch = reached.setdefault(int(str(record["epoch"])), {})
        of_epoch.setdefault(int(str(record["seed"])), {})[str(record["framework"])] = float(str(record["top1"]))
    found = {}
    for number, seeds in sorted(reached.items()):
        both = [sides["jax"] - sides["pytorch"] for sides in seeds.values() if len(sides) == len(FRAMEWORKS)]
        # Before the first epoch both have the same weights. Fewer seeds than at the end would be a choice among them.
        if number and len(both) == ends.seeds and (one := _over(both)) is not None:
            found[number] = one
    if not found:
        return []
    adjusted = ratios.holm([one.p for one in found.values()])
    found = {n: dataclasses.replace(one, p=p) for (n, one), p in zip(found.items(), adjusted, strict=True)}
    same = sum(one.verdict == EQUAL for one in found.values())
    number, most = max(found.items(), key=lambda item: abs(item[1].mean))
    apart = {n: one for n, one in found.items() if one.verdict not in (EQUAL, UNDECIDED)}
    deviations = [f"{one.verdict} after epoch {n}, {_points(one)}" for n, one in apart.items()]
    text = (
        f"during training: {EQUAL} after {same} of {len(found)} epochs, "
        f"furthest apart after epoch {number}, {_points(most)}"
    )
    return ["; ".join([text, *deviations])]


def _points(one: Difference) -> str:
    interval = f"[{100 * one.low:+.2f}, {100 * one.high:+.2f}]"
    return f"{100 * one.mean:+.2f} {interval} points"


def what_of(row: Row) -> str:
    return f"{row.benchmark} ({row.size}, {row.precision}) on {row.dataset}"


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the trainings among ``rows`` by group, of each the last try: numbers of points are a group's own."""
    found: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.recipe:
            found.setdefault(row.group or row.run_id, []).append(row)
    return [counted(mine) for mine in found.values()]


def seeds_apart(rows: Sequence[Row]) -> list[str]:
    """Return the seeds whose trainings have both ended, on different machines or devices, or one of them on several."""
    both = [pair for pair in partners(rows) if all(row.status == FINISHED for row in pair)]
    return [
        str(one.seed)
        for one, other in both
        if machines_apart(one, other) or any("training_seconds" in row.missing for row in (one, other))
    ]


def disturbed(rows: Sequence[Row]) -> list[str]:
    """Return the trainings whose times are not those of an undisturbed machine, and why."""
    found = []
    for row in rows:
        load, share = row.foreign_load or 0.0, row.disturbed_share or 0.0
        why = f"others took {load:.0%} of the CPUs' time" if load > FOREIGN_LOAD else ""
        why = why or f"throttling or other work in {share:.0%} of it"
        if load > FOREIGN_LOAD or share > LEFT_OUT:
            found.append(f"{NAMES[str(row.framework)]}'s seed {row.seed} ({why})")
    return found


def curves(rows: Sequence[Row], folder: Path) -> list[Record]:
    """Return a record for each epoch of each training of ``rows``, whose runs are in ``folder``.

    Without times and energy where the sides of a group ran on different machines, or others disturbed them: a figure
    would compare these.
    """
    found = []
    every = groups(rows)
    apart = {row.group for mine in every if seeds_apart(mine) or disturbed(mine) for row in mine}
    for row in (row for mine in every for row in mine):
        file = Run(folder / "runs" / str(row.run_id)).curve_file(row)
        try:
            epochs = _epochs(file)
        except FileNotFoundError:  # it had not begun to train
            continue
        except Damaged as error:
            warn(f"{row.run_id}: {error}; its curve is left out")
            continue
        common: Record = {"device_name": row.device_name, "point": what_of(row), "id": "", "mode": row.mode}
        common |= {"framework": row.framework, "seed": row.seed, "group": row.group, "run_id": row.run_id}
        seconds = 0.0
        joules: float | None = 0.0  # None from an epoch on whose energy is not known
        for epoch in epochs:
            seconds += epoch.seconds
            if epoch.number:  # the first is before any step
                joules = None if joules is None or epoch.joules is None else joules + epoch.joules
            spent = {"step": epoch.step, "seconds": seconds, "joules": joules or None}
            untimed = row.group in apart or "training_seconds" in row.missing
            spent |= {"seconds": None, "joules": None} if untimed else {}
            losses = {"training_loss": epoch.loss, "held_out_loss": epoch.held_out_loss}
            found.append(common | {"epoch": epoch.number, "top1": epoch.top1} | losses | spent)
    return found


def _epochs(file: Path) -> list[Epoch]:
    """Return the curve in ``file``. Raises FileNotFoundError if there is none, and Damaged."""
    stored = read(file)
    try:
        found = json.loads(stored)
    except ValueError as error:
        raise Damaged(f"{file.name} is damaged: {error}") from error
    return fitting(found, list[Epoch], file.name)


def sides_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    done = [row for row in rows if row.status == FINISHED and row.top1 is not None]
    sides = {name: [row for row in done if row.framework == name] for name in FRAMEWORKS}
    return {name: mine for name, mine in sides.items() if mine}


def mean(rows: Sequence[Row], column: str) -> float | None:
    known = [value for row in rows if (value := getattr(row, column)) is not None]
    return statistics.fmean(known) if len(known) == len(rows) else None


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
