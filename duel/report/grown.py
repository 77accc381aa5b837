"""The largest batches that fitted, as 'main.py fit' found them by trying."""

from collections.abc import Sequence

from duel.catalogue import FIT, FRAMEWORKS, USE_CASES
from duel.record import Row
from duel.states import FINISHED
from duel.terminal import Table
from duel.tries import TOO_LARGE, counted


def is_fit(rows: Sequence[Row]) -> bool:
    return any(row.preset == FIT for row in rows)


def table(rows: Sequence[Row]) -> Table:
    """Return, for each side, the largest batch that fitted and the smallest that did not."""
    title, lines, notes = [], [], []
    for framework in FRAMEWORKS:
        mine = counted(row for row in rows if row.framework == framework)
        fits = [row for row in mine if row.status == FINISHED]
        others = [row for row in mine if row.status != FINISHED and row.cause]
        if not mine:
            continue
        row = max(fits or mine, key=lambda one: one.batch_size or 0)
        what = f"{row.benchmark} ({row.size}, {row.precision}), {USE_CASES[row.use_case or 0].name}"
        unclear = [one for one in others if one.why not in TOO_LARGE]
        least = "at least " if unclear else ""  # that one did not fit is not what its failure says
        title.append(f"{what}: {framework} fits {least}{row.batch_size}" if fits else f"{what}: {framework} fits none")
        for one in sorted(mine, key=lambda one: one.batch_size or 0):
            peak = f"{one.peak_memory_bytes / 2**30:.3g} GiB" if one.peak_memory_bytes else ""
            plan = f"{one.planned_bytes / 2**30:.3g} GiB" if one.planned_bytes else ""
            lines.append([framework, str(one.batch_size), str(one.status), peak, plan])
        notes += list(dict.fromkeys(f"{one.framework}, batch {one.batch_size}: {one.cause}" for one in others))
        notes += [f"{framework}: memory is {row.peak_memory_kind}"] if row.peak_memory_kind else []
    return Table(["side", "batch", "", "peak", "planned"], lines, notes, right=[1, 3, 4], title=title)
