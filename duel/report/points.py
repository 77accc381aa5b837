"""ratios.csv: a line for each point of a published set, and the tables that are made of these lines alone."""

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec

from duel import files
from duel.catalogue import BENCHMARKS, USE_CASES
from duel.certificate import VERIFIED
from duel.modes import MODES
from duel.report import ratios
from duel.report.pairs import FASTER, Outcome
from duel.table import TABLE_BYTES

NAME = "ratios.csv"
FEWEST_BENCHMARKS = 5  # that a mean is made of
CARRIES = 0.1  # of the logarithm: by so much one benchmark may move a mean before it is named
FIRST_LINES = 10  # of README
SEVERAL = "; "
NOT_ALONE = "*"  # behind a verdict that Holm's correction does not leave
# What makes two lines the same point in two modes.
POINT = (
    *("benchmark", "size", "precision", "use_case", "product", "batch_size", "microbatch", "devices", "nodes"),
    *("scaling", "weights", "target", "device_kind", "device_name"),
)


@dataclass(frozen=True)
class Line:
    """One point of a published set. What is not known, or is no part of it, is empty."""

    benchmark: str
    size: str
    precision: str
    use_case: str
    product: str
    batch_size: int | None
    microbatch: int | None
    devices: int | None
    nodes: int | None
    scaling: str
    weights: str
    mode: str
    target: str
    device_kind: str
    device_name: str
    cpus: int | None  # that a process may use
    jax_version: str
    pytorch_version: str
    first_day: str
    last_day: str
    sessions: int
    pairs: int
    ratio: float | None  # JAX's throughput / PyTorch's
    low: float | None
    high: float | None
    interval: str  # what it covers
    another_low: float | None  # of what one more session may show
    another_high: float | None
    spread: float | None  # standard deviation of the sessions' ratios, relative
    floor: float | None
    p: float | None
    p_holm: float | None  # of all points over sessions in this file
    verdict: str
    jax_throughput: float | None  # the median over processes
    pytorch_throughput: float | None
    throughput_unit: str
    jax_start_seconds: float | None  # until the first step is done
    pytorch_start_seconds: float | None
    break_even_steps: float | None
    proof: str
    far_off: str
    apart: str  # what was measured of this point, too, and is not in its ratio
    why: str  # there is no ratio

    @property
    def short(self) -> str:
        """Ratio, interval and verdict in a cell of a table; what is not over sessions is no verdict."""
        if self.ratio is None:
            return self.verdict.lower()
        figures = f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        if self.another_low is None:
            return f"{figures} {self.interval}"
        return f"{figures} {self.marked.replace(f' {FASTER}', '')}"

    @property
    def marked(self) -> str:
        """The verdict, with a mark where it would not stand among all points of the set."""
        shown = self.verdict.endswith(FASTER)
        return f"{self.verdict}{NOT_ALONE}" if shown and (self.p_holm or 0.0) > 1 - ratios.CONFIDENCE else self.verdict


def lines(found: Sequence[Outcome]) -> list[Line]:
    """Of the outcomes ``found`` over sessions, in their order."""
    chances = [o.found.p for o in found if o.found is not None and not o.found.within]
    adjusted = iter(ratios.holm(chances))
    return [_line(o, next(adjusted) if o.found is not None and not o.found.within else None) for o in found]


def _line(outcome: Outcome, p_holm: float | None) -> Line:
    one, other = outcome.pairs[0]
    found = outcome.found
    sides = [*zip(*outcome.pairs, strict=True)]
    rates = [statistics.median(row.throughput or 0.0 for row in side) or None for side in sides]
    days = sorted(str(row.started)[:10] for side in sides for row in side if row.started) or [""]
    another = (found.another if found else None) or (None, None)
    return Line(
        benchmark=str(one.benchmark),
        size=str(one.size),
        precision=str(one.precision),
        use_case=USE_CASES[one.use_case or 0].name,
        product=one.product or "",
        batch_size=one.batch_size,
        microbatch=one.microbatch,
        devices=one.device_count,
        nodes=one.nodes,
        scaling=one.scaling or "",
        weights=one.weights or "",
        mode=str(one.mode),
        target=str(one.target),
        device_kind=str(one.device_kind),
        device_name=str(one.device_name),
        cpus=one.cpus,
        jax_version=str(one.framework_version),
        pytorch_version=str(other.framework_version),
        first_day=days[0],
        last_day=days[-1],
        sessions=len(outcome.sessions),
        pairs=len(outcome.pairs),
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        interval=outcome.reach,
        another_low=another[0],
        another_high=another[1],
        spread=found.spread if found else None,
        floor=outcome.floor,
        p=found.p if found else None,
        p_holm=p_holm,
        # What one hour shows is no verdict.
        verdict=f"no verdict {outcome.reach}" if found and found.within else outcome.kind,
        jax_throughput=rates[0],
        pytorch_throughput=rates[1],
        throughput_unit=str(one.throughput_unit),
        jax_start_seconds=outcome.starts[0],
        pytorch_start_seconds=outcome.starts[1],
        break_even_steps=outcome.break_even_steps,
        proof=_proof(outcome),
        far_off=SEVERAL.join(outcome.far),
        apart=SEVERAL.join(outcome.apart),
        why=outcome.why,
    )


