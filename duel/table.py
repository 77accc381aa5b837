"""results.csv: the rows of all runs in one table, with each pair judged. Any process may rebuild this derived file."""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from duel import certificate, comparability, files, index
from duel.catalogue import VALIDATE
from duel.errors import UserError
from duel.files import RUN_ID, Damaged, write_atomically
from duel.index import Index, Place
from duel.record import COLUMNS, Row
from duel.results import Results, Run, by_time
from duel.states import FINISHED, LOST, TERMINAL
from duel.status import is_settled

if TYPE_CHECKING:  # numpy is loaded only to judge evidence
    from duel.evidence import Evidence

TABLE_BYTES = 1 << 30
EVIDENCE_BYTES = 1 << 28
AT_END = TERMINAL - {LOST}  # a lost run may yet report again
csv.field_size_limit(8 * files.RECORD_BYTES)  # whatever a row's file can hold can be read back from the table


RESTORE = "restore it from git, or from where it came"
REMAKE = "delete it and run 'python main.py collect'"  # of results.csv, which is made from the runs


def read_rows(path: Path, strict: bool = True, remedy: str = RESTORE) -> list[Row]:
    """Return the rows of a CSV file, none if it does not exist. Raises UserError if it is not one of ours.

    A line that is not a row also raises it or, unless ``strict``, becomes a lost row with that cause. The error ends in
    the ``remedy``.
    """
    try:
        with files.opened(path) as data:
            if (size := os.fstat(data.fileno()).st_size) > TABLE_BYTES:
                raise Damaged(f"{path.name} has {size} bytes; at most {TABLE_BYTES} are allowed")
            reader = csv.reader(io.TextIOWrapper(data, "utf-8", errors="strict" if strict else "replace", newline=""))
            header = next(reader, [])
            if not {"run_id", "row", "missing"} <= set(header):
                raise Damaged("not a table of rows")
            # Another version has other columns, or another order.
            order = None if header == list(COLUMNS) else [header.index(n) if n in header else None for n in COLUMNS]
            return [_row(texts if order is None else _ordered(texts, order), strict) for texts in reader if texts]
    except FileNotFoundError:
        return []
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}; {remedy}") from error


def _ordered(texts: list[str], order: list[int | None]) -> list[str]:
    return ["" if place is None or place >= len(texts) else texts[place] for place in order]


def _row(texts: list[str], strict: bool) -> Row:
    try:
        return Row.from_csv(texts)
    except Damaged as error:
        if strict:
            raise
        found = dict(zip(COLUMNS, texts, strict=False))
        run_id, number = str(found.get("run_id")), str(found.get("row"))
        known = re.fullmatch("[0-9]{1,6}", number)
        return Row(
            run_id=run_id if RUN_ID.fullmatch(run_id) else None,
            row=int(number) if known else None,
            status=LOST,
            cause=f"damaged: results.csv: {error}",
            why="infrastructure",
        )


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write ``rows`` to a CSV file, whole or not at all."""
    write_atomically(path, (HEADER + _text(rows)).decode())


def tidy(lines: Iterable[Iterable[object]]) -> str:
    """Return ``lines`` as CSV for others to read. A bare carriage return, which would end a line, becomes a space."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(
        [value.replace("\r", " ") if isinstance(value, str) else value for value in line] for line in lines
    )
    return text.getvalue()


def _text(rows: Iterable[Row]) -> bytes:
    return _lines(row.to_csv() for row in rows)


