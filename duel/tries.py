"""Several tries: which of those at the same planned row counts, and which batch is tried next to find the largest."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from duel.record import Row
from duel.states import FINISHED, SKIPPED

# Why a row may have ended that would have finished otherwise (``duel.status.CAUSES``).
INTERRUPTIONS = ("warned", "told to end", "time limit", "preempted", "infrastructure", "cancelled", "killed")
TOO_LARGE = ("out of memory", "killed")  # why a row ended that does not fit; on a CPU the kernel kills it
MOST_DOUBLINGS = 14
MOST_AHEAD = 16  # times the largest batch that fits, for one that is expected to: plans may leave out much


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


def next_batch(first: int, low: int, high: int, step: int = 1, expected: int = 0) -> int | None:
    """Return the batch to try next, a multiple of ``step``, if ``low`` fits and ``high`` does not (0: unknown).

    Sizes are doubled from ``first`` until one does not fit, or halved until one does; then the interval between is
    halved until it is an eighth of the batch. None if that is reached. If there is a guess of the largest that is
    ``expected`` to fit, what lies a little below it and a little above is tried first.
    """
    least = max(step, low // 8)
    if low and high and high - low <= least:
        return None
    near = min(expected * 15 // 16, MOST_AHEAD * (low or high))
    most = min(high or math.inf, first << MOST_DOUBLINGS)
    if low + least < near < most:
        size = near
    elif near <= low + least < most and low < expected:
        size = low + least
    elif not high:
        size = min(2 * low, first << MOST_DOUBLINGS)
    elif not low:
        size = high // 2
    else:
        size = (low + high) // 2 if high <= 4 * low else math.isqrt(low * high)
    size = _round(size, step)
    return size if low < size else None  # what is known to fit is not tried again


def _round(size: int, step: int) -> int:
    """Return the multiple of ``step`` at or below the first six digits of the binary number ``size``.

    So it has divisors, as microbatches must be, and is within a thirty-second, or a step.
    """
    return (size >> (few := max(0, size.bit_length() - 6)) << few) // step * step


def expected_batch(planned: Mapping[int, int], memory_bytes: int) -> int:
    """Return the largest batch by the line through two plans (bytes by size); 0 without a plan.

    It goes through the two largest that fit, where no memory for no sample counts as one. If none fits, it goes through
    the smallest: short of memory, a compiler recomputes more, so the line through two that are too large is too flat.
    """
    if not planned:
        return 0
    fitting = [plan for plan in sorted(planned.items()) if plan[1] <= memory_bytes]
    (one, its_bytes), (other, more_bytes) = [(0, 0), *(fitting or [min(planned.items())])][-2:]
    each = (more_bytes - its_bytes) / (other - one)
    return int(other + (memory_bytes - more_bytes) / each) if each > 0 else 0
