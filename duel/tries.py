"""Several tries at the same planned row: which of them counts."""

from collections.abc import Iterable
from typing import Any

from duel.record import Row
from duel.states import FINISHED, SKIPPED

# Why a row may have ended that would have finished otherwise (``duel.status.CAUSES``).
INTERRUPTIONS = ("warned", "told to end", "time limit", "preempted", "infrastructure", "cancelled", "killed")


def planned_as(row: Row) -> tuple[Any, ...]:
    """Return what rows that are tries at the same planned one have in common."""
    return row.framework, row.point, row.repeat


def interrupted(row: Row) -> bool:
    """Return whether a row ended for a reason that lies not in itself, or is a training, which goes on anyway."""
    may = row.started is None or row.why in INTERRUPTIONS or bool(row.recipe)
    return row.status not in (FINISHED, SKIPPED) and may


def counted(rows: Iterable[Row]) -> list[Row]:
    """Return the last one of several tries at the same planned row, in the order of the first."""
    return list({planned_as(row): row for row in rows}.values())
