"""Why a ratio of ``default`` is another in ``tuned``: by what each switch between them changes it.

Switches interact, and so their order counts. Each is told twice: turned on before all others, and off behind them.
"""

import math
from collections.abc import Sequence

from duel import modes
from duel.record import CELL
from duel.report.pairs import Outcome
from duel.report.ratios import Estimate, change, estimate


def waterfalls(found: Sequence[Outcome]) -> list[str]:
    """Lines for each point of ``found`` that was measured in the modes of a waterfall; of a point that was measured in
    a mode again, the last counts."""
    points: dict[tuple[object, ...], dict[str, Outcome]] = {}
    for outcome in found:
        row = outcome.row
        point = tuple(getattr(row, name) for name in CELL if name not in ("framework", "mode"))
        points.setdefault(point, {})[str(row.mode)] = outcome
    return [line for by_mode in points.values() for line in _waterfall(by_mode)]


def _waterfall(by_mode: dict[str, Outcome]) -> list[str]:
    row = next(iter(by_mode.values())).row
    if row.device_kind is None:  # it failed before it knew
        return []
    turns = modes.waterfall(str(row.benchmark), row.use_case or 0, str(row.precision), row.device_kind)
    needed = modes.of_waterfall(turns)
    if not turns or not set(needed) <= set(by_mode):  # or modes that were asked for singly
        return []
    one = by_mode[modes.DEFAULT]
    point = f"{one.benchmark}, {one.use_case}, batch size {row.batch_size}"
    for mode in needed:
        if by_mode[mode].found is None:
            return [f"no waterfall of {point}: mode {mode}: {by_mode[mode].why}"]
    of = {mode: by_mode[mode].units for mode in needed}
    ends = [estimate(of[mode]).ratio for mode in (modes.DEFAULT, modes.TUNED)]
    whole = change(of[modes.DEFAULT], of[modes.TUNED])
    lines = [f"waterfall of {point}: JAX / PyTorch from {ends[0]:.3f} to {ends[1]:.3f}, {_factor(whole)}"]
    if len(turns) == 1:
        return [f"{lines[0]}, one switch: {turns[0].switch}"]
    for words, turned in (
        ("each turned on first", {turn.switch: turn.first for turn in turns}),
        ("each turned off last", {turn.switch: turn.last for turn in turns}),
    ):
        found = {switch: change(of[without], of[having]) for switch, (without, having) in turned.items()}
        told = [f"{switch} {_factor(one)}{_share(one.ratio, whole)}" for switch, one in found.items()]
        left = whole.ratio / math.prod(one.ratio for one in found.values())
        lines.append(f"  {words}: {'; '.join(told)}; left over x {left:.3f}{_share(left, whole)}")
    return lines


def _factor(found: Estimate) -> str:
    return f"x {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _share(factor: float, whole: Estimate) -> str:
    """Of the logarithm, so that shares add up; nothing where the ``whole`` was not shown to be a change."""
    if whole.low <= 1.0 <= whole.high:
        return ""
    return f" ({100 * math.log(factor) / math.log(whole.ratio):.0f} %)"
