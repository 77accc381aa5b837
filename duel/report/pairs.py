"""What pairs of rows come to: the ratio with its interval, the noise floor, a verdict in words."""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duel.catalogue import CLAIM_PAIRS, PRESETS, USE_CASES
from duel.comparability import COMPARABLE, NOT_COMPARABLE, partners
from duel.record import Row
from duel.report.ratios import Estimate, differs, estimate, noise_floor
from duel.results import Results
from duel.states import TERMINAL
from duel.table import read_rows

# What all repeats of one side have in common.
UNCHANGED = (
    "cell",
    "framework_version",
    "python_version",
    "packages_sha256",
    "switches",
    "variables",
    "execution",
    "device_id",
)
FEWEST_BENCHMARKS = 3  # that a mean is made of


@dataclass(frozen=True)
class Outcome:
    """One planned point of a pair: what was found of how fast JAX is, as a multiple of PyTorch.

    ``found`` and ``floor`` are None where no ratio is to be claimed; ``why`` says for what reason then, ``barred``
    whether that is because the pairs are not comparable. Comparable pairs that are too few for a claim have an
    ``indicative`` ratio.
    """

    pairs: list[tuple[Row, Row]]
    found: Estimate | None
    floor: float | None
    why: str
    break_even_steps: float | None = None
    indicative: float | None = None
    barred: bool = False

    @property
    def benchmark(self) -> str:
        """With its size and precision."""
        row = self.pairs[0][0]
        return f"{row.benchmark} ({row.size}, {row.precision})"

    @property
    def use_case(self) -> str:
        """With its product where it has one."""
        row = self.pairs[0][0]
        return USE_CASES[row.use_case or 0].name + (f", {row.product}" if row.product else "")

    @property
    def faster(self) -> str:
        """``JAX`` or ``PyTorch``; empty where no difference was shown."""
        if self.found is None or self.floor is None or not differs(self.found, self.floor):
            return ""
        return "JAX" if self.found.ratio > 1 else "PyTorch"

    @property
    def verdict(self) -> str:
        """In a few words, always with what it stands on."""
        if self.found is not None:
            return f"{self.kind}: {self.figures}"
        if self.indicative is not None:
            return f"{self.kind}: JAX / PyTorch {self.indicative:.3g} ({self._processes}, no interval: not a verdict)"
        return f"no ratio: {self.why}"

    @property
    def kind(self) -> str:
        """The verdict without its figures or reasons."""
        if self.found is not None:
            return f"{self.faster} is faster" if self.faster else "no difference shown"
        if self.indicative is not None:
            return "indicative"
        return NOT_COMPARABLE if self.barred else "no ratio"

    @property
    def shown(self) -> bool:
        """Whether there is a ratio, claimed or indicative."""
        return self.found is not None or self.indicative is not None

    @property
    def short(self) -> str:
        """The verdict in one line of a table."""
        if self.shown:
            return f"{self.kind}: JAX / PyTorch {self.ratio}"
        return self.why if self.barred else f"{self.kind}: {self.why}"

    @property
    def ratio(self) -> str:
        """JAX / PyTorch with its interval, where there is one; empty where there is no ratio."""
        if self.found is not None:
            return f"{self.found.ratio:.3f} [{self.found.low:.3f}, {self.found.high:.3f}]"
        return "" if self.indicative is None else f"{self.indicative:.3g}"

    @property
    def basis(self) -> str:
        """What the verdict stands on, or why there is none."""
        if self.found is not None:
            return f"{self.figures.partition(', ')[2]}. {COMPARABLE}"
        if self.indicative is not None:
            return f"indicative: {self._processes}, no interval: not a verdict"
        return self.verdict

    @property
    def _processes(self) -> str:
        """What an indicative ratio stands on."""
        n = len(self.pairs)
        if all(one.run_id == other.run_id for one, other in self.pairs):
            return "one pair, measured in turn" if n == 1 else f"{n} pairs, measured in turn"
        return "one process each, not in turn" if n == 1 else f"{n} processes each, not in turn"

    @property
    def figures(self) -> str:
        assert self.found is not None
        assert self.floor is not None
        found = self.found
        return (
            f"JAX / PyTorch {found.ratio:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f}, {found.n} pairs, "
            f"noise floor {self.floor:.3f}"
        )


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """One for each group and planned point of the judged ``rows`` that both sides have, in their order."""
    points: dict[tuple[str | None, int | None], list[tuple[Row, Row]]] = {}
    for pair in partners(rows):
        points.setdefault((pair[0].group, pair[0].point), []).append(pair)
    return [outcome(sorted(pairs, key=lambda pair: pair[0].repeat or 0)) for pairs in points.values()]


