"""CIFAR-10 and CIFAR-100, from the archives as published or the folders they unpack to (Krizhevsky 2009).

Two forms: binary (a label byte or two, then 3072 pixels) and "python", pickles of a dictionary.
"""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duel.data.samples import Bytes, DataError, Equal

PIXELS = 3 * 32 * 32
MOST_BYTES = 1 << 28  # of one member; real ones have 30 or 150 MB


@dataclass(frozen=True)
class Form:
    """One of the two published forms: the folder in its archive, and the names of its files for each split."""

    archive: str
    folder: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
FORMS = {
    10: (
        Form("cifar-10-binary.tar.gz", "cifar-10-batches-bin", tuple(f"{b}.bin" for b in BATCHES), ("test_batch.bin",)),
        Form("cifar-10-python.tar.gz", "cifar-10-batches-py", BATCHES, ("test_batch",)),
    ),
    100: (
        Form("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), ("test.bin",)),
        Form("cifar-100-python.tar.gz", "cifar-100-python", ("train",), ("test",)),
    ),
}


def find(classes: int, places: list[Path]) -> tuple[Path, Form] | None:
    """Return the first archive or folder of CIFAR with that many classes, with its form; None if there is none."""
    for place in places:
        for form in FORMS[classes]:
            for path in (place / form.folder, place / form.archive):
                if path.exists():
                    return path, form
    return None


def read(path: Path, form: Form, classes: int) -> tuple[Equal, Equal]:
    """Return the samples for training and those held out. Raises DataError if anything is missing or damaged."""
    names = (*form.train, *form.held_out)
    content = _folder(path, names) if path.is_dir() else _archive(path, form.folder, names)
    convert: Callable[[str, bytes, int], Equal] = _of_bytes if form.archive.endswith("binary.tar.gz") else _of_pickle
    parts = {name: convert(f"{path}, {name}", data, classes) for name, data in content.items()}
    return _joined([parts[name] for name in form.train]), _joined([parts[name] for name in form.held_out])


def _joined(parts: list[Equal]) -> Equal:
    return Equal(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def _folder(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    if missing := [name for name in names if not (path / name).is_file()]:
        raise DataError(f"{path}: {', '.join(missing)} missing; unpack the archive again")
    return {name: (path / name).read_bytes() for name in names}


def _archive(path: Path, folder: str, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the members ``names`` of an archive, which is read in place: nothing is unpacked to the disk."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as whole, tarfile.open(fileobj=whole, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./").removeprefix(f"{folder}/")
                if name in names and member.isfile() and member.size <= MOST_BYTES:
                    file = archive.extractfile(member)
                    found[name] = file.read() if file else b""
            while whole.read(1 << 20):  # up to its checksum, which is behind the archive's end
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path}: truncated or damaged archive ({error}); download it again") from None
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{path}: {', '.join(missing)} missing in it; download it again")
    return found


def _of_bytes(where: str, data: bytes, classes: int) -> Equal:
    """CIFAR-10 has one label byte, CIFAR-100 two: the superclass, and the class that is meant here."""
    labels = 1 if classes == 10 else 2
    record = labels + PIXELS
    if not data or len(data) % record:
        raise DataError(f"{where}: {len(data)} bytes are no whole number of records of {record}; download it again")
    table = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _pictures(where, table[:, labels:], table[:, labels - 1].astype(np.int32))


def _of_pickle(where: str, data: bytes, classes: int) -> Equal:
    try:
        stored = _Plain(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = stored[b"data"], stored[b"labels" if classes == 10 else b"fine_labels"]
        table, numbers = np.asarray(pixels, np.uint8), np.array(labels, np.int32)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except MemoryError:  # of what is in it, or of a false length
        raise DataError(f"{where}: no memory for what it says is in it: damaged, unless memory is short") from None
    except Exception as error:  # whatever a damaged pickle makes Python raise
        raise DataError(f"{where}: truncated or damaged ({type(error).__name__}: {error})") from None
    return _pictures(where, table, numbers)


def _pictures(where: str, table: Bytes, labels: Any) -> Equal:
    if table.ndim != 2 or table.shape[1] != PIXELS or labels.shape != table.shape[:1]:
        raise DataError(f"{where}: {table.shape} pixels and {labels.shape} labels; expected (n, {PIXELS}) and (n,)")
    return Equal(np.ascontiguousarray(table.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels)


class _Plain(pickle.Unpickler):
    """Reads pickles of lists, dictionaries and numpy arrays, and calls nothing else: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("multiarray", "_reconstruct"): _reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        found = known.get((module.rpartition(".")[2], name))
        if found is None:
            raise DataError(f"it is a pickle that would call {module}.{name}; CIFAR's hold arrays and lists only")
        return found


def _reconstruct(kind: Any, shape: Any, code: Any) -> Any:
    """Return the empty array that numpy's pickles begin with, before they set its content."""
    return np.ndarray((0,), np.uint8)


def _encode(text: str, encoding: str) -> bytes:
    """Python 3 pickles bytes at protocol 2 as a call of this."""
    return text.encode("latin-1")
