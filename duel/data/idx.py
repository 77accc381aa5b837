"""IDX files, as MNIST and its likes are published (LeCun, Cortes, Burges: the MNIST database)."""

import gzip
import io
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from duel.data.samples import Bytes, DataError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IMAGE = (28, 28)


def find(places: Sequence[Path]) -> list[Path] | None:
    """Return the four files, plain or .gz, of the first of ``places`` that has any of them, or None if none does.

    Raises DataError if some are there and others not.
    """
    for place in places:
        candidates = [(place / name, place / f"{name}.gz") for name in FILES]
        found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
        paths = [path for path in found if path is not None]
        if len(paths) == len(FILES):
            return paths
        if paths:
            missing = [name for name, path in zip(FILES, found, strict=True) if path is None]
            raise DataError(
                f"{place}: {', '.join(path.name for path in paths)} found, but {', '.join(missing)} missing "
                "(plain or .gz); add the missing files, or remove the others"
            )
    return None


def inspect(paths: Sequence[Path]) -> tuple[int, int]:
    """Check headers, sizes and counts of the four files; return the numbers of training and held-out samples."""
    counts = [_inspected(path) for path in paths]
    for images, labels in ((0, 1), (2, 3)):
        if counts[images] != counts[labels]:
            raise DataError(
                f"{paths[labels]}: {counts[labels]} labels for the {counts[images]} images of {paths[images].name}; "
                "the two must be equal"
            )
    return counts[0], counts[2]


def _inspected(path: Path) -> int:
    """Check one file's magic number, dimensions and size; return the number of its samples.

    An IDX file is two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
    uint32, and then the values.
    """
    dimensions = 3 if "images" in path.name else 1
    magic, length = 0x0800 + dimensions, 4 + 4 * dimensions
    with _open(path) as file:
        header = _content(path, file, length)
    if len(header) < length:
        raise DataError(f"{path}: ends after {len(header)} bytes, within its header of {length}")
    found, count, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise DataError(f"{path}: magic number {found}; expected {magic} (IDX, {dimensions}-dimensional bytes)")
    if dimensions == 3 and tuple(shape) != IMAGE:
        raise DataError(f"{path}: images of {shape[0]}x{shape[1]}; MNIST's are {IMAGE[0]}x{IMAGE[1]}")
    if count == 0:
        raise DataError(f"{path}: 0 samples; at least 1 is needed")
    expected = length + count * int(np.prod(shape, dtype=np.int64))
    size = _size(path)
    if size != expected:
        raise DataError(f"{path}: {size} bytes; its header promises {expected} ({count} samples)")
    return int(count)


def read(path: Path) -> Bytes:
    """Return the values of an inspected file, (N, 28, 28) or (N,)."""
    with _open(path) as file:
        content = _content(path, file, -1)
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _content(path: Path, file: gzip.GzipFile | io.BufferedReader, count: int) -> bytes:
    try:
        return file.read(count)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file ({error}); download it again") from None


def _size(path: Path) -> int:
    """Return the number of bytes of content.

    A gzip file's last four bytes give it without decompressing (RFC 1952, one member assumed).
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if path.suffix != ".gz":
            return size
        file.seek(max(0, size - 4))
        trailer = file.read()
    return int.from_bytes(trailer, "little")
