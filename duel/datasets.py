"""Labelled images from the user's data folder or, without one, from scikit-learn. Nothing is ever downloaded."""

import gzip
import importlib.util
import io
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]

SYNTHETIC = "synthetic"
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST_FOLDERS = (".", "mnist", "MNIST/raw")
MNIST_IMAGE = (28, 28)
MNIST_CLASSES = 10
DIGITS_HELD_OUT = 360
DIGITS_SEED = 0  # the split is part of the data set: it stays the same whatever a run's seed is


@dataclass(frozen=True)
class Dataset:
    """Images (N, channels, height, width) float32, labels (N,) int32.

    Images are standardised with the mean and the standard deviation of all training pixels. ``name`` says where they
    came from: "mnist-idx" or "sklearn-digits".
    """

    train_images: Floats
    train_labels: Labels
    held_out_images: Floats
    held_out_labels: Labels
    name: str


def load(name: str, folder: Path) -> Dataset:
    """Load the data set ``name`` ("mnist") from the data folder ``folder``.

    Raises ValueError if a file is damaged, if some but not all files are present, or if there is no source.
    """
    return _loader(name).load(folder)


def check(name: str, folder: Path) -> str:
    """Describe the source that ``load`` would read, judged by the files' sizes and first bytes alone.

    Raises the ValueError that ``load`` would raise, as far as these show it; labels are not checked, and only the
    interpreter that loads knows whether scikit-learn is installed.
    """
    if name == SYNTHETIC:
        return "synthetic: N(0,1) images and uniform labels, made from the seed"
    return _loader(name).check(folder)


@dataclass(frozen=True)
class _Loader:
    load: Callable[[Path], Dataset]
    check: Callable[[Path], str]


def _loader(name: str) -> _Loader:
    loaders = {"mnist": _Loader(_load_mnist, _check_mnist)}
    if name not in loaders:
        raise ValueError(f"unknown data set {name!r}; valid: {', '.join(loaders)}")
    return loaders[name]


def _load_mnist(folder: Path) -> Dataset:
    paths = _find_mnist(folder)
    if paths is None:
        return _load_digits(folder)
    _inspect_mnist(paths)
    arrays = [_read_idx(path) for path in paths]
    for path, labels in zip(paths[1::2], arrays[1::2], strict=True):
        if labels.max() >= MNIST_CLASSES:
            where = int(np.argmax(labels >= MNIST_CLASSES))
            raise ValueError(f"{path}: label {labels[where]} of sample {where}; labels are 0 to {MNIST_CLASSES - 1}")
    return _standardised(arrays[0], arrays[1], arrays[2], arrays[3], "mnist-idx")


def _check_mnist(folder: Path) -> str:
    paths = _find_mnist(folder)
    if paths is None:
        return f"sklearn-digits: no MNIST files under {folder}, so using the 1,797 digits that ship with scikit-learn"
    train, held_out = _inspect_mnist(paths)
    return f"mnist-idx: {train:,} training and {held_out:,} held-out images in {paths[0].parent}"


def _find_mnist(folder: Path) -> list[Path] | None:
    """Return the four MNIST files, plain or .gz, of the first folder that has any of them, or None if none does."""
    for place in (folder / name for name in MNIST_FOLDERS):
        candidates = [(place / name, place / f"{name}.gz") for name in MNIST_FILES]
        found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
        paths = [path for path in found if path is not None]
        if len(paths) == len(MNIST_FILES):
            return paths
        if paths:
            missing = [name for name, path in zip(MNIST_FILES, found, strict=True) if path is None]
            raise ValueError(
                f"{place}: {', '.join(path.name for path in paths)} found, but {', '.join(missing)} missing "
                "(plain or .gz); add the missing files, or remove the others to use scikit-learn's digits"
            )
    return None


def _inspect_mnist(paths: list[Path]) -> tuple[int, int]:
    """Check headers, sizes and counts of the four files; return the numbers of training and held-out samples."""
    counts = [_inspect_idx(path) for path in paths]
    for images, labels in ((0, 1), (2, 3)):
        if counts[images] != counts[labels]:
            raise ValueError(
                f"{paths[labels]}: {counts[labels]} labels for the {counts[images]} images of {paths[images].name}; "
                "the two must be equal"
            )
    return counts[0], counts[2]


