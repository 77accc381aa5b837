"""How long a job takes, from the best that is known: rows measured on its target, those of other devices scaled by
their measured ceilings, or the least that the measuring protocol needs.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from duel.catalogue import BENCHMARKS, INFERENCE, PRESETS, WEAK
from duel.job import Job
from duel.record import Row
from duel.states import FINISHED

MEASURED, SIMILAR, SCALED = "measured here", "similar rows here", "scaled from elsewhere"
ELSEWHERE, LEAST = "as measured elsewhere", "the protocol's least"
UNCERTAIN = (LEAST, ELSEWHERE)  # no time limit can be derived from these
# Starting a process, importing a framework, making and proving the program: what 720 published rows took on two CPU
# cores besides warm-up and blocks, at least.
START_SECONDS = 10.0
# A time limit is asked for with room for compilers, disturbed rows that are measured again, and a slow file system.
MARGIN, MORE_SECONDS = 1.5, 300.0

_SIMILAR = ("framework", "benchmark", "use_case", "size", "precision", "preset")
_EXACT = ("mode", "product", "batch_size", "nodes", "device_count")  # and these


@dataclass(frozen=True)
class Estimate:
    """Seconds, and the source of the least certain part."""

    seconds: float
    source: str

    @property
    def limit_minutes(self) -> float:
        """The time limit to ask for, in whole minutes."""
        return -(-(self.seconds * MARGIN + MORE_SECONDS) // 60)


class Known:
    """What is known of how long rows take."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[object, ...], list[Row]] = defaultdict(list)
        self._ceilings: dict[tuple[str | None, str | None], float] = {}
        self._kinds: dict[str | None, str | None] = {}
        for row in rows:
            if row.status != FINISHED or row.recipe or not row.started or not row.ended:
                continue
            self._rows[_key(row, _SIMILAR)].append(row)
            if row.matmul_flops_per_second:
                self._ceilings[row.target, row.precision] = row.matmul_flops_per_second
            self._kinds[row.target] = row.device_kind

    def job(self, job: Job) -> Estimate:
        """Estimate the time of all rows of ``job``, one after the other."""
        kind = job.device or self._kinds.get(job.target)
        found = [self._row(row, kind) for row in job.rows()]
        sources = (LEAST, ELSEWHERE, SCALED, SIMILAR, MEASURED)
        worst = min((one.source for one in found), key=sources.index)
        return Estimate(sum(one.seconds for one in found), worst)

    def _row(self, row: Row, kind: str | None) -> Estimate:
        size = BENCHMARKS[str(row.benchmark)].sizes[str(row.size)]
        if row.batch_size is None and kind is not None and kind in size.batch_size:
            row = row.replace(batch_size=size.batch_size[kind])
        if row.batch_size is not None and row.scaling == WEAK:  # measured rows have the batch over all devices
            row = row.replace(batch_size=row.batch_size * (row.device_count or 1))
        # What the plan leaves open, such as a batch size that the job chooses, may be anything.
        wanted = {name: value for name in _EXACT if (value := getattr(row, name)) is not None}
        similar = self._rows[_key(row, _SIMILAR)]
        exact = [one for one in similar if all(getattr(one, name) == value for name, value in wanted.items())]
        if here := [one for one in exact if one.target == row.target]:
            return Estimate(statistics.median(map(seconds, here)), MEASURED)
        if here := [one for one in similar if one.target == row.target]:
            return Estimate(max(map(seconds, here)), SIMILAR)
        scaled = [seconds(one) * factor for one in exact if (factor := self._factor(one, row))]
        if scaled or exact:
            found = scaled or [seconds(one) for one in exact]
            return Estimate(max(least(row), *found), SCALED if scaled else ELSEWHERE)
        return Estimate(least(row), LEAST)

    def _factor(self, measured: Row, row: Row) -> float | None:
        """Return how much longer than ``measured``, of another device, ``row`` takes; None unless both ceilings are
        known.
        """
        here, there = (self._ceilings.get((target, row.precision)) for target in (row.target, measured.target))
        return there / here if here and there else None


def seconds(row: Row) -> float:
    """Return how long the process of a finished ``row`` took."""
    started, ended = datetime.fromisoformat(str(row.started)), datetime.fromisoformat(str(row.ended))
    return max(0.0, (ended - started).total_seconds())


def least(row: Row) -> float:
    """Return the least that the protocol lets a row take."""
    preset = PRESETS[str(row.preset)]
    blocks = preset.blocks + (10 if preset.settling_seconds else 0)  # ten without a trend end the warm-up
    calls = preset.block_seconds if row.use_case == INFERENCE else 0.0
    return START_SECONDS + preset.warmup_seconds + blocks * preset.block_seconds + calls


def parts(job: Job, most_seconds: float | None, known: Known) -> list[Job]:
    """Cut ``job`` into jobs of whole points that fit into ``most_seconds`` each, as far as single points do."""
    if most_seconds is None or known.job(job).seconds <= most_seconds:
        return [job]
    points = job.points
    found: list[list[Job]] = []
    for point in points:
        if found and known.job(joined([*found[-1], point])).seconds <= most_seconds and _fits(found[-1], point):
            found[-1].append(point)
        else:
            found.append([point])
    return [joined(some) for some in found]


def joined(points: Sequence[Job]) -> Job:
    """Return the one job of ``points``, which differ in their batch sizes or in their products."""
    sizes = tuple(dict.fromkeys(size for point in points for size in point.batch_sizes))
    products = tuple(dict.fromkeys(product for point in points for product in point.products))
    delay = max(point.delay for point in points)
    return dataclasses.replace(points[0], batch_sizes=sizes, products=products, delay=delay)


def _fits(points: Sequence[Job], another: Job) -> bool:
    """Return whether a job of ``points`` and ``another`` has no further points."""
    return len(joined([*points, another]).points) == len(points) + 1


def _key(row: Row, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in names)
