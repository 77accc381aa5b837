"""The same point measured at several times: what another hour would show, too."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from duel.catalogue import CLAIM_PAIRS, CLAIM_SESSIONS, PRESETS, SESSION_SECONDS
from duel.report.pairs import Outcome, Session, changes, claim, in_turn

# What sessions of one point have in common besides ``pair``; where they do not, they are kept apart.
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
    """Of the outcomes ``found``, each of one group, those of the same point together, in order of their first.

    A group without comparable pairs is left out of a ratio that others have, and named. What is of other code,
    versions or switches makes an outcome of its own, and so does a group that was not measured in turn, or by a preset
    that claims nothing.
    """
    points: dict[object, list[Outcome]] = {}
    for place, outcome in enumerate(found):
        points.setdefault(outcome.row.pair if claims(outcome) and outcome.row.pair else place, []).append(outcome)
    return [merged for same in points.values() for merged in _merged(same)]


def claims(outcome: Outcome) -> bool:
    """Whether its pairs may be part of a claim, if only there are enough of them."""
    preset = PRESETS.get(str(outcome.row.preset))
    return preset is not None and preset.pairs >= CLAIM_PAIRS and in_turn(outcome.pairs)


def _merged(same: list[Outcome]) -> list[Outcome]:
    """Of one point: the outcomes of what is alike, and, where there is none, of each group."""
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
    """What is not alike, of both sides: names of columns."""
    return ", ".join(changes([one.pairs[0], other.pairs[0]], ALIKE))


def _together(same: list[Outcome], apart: list[str]) -> Outcome:
    sessions = split([outcome.pairs for outcome in same])
    if len(sessions) < CLAIM_SESSIONS and sum(map(len, sessions)) < CLAIM_PAIRS:
        last = same[-1]
        return Outcome([last.pairs], why=last.why, indicative=last.indicative, apart=apart)
    try:
        return claim(sessions, apart)
    except ValueError as error:  # two sessions of two pairs each, say
        return Outcome(sessions, why=str(error), apart=apart)


def split(groups: Sequence[Session]) -> list[Session]:
    """The pairs of ``groups`` as sessions: what follows within ``SESSION_SECONDS`` on a host is one."""
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
    """Whether ``after`` is of the same session; what has no times that can be read is taken for it."""
    if before[0][0].host != after[0][0].host:
        return False
    end = max((row.ended or row.started or "" for pair in before for row in pair), default="")
    try:
        gap = datetime.fromisoformat(_start(after)) - datetime.fromisoformat(end)
    except (ValueError, TypeError):
        return True
    return gap < timedelta(seconds=SESSION_SECONDS)


def _start(pairs: Session) -> str:
    """UTC, as rows have it: texts of one form sort by time."""
    return min((row.started for pair in pairs for row in pair if row.started), default="")
