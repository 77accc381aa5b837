"""Scikit-learn's 1,797 digits, which ship with that package."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.data.samples import Bytes

HELD_OUT = 360
SEED = 0  # the split is part of the data set: it stays the same whatever a run's seed is


def file(packages: Sequence[Path] = ()) -> Path | None:
    """Return the package's file, in this interpreter or in folders of ``packages``, or None if it is in neither."""
    # The file instead of load_digits: importing scikit-learn takes over a second, and brings SciPy and a second OpenMP
    # into the measured process.
    found = importlib.util.find_spec("sklearn")
    folders = [Path(found.origin or "").parent] if found else []
    folders += [folder / "sklearn" for folder in packages]
    paths = [folder / "datasets" / "data" / "digits.csv.gz" for folder in folders]
    return next((path for path in paths if path.exists()), None)


def read(packages: Sequence[Path] = ()) -> tuple[Bytes, npt.NDArray[Any], Bytes, npt.NDArray[Any]]:
    """Return training images (1437, 28, 28) and labels, held-out images (360, 28, 28) and labels.

    Of 8x8 pixels from 0 to 16, each is repeated 3x3 and the image padded by 2 with zeros: no interpolation, so the
    result is bit-identical on every machine. Raises FileNotFoundError without scikit-learn.
    """
    path = file(packages)
    if path is None:
        raise FileNotFoundError("scikit-learn's digits")
    table = np.loadtxt(path, np.uint8, delimiter=",")  # 64 pixels and the label
    images = table[:, :-1].reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    # RandomState: its stream is frozen (NEP 19), a Generator's may change between numpy releases
    order = np.random.RandomState(SEED).permutation(len(images))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    labels = table[:, -1]
    return images[train], labels[train], images[held_out], labels[held_out]
