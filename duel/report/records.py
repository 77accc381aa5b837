"""The records that a report is made from: a published set, or results.csv."""

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel.errors import UserError
from duel.record import Row
from duel.report import points
from duel.report.figure_data import Curve
from duel.report.pairs import Outcome, outcomes
from duel.report.points import Line
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.table import merge, read_rows


@dataclass(frozen=True)
class Records:
    """Rows, and the outcomes of their pairs over sessions, each with its line of ratios.csv."""

    name: str
    folder: Path  # where 'runs' is
    rows: list[Row]
    found: list[tuple[Outcome, Line]]

    @property
    def damaged(self) -> list[str]:
        """What is wrong with rows that cannot be used."""
        return [f"{row.run_id}, row {row.row}: {row.cause}" for row in self.rows if row.framework is None]

    @property
    def lines(self) -> list[Line]:
        return [line for _, line in self.found]

    def since(self, earlier: "Records") -> "Records":
        """Return what is not in ``earlier``."""
        known = {(row.run_id, row.row) for row in earlier.rows}
        rows = [row for row in self.rows if (row.run_id, row.row) not in known]
        return self if len(rows) == len(self.rows) else _records(self.name, self.folder, rows)

    def curve(self, row: Row) -> Curve:
        """Return step and loss of each timed block of ``row``; none if they were not kept."""
        return _curves(self.folder / "runs" / str(row.run_id)).get(row.row or 0, [])


def published(results: Results, name: str) -> Records:
    """Return the published set ``name``. Raises UserError if there is no such set."""
    folder = results.folder / "published" / name
    if not (folder / "results.csv").exists():
        there = sorted(path.parent.name for path in (results.folder / "published").glob("*/results.csv"))
        raise UserError(f"nothing is published as {name!r}; valid: {', '.join(there) or 'none yet'}")
    return stored(name, folder)


def stored(name: str, folder: Path) -> Records:
    """Return the records of the results.csv in ``folder``."""
    return _records(name, folder, read_rows(folder / "results.csv", strict=False))


def measured(results: Results, runs: Collection[str] | None = None) -> Records:
    """Return the records of results.csv, brought up to date, of all or some ``runs``. Raises UserError if empty."""
    rows = [row for row in merge(results) if runs is None or row.run_id in runs]
    if not rows:
        raise UserError("no records yet; 'python main.py --benchmark mnist --use_case 1 --paired' makes some")
    return _records("results", results.folder, rows)


def _records(name: str, folder: Path, rows: list[Row]) -> Records:
    found = over_sessions(outcomes(rows))
    return Records(name, folder, rows, list(zip(found, points.lines(found), strict=True)))


@functools.lru_cache(maxsize=1024)
def _curves(run: Path) -> dict[int, Curve]:
    """Return the curve of each row, from samples.jsonl of a published run or metrics.jsonl of any other."""
    found: dict[int, Curve] = {}
    if (run / "samples.jsonl").exists():
        for stored in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
            blocks = stored.get("blocks", {})
            found[stored["row"]] = _known(zip(blocks.get("step", []), blocks.get("loss", []), strict=False))
        return found
    events: list[dict[str, Any]] = Results(run.parent.parent).run(run.name).events()[0]
    for event in events:
        if event.get("event") == "block":
            found.setdefault(event["row"], []).extend(_known([(event["step"], event.get("loss"))]))
    return found


def _known(pairs: Any) -> Curve:
    return [(step, loss) for step, loss in pairs if loss is not None]
