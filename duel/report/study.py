"""The records that a report is made of: a published set, or what results.csv has."""

import functools
import json
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
class Study:
    """Rows, and what their pairs come to: each outcome over sessions with its line of ratios.csv."""

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

    def curve(self, row: Row) -> Curve:
        """Step and loss of each timed block of ``row``; none where they were not kept."""
        return _curves(self.folder / "runs" / str(row.run_id)).get(row.row or 0, [])


def published(results: Results, name: str) -> Study:
    """Raises UserError where there is no such set."""
    folder = results.folder / "published" / name
    if not (folder / "results.csv").exists():
        there = sorted(path.parent.name for path in (results.folder / "published").glob("*/results.csv"))
        raise UserError(f"nothing is published as {name!r}; valid: {', '.join(there) or 'none yet'}")
    return stored(name, folder)


def stored(name: str, folder: Path) -> Study:
    """Of the results.csv in ``folder``."""
    return _study(name, folder, read_rows(folder / "results.csv", strict=False))


def measured(results: Results) -> Study:
    """What is in results.csv, after the runs have been looked at. Raises UserError where there is nothing."""
    rows = merge(results)
    if not rows:
        raise UserError("no records yet; 'python main.py --benchmark mnist --use_case 1 --paired' makes some")
    return _study("results", results.folder, rows)


def _study(name: str, folder: Path, rows: list[Row]) -> Study:
    found = over_sessions(outcomes(rows))
    return Study(name, folder, rows, list(zip(found, points.lines(found), strict=True)))


@functools.lru_cache(maxsize=1024)
def _curves(run: Path) -> dict[int, Curve]:
    """Row to its curve: of a published run by samples.jsonl, of another by metrics.jsonl."""
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
