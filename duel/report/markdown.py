"""The tables of a published set in Markdown, made from the lines of its ratios.csv alone."""

import math
import statistics
from collections.abc import Iterator, Sequence

from duel.catalogue import BENCHMARKS, USE_CASES
from duel.modes import MODES
from duel.report import ratios
from duel.report.pairs import INDICATIVE
from duel.report.points import NOT_ALONE, SEVERAL, Line, by_mode, told_of_itself

FEWEST_BENCHMARKS = 5  # in a mean
CARRIES = 0.1  # a benchmark that moves the logarithm of a mean by more than this is named
FIRST_LINES, FIRST_POINTS = 5, 10  # in README's table and in its figure


def summary(points: Sequence[Line], folder: str) -> str:
    """Return README's section on the set in ``folder``: its figure, and a line per point with a column per mode.

    Of a set whose sessions are not all measured, so that no ratio has an interval, only that.
    """
    found = by_mode(points)
    if all(line.short == INDICATIVE for line in points):
        return (
            f"{where(points)} [{folder}]({folder}/README.md) has {len(found)} points so far, each measured in too few "
            "pairs for a ratio with an interval; further sessions are added.\n"
        )
    modes = sorted({mode for each in found.values() for mode in each})
    first = leading(points, FIRST_LINES)
    return "\n".join(
        [
            f"![JAX / PyTorch, with intervals]({folder}/ratios.svg)",
            "",
            f"{where(points)} JAX's throughput as a multiple of PyTorch's, from pairs that are COMPARABLE, with its",
            f"95 % interval over sessions and the verdict. {len(first)} of {len(found)} points; the others, and what",
            f"they rest on, are in [{folder}]({folder}/README.md).",
            "",
            f"| benchmark | use case | batch | {' | '.join(modes)} |",
            f"|---|---|---|{'---|' * len(modes)}",
            *(
                f"| {_what(next(iter(found[key].values())))} | "
                f"{' | '.join(found[key][mode].short if mode in found[key] else '' for mode in modes)} |"
                for key in first
            ),
            "",
        ]
    )


def leading(points: Sequence[Line], most: int) -> list[tuple[object, ...]]:
    """Return the ``by_mode`` keys of the ``most`` points that a reader wants first."""
    found = by_mode(points)
    return sorted(found, key=lambda key: _weight(next(iter(found[key].values()))))[:most]


def _weight(line: Line) -> tuple[object, ...]:
    """Return the sort key: full size first, then training and inference on one device, then large batches."""
    numbers = {use_case.name: number for number, use_case in USE_CASES.items()}
    order = [1, 5, 3, 2, 4]
    return (
        line.size != "full",
        order.index(numbers[line.use_case]),
        -(line.batch_size or 0),
        list(BENCHMARKS).index(line.benchmark),
        line.product,
    )


def table(points: Sequence[Line]) -> str:
    """Return all points as Markdown, a table for each device, with what they were measured on above, means below."""
    names = dict.fromkeys(line.device_name for line in points)
    if len(names) > 1:
        return "\n\n".join(table([line for line in points if line.device_name == name]) for name in names)
    head = "benchmark | use case | batch | mode | JAX | PyTorch | JAX / PyTorch | another session | floor | verdict"
    return "\n".join(
        [
            where(points),
            "",
            f"| {head} |",
            f"|{'---|' * len(head.split(' | '))}",
            *(_full(line) for line in points),
            *_notes(points),
            *_against_itself(points),
            *_means(points),
        ]
    )


def where(points: Sequence[Line]) -> str:
    """Return what was measured on, with which versions, and when."""
    if not points:
        return "Nothing is published here."
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


def _what(line: Line) -> str:
    use_case = line.use_case + (f", {line.product}" if line.product else "")
    if (line.devices or 1) > 1:
        use_case += f", {line.devices} devices, {line.scaling}"
    use_case += f", {line.which} kept apart" if line.which else ""
    if line.microbatch and line.microbatch * (line.devices or 1) < (line.batch_size or 0):
        use_case += f", microbatch {line.microbatch}"
    return f"{line.benchmark} ({line.size}, {line.precision}) | {use_case} | {line.batch_size}"


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
    return f"| {' | '.join([_what(line), line.mode, *rates, *figures])} |"


def _notes(points: Sequence[Line]) -> Iterator[str]:
    if any(line.marked.endswith(NOT_ALONE) for line in points):
        tested = sum(line.p_holm is not None for line in points)
        yield f"\n`{NOT_ALONE}` shown for this point alone; not among all {tested} points, by Holm's correction."
    remarks = {line: [text for text in (line.far_off, line.apart) if text] for line in points}
    if any(remarks.values()):
        yield "\nFar from all others of its side and session, or measured and not in the ratio:\n"
    for line, texts in remarks.items():
        if texts:
            yield f"- {_what(line).replace(' | ', ', ')}, {line.mode}: {SEVERAL.join(texts)}"


def _against_itself(points: Sequence[Line]) -> Iterator[str]:
    if text := told_of_itself(points):
        yield f"\nBy the same intervals over sessions, {text}; chance alone would give 5 %."


def _means(points: Sequence[Line]) -> Iterator[str]:
    """Yield geometric means over the benchmarks that have a ratio in each mode of the same size, use case and product.

    A benchmark with several points counts once, by the mean of their logarithms. Versions are never mixed.
    """
    several = len({(line.jax_version, line.pytorch_version) for line in points}) > 1
    groups: dict[tuple[str, ...], dict[str, dict[str, list[float]]]] = {}
    for line in points:
        if line.ratio is not None and line.mode in MODES:
            devices = f"{line.devices} devices, {line.scaling}" if (line.devices or 1) > 1 else ""
            versions = f"jax {line.jax_version}, pytorch {line.pytorch_version}" if several else ""
            key = tuple(filter(None, (line.use_case, line.product, devices, line.size, line.precision, versions)))
            by_name = groups.setdefault(key, {}).setdefault(line.mode, {})
            by_name.setdefault(line.benchmark, []).append(math.log(line.ratio))
    texts = []
    for key, modes in groups.items():
        names = set.intersection(*(set(each) for each in modes.values()))
        if len(names) >= FEWEST_BENCHMARKS:
            texts.append(f"- {', '.join(key)}, over {', '.join(sorted(names))}:")
            texts += [
                f"  - {mode}: {_mean({n: statistics.fmean(each[n]) for n in names})}" for mode, each in modes.items()
            ]
    if texts:
        yield "\nGeometric means of JAX / PyTorch over benchmarks. The interval is that of benchmarks drawn at random,"
        yield "which these are not: it says how much they differ.\n"
        yield from texts


def _mean(logs: dict[str, float]) -> str:
    """Return the mean with its interval, and without the benchmark that carries it, if one does."""
    found = ratios.estimate(list(logs.values()))
    text = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    without = {name: statistics.fmean(log for n, log in logs.items() if n != name) for name in logs}
    name = max(without, key=lambda name: abs(without[name] - math.log(found.ratio)))
    if abs(without[name] - math.log(found.ratio)) > CARRIES:
        text += f"; without {name} {math.exp(without[name]):.3f}"
    return text