def _inspect_idx(path: Path) -> int:
    """Check one file's magic number, dimensions and size; return the number of its samples.

    An IDX file is two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
    uint32, and then the values (LeCun, Cortes, Burges: the MNIST database).
    """
    dimensions = 3 if "images" in path.name else 1
    magic, length = 0x0800 + dimensions, 4 + 4 * dimensions
    with _open(path) as file:
        header = _read(path, file, length)
    if len(header) < length:
        raise ValueError(f"{path}: ends after {len(header)} bytes, within its header of {length}")
    found, count, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise ValueError(f"{path}: magic number {found}; expected {magic} (IDX, {dimensions}-dimensional bytes)")
    if dimensions == 3 and tuple(shape) != MNIST_IMAGE:
        raise ValueError(f"{path}: images of {shape[0]}x{shape[1]}; MNIST's are {MNIST_IMAGE[0]}x{MNIST_IMAGE[1]}")
    if count == 0:
        raise ValueError(f"{path}: 0 samples; at least 1 is needed")
    expected = length + count * int(np.prod(shape, dtype=np.int64))
    size = _size(path)
    if size != expected:
        raise ValueError(f"{path}: {size} bytes; its header promises {expected} ({count} samples)")
    return int(count)


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the values of an inspected file, (N, 28, 28) or (N,)."""
    with _open(path) as file:
        content = _read(path, file, -1)
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _read(path: Path, file: gzip.GzipFile | io.BufferedReader, count: int) -> bytes:
    try:
        return file.read(count)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged gzip file ({error}); download it again") from None


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


def _load_digits(folder: Path) -> Dataset:
    """Return scikit-learn's 1,797 digits of 8x8 pixels from 0 to 16, enlarged to 28x28.

    Each pixel is repeated 3x3 and the image padded by 2 with zeros: no interpolation, so the result is bit-identical on
    every machine. A fixed permutation splits them into 1,437 training and 360 held-out samples.
    """
    # Read the file instead of calling load_digits: importing scikit-learn takes over a second, and brings SciPy and a
    # second OpenMP into the measured process.
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if found else None
    if file is None or not file.exists():
        raise ValueError(
            f"no MNIST files under {folder} and no scikit-learn in this interpreter; put the four IDX files "
            f"({', '.join(MNIST_FILES)}, plain or .gz) there, or install scikit-learn to use its digits"
        )
    table = np.loadtxt(file, np.uint8, delimiter=",")  # 64 pixels and the label
    images = table[:, :-1].reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    # RandomState: its stream is frozen (NEP 19), a Generator's may change between numpy releases
    order = np.random.RandomState(DIGITS_SEED).permutation(len(images))
    held_out, train = order[:DIGITS_HELD_OUT], order[DIGITS_HELD_OUT:]
    labels = table[:, -1]
    return _standardised(images[train], labels[train], images[held_out], labels[held_out], "sklearn-digits")


def _standardised(
    train_images: npt.NDArray[np.uint8],
    train_labels: npt.NDArray[Any],
    held_out_images: npt.NDArray[np.uint8],
    held_out_labels: npt.NDArray[Any],
    name: str,
) -> Dataset:
    # Integer sums (255² fits 16 bits), so that no order of summation can change a bit of the two numbers.
    count, total = train_images.size, int(train_images.sum(dtype=np.int64))
    squares = int(np.square(train_images, dtype=np.uint16).sum(dtype=np.int64))
    mean, std = total / count, math.sqrt(count * squares - total * total) / count
    if std == 0:
        raise ValueError(f"{name}: every training pixel is {mean:g}; such images cannot be standardised")
    table = ((np.arange(256) - mean) / std).astype(np.float32)
    return Dataset(
        table[train_images[:, np.newaxis]],
        train_labels.astype(np.int32),
        table[held_out_images[:, np.newaxis]],
        held_out_labels.astype(np.int32),
        name,
    )
