"""Trainings to accuracy: both sides' accuracy, time and energy, and whether their accuracies are equivalent.

One training's accuracy varies with its seed by more than what is asked here, so a verdict needs several seeds, each
trained by both sides from the same weights on the same batches.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duel import recipes
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.comparability import COMPARABLE, FOREIGN_LOAD, LEFT_OUT, machines_apart, partners
from duel.files import Damaged, fitting, read
from duel.record import Row
from duel.report.figure_data import Record
from duel.results import Run
from duel.states import FINISHED
from duel.terminal import Table, warn
from duel.tries import counted

POINT = 0.01  # accuracies within it of each other are equivalent
FEWEST_SEEDS = 5
EQUIVALENT = 0.90  # confidence of the interval that must lie within it: two one-sided tests at 5 % (Schuirmann 1987)
UNTIMED = "no times or energy"
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
    """JAX's held-out top-1 accuracy minus PyTorch's, over seeds: the mean and its 90 % interval, shares of 1."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        if self.low >= -POINT and self.high <= POINT:
            return EQUAL
        if self.low > 0 or self.high < 0:
            return f"{'JAX' if self.mean > 0 else 'PyTorch'} is more accurate"
        return UNDECIDED


def is_training(rows: Sequence[Row]) -> bool:
    return any(row.recipe for row in rows)


def difference(rows: Sequence[Row]) -> Difference | None:
    """Return the difference over seeds; None for fewer than ``FEWEST_SEEDS``, or if a pair is lost or not comparable.

    Leaving that pair out would be choosing among results.
    """
    pairs = [pair for pair in partners(rows) if pair[0].comparable]
    if any(one.comparable != COMPARABLE for one, _ in pairs) or len(pairs) < _planned(rows):
        return None
    return _over([one.top1 - other.top1 for one, other in pairs if one.top1 is not None and other.top1 is not None])


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
    return Difference(mean, mean - half, mean + half, len(apart))


def verdict(rows: Sequence[Row]) -> str:
    """Return the outcome in one sentence."""
    what, sides = _what(rows[0]), _sides(rows)
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
    planned = _planned(rows)
    more = "" if planned >= FEWEST_SEEDS else f" (--seeds {FEWEST_SEEDS})"
    return f"{what}: {reached}; no verdict, {len(pairs)} of {max(planned, FEWEST_SEEDS)} seeds{more}"


def _reached(sides: dict[str, list[Row]]) -> str:
    return ", ".join(f"{NAMES[name]} {_percent(_mean(mine, 'top1'))}" for name, mine in sides.items())


def on_the_way(rows: Sequence[Row], folder: Path) -> list[str]:
    """Return in a sentence whether the two sides' curves agree after each epoch, if there is a verdict on their ends.

    The curves are in the runs in ``folder``; epochs that not all seeds have on both sides are left out. After so many
    epochs, some intervals exclude 0 by chance.
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


def verdicts(rows: Sequence[Row], folder: Path) -> list[str]:
    """Return the outcome of each group of trainings among ``rows``, and after it the figures of both sides.

    Their runs are in ``folder``.
    """
    groups = _groups(rows)
    alike = Counter(_what(mine[0]) for mine in groups)
    found = []
    for mine in groups:
        which = f"{mine[0].group or mine[0].run_id}: " if alike[_what(mine[0])] > 1 else ""
        found += [which + verdict(mine), *_figures(mine), *on_the_way(mine, folder)]
    return found


def _what(row: Row) -> str:
    return f"{row.benchmark} ({row.size}, {row.precision}) on {row.dataset}"


def _figures(rows: Sequence[Row]) -> list[str]:
    found = table(rows)
    sides = [NAMES[name] for name in found.head[1:]]
    texts = [
        f"{name}: {', '.join(f'{side} {cell}' for side, cell in zip(sides, cells, strict=True) if cell)}"
        for name, *cells in found.lines
    ]
    texts += [note for note in found.notes if note.startswith(UNTIMED)]
    return [f"{found.head[0].capitalize()}: {'; '.join(texts)}"] if texts else []


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the trainings among ``rows`` by group, of each the last try: numbers of points are a group's own."""
    found: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.recipe:
            found.setdefault(row.group or row.run_id, []).append(row)
    return [counted(mine) for mine in found.values()]


def table(rows: Sequence[Row]) -> Table:
    """Return both sides beside each other: means over seeds, with the lowest and highest accuracy."""
    rows = counted(rows)
    sides = _sides(rows)
    apart, disturbed = ", ".join(_machines_apart(rows)), ", ".join(_disturbed(rows))
    shown = _LINES if apart or disturbed else _LINES + _OF_MACHINE
    lines = [[text, *(cell(mine) for mine in sides.values())] for text, cell in shown]
    lines = [line for line in lines if any(line[1:])]
    notes = [f"recipe: {rows[0].recipe}"]
    if rows[0].benchmark in BENCHMARKS:  # else of another version
        found = recipes.recipe(str(rows[0].benchmark), str(rows[0].dataset), rows[0].epochs, rows[0].batch_size)
        notes = [f"{notes[0]}; {found.source}", *([f"published aim: {_percent(found.aim)} top-1"] if found.aim else [])]
    notes += list(dict.fromkeys(f"{row.framework}, seed {row.seed}: {row.cause}" for row in rows if row.cause))
    notes += [f"energy: {row.missing['training_joules']}" for row in rows[:1] if "training_joules" in row.missing]
    notes += [f"{UNTIMED}: the sides of seed {apart} ran on different machines or devices"] if apart else []
    notes += [f"{UNTIMED}: disturbed trainings: {disturbed}"] if disturbed else []
    notes += [
        f"damaged: {row.run_id}, row {row.row} does not say how many epochs it trained"
        for mine in sides.values()
        for row in mine
        if row.trained_epochs is None
    ]
    right = list(range(1, 1 + len(sides)))
    return Table(["mean over seeds", *sides], lines, notes, right=right, title=[verdict(rows)])


