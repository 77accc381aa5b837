"""What has changed since an earlier set: both sides of each point and their ratio, with interval and verdict."""

import math
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duel import ROOT
from duel.catalogue import CLAIM_SESSIONS
from duel.errors import UserError
from duel.report import ratios
from duel.report.figure_data import label, work
from duel.report.itself import level
from duel.report.pairs import Outcome
from duel.report.points import POINT, Line
from duel.report.records import Records, published, stored
from duel.results import Results
from duel.terminal import Table

EQUAL = 1.03  # a change whose whole interval lies within this factor is negligible
QUANTITIES = ("JAX", "PyTorch", "JAX / PyTorch")
FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", f"equal within {round(100 * (EQUAL - 1))} %", "undecided"


@dataclass(frozen=True)
class Change:
    """The factor by which a throughput, or the ratio of both, has changed at a point.

    ``p`` is adjusted for all quantities at all points by Holm's method.
    """

    line: Line
    quantity: str
    factor: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        if self.low >= 1 / EQUAL and self.high <= EQUAL:
            return SAME
        if self.p > 1 - ratios.CONFIDENCE:
            return UNDECIDED
        return FASTER if self.factor > 1 else SLOWER


def earlier(results: Results, where: str, name: str) -> Records:
    """Return the set that ``where`` names: a folder, a published set, or the set ``name`` at a git revision.

    Raises UserError if it is none of these.
    """
    if (Path(where) / "results.csv").is_file():
        return stored(Path(where).name, Path(where))
    if (results.folder / "published" / where / "results.csv").is_file():
        return published(results, where)
    path = f"results/published/{name}/results.csv"
    found = subprocess.run(
        ["git", "show", "--end-of-options", f"{where}:{path}"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode:
        raise UserError(f"--against {where!r}: no folder with a results.csv, no published set, no commit with {path}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results.csv").write_bytes(found.stdout)
        return stored(where, Path(folder))


def changes(before: Records, after: Records) -> tuple[list[Change], list[str]]:
    """Return the changes at points that both sets measured over sessions, and a sentence on each other point.

    Where ``after`` has grown out of ``before``, as a published set does, only what is new is compared with it.
    """
    after = after.since(before)
    old = _newest(before)
    tested: list[tuple[Line, str, float, float, float, float]] = []
    left_out = []
    for key, (outcome, line) in _newest(after).items():
        was = old.pop(key, None)
        if was is None:
            left_out.append(f"{_what(line)}: not in {before.name}")
        elif not (_is_tested(outcome) and _is_tested(was[0])):
            left_out.append(f"{_what(line)}: both sets need {CLAIM_SESSIONS} sessions")
        else:
            tested += [(line, name, *_welch(_logs(was[0], name), _logs(outcome, name))) for name in QUANTITIES]
    left_out += [f"{_what(line)}: not in {after.name}" for _, line in old.values()]
    found = sorted(corrected(tested), key=lambda change: QUANTITIES.index(change.quantity))
    return found, left_out


def corrected(tested: Sequence[tuple[Line, str, float, float, float, float]]) -> list[Change]:
    """Return the changes with their p adjusted for all that is ``tested``: any of it may give a false alarm."""
    adjusted = ratios.holm([p for *_, p in tested])
    return [Change(*one[:-1], p) for one, p in zip(tested, adjusted, strict=True)]


def table(found: Sequence[Change], left_out: Sequence[str], before: str) -> Table:
    lines = []
    for change in found:
        interval = f"[{change.low:.3f}, {change.high:.3f}]"
        lines.append([_what(change.line), change.quantity, f"{change.factor:.3f}", interval, change.verdict])
    counts = {kind: sum(change.verdict == kind for change in found) for kind in (FASTER, SLOWER, SAME, UNDECIDED)}
    verdicts = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    title = f"Against {before}: {verdicts or 'no point can be compared'}"
    return Table(
        ["point", "quantity", "factor", "95 % interval", "verdict"], lines, list(left_out), right=[2], title=[title]
    )


def is_slower(found: Sequence[Change]) -> bool:
    """Return whether a framework became slower anywhere. A fallen ratio does not count: PyTorch may be faster."""
    return any(change.verdict == SLOWER for change in found if change.quantity != QUANTITIES[-1])


def _logs(outcome: Outcome, quantity: str) -> list[float]:
    """Return the logarithm of ``quantity`` for each session."""
    if quantity == QUANTITIES[-1]:
        return [math.log(ratio) for ratio in outcome.session_ratios]
    side = QUANTITIES.index(quantity)
    return [level([pair[side] for pair in session]) for session in outcome.sessions]


def _welch(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the factor, its interval and p by Welch's t-test on logarithms."""
    from scipy import stats

    factor = math.exp(statistics.fmean(after) - statistics.fmean(before))
    if len(set(before)) == 1 == len(set(after)):  # nothing varies, so there is nothing to test
        return factor, factor, factor, float(factor == 1)
    found = stats.ttest_ind(after, before, equal_var=False)
    low, high = found.confidence_interval(ratios.CONFIDENCE)
    return factor, math.exp(low), math.exp(high), float(found.pvalue)


def _newest(records: Records) -> dict[tuple[object, ...], tuple[Outcome, Line]]:
    """Return the outcomes by point: of several that were kept apart, the last one measured over enough sessions."""
    found = sorted(records.found, key=lambda one: (_is_tested(one[0]), one[0].last_start))
    return {tuple(getattr(line, name) for name in (*POINT, "mode")): (outcome, line) for outcome, line in found}


def _is_tested(outcome: Outcome) -> bool:
    return outcome.found is not None and not outcome.found.within


def _what(line: Line) -> str:
    return f"{work(line)}, {label(line)}, {line.mode}"
