"""Labelled images from the user's data folder or, without one, from scikit-learn. Nothing is ever downloaded."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.data import digits, idx

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]

SYNTHETIC = "synthetic"
MNIST_FOLDERS = (".", "mnist", "MNIST/raw")
MNIST_CLASSES = 10


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
    paths = idx.find([folder / name for name in MNIST_FOLDERS])
    if paths is None:
        return _load_digits(folder)
    idx.inspect(paths)
    arrays = [idx.read(path) for path in paths]
    for path, labels in zip(paths[1::2], arrays[1::2], strict=True):
        if labels.max() >= MNIST_CLASSES:
            where = int(np.argmax(labels >= MNIST_CLASSES))
            raise ValueError(f"{path}: label {labels[where]} of sample {where}; labels are 0 to {MNIST_CLASSES - 1}")
    return _standardised(arrays[0], arrays[1], arrays[2], arrays[3], "mnist-idx")


def _check_mnist(folder: Path) -> str:
    paths = idx.find([folder / name for name in MNIST_FOLDERS])
    if paths is None:
        return f"sklearn-digits: no MNIST files under {folder}, so using the 1,797 digits that ship with scikit-learn"
    train, held_out = idx.inspect(paths)
    return f"mnist-idx: {train:,} training and {held_out:,} held-out images in {paths[0].parent}"


def _load_digits(folder: Path) -> Dataset:
    try:
        return _standardised(*digits.read(), "sklearn-digits")
    except FileNotFoundError:
        raise ValueError(
            f"no MNIST files under {folder} and no scikit-learn in this interpreter; put the four IDX files "
            f"({', '.join(idx.FILES)}, plain or .gz) there, or install scikit-learn to use its digits"
        ) from None


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
