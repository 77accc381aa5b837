"""The tables of a published set in Markdown, made from the lines of its ratios.csv alone."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

from duel.catalogue import BENCHMARKS, USE_CASES
from duel.report import ratios
from duel.report.pairs import INDICATIVE
from duel.report.points import POINT, SEVERAL, Line, by_mode, legend, preference, told_of_itself

FEWEST_BENCHMARKS = 5  # in a mean
CARRIES = 0.1  # a benchmark that moves the logarithm of a mean by more than this is named
FIRST_LINES, FIRST_POINTS = 5, 10  # in README's table and in its figure


def summary(points: Sequence[Line], folder: str) -> str:
    """Return README's section on the set in ``folder``: its figure, and a line per point with a column per mode.

    Of a set whose sessions are not all measured, so that no ratio has an interval, only that.
    """
    every = leading(points)
    if all(line.short == INDICATIVE for line in points):
        return (
            f"{_escaped(where(points))} [{folder}]({folder}/README.md) has {len(every)} points so far, each measured "
            "in too few pairs for a ratio with an interval; further sessions are added.\n"
        )
    modes = sorted({mode for each in every for mode in each})
    first = sorted(every, key=lambda each: all(line.ratio is None for line in each.values()))[:FIRST_LINES]
    meaning = legend([line for each in first for line in each.values()])
    return "\n".join(
        [
            f"![JAX / PyTorch, with intervals]({folder}/ratios.svg)",
            "",
            f"{_escaped(where(points))} JAX's throughput as a multiple of PyTorch's, from pairs that are COMPARABLE,",
            f"with its 95 % interval over sessions and the verdict. {len(first)} of {len(every)} points;",
            f"the others, and what they rest on, are in [{folder}]({folder}/README.md); all figures are in",
            f"[{folder}/report/index.html]({folder}/report/index.html), to open in a browser from a checkout",
            f"(`python main.py report --name {folder.rpartition('/')[2]}` also writes each as SVG, PDF and CSV).",
            "",
            _cells("benchmark", "use case", "batch", *modes),
            f"|---|---|---|{'---|' * len(modes)}",
            *(
                _cells(*_what(next(iter(each.values()))), *(each[mode].short if mode in each else "" for mode in modes))
                for each in first
            ),
            *(["", _escaped(meaning)] if meaning else []),
            "",
        ]
    )


def _cells(*texts: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(_escaped, texts))} |"


def _escaped(text: str) -> str:
    """Return ``text`` so that Markdown reads it as text in one cell or line."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def leading(points: Sequence[Line]) -> list[dict[str, Line]]:
    """Return the lines of each point by mode, what a reader wants first, first.

    Of a point that was measured with several versions, these are the lines of the one to prefer.
    """
    found: dict[tuple[object, ...], dict[str, Line]] = {}
    for key, modes in by_mode(points).items():
        point = key[: len(POINT)]
        found[point] = max(modes, found.get(point, modes), key=lambda each: max(map(preference, each.values())))
    return sorted(found.values(), key=lambda modes: _weight(next(iter(modes.values()))))


def _weight(line: Line) -> tuple[object, ...]:
    """Return the sort key: full size first, then training and inference on one device, then large batches."""
    numbers = {use_case.name: number for number, use_case in USE_CASES.items()}
    order = [1, 5, 3, 2, 4]
    return (
        line.size != "full",
        order.index(numbers[line.use_case]),
        -(line.batch_size or 0),
        [*BENCHMARKS, line.benchmark].index(line.benchmark),  # one of another version last
        line.product,
    )


def table(points: Sequence[Line]) -> str:
    """Return all points as Markdown, a table for each device, with what they were measured on above, means below."""
    if not points:  # only trainings
        return where(points)
    names = dict.fromkeys(line.device_name for line in points)
    if len(names) > 1:
        return "\n\n".join(table([line for line in points if line.device_name == name]) for name in names)
    head = ["benchmark", "use case", "batch", "mode", "JAX", "PyTorch", "JAX / PyTorch", "another session"]
    head += ["floor", "verdict"]
    return "\n".join(
        [
            _escaped(where(points)),
            "",
            _cells(*head),
            f"|{'---|' * len(head)}",
            *(_full(line) for line in points),
            *_notes(points),
            *_against_itself(points),
            *_means(points),
        ]
    )


# Of what makes a point: where it was measured.
HERE = ("target", "device_kind", "device_name", "cpus")


def side_by_side(points: Sequence[Line]) -> str:
    """Return the ratios of each point and mode with a column for each device. Nothing is averaged over devices."""
    devices = list(dict.fromkeys(line.device_name for line in points))
    elsewhere = [name for name in POINT if name not in HERE]
    found: dict[tuple[object, ...], dict[str, Line]] = {}
    for line in points:
        cells = found.setdefault(tuple(getattr(line, name) for name in (*elsewhere, "mode")), {})
        cells[line.device_name] = max(line, cells.get(line.device_name, line), key=preference)
    rows = []
    for cells in found.values():
        line = next(iter(cells.values()))
        besides = [text for text in line.besides.split(", ") if not text.startswith(HERE)]
        line = dataclasses.replace(line, which="", besides=", ".join(besides))
        each = [f"{cells[name].short} {cells[name].which}".rstrip() if name in cells else "" for name in devices]
        rows.append(_cells(*_what(line), line.mode, *each))
    head = ["benchmark", "use case", "batch", "mode", *devices]
    return "\n".join([_cells(*head), f"|{'---|' * len(head)}", *rows])


