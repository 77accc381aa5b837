"""What a search for the fastest switches tried, and what it found."""

import statistics
from collections.abc import Sequence

from duel import tuned
from duel.catalogue import FRAMEWORKS, TRIAL, USE_CASES
from duel.modes import DEFAULT
from duel.record import Row
from duel.report.tables import as_text
from duel.states import FINISHED, TERMINAL
from duel.terminal import Table
from duel.tuned import Trial


def is_search(rows: Sequence[Row]) -> bool:
    return any(row.preset == TRIAL for row in rows)


def table(rows: Sequence[Row]) -> Table:
    """Return the choice at each point of each side, and the speed and number of measurements of every mode tried."""
    last = {row.point: row for row in rows if row.status in TERMINAL}  # the last rung of each row
    asked = next((str(row.precision) for row in rows if not row.rung), "")
    sides: dict[tuple[int | None, str | None, str], list[Row]] = {}
    for framework in FRAMEWORKS:
        for row in last.values():
            if row.framework == framework:
                sides.setdefault((row.batch_size, row.product, framework), []).append(row)
    title, lines = [], []
    for (*_, framework), tried in sides.items():
        trials = [tuned.trial(row, asked) for row in tried]
        what, mode = _what(tried, asked), tuned.chosen(trials)
        ran = any(trial.throughput for trial in trials)
        count = len({trial.mode for trial in trials})
        title.append(f"{what}: {framework} {mode if ran else 'no figure'}, of {count} tried")
        lines += [[what, framework, *line] for line in _modes(trials, mode)]
    why = [
        (row, row.cause or (tuned.discounted(row, asked) if row.status == FINISHED else "")) for row in last.values()
    ]
    causes = dict.fromkeys(f"{row.framework} {row.mode}: {cause}" for row, cause in why if cause)
    unit = next((row.throughput_unit for row in rows), "")
    head = ["point", "side", str(unit), "x default", "n", "mode"]
    if len({line[0] for line in lines}) == 1:
        head, lines = head[1:], [line[1:] for line in lines]
    right = [place for place, name in enumerate(head) if name not in ("point", "side", "mode")]
    return Table(head, lines, list(causes), right=right, title=title)


def _modes(trials: Sequence[Trial], chosen: str) -> list[list[str]]:
    """Return a line for each mode, the fastest first."""
    rates: dict[str, list[float]] = {}
    for trial in trials:
        rates.setdefault(trial.mode, []).extend([trial.throughput] if trial.throughput else [])
    of = {mode: statistics.fmean(each) if each else 0.0 for mode, each in rates.items()}
    lines = []
    for mode in sorted(of, key=lambda mode: -of[mode]):
        factor = f"{of[mode] / of[DEFAULT]:.3f}" if of[mode] and of.get(DEFAULT) else ""
        rate = as_text("throughput", of[mode], "") if of[mode] else "no figure"
        lines.append([rate, factor, str(len(rates[mode])), f"{mode}, chosen" if mode == chosen and of[mode] else mode])
    return lines


def _what(rows: Sequence[Row], precision: str) -> str:
    row = next((row for row in rows if row.batch_size), rows[0])
    parts = [f"{row.benchmark} ({row.size}, {precision})", USE_CASES[row.use_case or 0].name]
    parts += [row.product] if row.product else []
    return ", ".join([*parts, f"batch size {row.batch_size}"])
