"""ratios.csv: a line for each point of a published set, with everything its verdict rests on."""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from duel import files
from duel.catalogue import FRAMEWORKS, MANY, USE_CASES
from duel.certificate import VERIFIED
from duel.comparability import no_figure
from duel.modes import DEFAULT, MODES
from duel.report import ratios
from duel.report.itself import across, itself, surroundings
from duel.report.pairs import FASTER, INDICATIVE, Outcome
from duel.table import TABLE_BYTES, tidy

NAME = "ratios.csv"
SEVERAL = "; "
NOT_ALONE = "*"  # after a verdict that does not survive Holm's correction
NOT_ALONE_MEANS = f"A {NOT_ALONE} after a verdict: significant alone, but not after correction for the whole set (Holm)"
INDICATIVE_MEANS = f"{INDICATIVE}: too few sessions for an interval"
# What makes two lines the same point in two modes.
POINT = (
    *("benchmark", "size", "precision", "use_case", "product", "batch_size", "microbatch", "devices", "nodes"),
    *("scaling", "weights", "target", "device_kind", "device_name", "cpus"),
)


# Columns of rows that a short description of a point tells, and those that it does not.
SHOWN = ("benchmark", "size", "precision", "use_case", "product", "batch_size", "device_count", "scaling")
BESIDES = ("microbatch", "nodes", "weights", "target", "cpus")


def _means(text: str) -> Any:
    """A column of ratios.csv, and what it holds."""
    return field(metadata={"meaning": text})


@dataclass(frozen=True)
class Line:
    """One point of a published set. What is unknown or does not apply is empty."""

    benchmark: str = _means("name in the catalogue")
    size: str = _means("tiny or full")
    precision: str = _means("of products: fp32, tf32, bf16, fp16, framework_default")
    use_case: str = _means("name in the catalogue")
    product: str = _means("what was computed from per-sample gradients")
    batch_size: int | None = _means("samples of a step")
    microbatch: int | None = _means("samples whose gradients are computed at once")
    devices: int | None = _means("devices of the job")
    nodes: int | None = _means("nodes of the job")
    scaling: str = _means("weak or strong, on many devices")
    weights: str = _means("the seed or the file that the initial weights come from")
    mode: str = _means("default, tuned, or default with switches")
    target: str = _means("entry of cluster.yaml")
    device_kind: str = _means("cpu, gpu, tpu or mps")
    device_name: str = _means("name that the device reports")
    cpus: int | None = _means("CPUs available to a process")
    jax_version: str = _means("version of JAX")
    pytorch_version: str = _means("version of PyTorch")
    code: str = _means("the first digits of code_sha256")
    first_day: str = _means("day of the first row")
    last_day: str = _means("day of the last row")
    sessions: int = _means("sessions in the ratio")
    pairs: int = _means("pairs in the ratio")
    ratio: float | None = _means("JAX's throughput / PyTorch's")
    low: float | None = _means("lower end of the ratio's 95 % interval")
    high: float | None = _means("upper end of it")
    interval: str = _means("what the interval covers")
    another_low: float | None = _means("lower end of what one more session may show, 95 %")
    another_high: float | None = _means("upper end of it")
    spread: float | None = _means("standard deviation of the sessions' ratios, relative")
    session_ratios: str = _means("the ratio of each session")
    floor: float | None = _means("noise floor: how far consecutive processes of one side and session differ")
    jax_itself: float | None = _means(
        "JAX against itself: consecutive processes of one session, or another mode with the same switches"
    )
    jax_itself_low: float | None = _means("lower end of its interval")
    jax_itself_high: float | None = _means("upper end of its interval")
    pytorch_itself: float | None = _means("PyTorch against itself, likewise")
    pytorch_itself_low: float | None = _means("lower end of its interval")
    pytorch_itself_high: float | None = _means("upper end of its interval")
    p: float | None = _means("chance of a ratio as far from 1 if there were no difference")
    p_holm: float | None = _means("the same among all points over sessions of its set, by Holm")
    verdict: str = _means("which side is faster, equal within 5 %, undecided, or why there is no verdict")
    jax_throughput: float | None = _means("median over JAX's processes")
    pytorch_throughput: float | None = _means("median over PyTorch's processes")
    throughput_unit: str = _means("unit of both")
    jax_start_seconds: float | None = _means("seconds until JAX's first step is done")
    pytorch_start_seconds: float | None = _means("seconds until PyTorch's first step is done")
    break_even_steps: float | None = _means(
        "steps after which the side that starts slower and runs faster has caught up"
    )
    proof: str = _means("what proves that both sides computed the same")
    far_off: str = _means("processes far from all others of their side and session")
    apart: str = _means("also measured at this point but not in its ratio")
    which: str = _means("which one of a point's lines, if it has several, such as 1 of 2 kept apart")
    besides: str = _means("what tells points apart that read alike without it, such as nodes 2")
    why: str = _means("the reason if there is no ratio")

    @property
    def short(self) -> str:
        """Ratio, interval and verdict for a table cell; without an interval over sessions there is no verdict."""
        if self.ratio is None:
            return self.verdict.lower()
        figures = f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        if self.another_low is None:
            return f"{figures} {self.interval}"
        return f"{figures} {self.marked.replace(f' {FASTER}', '')}"

    @property
    def is_baseline(self) -> bool:
        """Whether it is the one device with which several are compared."""
        return self.devices == 1 and self.use_case in [USE_CASES[number].name for number in MANY]

    @property
    def each_session(self) -> list[float]:
        """The ratio of each session."""
        return list(map(float, filter(None, self.session_ratios.split(SEVERAL))))

    @property
    def marked(self) -> str:
        """The verdict, with a mark if it does not hold among all points of the set."""
        shown = self.verdict.endswith(FASTER)
        return f"{self.verdict}{NOT_ALONE}" if shown and (self.p_holm or 0.0) > 1 - ratios.CONFIDENCE else self.verdict


