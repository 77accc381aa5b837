"""Why a ratio differs between ``default`` and ``tuned``: how much each switch between them changes it.

Switches interact, so their order matters. Each is measured twice: turned on before all others, and off after them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from duel import modes
from duel.catalogue import BENCHMARKS
from duel.record import CELL, Row
from duel.report.itself import surroundings
from duel.report.pairs import Outcome
from duel.report.ratios import Estimate, change, estimate

FIRST, LAST = "each turned on first", "each turned off last"


@dataclass(frozen=True)
class Step:
    """What turning one switch does to JAX / PyTorch."""

    outcome: Outcome  # in mode default
    switch: str
    order: str  # FIRST or LAST
    factor: Estimate


@dataclass(frozen=True)
class Waterfall:
    """One point measured in all modes of a waterfall, or ``why`` it has none."""

    outcome: Outcome  # in mode default
    ends: tuple[float, float] = (1.0, 1.0)  # JAX / PyTorch in default and in tuned
    whole: Estimate | None = None
    steps: list[Step] = field(default_factory=list)
    why: str = ""


def steps(found: Sequence[Outcome]) -> list[Step]:
    """Return the steps of all points of ``found`` that were measured in the modes of a waterfall."""
    return [step for waterfall in _waterfalls(found) for step in waterfall.steps]


def waterfalls(found: Sequence[Outcome], missing: bool = True) -> list[str]:
    """Return the lines to print for these points; with ``missing``, also why one has no waterfall."""
    return [line for waterfall in _waterfalls(found) if missing or not waterfall.why for line in _lines(waterfall)]


def _waterfalls(found: Sequence[Outcome]) -> list[Waterfall]:
    """Return the waterfalls of ``found``, each of one device and version; of a mode measured twice, the last counts."""
    points: dict[tuple[object, ...], dict[str, Outcome]] = {}
    for outcome in found:
        row = outcome.row
        point = [getattr(row, name) for name in CELL if name not in ("framework", "mode")]
        points.setdefault((*point, row.cpus, *surroundings(outcome.pairs[0])), {})[str(row.mode)] = outcome
    made = [_waterfall(by_mode) for by_mode in points.values()]
    return [waterfall for waterfall in made if waterfall is not None]


def _waterfall(by_mode: dict[str, Outcome]) -> Waterfall | None:
    row = next(iter(by_mode.values())).row
    # A row that failed early does not know its device; another version may know other benchmarks.
    if len(by_mode) == 1 or row.device_kind is None or row.benchmark not in BENCHMARKS:
        return None
    turns = modes.waterfall(str(row.benchmark), row.use_case or 0, str(row.precision), row.device_kind)
    needed = modes.of_waterfall(turns)
    if not turns or not set(needed) <= set(by_mode):  # nothing to turn, or modes requested singly
        return None
    default, tuned = by_mode[modes.DEFAULT], by_mode[modes.TUNED]
    if len(turns) == 1 and _apart(default, tuned) != {turns[0].switch}:  # what a search chose may be another switch
        return None
    for mode in needed:
        if by_mode[mode].found is None:
            return Waterfall(default, why=f"mode {mode}: {by_mode[mode].why}")
    of = {mode: by_mode[mode].units for mode in needed}
    ends = (estimate(of[modes.DEFAULT]).ratio, estimate(of[modes.TUNED]).ratio)
    whole = change(of[modes.DEFAULT], of[modes.TUNED])
    first = [Step(default, t.switch, FIRST, change(of[t.first[0]], of[t.first[1]])) for t in turns]
    last = [Step(default, t.switch, LAST, change(of[t.last[0]], of[t.last[1]])) for t in turns]
    return Waterfall(default, ends, whole, first if len(turns) == 1 else first + last)


def _apart(one: Outcome, other: Outcome) -> set[str]:
    """Return the switches, of either framework, that differ between two modes."""
    sides = zip(one.pairs[0], other.pairs[0], strict=True)
    return {text.partition("=")[0] for before, after in sides for text in _switches(before) ^ _switches(after)}


def _switches(row: Row) -> set[str]:
    return set((row.switches or "").split())


def _lines(found: Waterfall) -> list[str]:
    one = found.outcome
    point = f"{one.benchmark}, {one.use_case}, batch size {one.row.batch_size}"
    if found.whole is None:
        return [f"no waterfall of {point}: {found.why}"]
    before, after = found.ends
    head = f"waterfall of {point}: JAX / PyTorch from {before:.3f} to {after:.3f}, {_factor(found.whole)}"
    if len(found.steps) == 1:
        return [f"{head}, one switch: {found.steps[0].switch}"]
    lines = [head]
    for order in (FIRST, LAST):
        mine = [step for step in found.steps if step.order == order]
        texts = [f"{step.switch} {_factor(step.factor)}{_share(step.factor.ratio, found.whole)}" for step in mine]
        left = found.whole.ratio / math.prod(step.factor.ratio for step in mine)
        lines.append(f"  {order}: {'; '.join(texts)}; left over x {left:.3f}{_share(left, found.whole)}")
    return lines


def _factor(found: Estimate) -> str:
    return f"x {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _share(factor: float, whole: Estimate) -> str:
    """Return the share of the logarithm, so that shares add up; empty if ``whole`` is not shown to be a change."""
    if whole.low <= 1.0 <= whole.high:
        return ""
    return f" ({100 * math.log(factor) / math.log(whole.ratio):.0f} %)"
