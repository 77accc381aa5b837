"""The index of results.csv: where each run's lines are, and which runs have nothing more to report.

With it thousands of settled runs cost one small file instead of a folder each. Like the table it is derived: it counts
only beside the very table that it was written for, and without it all runs are read again.
"""

import bisect
import contextlib
import io
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from duel import files
from duel.files import digest, replacing
from duel.record import COLUMNS
from duel.results import Results, by_time

FORMAT = 1
INDEX_BYTES = 1 << 28
COPIED_BYTES = 1 << 20  # at once
TRIES, PAUSE_SECONDS = 5, 0.02  # the table may be replaced meanwhile, a moment before its index is
RULES = ("comparability.py", "evidence.py")
TABLE_COLUMNS = digest({"columns": COLUMNS})


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The lines of one run in the table, and what is known of the run."""

    start: int  # byte at which they begin
    length: int  # bytes
    groups: tuple[str, ...]
    states: dict[str, int]  # how many of its rows are in which state
    settled: bool  # nothing more is expected of it

    @property
    def end(self) -> int:
        return self.start + self.length


class Index(msgspec.Struct, frozen=True):
    """The place of each run, in the table's order. ``table`` is the ``stamp`` of the table that this describes."""

    format: int = FORMAT
    columns: str = TABLE_COLUMNS
    table: tuple[int, int] = (0, 0)
    proofs: str = ""  # a digest of the certificates and rules that the rows were judged by
    places: dict[str, Place] = {}

    @property
    def settled(self) -> set[str]:
        """The runs that need not be read again."""
        return {run_id for run_id, place in self.places.items() if place.settled}

    @property
    def states(self) -> Mapping[str, int]:
        """How many rows of the table are in which state."""
        found: dict[str, int] = {}
        for place in self.places.values():
            for state, count in place.states.items():
                found[state] = found.get(state, 0) + count
        return found

    def related(self, run_ids: Collection[str]) -> list[str]:
        """Return those of ``run_ids`` that are in the table, and all runs that share a group with one of them."""
        groups = {group for run_id in run_ids if run_id in self.places for group in self.places[run_id].groups}
        return [
            run_id for run_id, place in self.places.items() if run_id in run_ids or not groups.isdisjoint(place.groups)
        ]


def _file(results: Results) -> Path:
    return results.folder / ".index.json"


def locked(results: Results, wait: bool) -> AbstractContextManager[object]:
    """Hold the lock of whoever writes the table and its index; ``wait`` is as in ``files.locked``."""
    return files.locked(results.folder / ".results.lock", wait)


def load(results: Results) -> Index:
    """Return the index of results.csv as it is; an empty one if there is none, or none of this very table."""
    with opened(results) as (found, _):
        return found


@contextlib.contextmanager
def opened(results: Results) -> Iterator[tuple[Index, BinaryIO]]:
    """Yield the index and the table that it describes; without them, an empty index and an empty file."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            try:
                table = stack.enter_context(files.opened(results.csv))
                found = msgspec.json.decode(files.read(_file(results), INDEX_BYTES), type=Index)
            except (FileNotFoundError, ValueError, RecursionError):  # damaged, or of another version
                break
            if (found.format, found.columns) != (FORMAT, TABLE_COLUMNS):
                break
            if found.table == stamp(table) and all(
                0 < p.start <= p.end <= found.table[0] for p in found.places.values()
            ):
                yield found, table
                return
        time.sleep(PAUSE_SECONDS)
    yield Index(), io.BytesIO()


def stamp(table: BinaryIO) -> tuple[int, int]:
    """Return what tells one version of a table from another: its size in bytes, and its last change in ns."""
    found = os.fstat(table.fileno())
    return found.st_size, found.st_mtime_ns


def text(table: BinaryIO, place: Place) -> bytes:
    """Return the lines at ``place``."""
    table.seek(place.start)
    return table.read(place.length)


def rewrite(
    results: Results, known: Index, table: BinaryIO, header: bytes, new: Mapping[str, tuple[bytes, Place]], proofs: str
) -> Index:
    """Write results.csv and its index with the ``new`` lines of some runs and the ``known`` ones of all others.

    What has not changed is not written. The caller holds the table's lock and has opened the ``known`` one. Returns the
    new index.
    """
    places, at = {}, len(header)
    order = list(known.places)  # which is sorted
    for run_id in new.keys() - known.places.keys():
        bisect.insort(order, run_id, key=by_time)
    for run_id in order:
        lines, place = new[run_id] if run_id in new else (None, known.places[run_id])
        length = place.length if lines is None else len(lines)
        if (place.start, place.length) != (at, length):
            place = msgspec.structs.replace(place, start=at, length=length)
        places[run_id] = place
        at += length
    found = msgspec.structs.replace(known, proofs=proofs, places=places)
    same = known.places and all(
        run_id in known.places and text(table, known.places[run_id]) == lines for run_id, (lines, _) in new.items()
    )
    if not same:
        with replacing(results.csv, durable=False) as file:
            file.write(header)
            for piece in _pieces(places, known, {run_id: lines for run_id, (lines, _) in new.items()}):
                if isinstance(piece, bytes):
                    file.write(piece)
                else:
                    _copy(table, *piece, file)
            ours = os.fstat(file.fileno()).st_ino
        with files.opened(results.csv) as written:  # not before: a network's server sets the time
            if os.fstat(written.fileno()).st_ino != ours:  # replaced already, by a node that does not see our lock
                return known
            found = msgspec.structs.replace(found, table=stamp(written))
    if found != known:
        write(results, found)
    return found


def _pieces(order: Collection[str], known: Index, lines: Mapping[str, bytes]) -> Iterator[bytes | tuple[int, int]]:
    """Yield the table's parts: new lines, or the first byte and the end of a stretch of the ``known`` table."""
    start = end = 0
    for run_id in order:
        if run_id not in lines:
            place = known.places[run_id]
            if place.start != end:
                yield start, end
                start = place.start
            end = place.end
            continue
        yield start, end
        yield lines[run_id]
        start = end
    yield start, end


def _copy(source: BinaryIO, start: int, end: int, target: BinaryIO) -> None:
    source.seek(start)
    while start < end:
        part = source.read(min(COPIED_BYTES, end - start))
        if not part:
            raise OSError(f"{source.name} became shorter while it was read; 'python main.py collect' makes it again")
        target.write(part)
        start += len(part)


def write(results: Results, index: Index) -> None:
    """Write ``index``. The caller holds the table's lock."""
    with replacing(_file(results), durable=False) as file:
        file.write(msgspec.json.encode(index))


@contextlib.contextmanager
def forgotten(results: Results, run_id: str) -> Iterator[None]:
    """Let a settled run change: no table is made meanwhile, and the next one reads the run again."""
    results.folder.mkdir(exist_ok=True)
    with locked(results, wait=True):
        found = load(results)
        if run_id in found.places:
            kept = {name: place for name, place in found.places.items() if name != run_id}
            write(results, msgspec.structs.replace(found, places=kept))
        yield


def proofs(folder: Path) -> str:
    """Return a digest that changes when any of the certificates in ``folder`` does, or how rows are judged."""
    found: dict[str, Any] = {name: (Path(__file__).parent / name).read_text() for name in RULES}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            seen = entry.stat(follow_symlinks=False)
            found[entry.name] = [seen.st_size, seen.st_mtime_ns]
    return digest(found)
