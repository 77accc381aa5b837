"""The records that a report is made from: a published set, or results.csv."""

import csv
import functools
import io
import json
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from duel.errors import UserError
from duel.files import Damaged, fitting, write_atomically
from duel.record import Row
from duel.report import points
from duel.report.figure_data import Curve
from duel.report.pairs import Outcome, outcomes
from duel.report.points import Line
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.table import merge, read_rows, tidy
from duel.terminal import warn

OUTSIDE = "outside.csv"


@dataclass(frozen=True)
class Records:
    """Rows, and the outcomes of their pairs over sessions, each with its line of ratios.csv."""

    name: str
    folder: Path  # where 'runs' is
    rows: list[Row]
    found: list[tuple[Outcome, Line]]
    outside: list[tuple[str, float]] = field(default_factory=list)  # status and device-hours of rows beside a set

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
    found = _records(name, folder, read_rows(folder / "results.csv", strict=False))
    return replace(found, outside=[(one.status, one.device_hours) for one in read_outside(folder)])


@dataclass(frozen=True)
class Outside:
    """A row that was measured on the device of a published set and is no part of it: failed, cancelled, of a search."""

    run_id: str
    row: int
    status: str
    device_hours: float


def read_outside(folder: Path) -> list[Outside]:
    """Return what ``write_outside`` wrote to ``folder``; none if it did not, or if that is damaged, which is said."""
    try:
        texts = csv.DictReader(io.StringIO((folder / OUTSIDE).read_text(), newline=""))
        return msgspec.convert(list(texts), list[Outside], strict=False)
    except FileNotFoundError:
        return []
    except (ValueError, csv.Error) as error:
        warn(f"{folder.name}/{OUTSIDE} is damaged: {error}")
        return []


def write_outside(folder: Path, rows: Iterable[Outside]) -> None:
    write_atomically(folder / OUTSIDE, tidy([[one.name for one in fields(Outside)], *map(astuple, rows)]))


def measured(results: Results, runs: Collection[str] | None = None) -> Records:
    """Return the records of results.csv, brought up to date, of all or some ``runs``. Raises UserError if empty."""
    _curves.cache_clear()  # a live report reads them again
    rows = [row for row in merge(results) if runs is None or row.run_id in runs]
    if not rows:
        raise UserError("no records yet; 'python main.py --benchmark mnist --use_case 1 --paired' makes some")
    return _records("results", results.folder, rows)


def _records(name: str, folder: Path, rows: list[Row]) -> Records:
    found = over_sessions(outcomes(rows))
    return Records(name, folder, rows, list(zip(found, points.lines(found), strict=True)))


@dataclass(frozen=True)
class _Blocks:
    """What is read of a row's timed blocks; only some have a loss."""

    step: list[int | None] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class _Samples:
    """What is read of a line of samples.jsonl."""

    row: int
    blocks: _Blocks = field(default_factory=_Blocks)


@functools.lru_cache(maxsize=1024)
def _curves(run: Path) -> dict[int, Curve]:
    """Return the curve of each row, from samples.jsonl of a published run or metrics.jsonl of any other."""
    if (run / "samples.jsonl").exists():
        return _published_curves(run / "samples.jsonl")
    found: dict[int, Curve] = {}
    events: list[dict[str, Any]] = Results(run.parent.parent).run(run.name).events()[0]
    for event in events:
        if event.get("event") == "block":
            found.setdefault(event["row"], []).extend(_known([(event["step"], event.get("loss"))]))
    return found


def _published_curves(file: Path) -> dict[int, Curve]:
    """Return the curve of each row in ``file``; a line that is damaged is reported and left out."""
    found: dict[int, Curve] = {}
    for number, text in enumerate(file.read_text(errors="replace").splitlines(), 1):
        try:
            samples = fitting(json.loads(text), _Samples, file.name)
        except (ValueError, RecursionError) as error:
            why = error if isinstance(error, Damaged) else f"damaged: {error}"
            warn(f"{file.parent.name}/{file.name}, line {number}: {why}; its losses are left out")
            continue
        found[samples.row] = _known(zip(samples.blocks.step, samples.blocks.loss, strict=False))
    return found


def seconds(row: Row) -> float:
    """Return how long ``row`` took; 0 if its times are not known or, which is reported, cannot be read."""
    if not row.started or not row.ended:
        return 0.0
    try:
        return (datetime.fromisoformat(row.ended) - datetime.fromisoformat(row.started)).total_seconds()
    except (ValueError, TypeError):  # TypeError: one of them has a time zone
        warn(f"{row.run_id}, row {row.row}: damaged: it started {row.started!r} and ended {row.ended!r}")
        return 0.0


def _known(pairs: Any) -> Curve:
    return [(step, loss) for step, loss in pairs if step is not None and loss is not None]
