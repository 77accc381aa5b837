"""What is shown of trainings to accuracy: both sides' figures beside each other, and the sentences of a report."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from duel import recipes
from duel.catalogue import BENCHMARKS
from duel.record import Row
from duel.report import learned
from duel.terminal import Table
from duel.tries import counted

UNTIMED, NEVER_THERE = "no times or energy", "no time to target"


def verdicts(rows: Sequence[Row], folder: Path) -> list[str]:
    """Return the outcome of each group of trainings among ``rows``, and after it the figures of both sides.

    Their runs are in ``folder``.
    """
    groups = learned.groups(rows)
    alike = Counter(learned.what_of(mine[0]) for mine in groups)
    found = []
    for mine in groups:
        which = f"{mine[0].group or mine[0].run_id}: " if alike[learned.what_of(mine[0])] > 1 else ""
        found += [which + learned.verdict(mine), *_figures(mine), *learned.on_the_way(mine, folder)]
    return found


def _figures(rows: Sequence[Row]) -> list[str]:
    found = table(rows)
    sides = [learned.NAMES[name] for name in found.head[1:]]
    texts = [
        f"{name}: {', '.join(f'{side} {cell}' for side, cell in zip(sides, cells, strict=True) if cell)}"
        for name, *cells in found.lines
    ]
    texts += [note for note in found.notes if note.startswith((UNTIMED, NEVER_THERE))]
    return [f"{found.head[0].capitalize()}: {'; '.join(texts)}"] if texts else []


def table(rows: Sequence[Row]) -> Table:
    """Return both sides beside each other: means over seeds, with the lowest and highest accuracy."""
    rows = counted(rows)
    sides = learned.sides_of(rows)
    apart, disturbed = ", ".join(learned.seeds_apart(rows)), ", ".join(learned.disturbed(rows))
    shown = _LINES if apart or disturbed else _LINES + _OF_MACHINE
    lines = [[text, *(cell(mine) for mine in sides.values())] for text, cell in shown]
    lines = [line for line in lines if any(line[1:])]
    notes = [f"recipe: {rows[0].recipe}"]
    if rows[0].benchmark in BENCHMARKS:  # else of another version
        found = recipes.recipe(str(rows[0].benchmark), str(rows[0].dataset), rows[0].epochs, rows[0].batch_size)
        notes = [f"{notes[0]}; {found.source}"]
        notes += [f"published aim: {learned.percent(found.aim)} top-1"] if found.aim else []
    notes += list(dict.fromkeys(f"{row.framework}, seed {row.seed}: {row.cause}" for row in rows if row.cause))
    untimed = [row for mine in sides.values() for row in mine if row.target_accuracy and row.seconds_to_target is None]
    notes += [f"{NEVER_THERE}: {r.framework}, seed {r.seed}: {r.missing.get('seconds_to_target')}" for r in untimed]
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
    return Table(["mean over seeds", *sides], lines, notes, right=right, title=[learned.verdict(rows)])


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
    ("top-1 accuracy", lambda rows: learned.percent(learned.mean(rows, "top1"))),
    ("lowest to highest", _range),
    ("top-5 accuracy", lambda rows: learned.percent(learned.mean(rows, "top5"))),
    ("held-out loss", _number("held_out_loss", "")),
    ("epochs", _number("trained_epochs", "")),
]
_OF_MACHINE: list[tuple[str, Callable[[Sequence[Row]], str]]] = [  # what the machine decides, too
    ("training time", _number("training_seconds", "s")),
    ("training energy", _number("training_joules", "J")),
    ("time of an epoch", _per_epoch("training_seconds", "s")),
    ("energy of an epoch", _per_epoch("training_joules", "J")),
    ("waiting for data", lambda rows: learned.percent(learned.mean(rows, "waiting_share"))),
    ("samples trained on a second", _number("trained_per_second", "")),
    ("the same without waiting", _without_waiting),
    ("time to target", _number("seconds_to_target", "s")),
    ("energy to target", _number("joules_to_target", "J")),
]
