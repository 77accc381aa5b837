"""The same point measured at several times, which covers what another hour would show."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from duel.catalogue import CLAIM_PAIRS, CLAIM_SESSIONS, PRESETS, SESSION_SECONDS
from duel.report.pairs import Outcome, Session, changes, claim, in_turn

# What sessions of one point have in common besides ``pair``; if it differs, they are kept apart.
ALIKE = (
    "code_sha256",
    "framework_version",
    "python_version",
    "packages_sha256",
    "switches",
    "variables",
    "execution",
    "device_name",
)


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
        merged.append(_together(mine, apart))
    return merged


def _what(outcome: Outcome) -> object:
    return tuple(getattr(row, name) for row in outcome.pairs[0] for name in ALIKE)


def _difference(one: Outcome, other: Outcome) -> str:
    """Return the names of the columns that differ, for both sides."""
    return ", ".join(changes([one.pairs[0], other.pairs[0]], ALIKE))


def _together(same: list[Outcome], apart: list[str]) -> Outcome:
    sessions = split([part for outcome in same for part in outcome.sessions])
    if len(sessions) < CLAIM_SESSIONS and sum(map(len, sessions)) < CLAIM_PAIRS:
        last = same[-1]
        return Outcome([last.pairs], why=last.why, indicative=last.indicative, apart=apart)
    try:
        return claim(sessions, apart)
    except ValueError as error:  # such as two sessions of two pairs each
        return Outcome(sessions, why=str(error), apart=apart)


def split(groups: Sequence[Session]) -> list[Session]:
    """Return the pairs of ``groups`` as sessions: groups within ``SESSION_SECONDS`` of each other on a host are one."""
    sessions: list[Session] = []
    for pairs in sorted(groups, key=_start):
        for session in sessions:
            if _follows(session, pairs):
                session += pairs
                break
        else:
            sessions.append([*pairs])
    return sessions


def _follows(before: Session, after: Session) -> bool:
    """Return whether ``after`` is of the same session; this is assumed if the times cannot be read."""
    if before[0][0].host != after[0][0].host:
        return False
    end = max((row.ended or row.started or "" for pair in before for row in pair), default="")
    try:
        gap = datetime.fromisoformat(_start(after)) - datetime.fromisoformat(end)
    except (ValueError, TypeError):
        return True
    return gap < timedelta(seconds=SESSION_SECONDS)


def _start(pairs: Session) -> str:
    """Return when ``pairs`` started, in UTC as rows have it: texts of one form sort by time."""
    return min((row.started for pair in pairs for row in pair if row.started), default="")
