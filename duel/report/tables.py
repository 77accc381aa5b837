"""Rows side by side: one column for each side or, with many points, one line for each point."""

import statistics
from collections.abc import Sequence
from typing import Any

from duel.catalogue import FRAMEWORKS
from duel.comparability import too_few_blocks
from duel.record import NOT_HERE, Row
from duel.report.pairs import Outcome
from duel.states import FINISHED
from duel.terminal import Table

SHOWN = (
    "status",
    "cause",
    "benchmark",
    "dataset",
    "size",
    "batch_size",
    "product",
    "microbatch",
    "precision",
    "mode",
    "rung",
    "execution",
    "host",
    "device_name",
    "device_id",
    "clock_mhz",
    "device_count",
    "nodes",
    "scaling",
    "throughput",
    "scaling_efficiency",
    "collective_seconds",
    "step_seconds_p50",
    "step_seconds_std",
    "forward_seconds",
    "gradient_seconds",
    "iterations",
    "blocks",
    "left_out_blocks",
    "steady",
    "latency_seconds_mean",
    "latency_seconds_std",
    "latency_seconds_p50",
    "latency_seconds_p95",
    "latency_seconds_p99",
    "latency_calls",
    "compile_seconds",
    "first_step_seconds",
    "cold_start_seconds",
    "warm_start_seconds",
    "peak_memory_bytes",
    "peak_memory_kind",
    "throughput_per_gb",
    "joules_per_item",
    "mean_watts",
    "mfu",
    "bound",
    "learning_rate",
    "loss_first",
    "loss_last",
    "loss_steps",
    "accuracy",
    "parameters",
    "framework_version",
    "python_version",
)
# What tells apart the rows of one run that are not repeats of each other.
POINT = ("product", "batch_size", "device_count")
# Shown only for rows of many devices.
MANY = ("device_count", "nodes")
# Shown if the rows differ in it, and if any row has it.
IF_APART, IF_ANY = ("host", "device_id"), ("rung", "left_out_blocks", "joules_per_item", "mean_watts")
# Derived from the timed blocks.
OF_BLOCKS = ("throughput", "step_seconds_p50", "step_seconds_std", "scaling_efficiency", "throughput_per_gb", "mfu")
LATENCIES = [name for name in SHOWN if name.startswith("latency_seconds")]
UNITS = {
    "throughput": 1.0,
    "step_seconds_p50": 1e3,
    "step_seconds_std": 1e3,
    "peak_memory_bytes": 2.0**-20,
    "collective_seconds": 1e3,
    "forward_seconds": 1e3,
    "gradient_seconds": 1e3,
} | dict.fromkeys(LATENCIES, 1e3)
NAMES = {
    "step_seconds_p50": "step time, median (ms)",
    "step_seconds_std": "step time, std (ms)",
    "forward_seconds": "forward pass alone (ms)",
    "gradient_seconds": "forward and backward (ms)",
    "compile_seconds": "compile time (s)",
    "first_step_seconds": "first step (s)",
    "peak_memory_bytes": "peak memory (MiB)",
    "peak_memory_kind": "peak memory is",
    "cold_start_seconds": "cold start (s)",
    "warm_start_seconds": "warm start (s)",
    "clock_mhz": "clock (MHz)",
    "mfu": "share of measured matmul rate",
    "throughput_per_gb": "throughput per GB",
    "joules_per_item": "energy (J per item)",
    "mean_watts": "power (W)",
    "iterations": "timed steps",
    "blocks": "timed blocks (n)",
    "framework_version": "version",
    "python_version": "Python",
    "device_name": "device",
    "device_count": "devices",
    "collective_seconds": "all-reduce alone (ms)",
    "batch_size": "batch size",
    "latency_calls": "latency calls (n)",
    **{name: f"latency, {name.rpartition('_')[2]} (ms)" for name in LATENCIES},
}
# Shown for each point and side if there are many, under short names; the rest is in results.csv.
SHORT = {
    "step_seconds_p50": "step (ms)",
    "latency_seconds_p50": "p50 (ms)",
    "latency_seconds_p99": "p99 (ms)",
    "scaling_efficiency": "efficiency",
    "collective_seconds": "all-reduce (ms)",
    "first_step_seconds": "first step (s)",
    "peak_memory_bytes": "memory (MiB)",
}
LONGEST = 60  # characters of a value
FRAMEWORKS_FIRST = {name: place for place, name in enumerate(FRAMEWORKS)}


def tables(rows: list[Row], found: list[Outcome]) -> list[Table | str]:
    """Return the tables of the ``rows`` of one group and their outcomes ``found``, with medians over repeats."""
    repeats: dict[tuple[Any, str], dict[Any, Row]] = {}
    for row in sorted(rows, key=lambda row: (row.product or "", row.batch_size or 0)):
        repeats.setdefault((point(row), str(row.framework or row.run_id)), {})[row.repeat] = row  # the last counts
    points: dict[Any, dict[str, Row]] = {}
    for (key, name), each in repeats.items():
        points.setdefault(key, {})[name] = _median([*each.values()])
    rows = [row for sides in points.values() for row in sides.values()]
    names = list(dict.fromkeys(name for sides in points.values() for name in sides))
    names.sort(key=lambda name: FRAMEWORKS_FIRST.get(name, len(FRAMEWORKS)))
    if len(points) == 1:
        return [_facts(list(points.values()), names, SHOWN)]
    varied = varied_of(rows)
    by_point = {point(outcome.row): outcome for outcome in found}
    return [
        _points(points, names, varied, by_point),
        "",
        _details(points, names, varied),
        "",
        _facts(list(points.values()), names, [name for name in SHOWN if name not in (*SHORT, "throughput")]),
    ]