def _machines_apart(rows: Sequence[Row]) -> list[str]:
    """Return the seeds whose trainings have both ended, on different machines or devices."""
    both = [pair for pair in partners(rows) if all(row.status == FINISHED for row in pair)]
    return [str(one.seed) for one, other in both if machines_apart(one, other)]


def _disturbed(rows: Sequence[Row]) -> list[str]:
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
    groups = _groups(rows)
    apart = {row.group for mine in groups if _machines_apart(mine) or _disturbed(mine) for row in mine}
    for row in (row for mine in groups for row in mine):
        file = Run(folder / "runs" / str(row.run_id)).curve_file(row)
        try:
            epochs = _epochs(file)
        except FileNotFoundError:  # it had not begun to train
            continue
        except Damaged as error:
            warn(f"{row.run_id}: {error}; its curve is left out")
            continue
        common: Record = {"device_name": row.device_name, "point": _what(row), "id": "", "mode": row.mode}
        common |= {"framework": row.framework, "seed": row.seed, "group": row.group, "run_id": row.run_id}
        seconds = 0.0
        joules: float | None = 0.0  # None from an epoch on whose energy is not known
        for epoch in epochs:
            seconds += epoch.seconds
            if epoch.number:  # the first is before any step
                joules = None if joules is None or epoch.joules is None else joules + epoch.joules
            spent = {"step": epoch.step, "seconds": seconds, "joules": joules or None}
            spent |= {"seconds": None, "joules": None} if row.group in apart else {}
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


def _sides(rows: Sequence[Row]) -> dict[str, list[Row]]:
    done = [row for row in rows if row.status == FINISHED and row.top1 is not None]
    sides = {name: [row for row in done if row.framework == name] for name in FRAMEWORKS}
    return {name: mine for name, mine in sides.items() if mine}


def _mean(rows: Sequence[Row], column: str) -> float | None:
    known = [value for row in rows if (value := getattr(row, column)) is not None]
    return statistics.fmean(known) if len(known) == len(rows) else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _range(rows: Sequence[Row]) -> str:
    every = [row.top1 for row in rows if row.top1 is not None]
    return f"{100 * min(every):.2f} to {100 * max(every):.2f} %" if len(every) > 1 else ""


def _with(unit: str, each: Sequence[float], rows: Sequence[Row]) -> str:
    """Return the mean of ``each``; empty unless all ``rows`` have one."""
    return f"{statistics.fmean(each):.4g} {unit}".rstrip() if each and len(each) == len(rows) else ""


def _number(column: str, unit: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: _with(unit, [value for row in rows if (value := getattr(row, column)) is not None], rows)


def _per_epoch(column: str, unit: str) -> Callable[[Sequence[Row]], str]:
    def cell(rows: Sequence[Row]) -> str:
        epochs = [(getattr(row, column), row.trained_epochs) for row in rows]
        return _with(unit, [value / count for value, count in epochs if value and count], rows)

    return cell


def _without_waiting(rows: Sequence[Row]) -> str:
    known = [(row.trained_per_second, row.waiting_share) for row in rows]
    return _with("", [rate / (1 - share) for rate, share in known if rate and share is not None and share < 1], rows)


_LINES: list[tuple[str, Callable[[Sequence[Row]], str]]] = [
    ("trainings", lambda rows: str(len(rows))),
    ("top-1 accuracy", lambda rows: _percent(_mean(rows, "top1"))),
    ("lowest to highest", _range),
    ("top-5 accuracy", lambda rows: _percent(_mean(rows, "top5"))),
    ("held-out loss", _number("held_out_loss", "")),
    ("epochs", _number("trained_epochs", "")),
]
_OF_MACHINE: list[tuple[str, Callable[[Sequence[Row]], str]]] = [  # what the machine decides, too
    ("training time", _number("training_seconds", "s")),
    ("training energy", _number("training_joules", "J")),
    ("time of an epoch", _per_epoch("training_seconds", "s")),
    ("energy of an epoch", _per_epoch("training_joules", "J")),
    ("waiting for data", lambda rows: _percent(_mean(rows, "waiting_share"))),
    ("samples trained on a second", _number("trained_per_second", "")),
    ("the same without waiting", _without_waiting),
    ("time to target", _number("seconds_to_target", "s")),
    ("energy to target", _number("joules_to_target", "J")),
]
