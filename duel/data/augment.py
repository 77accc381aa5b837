"""Augmentation: the same pixels for the same seed, epoch and sample, in both frameworks and on every machine."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from duel.data.samples import Bytes
from duel.recipes import CROP, NONE, RESIZED

PADDING = 4
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
TRIES = 10  # for a part that fits; then the middle
EVALUATED = 224 / 256  # share of the shorter side that is evaluated
NUMBERS = 2 + 4 * TRIES  # random numbers for a picture: its mirroring, one spare, and its parts

Floats = npt.NDArray[np.float64]


def draws(seed: int, epoch: int, positions: npt.NDArray[np.int64], count: int) -> Floats:
    """Return ``count`` numbers from [0, 1) for each sample, (len(positions), count), that depend on nothing else.

    SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) of a counter: NumPy's generators would have to be made
    anew for each sample, and their streams may change between releases.
    """
    with np.errstate(over="ignore"):
        start = _mixed(np.uint64(seed) + _mixed(np.uint64(epoch) + np.uint64(1)))
        of_sample = _mixed(start + positions.astype(np.uint64))
        bits = _mixed(of_sample[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53, np.float64)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(value: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = value + _GAMMA
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(value ^ (value >> np.uint64(31)))


def order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """Return the samples' positions in the order in which this epoch takes them."""
    keys = draws(seed, ~epoch & 0xFFFFFFFF, np.arange(samples), 1)[:, 0]  # not those that augment
    return np.argsort(keys, kind="stable")


def trained(pictures: Sequence[Bytes] | Bytes, how: str, height: int, width: int, numbers: Floats) -> Bytes:
    """Return ``pictures`` augmented, (n, height, width, channels); ``numbers`` are their ``draws``, (n, NUMBERS)."""
    if how == RESIZED:
        parts = [
            _resized(picture, _part(picture.shape, row), height, width)
            for picture, row in zip(pictures, numbers[:, 2:], strict=True)
        ]
        cut = np.stack(parts)
    else:
        cut = evaluated(pictures, height, width)
    if how == CROP:
        cut = _shifted(cut, numbers[:, 2:4])
    if how == NONE:
        return cut
    mirrored = numbers[:, 0] < 0.5
    return np.where(mirrored[:, None, None, None], cut[:, :, ::-1], cut)


def evaluated(pictures: Sequence[Bytes] | Bytes, height: int, width: int) -> Bytes:
    """Return ``pictures`` as they are evaluated, (n, height, width, channels): as they are, or the middle resized.

    Cutting out the middle before resizing gives, but for rounding at the edges, what resizing to 256 pixels and cutting
    224 does, and reads fewer pixels.
    """
    if isinstance(pictures, np.ndarray) and pictures.shape[1:3] == (height, width):
        return np.asarray(pictures)
    return np.stack([_resized(picture, _middle(picture.shape, height, width), height, width) for picture in pictures])


def _shifted(pictures: Bytes, numbers: Floats) -> Bytes:
    """Return ``pictures`` cut out of themselves padded with zeros, at places by ``numbers`` (n, 2)."""
    count, height, width, _ = pictures.shape
    padded = np.pad(pictures, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    top, left = (np.floor(numbers * (2 * PADDING + 1)).astype(np.int64)).T
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    return np.asarray(padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]])


Part = tuple[int, int, int, int]  # top, left, height, width


def _part(shape: tuple[int, ...], numbers: Floats) -> Part:
    """Return a random part of a picture, as torchvision's RandomResizedCrop chooses it."""
    height, width = shape[:2]
    low, high = (math.log(ratio) for ratio in RATIO)
    for area, ratio, top, left in numbers.reshape(TRIES, 4).tolist():
        wanted = height * width * (AREA[0] + area * (AREA[1] - AREA[0]))
        shaped = math.exp(low + ratio * (high - low))
        w, h = round(math.sqrt(wanted * shaped)), round(math.sqrt(wanted / shaped))
        if 0 < w <= width and 0 < h <= height:
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    h, w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def _middle(shape: tuple[int, ...], height: int, width: int) -> Part:
    """Return the part in the middle that is evaluated: ``EVALUATED`` of the largest one of this shape."""
    scale = EVALUATED * min(shape[0] / height, shape[1] / width)
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    return (shape[0] - h) // 2, (shape[1] - w) // 2, h, w


def _resized(picture: Bytes, part: Part, height: int, width: int) -> Bytes:
    from PIL import Image

    top, left, h, w = part
    cut = np.ascontiguousarray(picture[top : top + h, left : left + w])
    grey = cut.shape[-1] == 1
    image = Image.fromarray(cut[..., 0] if grey else cut)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array[..., None] if grey else array