def where(points: Sequence[Line]) -> str:
    """Return what was measured on, with which versions, and when."""
    if not points:
        return "No throughputs are compared here."
    cpus: dict[str, set[str]] = {}
    for line in points:
        cpus.setdefault(f"{line.device_name} ({line.device_kind}", set()).add(str(line.cpus))
    devices = ", ".join(f"{name}, {' or '.join(sorted(each))} CPUs)" for name, each in sorted(cpus.items()))
    versions = ", ".join(
        f"{name} {'/'.join(sorted({getattr(line, f'{name}_version') for line in points}))}"
        for name in ("jax", "pytorch")
    )
    first, last = min(line.first_day for line in points), max(line.last_day for line in points)
    return f"{devices}; {versions}; {first if first == last else f'{first} to {last}'}."


def _what(line: Line) -> list[str]:
    use_case = line.use_case + (f", {line.product}" if line.product else "")
    use_case += f", {devices}" if (devices := _devices(line)) else ""
    use_case += "".join(f", {text}" for text in (line.which, line.besides) if text)
    if line.microbatch and line.microbatch * (line.devices or 1) < (line.batch_size or 0):
        use_case += f", microbatch {line.microbatch}"
    return [f"{line.benchmark} ({line.size}, {line.precision})", use_case, str(line.batch_size)]


def _devices(line: Line) -> str:
    """Return the number of devices in a use case that has many; one is the baseline of its scaling."""
    if (line.devices or 1) > 1:
        return f"{line.devices} devices, {line.scaling}"
    return "1 device" if line.is_baseline else ""


def _full(line: Line) -> str:
    rates = [
        "-" if rate is None else f"{rate:.4g} {line.throughput_unit}"
        for rate in (line.jax_throughput, line.pytorch_throughput)
    ]
    if line.ratio is None:
        figures = ["-", "-", "-", line.why or line.verdict]
    else:
        counts = f"{line.pairs} pairs, {line.interval}"
        figures = [f"{line.ratio:.3f} [{line.low:.3f}, {line.high:.3f}], {counts}"]
        figures += ["-" if line.another_low is None else f"{line.another_low:.3f} to {line.another_high:.3f}"]
        figures += ["-" if line.floor is None else f"{line.floor:.3f}", line.marked]
    return _cells(*_what(line), line.mode, *rates, *figures)


def _notes(points: Sequence[Line]) -> Iterator[str]:
    if meaning := legend(points):
        yield f"\n{_escaped(meaning)}"
    remarks = {line: [text for text in (line.far_off, line.apart) if text] for line in points}
    if any(remarks.values()):
        yield "\nFar from all others of its side and session, or measured and not in the ratio:\n"
    for line, texts in remarks.items():
        if texts:
            yield f"- {_escaped(', '.join([*_what(line), line.mode]))}: {_escaped(SEVERAL.join(texts))}"


def _against_itself(points: Sequence[Line]) -> Iterator[str]:
    if text := told_of_itself(points):
        yield f"\nBy the same intervals over sessions, {text}; chance alone would give 5 %."


def _means(points: Sequence[Line]) -> Iterator[str]:
    """Yield geometric means over the points that have a ratio in each mode of the same size, use case and product.

    A benchmark with several points counts once, by the mean of their logarithms. Versions are never mixed.
    """
    several = len({(line.jax_version, line.pytorch_version) for line in points}) > 1
    groups: dict[str, list[dict[str, Line]]] = {}
    for found in by_mode(points).values():
        if known := {mode: line for mode, line in found.items() if line.ratio is not None}:
            line = next(iter(known.values()))
            versions = f"jax {line.jax_version}, pytorch {line.pytorch_version}" if several else ""
            parts = [line.use_case, line.product, _devices(line), line.size, line.precision, versions]
            groups.setdefault(", ".join(filter(None, parts)), []).append(known)
    texts = []
    for what, every in groups.items():
        modes = dict.fromkeys(mode for known in every for mode in known)
        whole = [known for known in every if len(known) == len(modes)]
        names = sorted({line.benchmark for known in whole for line in known.values()})
        if len(names) >= FEWEST_BENCHMARKS:
            texts.append(f"- {_escaped(what)}, over {', '.join(names)}:")
            texts += [f"  - {mode}: {_mean(_logs([known[mode] for known in whole]))}" for mode in modes]
    if texts:
        yield "\nGeometric means of JAX / PyTorch over benchmarks. The interval is that of benchmarks drawn at random,"
        yield "which these are not: it says how much they differ.\n"
        yield from texts


def _logs(lines: Sequence[Line]) -> dict[str, float]:
    """Return for each benchmark the mean of the logarithms of its ratios."""
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line.benchmark, []).append(math.log(line.ratio or math.nan))
    return {name: statistics.fmean(logs) for name, logs in found.items()}


def _mean(logs: dict[str, float]) -> str:
    """Return the mean with its interval, and without the benchmark that carries it, if one does."""
    found = ratios.estimate(list(logs.values()))
    text = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    without = {name: statistics.fmean(log for n, log in logs.items() if n != name) for name in logs}
    name = max(without, key=lambda name: abs(without[name] - math.log(found.ratio)))
    if abs(without[name] - math.log(found.ratio)) > CARRIES:
        text += f"; without {name} {math.exp(without[name]):.3f}"
    return text
