"""The tidy table behind each figure of a report, made from outcomes over sessions and their lines.

A table is a list of records with the same keys. ``point`` describes a point, ``id`` is its anchor in the page.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from duel.catalogue import FRAMEWORKS, INFERENCE, MANY, USE_CASES
from duel.files import digest
from duel.modes import MODES
from duel.record import Row
from duel.report.pairs import Outcome
from duel.report.points import POINT, Line
from duel.report.waterfall import steps

Record = dict[str, Any]
Curve = list[tuple[int, float]]  # step and loss of each timed block

LATENCIES = ("p50", "p95", "p99")


def tables(found: Sequence[tuple[Outcome, Line]], curve: Callable[[Row], Curve]) -> dict[str, list[Record]]:
    """Return the table of each figure by name; it may be empty. ``curve`` returns the losses of a row."""
    # Single switches have a separate figure.
    named = [(outcome, line, point(line)) for outcome, line in found if line.mode in MODES]
    made = {
        name: [base | record for o, line, base in named for record in make(o, line)] for name, make in _MAKERS.items()
    }
    made["training"] = [record for o, line, _ in named for record in _training(o, line, curve)]
    made["switches"] = list(_switches(found))
    return made


def anchor(line: Line) -> str:
    """Return the anchor of the point and mode of ``line`` in the page of a report."""
    names = (*POINT, "mode", *(["which"] if line.which else []))
    return "p" + digest({name: getattr(line, name) for name in names})


def label(line: Line) -> str:
    """Describe a point, without its mode and device."""
    parts = [line.benchmark if line.size == "full" else f"{line.benchmark} ({line.size})"]
    parts += [line.precision] if line.precision != "fp32" else []
    parts += [f"batch {line.batch_size}"]
    parts += [line.product] if line.product else []
    if (line.devices or 1) > 1:
        parts.append(f"{line.devices} devices, {line.scaling}")
    parts += ["1 device"] if line.is_baseline else []
    parts += filter(None, (line.which, line.besides))
    return ", ".join(parts)


def work(line: Line) -> str:
    """Describe the use case of ``line``."""
    use_case = next(each for each in USE_CASES.values() if each.name == line.use_case)
    return use_case.name if use_case.number == INFERENCE else use_case.meaning


def point(line: Line) -> Record:
    """Return the fields that every record of a point has."""
    names = ("device_name", "benchmark", "size", "precision", "product", "which", "besides", "batch_size", "devices")
    values = {name: getattr(line, name) for name in (*names, "scaling", "mode")} | {"use_case": work(line)}
    return values | {"point": label(line), "id": anchor(line)}


def ratio_records(line: Line) -> Iterator[Record]:
    """Yield a record for each session; what belongs to the point is the same in all of them."""
    if line.ratio is None:
        return
    names = ("ratio", "low", "high", "another_low", "another_high", "floor", "sessions", "pairs", "interval")
    common = {name: getattr(line, name) for name in names} | {"verdict": line.marked, "floor": _floor(line)}
    for number, ratio in enumerate(line.each_session, 1):
        yield common | {"session": number, "session_ratio": ratio}


def _floor(line: Line) -> float | None:
    """Return the noise floor or, if sessions have no two pairs, the farther end of a framework against itself."""
    ends = [
        end
        for framework in FRAMEWORKS
        if (low := getattr(line, f"{framework}_itself_low")) is not None
        for end in (1 / low, getattr(line, f"{framework}_itself_high"))
    ]
    return max(ends, default=None) if line.floor is None else line.floor


def _itself(outcome: Outcome, line: Line) -> Iterator[Record]:
    for framework in FRAMEWORKS:
        ratio, low, high = (getattr(line, f"{framework}_itself{end}") for end in ("", "_low", "_high"))
        if ratio is not None:
            yield {"framework": framework, "ratio": ratio, "low": low, "high": high}


def _throughput(outcome: Outcome, line: Line) -> Iterator[Record]:
    for framework in FRAMEWORKS:
        rate = getattr(line, f"{framework}_throughput")
        if rate is not None and line.ratio is not None:
            yield {"framework": framework, "throughput": rate, "unit": line.throughput_unit}


def _latency(outcome: Outcome, line: Line) -> Iterator[Record]:
    if outcome.row.use_case != INFERENCE:
        return
    for framework, rows in _sides(outcome):
        for percentile in LATENCIES:
            seconds = _median(rows, f"latency_seconds_{percentile}")
            if seconds is not None:
                found = {"framework": framework, "percentile": percentile, "milliseconds": 1e3 * seconds}
                yield found


def _scaling(outcome: Outcome, line: Line) -> Iterator[Record]:
    if outcome.row.use_case not in MANY or line.ratio is None:
        return
    for framework, rows in _sides(outcome):
        found = {"framework": framework, "throughput": _median(rows, "throughput"), "unit": line.throughput_unit}
        found |= {"place": ", ".join(filter(None, (str(line.devices), line.besides)))}
        yield found | {"efficiency": 1.0 if line.devices == 1 else _median(rows, "scaling_efficiency")}


def _start(outcome: Outcome, line: Line) -> Iterator[Record]:
    """Yield the seconds until the first step is done, and those of each later step."""
    if line.ratio is None:
        return
    for framework, rows in _sides(outcome):
        found = {"framework": framework, "start_seconds": getattr(line, f"{framework}_start_seconds")}
        found |= {"step_seconds": _median(rows, "step_seconds_p50"), "break_even_steps": line.break_even_steps}
        yield found


def _parts(outcome: Outcome, line: Line) -> Iterator[Record]:
    """Yield the forward pass, what the backward pass adds to it, and what the optimizer adds to both.

    Compiled parts need not add up to the step; the third may then be 0.
    """
    for framework, rows in _sides(outcome):
        ends = [_median(rows, name) for name in ("forward_seconds", "gradient_seconds", "step_seconds_p50")]
        before = 0.0
        for part, end in zip(("forward", "backward", "optimizer"), ends, strict=True):
            if end is None:
                break
            yield {"framework": framework, "part": part, "milliseconds": 1e3 * max(0.0, end - before)}
            before = end


def _memory(outcome: Outcome, line: Line) -> Iterator[Record]:
    for framework, rows in _sides(outcome):
        peak = _median(rows, "peak_memory_bytes")
        if peak is not None:
            found = {"framework": framework, "mebibytes": peak / 2**20, "kind": rows[0].peak_memory_kind}
            yield found


def _energy(outcome: Outcome, line: Line) -> Iterator[Record]:
    for framework, rows in _sides(outcome):
        joules = _median(rows, "joules_per_item")
        if joules is not None:
            yield {"framework": framework, "joules_per_item": joules, "source": rows[0].energy_source}


def _roofline(outcome: Outcome, line: Line) -> Iterator[Record]:
    """Yield the FLOP/s of a step and the ceilings of the machine: the higher that either side measured."""
    rows = [row for pair in outcome.pairs for row in pair]
    product, copy = (
        max((value for row in rows if (value := getattr(row, name)) is not None), default=None)
        for name in ("matmul_flops_per_second", "copy_bytes_per_second")
    )
    for framework, mine in _sides(outcome):
        flops, seconds = _median(mine, "step_flops"), _median(mine, "step_seconds_p50")
        intensity = _median(mine, "arithmetic_intensity")
        if flops and seconds and intensity and product and copy:
            found = {"framework": framework, "flops_per_second": flops / seconds, "flops_per_byte": intensity}
            yield found | {"product_flops_per_second": product, "copy_bytes_per_second": copy}


def _training(outcome: Outcome, line: Line, curve: Callable[[Row], Curve]) -> Iterator[Record]:
    """Yield the losses of the first process of each side, and the held-out accuracy if the data are real."""
    names = ("device_name", "use_case", "mode", "point", "id")
    common = {name: value for name, value in point(line).items() if name in names}
    for framework, rows in _sides(outcome):
        accuracy = _median(rows, "accuracy")
        for step, loss in curve(rows[0]):
            yield common | {"framework": framework, "step": step, "loss": float(f"{loss:.5g}"), "accuracy": accuracy}


def _switches(found: Sequence[tuple[Outcome, Line]]) -> Iterator[Record]:
    lines = {id(outcome): line for outcome, line in found}
    for step in steps([outcome for outcome, _ in found]):
        names: Record = {"switch": step.switch, "order": step.order}
        names |= {"factor": step.factor.ratio, "low": step.factor.low, "high": step.factor.high}
        yield point(lines[id(step.outcome)]) | names


def _sides(outcome: Outcome) -> Iterator[tuple[str, list[Row]]]:
    """Yield each framework with its rows, if there is a ratio."""
    if outcome.shown:
        yield from zip(FRAMEWORKS, map(list, zip(*outcome.pairs, strict=True)), strict=True)


def _median(rows: Sequence[Row], column: str) -> float | None:
    """Return the median over the processes that know the value, None if none does."""
    known = [value for row in rows if (value := getattr(row, column)) is not None]
    return statistics.median(known) if known else None


# What each figure's records add to ``point``.
_MAKERS: dict[str, Callable[[Outcome, Line], Iterator[Record]]] = {
    "ratios": lambda outcome, line: ratio_records(line),
    "itself": _itself,
    "throughput": _throughput,
    "latency": _latency,
    "scaling": _scaling,
    "start": _start,
    "parts": _parts,
    "memory": _memory,
    "energy": _energy,
    "roofline": _roofline,
}
