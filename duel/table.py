"""results.csv: the rows of all runs in one table, with each pair judged. Any process may rebuild this derived file."""

import csv
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from duel import certificate, comparability, files
from duel.catalogue import VALIDATE
from duel.errors import UserError
from duel.files import RUN_ID, Damaged, locked, write_atomically
from duel.record import COLUMNS, Row
from duel.results import Results, by_time
from duel.states import FINISHED, LOST, TERMINAL

if TYPE_CHECKING:  # numpy is loaded only to judge evidence
    from duel.evidence import Evidence

TABLE_BYTES = 1 << 30
EVIDENCE_BYTES = 1 << 28
csv.field_size_limit(8 * files.RECORD_BYTES)  # whatever a row's file can hold can be read back from the table


def read_rows(path: Path, strict: bool = True) -> list[Row]:
    """Return the rows of a CSV file, none if it does not exist. Raises UserError if it is not one of ours.

    A line that is not a row also raises it or, unless ``strict``, becomes a lost row with that cause.
    """
    try:
        data = io.BytesIO(files.read(path, TABLE_BYTES))
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
        raise UserError(f"{path}: damaged: {error}; delete it and run 'python main.py collect'") from error


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
    text = io.StringIO(newline="")
    # All quoted: to readers, a bare carriage return inside a text would otherwise end the line.
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    writer.writerows(row.to_csv() for row in rows)
    write_atomically(path, text.getvalue())


def merge(results: Results, wait: bool = True) -> list[Row]:
    """Bring results.csv up to date with the runs' folders and return its rows.

    Runs whose rows have all ended in the CSV are not read again. Without ``wait`` the call does nothing if another
    process is merging: that one looks again before it is done.
    """
    asked = results.folder / ".results.again"
    rows: list[Row] = []
    while True:
        # First the mark, then the lock: a process that finds the lock taken has left its mark for the holder.
        asked.touch()
        with locked(results.folder / ".results.lock", wait) as held:
            if not held:
                return rows
            asked.unlink(missing_ok=True)
            results.remove_litter()
            rows = _merge(results)
        if not asked.exists():
            return rows
        wait = False  # if the lock is taken by now, its holder finds the mark


def _merge(results: Results) -> list[Row]:
    """Merge; the caller holds the lock."""
    before = read_rows(results.csv, strict=False)
    known: dict[str | None, list[Row]] = {}
    for row in before:
        known.setdefault(row.run_id, []).append(row)
    at_end = TERMINAL - {LOST}  # a lost run may yet report again
    settled = {run_id for run_id, rows in known.items() if all(row.status in at_end for row in rows)}
    if known.pop(None, []):
        settled = set()  # a damaged line may belong to any run
    known |= {run.id: run.rows() for run in results.runs() if run.id not in settled}
    in_order = [row for run_id in sorted(filter(None, known), key=by_time) for row in known[run_id]]
    proved = [with_parity(row, results) for row in in_order if row.use_case != VALIDATE]  # measures nothing
    rows = comparability.judged(proved, lambda row: evidence(row, results))
    if rows != before or not results.csv.exists():
        write_rows(results.csv, rows)
    return rows


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