def _lines(lines: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    plain, quoted = (csv.writer(text, lineterminator="\n", quoting=how) for how in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    for line in lines:
        # To readers, a bare carriage return outside quotes ends the line, and "minimal" may leave it there.
        (quoted if any("\r" in value for value in line) else plain).writerow(line)
    return text.getvalue().encode()


HEADER = _lines([COLUMNS])


def merge(results: Results, check: bool = False) -> list[Row]:
    """Bring results.csv up to date and return all its rows. ``check`` is as in ``update``."""
    update(results, check=check)
    return read_rows(results.csv, strict=False, remedy=REMAKE)


def rows_of(results: Results, run_ids: Collection[str]) -> list[Row]:
    """Return the rows in results.csv, as it is, of ``run_ids`` and of all runs that share a group with one of them.

    Raises UserError if it is not one of ours.
    """
    with index.opened(results) as (known, table):
        if known.places:
            return [row for run_id in known.related(run_ids) for row in _read(table, known.places[run_id])]
    rows = read_rows(results.csv, strict=False, remedy=REMAKE)
    groups = _groups(row for row in rows if row.run_id in run_ids)
    return [row for row in rows if row.run_id in run_ids or row.group in groups]


@dataclass(frozen=True)
class Update:
    """What an update of results.csv found."""

    rows: list[Row]  # of the runs that were read for it
    states: Mapping[str, int]  # how many of all rows are in which state


def update(results: Results, wait: bool = True, check: bool = False) -> Update:
    """Bring results.csv up to date with the runs' folders.

    Settled runs are not read again unless ``check`` is true. Without ``wait`` the call does nothing if another process
    is merging: that one looks again before it is done.
    """
    asked = results.folder / ".results.again"
    done = Update([], {})
    while True:
        # First the mark, then the lock: a process that finds the lock taken has left its mark for the holder.
        asked.touch()
        with index.locked(results, wait) as held:
            if not held:
                return done
            asked.unlink(missing_ok=True)
            results.remove_litter()
            done = _update(results, check)
        if not asked.exists():
            return done
        wait = False  # if the lock is taken by now, its holder finds the mark


def _update(results: Results, check: bool) -> Update:
    """Update the table and its index; the caller holds the lock."""
    names = results.names()
    runs = set(names)
    with index.opened(results) as (known, table):
        known = Index() if check else known
        settled, proofs = known.settled, index.proofs(results.folder / "parity")
        read = [results.run(run_id) for run_id in names if run_id not in settled]
        planned = {run.id: _planned(run) for run in read}  # before their rows: those of an ended run change no more
        fresh = {run.id: run.rows() for run in read} | ({} if known.places else _removed(results, runs))
        groups = _groups(row for rows in fresh.values() for row in rows)
        others = {
            run_id: _read(table, place)
            for run_id, place in known.places.items()
            if run_id not in fresh and (known.proofs != proofs or not groups.isdisjoint(place.groups))
        }
        found = _judged(fresh | others, runs, results)
        settled |= {run_id for run_id, least in planned.items() if least and _is_whole(fresh[run_id], least)}
        new = {run_id: (_text(rows), _place(rows, run_id in settled)) for run_id, rows in found.items()}
        written = index.rewrite(results, known, table, HEADER, new, proofs)
    return Update([row for run_id in fresh for row in found[run_id]], written.states)


def archived(results: Results) -> dict[str, Path]:
    """Return the archive of each run that is in one (``duel.launch.archive``)."""
    found: dict[str, Path] = {}
    for path in _archives(results):
        found |= {str(row.run_id): path.with_suffix(".tar.gz") for row in _archived_rows(path)}
    return found


def _archives(results: Results) -> list[Path]:
    """Return the tables of all archives."""
    return sorted((results.folder / "archive").glob("*.csv"))


def _archived_rows(path: Path) -> list[Row]:
    """Return the rows in the table of an archive. Raises UserError if it is not one of ours."""
    remedy = f"unpack {path.stem}.tar.gz, which is beside it, into results/runs, then delete both"
    return read_rows(path, strict=False, remedy=remedy)


def _removed(results: Results, runs: Container[str]) -> dict[str, list[Row]]:
    """Return the rows of runs whose folders are gone: those of archives, and what else results.csv has.

    Raises UserError if one of these is not one of ours.
    """
    found: dict[str, dict[int | None, Row]] = {}
    known = [read_rows(results.csv, strict=False, remedy=REMAKE), *map(_archived_rows, _archives(results))]
    for row in (row for rows in known for row in rows):
        if row.run_id and row.run_id not in runs:
            found.setdefault(row.run_id, {})[row.row] = row
    return {run_id: list(rows.values()) for run_id, rows in found.items()}


def _judged(rows: Mapping[str, list[Row]], runs: Container[str], results: Results) -> dict[str, list[Row]]:
    """Return the rows of each run as results.csv has them: without validations, and judged.

    A run that is not among ``runs`` keeps its verdict: its evidence is gone.
    """
    found = {run_id: [row for row in some if row.use_case != VALIDATE] for run_id, some in rows.items()}
    here = [run_id for run_id in sorted(rows, key=by_time) if run_id in runs]
    proved = [with_parity(row, results) for run_id in here for row in found[run_id]]
    found |= {run_id: [] for run_id in here}
    for row in comparability.judged(proved, lambda row: evidence(row, results)):
        found[str(row.run_id)].append(row)
    return found


def _planned(run: Run) -> int:
    """Return how many rows a settled run has at least; 0 for any other."""
    try:
        launch = run.launch()
    except Damaged:
        return 0
    if not is_settled(run.status(), launch):
        return 0
    return len(launch.job.rows()) if launch.job and not launch.job.unknown else 1


def _is_whole(rows: list[Row], least: int) -> bool:
    """Return whether these are all rows of an ended run, each with its end."""
    ended = all(row.status in AT_END and (row.ended or not row.started) for row in rows)
    return ended and len(rows) >= least and [row.row for row in rows] == list(range(len(rows)))


def _place(rows: list[Row], settled: bool) -> Place:
    return Place(0, 0, tuple(sorted(_groups(rows))), Counter(str(row.status) for row in rows), settled)


def _groups(rows: Iterable[Row]) -> set[str]:
    return {row.group for row in rows if row.group is not None}


def _read(table: BinaryIO, place: Place) -> list[Row]:
    """Return the rows of one run in ``table``."""
    text = index.text(table, place).decode(errors="replace")
    return [_row(texts, strict=False) for texts in csv.reader(io.StringIO(text, newline=""))]


def evidence(row: Row, results: Results) -> "list[Evidence]":
    """Return what ``row``'s program computed from known weights, for each rank.

    Raises ValueError if it is missing or is not what the row recorded.
    """
    from duel.evidence import Evidence, sha256

    run = results.run(str(row.run_id))
    paths = run.evidence_files(row.row or 0)
    if not paths:
        raise ValueError(f"there is none in runs/{run.id}/evidence")
    data = [files.read(path, EVIDENCE_BYTES) for path in paths]
    if sha256(data) != row.evidence_sha256:
        raise ValueError(f"runs/{run.id}/evidence was changed since: its hash is not the row's evidence_sha256")
    return [Evidence.from_bytes(each) for each in data]


def with_parity(row: Row, results: Results) -> Row:
    """Return ``row`` with its parity as of now: a finished row may have been verified since it ended."""
    if row.status != FINISHED or row.parity == certificate.VERIFIED:
        return row
    return row.replace(parity=certificate.verdict(row, results.folder))