def legend(points: Sequence[Line]) -> str:
    """Return what the marks of verdicts mean that ``points`` have; empty if they have none."""
    texts = [NOT_ALONE_MEANS] if any(line.marked.endswith(NOT_ALONE) for line in points) else []
    texts += [INDICATIVE_MEANS] if any(line.verdict == INDICATIVE for line in points) else []
    return f"{'; '.join(texts)}." if texts else ""


def lines(found: Sequence[Outcome]) -> list[Line]:
    """Return the lines of the outcomes ``found`` over sessions, in their order."""
    chances = [o.found.p for o in found if o.found is not None and not o.found.within]
    adjusted = iter(ratios.holm(chances))
    default = {_point(o): o for o in found if o.found is not None and o.row.mode == DEFAULT}
    texts = [{"which": one, "besides": other} for one, other in zip(_which(found), _besides(found), strict=True)]
    return [
        _line(o, next(adjusted) if o.found is not None and not o.found.within else None, default.get(_point(o)), **told)
        for o, told in zip(found, texts, strict=True)
    ]


def _which(found: Sequence[Outcome]) -> list[str]:
    """Number the outcomes of one point and mode, if there are several: other code or versions, or no claim."""
    names = ["device_count" if name == "devices" else name for name in (*POINT, "mode")]
    keys = [tuple(getattr(outcome.row, name) for name in names) for outcome in found]
    counts, seen = Counter(keys), Counter[tuple[object, ...]]()
    texts = []
    for key in keys:
        seen[key] += 1
        texts.append(f"{seen[key]} of {counts[key]} kept apart" if counts[key] > 1 else "")
    return texts


def _besides(found: Sequence[Outcome]) -> list[str]:
    """Return what tells outcomes apart that a short description of their points does not, such as '2 nodes'."""
    keys = [tuple(getattr(o.row, name) for name in (*SHOWN, "device_name")) for o in found]
    values: dict[tuple[object, ...], set[object]] = {}
    for key, outcome in zip(keys, found, strict=True):
        for name in BESIDES:
            values.setdefault((key, name), set()).add(getattr(outcome.row, name))
    return [
        ", ".join(f"{name} {getattr(o.row, name)}" for name in BESIDES if len(values[key, name]) > 1)
        for key, o in zip(keys, found, strict=True)
    ]


def _point(outcome: Outcome) -> tuple[object, ...]:
    """Return what an outcome has in common with those of the same point in other modes."""
    names = ("device_name", "target", "weights", "device_count", "nodes", "scaling")
    what = ("benchmark", "size", "precision", "use_case", "product", "batch_size", "microbatch")
    return (*surroundings(outcome.pairs[0]), *(getattr(outcome.row, name) for name in (*names, *what)))