def _proof(outcome: Outcome) -> str:
    rows = [row for pair in outcome.pairs for row in pair]
    if outcome.barred or any(row.evidence_sha256 is None for row in rows):
        return ""
    sharp = all(row.parity == VERIFIED for row in rows)
    return "each row, and in float64" if sharp else f"each row, as sharp as {outcome.row.precision} rounding"


def write(path: Path, points: Sequence[Line]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Line)])
    writer.writerows(["" if value is None else value for value in asdict(point).values()] for point in points)
    files.write_atomically(path, text.getvalue())


def read(path: Path) -> list[Line]:
    """Raises ValueError where it is not what ``write`` wrote."""
    text = files.read(path, TABLE_BYTES).decode()
    texts = csv.DictReader(io.StringIO(text, newline=""))
    empty = {field.name: None if "None" in str(field.type) else "" for field in fields(Line)}
    known = [empty | {name: value for name, value in line.items() if value} for line in texts]
    return msgspec.convert(known, list[Line], strict=False)


def by_mode(points: Sequence[Line]) -> dict[tuple[object, ...], dict[str, Line]]:
    """The lines of each point in modes that have a name of their own: there is no end to those with single switches."""
    found: dict[tuple[object, ...], dict[str, Line]] = {}
    for line in points:
        if line.mode in MODES:
            found.setdefault(tuple(getattr(line, name) for name in POINT), {})[line.mode] = line
    return found


def summary(points: Sequence[Line], link: str) -> str:
    """The lines that a reader of README wants, as a Markdown table: a line a point, a column a mode."""
    found = by_mode(points)
    modes = sorted({mode for each in found.values() for mode in each})
    first = sorted(found, key=lambda key: _weight(next(iter(found[key].values()))))[:FIRST_LINES]
    return "\n".join(
        [
            f"{where(points)} JAX's throughput as a multiple of PyTorch's, of pairs that are COMPARABLE, with its 95 %",
            f"interval over sessions, and who is faster. {len(first)} of {len(found)} points; the others, and what all",
            f"stand on: [{link}]({link}).",
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


def _weight(line: Line) -> tuple[object, ...]:
    """What comes first: full size, training and inference, on one device, large batches."""
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
    """All of it as a Markdown table, with what it was measured on above it and means below."""
    head = "benchmark | use case | batch | mode | JAX | PyTorch | JAX / PyTorch | another session | floor | verdict"
    return "\n".join(
        [
            where(points),
            "",
            f"| {head} |",
            f"|{'---|' * len(head.split(' | '))}",
            *(_full(line) for line in points),
            *_notes(points),
            *_means(points),
        ]
    )


def where(points: Sequence[Line]) -> str:
    """What was measured on, with what, and when."""
    if not points:
        return "Nothing is published here."
    devices = ", ".join(sorted({f"{line.device_name} ({line.device_kind}, {line.cpus} CPUs)" for line in points}))
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
        yield f"\n`{NOT_ALONE}` shown of this point alone; not among all {tested} points, by Holm's correction."
    said = {line: [text for text in (line.far_off, line.apart) if text] for line in points}
    if any(said.values()):
        yield "\nFar from all others of its side and session, or measured and not in the ratio:\n"
    for line, texts in said.items():
        if texts:
            yield f"- {_what(line).replace(' | ', ', ')}, {line.mode}: {SEVERAL.join(texts)}"


def _means(points: Sequence[Line]) -> Iterator[str]:
    """Geometric means over the benchmarks that have a ratio in each mode of the same size, use case and product.

    Of a benchmark with several points the mean of their logarithms counts once.
    """
    groups: dict[tuple[str, ...], dict[str, dict[str, list[float]]]] = {}
    for line in points:
        if line.ratio is not None and line.mode in MODES:
            devices = f"{line.devices} devices, {line.scaling}" if (line.devices or 1) > 1 else ""
            key = tuple(filter(None, (line.use_case, line.product, devices, line.size, line.precision)))
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
    """With its interval, and without the benchmark that carries it, if one does."""
    found = ratios.estimate(list(logs.values()))
    text = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    without = {name: statistics.fmean(log for n, log in logs.items() if n != name) for name in logs}
    name = max(without, key=lambda name: abs(without[name] - math.log(found.ratio)))
    if abs(without[name] - math.log(found.ratio)) > CARRIES:
        text += f"; without {name} {math.exp(without[name]):.3f}"
    return text
