"""What a data set holds, whatever its files look like."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int32]


class DataError(ValueError):
    """A data set is missing, incomplete or damaged; the message says which file, how, and what would help."""


class Pictures(Protocol):
    """Labelled pictures, height x width x channels bytes each."""

    @property
    def labels(self) -> Labels:
        """Return the labels, (N,)."""

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[Bytes] | Bytes:
        """Return the pictures at ``positions``; one array if all have one size."""


@dataclass(frozen=True)
class Equal:
    """Pictures of one size: ``pixels`` (N, height, width, channels), ``labels`` (N,)."""

    pixels: Bytes
    labels: Labels

    def at(self, positions: npt.NDArray[np.int64]) -> Bytes:
        return self.pixels[positions]


@dataclass(frozen=True)
class Arrays:
    """Samples that need no augmentation, as ``duel.measure.batches.Batch`` has them: first axis N."""

    inputs: tuple[npt.NDArray[np.float32 | np.int32], ...]
    labels: Labels


@dataclass(frozen=True)
class Dataset:
    """A data set: its samples for training and those held out.

    ``source`` says in one sentence what was read and from where. ``channels`` of pictures, which are standardised with
    each channel's ``mean`` and ``std`` (of bytes, 0 to 255); all three are empty or 0 for other samples. ``classes`` is
    0 where labels are not classes.
    """

    name: str
    source: str
    train: Pictures | Arrays
    held_out: Pictures | Arrays
    classes: int
    channels: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def of_pictures(name: str, source: str, train: Equal, held_out: Equal, classes: int) -> Dataset:
    """Return a data set of pictures of one size, standardised with the statistics of all its training pixels.

    Raises DataError for labels out of range, and for a class without a training sample.
    """
    check_labels(name, train.labels, classes)
    check_labels(f"{name}, held out", held_out.labels, classes)
    if missing := sorted(set(range(classes)) - set(train.labels.tolist())):
        raise DataError(f"{name}: no training sample of class {', '.join(map(str, missing[:10]))}")
    channels = train.pixels.shape[-1]
    count = train.pixels.size // channels
    # Integer sums, so that no order of summation can change a bit.
    mean = [int(part.sum(dtype=np.int64)) / count for part in _channels(train.pixels)]
    squares = [int(np.square(part, dtype=np.uint16).sum(dtype=np.int64)) for part in _channels(train.pixels)]
    std = [max(0.0, s / count - m * m) ** 0.5 for s, m in zip(squares, mean, strict=True)]
    if not all(std):
        raise DataError(f"{name}: every training pixel of a channel is the same; such pictures cannot be standardised")
    return Dataset(name, source, train, held_out, classes, channels, tuple(mean), tuple(std))


def enlarged(dataset: Dataset, channels: int, height: int, width: int) -> Dataset:
    """Return ``dataset`` for a network that takes ``channels`` of ``height`` x ``width``.

    Grey pictures of one size get the same in each channel and zeros around them, as is usual where networks for
    CIFAR-10 train on MNIST's. All others are returned as they are.
    """
    train, held_out = dataset.train, dataset.held_out
    if dataset.channels != 1 or channels == 1 or not (isinstance(train, Equal) and isinstance(held_out, Equal)):
        return dataset
    return dataclasses.replace(
        dataset,
        train=Equal(_enlarged(train.pixels, channels, height, width), train.labels),
        held_out=Equal(_enlarged(held_out.pixels, channels, height, width), held_out.labels),
        channels=channels,
        mean=channels * dataset.mean,
        std=channels * dataset.std,
    )


def _enlarged(pixels: Bytes, channels: int, height: int, width: int) -> Bytes:
    rows, columns = (max(0, most - size) for most, size in zip((height, width), pixels.shape[1:3], strict=True))
    around = ((0, 0), (rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2), (0, 0))
    padded = np.pad(pixels, around)
    return np.broadcast_to(padded, (*padded.shape[:3], channels))  # which takes no more memory


def _channels(pixels: Bytes) -> Iterator[Bytes]:
    return (pixels[..., channel] for channel in range(pixels.shape[-1]))


def check_labels(where: str, labels: Labels, classes: int) -> None:
    """Raise DataError if a label is not from 0 to ``classes`` - 1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(f"{where}: label {labels[first]} of sample {first}; labels are 0 to {classes - 1}")