def _line(outcome: Outcome, p_holm: float | None, default: Outcome | None, **told: Any) -> Line:
    one, other = outcome.pairs[0]
    found = outcome.found
    sides = [*zip(*outcome.pairs, strict=True)]
    rates = [
        None if any(map(no_figure, side)) else statistics.median(row.throughput or 0.0 for row in side)
        for side in sides
    ]
    days = sorted(str(row.started)[:10] for side in sides for row in side if row.started) or [""]
    another = (found.another if found else None) or (None, None)
    return Line(
        benchmark=str(one.benchmark),
        size=one.size or "",
        precision=one.precision or "",
        use_case=USE_CASES[one.use_case or 0].name,
        product=one.product or "",
        batch_size=one.batch_size,
        microbatch=one.microbatch,
        devices=one.device_count,
        nodes=one.nodes,
        scaling=one.scaling or "",
        weights=one.weights or "",
        mode=one.mode or "",
        target=one.target or "",
        device_kind=one.device_kind or "",
        device_name=one.device_name or "",
        cpus=one.cpus,
        jax_version=one.framework_version or "",
        pytorch_version=other.framework_version or "",
        code=str(one.code_sha256 or "")[:12],
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
        session_ratios=SEVERAL.join(f"{ratio:.6g}" for ratio in outcome.session_ratios) if found else "",
        floor=outcome.floor,
        **_itself(outcome, default),
        p=found.p if found else None,
        p_holm=p_holm,
        # Too few sessions make no verdict.
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
        **told,
        why=outcome.why,
    )


def _itself(outcome: Outcome, default: Outcome | None) -> dict[str, Any]:
    """Return each framework against itself: within sessions or, if these have one pair each, against ``default``."""
    found = {one.framework: one.found for one in itself(outcome.sessions)} if outcome.found else {}
    if outcome.found and default is not None and default is not outcome:
        for place, framework in enumerate(FRAMEWORKS):
            sides = [[[pair[place] for pair in session] for session in each.sessions] for each in (outcome, default)]
            if framework not in found and (same := across(sides[0], sides[1], framework)):
                found[framework] = same.found
    columns: dict[str, Any] = {}
    for framework in FRAMEWORKS:
        one = found.get(framework)
        columns[f"{framework}_itself"] = one.ratio if one else None
        columns[f"{framework}_itself_low"] = one.low if one else None
        columns[f"{framework}_itself_high"] = one.high if one else None
    return columns


def _proof(outcome: Outcome) -> str:
    rows = [row for pair in outcome.pairs for row in pair]
    if outcome.barred or any(row.evidence_sha256 is None for row in rows):
        return ""
    sharp = all(row.parity == VERIFIED for row in rows)
    return "each row, and in float64" if sharp else f"each row, as sharp as {outcome.row.precision} rounding"


def write(path: Path, points: Sequence[Line]) -> None:
    names = [field.name for field in fields(Line)]
    values = ([getattr(point, name) for name in names] for point in points)
    files.write_atomically(path, tidy([names, *values]))


def read(path: Path) -> list[Line]:
    """Return the lines that ``write`` wrote. Raises ValueError if the file holds anything else."""
    text = files.read(path, TABLE_BYTES).decode()
    texts = csv.DictReader(io.StringIO(text, newline=""))
    empty = {field.name: None if "None" in str(field.type) else "" for field in fields(Line)}
    known = [empty | {name: value for name, value in line.items() if value} for line in texts]
    return msgspec.convert(known, list[Line], strict=False)


def by_mode(points: Sequence[Line]) -> dict[tuple[object, ...], dict[str, Line]]:
    """Return the lines of each point in named modes, without the unlimited ones that turn single switches.

    A point that was measured with other code or versions is there once for each, as modes of one are never compared
    with those of another. The keys begin with the values of ``POINT``.
    """
    found: dict[tuple[object, ...], dict[str, Line]] = {}
    names = (*POINT, "jax_version", "pytorch_version", "code")
    for line in points:
        if line.mode in MODES:
            modes = found.setdefault(tuple(getattr(line, name) for name in names), {})
            modes[line.mode] = max(line, modes.get(line.mode, line), key=preference)
    return found


def preference(line: Line) -> tuple[bool, str]:
    """Return the key that sorts lines of one point so that the last one counts: with a ratio, and then the latest."""
    return line.ratio is not None, line.last_day


def against_itself(points: Sequence[Line], framework: str) -> tuple[int, int]:
    """Return at how many of ``points`` a framework differs from itself (its interval over sessions excludes 1), and for
    how many that is known."""
    known = [line for line in points if getattr(line, f"{framework}_itself") is not None]
    differs = [
        line
        for line in known
        if not getattr(line, f"{framework}_itself_low") <= 1.0 <= getattr(line, f"{framework}_itself_high")
    ]
    return len(differs), len(known)


def told_of_itself(points: Sequence[Line]) -> str:
    """Describe at how many points each framework differs from itself; empty if that is known for neither."""
    texts = []
    for framework, name in (("jax", "JAX"), ("pytorch", "PyTorch")):
        differs, known = against_itself(points, framework)
        if known:
            texts.append(f"{name} differs from itself at {differs} of {known} points")
    return " and ".join(texts)