def outcome(pairs: list[tuple[Row, Row]]) -> Outcome:
    """Of the judged ``pairs`` of one point, in the order in which they ran.

    A ratio is made of all of them or of none: to leave out a pair that is not comparable would choose among results.
    """
    if unfinished := [row for pair in pairs for row in pair if row.status not in TERMINAL]:
        sides = dict.fromkeys(f"{row.framework} is {row.status}" for row in unfinished)
        return Outcome(pairs, None, None, f"not all of it has finished: {', '.join(sides)}")
    barred = [one for one, _ in pairs if one.comparable != COMPARABLE]
    if barred:
        words = "; ".join(dict.fromkeys(map(_barred, barred)))
        return Outcome(pairs, None, None, words, barred=any(row.comparable for row in barred))
    if changed := _changed(pairs):
        return Outcome(pairs, None, None, f"{COMPARABLE}, but repeats differ: {', '.join(changed)}")
    if len(pairs) < CLAIM_PAIRS:
        preset = PRESETS.get(str(pairs[0][0].preset))
        more = [p.name for p in PRESETS.values() if p.pairs >= CLAIM_PAIRS]
        alone = "" if preset is None or preset.pairs < CLAIM_PAIRS else "--paired and "
        count = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
        why = f"{COMPARABLE}, but {count}; {CLAIM_PAIRS} are needed: {alone}preset {' or '.join(more)}"
        return Outcome(pairs, None, None, why, indicative=math.exp(statistics.fmean(logs(pairs))))
    return Outcome(pairs, estimate(logs(pairs)), noise_floor(_same_side(pairs)), "", _break_even(pairs))


def _barred(row: Row) -> str:
    """Of a pair that was skipped on both sides nothing is judged."""
    return str(row.comparable) if row.comparable else f"{row.status} on both sides: {row.cause}"


def logs(pairs: list[tuple[Row, Row]]) -> list[float]:
    """Of each pair's ratio."""
    return [math.log((one.throughput or math.nan) / (other.throughput or math.nan)) for one, other in pairs]


def _changed(pairs: list[tuple[Row, Row]]) -> list[str]:
    """What is not the same in all repeats of a side."""
    return [
        f"{name} of {side[0].framework}"
        for side in zip(*pairs, strict=True)
        for name in UNCHANGED
        if len({getattr(row, name) for row in side}) > 1
    ]


def by_run(results: Results) -> dict[str, str]:
    """Run id to a line that says what its pair comes to, as results.csv has it; none where a side has not ended.

    Raises ValueError where results.csv is damaged.
    """
    try:
        return _by_run(results.csv, results.csv.lstat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@functools.lru_cache(maxsize=1)  # 'status --watch' asks each second
def _by_run(csv: Path, modified: int) -> dict[str, str]:
    points: dict[str, list[Outcome]] = {}
    for found in outcomes(read_rows(csv, strict=False)):
        for run_id in {str(row.run_id) for pair in found.pairs for row in pair}:
            points.setdefault(run_id, []).append(found)
    lines = {}
    for run_id, each in points.items():
        if any(row.status not in TERMINAL for found in each for pair in found.pairs for row in pair):
            continue
        kinds = Counter(found.kind for found in each)
        several = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines[run_id] = each[0].short if len(each) == 1 else f"{len(each)} points: {several}"
    return lines


def over_benchmarks(found: Sequence[Outcome]) -> dict[str, Estimate]:
    """The geometric mean of the ratios of several benchmarks, for each use case, size, precision and mode.

    Of a benchmark with several points (batch sizes, products) the mean of their logarithms counts once. Of fewer than
    ``FEWEST_BENCHMARKS`` nothing is said: with two, Student's t is 12.7, and the interval has no end to speak of.
    """
    groups: dict[str, dict[str, list[float]]] = {}
    for outcome in found:
        if outcome.found is not None:
            row = outcome.pairs[0][0]
            name = f"{USE_CASES[row.use_case or 0].name}, {row.size}, {row.precision}, {row.mode}"
            groups.setdefault(name, {}).setdefault(str(row.benchmark), []).append(math.log(outcome.found.ratio))
    means = {name: [statistics.fmean(logs) for logs in each.values()] for name, each in groups.items()}
    return {name: estimate(logs) for name, logs in means.items() if len(logs) >= FEWEST_BENCHMARKS}


def _same_side(pairs: list[tuple[Row, Row]]) -> list[float]:
    """Logarithms of ratios of each side's processes to each other: every two that follow, each used once.

    As many as there are pairs, half of them of each side.
    """
    found = []
    for side in zip(*pairs, strict=True):
        numbers = [row.throughput or math.nan for row in side]
        found += [math.log(a / b) for a, b in zip(numbers[::2], numbers[1::2], strict=False)]
    return found


def _break_even(pairs: list[tuple[Row, Row]]) -> float | None:
    """Steps after which the side that starts more slowly and runs faster has caught up, by medians; None for never."""
    starts, steps = [], []
    for side in zip(*pairs, strict=True):
        starts.append(statistics.median((row.compile_seconds or 0.0) + (row.first_step_seconds or 0.0) for row in side))
        steps.append(statistics.median(row.step_seconds_p50 or math.nan for row in side))
    slower, gain = starts[0] - starts[1], steps[1] - steps[0]
    return slower / gain if gain and slower / gain > 0 else None
