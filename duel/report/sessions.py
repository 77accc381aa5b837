"""The same point measured at several times, which shows how much sessions differ."""

import functools
from collections import Counter
from collections.abc import Collection, Sequence

from duel.catalogue import CLAIM_PAIRS, PRESETS
from duel.report.itself import ALIKE, changes
from duel.report.pairs import Outcome, claim, in_turn, outcomes, split
from duel.results import Results
from duel.states import TERMINAL
from duel.table import rows_of


def over_sessions(found: Sequence[Outcome]) -> list[Outcome]:
    """Merge the outcomes ``found``, each of one group, by point, in order of first appearance.

    A group without comparable pairs is left out of a ratio that others have, and named. Groups of other code, versions
    or switches make a separate outcome, and so does a group that was not measured in turn, or with a preset that claims
    no ratio.
    """
    points: dict[object, list[Outcome]] = {}
    for place, outcome in enumerate(found):
        points.setdefault(outcome.row.pair if claims(outcome) and outcome.row.pair else place, []).append(outcome)
    return [merged for same in points.values() for merged in _merged(same)]


def claims(outcome: Outcome) -> bool:
    """Return whether its pairs may be part of a claim, given enough of them."""
    preset = PRESETS.get(str(outcome.row.preset))
    return preset is not None and preset.pairs >= CLAIM_PAIRS and in_turn(outcome.pairs)


def _merged(same: list[Outcome]) -> list[Outcome]:
    """Merge the outcomes of one point that are alike; if none has a ratio, return each group's."""
    usable = [outcome for outcome in same if outcome.shown]
    if not usable:
        return same
    left_out = [f"{outcome.row.run_id}: {outcome.why}" for outcome in same if not outcome.shown]
    alike: dict[object, list[Outcome]] = {}
    for outcome in usable:
        alike.setdefault(_what(outcome), []).append(outcome)
    merged = []
    for mine in alike.values():
        others = [outcome for each in alike.values() if each is not mine for outcome in each]
        apart = left_out + [f"{other.row.run_id}: other {_difference(mine[0], other)}" for other in others]
        merged.append(claim(split([session for outcome in mine for session in outcome.sessions]), apart))
    return merged


def _what(outcome: Outcome) -> object:
    return tuple(getattr(row, name) for row in outcome.pairs[0] for name in ALIKE)


def _difference(one: Outcome, other: Outcome) -> str:
    """Return the names of the columns that differ, for both sides."""
    return ", ".join(changes([one.pairs[0], other.pairs[0]], ALIKE))


def by_run(results: Results, run_ids: Collection[str]) -> dict[str, str]:
    """Return a line for each of ``run_ids`` with the outcome of its pair in results.csv; none while a side has not
    ended.

    Raises ValueError if results.csv is damaged.
    """
    try:
        return _by_run(results, frozenset(run_ids), results.csv.lstat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@functools.lru_cache(maxsize=1)  # 'status --watch' asks every second
def _by_run(results: Results, run_ids: frozenset[str], modified: int) -> dict[str, str]:
    points: dict[str, list[Outcome]] = {}
    for found in outcomes(rows_of(results, run_ids)):
        for run_id in {str(row.run_id) for pair in found.pairs for row in pair}:
            points.setdefault(run_id, []).append(found)
    lines = {}
    for run_id, each in points.items():
        if any(row.status not in TERMINAL for found in each for pair in found.pairs for row in pair):
            continue
        kinds = Counter(" ".join(filter(None, (found.kind, found.reach))) for found in each)
        several = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines[run_id] = each[0].short if len(each) == 1 else f"{len(each)} points: {several}"
    return lines
