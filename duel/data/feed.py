"""The batches of a training, the same for both frameworks: which samples, in which order, augmented how."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.data import augment
from duel.data.samples import Arrays, Dataset
from duel.recipes import CROP, FLIP, NONE, RESIZED

EVALUATED = 500  # samples of an evaluation's batch, at most
AHEAD_BYTES = 2**31  # of batches that are made ahead, by each rank
EVERY = 97  # of a batch's numbers, one in so many is hashed: a prime, so that all rows and channels are met
_DRAWN = {NONE: 1, FLIP: 1, CROP: 4, RESIZED: augment.NUMBERS}


@dataclass(frozen=True)
class Fed:
    """A batch: ``inputs`` and ``labels`` as ``duel.measure.batches.Batch`` has them, of this rank.

    ``present`` counts the labels of all ranks that are not missing.
    """

    inputs: tuple[npt.NDArray[np.float32 | np.int32], ...]
    labels: npt.NDArray[np.int32]
    present: int

    def digest(self) -> bytes:
        """Return a hash of the labels and of every ``EVERY``-th number of the inputs."""
        found = hashlib.sha256(np.ascontiguousarray(self.labels).data)
        for array in self.inputs:
            found.update(np.ascontiguousarray(array.reshape(-1)[::EVERY]).data)
        return found.digest()


@dataclass(frozen=True, eq=False)  # hashed by identity, for the cache of orders
class Feed:
    """Makes the batches. ``height`` and ``width`` are those of pictures; ``batch_size`` is over all ``ranks``."""

    dataset: Dataset
    augmentation: str
    batch_size: int
    seed: int
    height: int = 0
    width: int = 0
    rank: int = 0
    ranks: int = 1

    @property
    def steps(self) -> int:
        """The steps of an epoch: as many full batches as there are; the rest, another one each time, is left out."""
        return len(self.dataset.train.labels) // self.batch_size

    @functools.cached_property
    def evaluated(self) -> int:
        """The samples of an evaluation's batch.

        Where a sample has many labels, as text has, the logits of 500 may not fit: no more than a device trains on.
        """
        each = max(1, self.batch_size // self.ranks)
        return min(EVALUATED, each) if self.dataset.held_out.labels.ndim > 1 else EVALUATED

    def batch(self, step: int) -> Fed:
        """Return the batch of a training's step ``step``, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps)
        chosen = self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        present = int((self.dataset.train.labels[chosen] >= 0).sum())
        each = self.batch_size // self.ranks
        mine = chosen[self.rank * each : (self.rank + 1) * each]
        train = self.dataset.train
        if isinstance(train, Arrays):
            return Fed(tuple(array[mine] for array in train.inputs), train.labels[mine], present)
        numbers = augment.draws(self.seed, epoch, mine, _DRAWN[self.augmentation])
        pixels = augment.trained(train.at(mine), self.augmentation, self.height, self.width, numbers)
        return Fed((self._standardised(pixels),), train.labels[mine], present)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a feed lives as long as its process
    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        return augment.order(self.seed, epoch, len(self.dataset.train.labels))

    def batches(self, first: int, end: int, threads: int) -> Iterator[Fed]:
        """Yield the batches of steps ``first`` to ``end`` - 1, made ahead by ``threads`` threads."""
        return self._ahead(self.batch, first, end, threads, self.batch_size // self.ranks)

    def held_out(self, threads: int) -> Iterator[Fed]:
        """Yield all held-out samples in their order, not augmented, in batches of ``evaluated`` and a last one."""
        end = -(-len(self.dataset.held_out.labels) // self.evaluated)
        return self._ahead(self._evaluated, 0, end, threads, self.evaluated)

    def _evaluated(self, number: int) -> Fed:
        held = self.dataset.held_out
        chosen = np.arange(number * self.evaluated, min((number + 1) * self.evaluated, len(held.labels)))
        labels = held.labels[chosen]
        present = int((labels >= 0).sum())
        if isinstance(held, Arrays):
            return Fed(tuple(array[chosen] for array in held.inputs), labels, present)
        pixels = augment.evaluated(held.at(chosen), self.height, self.width)
        return Fed((self._standardised(pixels),), labels, present)

    def _ahead(self, make: Any, first: int, end: int, threads: int, samples: int) -> Iterator[Fed]:
        import grain

        size = 4 * samples * self.dataset.channels * self.height * self.width  # 0: no pictures, which are small
        ahead = min(2 * threads, max(2, AHEAD_BYTES // size)) if size else 2 * threads
        options = grain.ReadOptions(num_threads=min(threads, ahead), prefetch_buffer_size=ahead)
        return iter(grain.MapDataset.range(first, end).map(make).to_iter_dataset(options))

    def _standardised(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return (n, channels, height, width) float32, each channel by its table of 256 values."""
        found = np.empty((len(pixels), self.dataset.channels, *pixels.shape[1:3]), np.float32)
        for channel, table in enumerate(self._tables):
            np.take(table, pixels[..., channel], out=found[:, channel])
        return found

    @functools.cached_property
    def _tables(self) -> list[npt.NDArray[np.float32]]:
        values = np.arange(256)
        moments = zip(self.dataset.mean, self.dataset.std, strict=True)
        return [((values - mean) / std).astype(np.float32) for mean, std in moments]