def _median(repeats: Sequence[Row]) -> Row:
    """Return the first of the finished ``repeats`` with the median over them for each figure that all have."""
    done = [row for row in repeats if row.status == FINISHED] or list(repeats[:1])
    figures: dict[str, Any] = {}
    for name in SHOWN:
        values = [value for row in done if isinstance(value := getattr(row, name), int | float)]
        if len(values) == len(done) and not isinstance(values[0], bool):
            median = statistics.median if isinstance(values[0], float) else statistics.median_low
            figures[name] = median(values)
    return done[0].replace(**figures)


def point(row: Row) -> Any:
    """Return what the rows of both sides share; a row may lack what its job finds out, such as a batch size."""
    return tuple(getattr(row, name) for name in POINT) if row.point is None else row.point


def varied_of(rows: Sequence[Row]) -> list[str]:
    """Return which of ``POINT`` differ among ``rows``, ignoring unknown values."""
    return [name for name in POINT if len({getattr(row, name) for row in rows} - {None}) > 1]


def _facts(points: Sequence[dict[str, Row]], names: Sequence[str], shown: Sequence[str]) -> Table:
    """Return a column per side and a line for each quantity of ``shown`` that is the same at all ``points``, with its
    unit; an empty value shows its reason."""
    rows = [row for sides in points for row in sides.values()]
    hidden = [name for name in IF_APART if len({getattr(row, name) for row in rows}) == 1]
    hidden += [name for name in IF_ANY if not any(getattr(row, name) for row in rows)]
    lines = []
    for name in shown:
        cells = []
        for side in names:
            texts = {_cell(name, sides[side]) for sides in points if side in sides}
            cells.append(texts.pop() if len(texts) == 1 else None)
        if name not in hidden and None not in cells and any(cells):
            lines.append([_name(name, rows), *(_shortened(cell or "") for cell in cells)])
    columns = range(1, len(names) + 1)
    return Table(["", *names], lines, folded=columns, right=columns)


def _points(
    points: dict[Any, dict[str, Row]],
    names: Sequence[str],
    varied: Sequence[str],
    found: dict[Any, Outcome],
) -> Table:
    """Return a line per point: the throughput of each side, and the verdict."""
    units = {str(row.throughput_unit) for sides in points.values() for row in sides.values() if row.throughput_unit}
    lines = []
    for key, sides in points.items():
        outcome = found.get(key)
        known = {name: [str(v) for row in sides.values() if (v := getattr(row, name)) is not None] for name in varied}
        line = [(known[name] or ["-"])[0] for name in varied]
        line += [_throughput(sides.get(name)) for name in names]
        if found:
            floor = f"{outcome.floor:.3f}" if outcome and outcome.floor else "-"
            line += [outcome.ratio or "-", floor, outcome.kind] if outcome else ["-", "-", ""]
        lines.append(line)
    head = [*(_short(name) for name in varied), *names]
    head += ["JAX / PyTorch", "floor", "verdict"] if found else []
    notes = [f"Throughput in {', '.join(sorted(units))}."] if units else []
    right = [place for place, name in enumerate(head) if name not in ("product", "verdict")]
    return Table(head, lines, notes, folded=[len(head) - 1] if found else (), right=right)


def _throughput(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.status != FINISHED or row.throughput is None or too_few_blocks(row):
        return too_few_blocks(row) or str(row.status)
    return as_text("throughput", row.throughput, "")


def _details(points: dict[Any, dict[str, Row]], names: Sequence[str], varied: Sequence[str]) -> Table:
    """Return a line for each point and side, with the columns that any of them knows."""
    rows = [sides[name] for sides in points.values() for name in names if name in sides]
    columns = [name for name in SHORT if any(getattr(row, name) is not None for row in rows)]
    lines = []
    for row in rows:
        few = OF_BLOCKS if too_few_blocks(row) else ()
        texts = ["-" if name in few else as_text(name, getattr(row, name), "") or "-" for name in columns]
        at = ["-" if getattr(row, name) is None else str(getattr(row, name)) for name in varied]
        lines.append([*at, str(row.framework), *texts])
    head = [*(_short(name) for name in varied), "framework", *(SHORT[name] for name in columns)]
    return Table(head, lines, right=[n for n, name in enumerate(head) if name not in ("product", "framework")])


def _short(name: str) -> str:
    return "devices" if name == "device_count" else name.removesuffix("_size")


def _name(name: str, rows: list[Row]) -> str:
    if name == "throughput":
        return f"throughput ({rows[0].throughput_unit})"
    return NAMES.get(name, name.replace("_", " "))


def _cell(name: str, row: Row) -> str:
    """Return a quantity of a row as text, or why there is none."""
    if name in MANY and not row.scaling:
        return ""
    if name in OF_BLOCKS and (few := too_few_blocks(row)):
        return f"- ({few})"
    return as_text(name, getattr(row, name), row.missing.get(name, ""))


def as_text(name: str, value: Any, reason: str) -> str:
    if value is None:
        return "" if reason in ("", NOT_HERE) else f"- ({reason})"
    if name in UNITS:
        value = value * UNITS[name]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shortened(cell: str) -> str:
    return cell if len(cell) <= LONGEST else f"{cell[: LONGEST - 1]}…"
