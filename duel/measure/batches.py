"""The batches that both frameworks train on, made in numpy from one seed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duel import datasets
from duel.catalogue import Benchmark

# A pool is larger than one batch so that no cache and no constant folding can learn it by heart.
POOL_BATCHES = 8
EVALUATION_CHUNK = 500  # samples per forward pass in evaluation, whatever the batch size


@dataclass(frozen=True)
class Batch:
    """Images (N, channels, height, width), labels (N,)."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]

    def chunks(self) -> Iterator["Batch"]:
        """The batch in parts of at most ``EVALUATION_CHUNK`` samples."""
        for start in range(0, len(self.labels), EVALUATION_CHUNK):
            part = slice(start, start + EVALUATION_CHUNK)
            yield Batch(self.images[part], self.labels[part])


@dataclass(frozen=True)
class Pool:
    """At least ``POOL_BATCHES`` batches of one shape, taken in turn; ``held_out`` is None for synthetic data.

    ``dataset`` says where the samples came from, ``sha256`` is over all arrays in order.
    """

    batches: tuple[Batch, ...]
    held_out: Batch | None
    dataset: str
    synthetic: bool
    sha256: str


def pool(benchmark: Benchmark, size: str, batch_size: int, seed: int, data_folder: Path) -> Pool:
    """The pool of ``benchmark`` at ``size``, the same for the same arguments and data.

    Synthetic images are N(0,1) and never constant: zeros draw less power and run faster on a GPU. Real data are
    shuffled and cut into full batches, the rest is dropped; a data set of too few batches is shuffled again and again.
    Raises ValueError where ``batch_size`` is not positive or larger than the data set.
    """
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}; at least 1 is needed")
    generator = np.random.default_rng(seed)
    if benchmark.dataset == datasets.SYNTHETIC:
        shape, classes = benchmark.sizes[size].image, benchmark.sizes[size].classes
        made = tuple(
            Batch(
                generator.standard_normal((batch_size, *shape), dtype=np.float32),
                generator.integers(classes, size=batch_size, dtype=np.int32),
            )
            for _ in range(POOL_BATCHES)
        )
        return Pool(made, None, datasets.SYNTHETIC, True, _sha256(made))
    data = datasets.load(benchmark.dataset, data_folder)
    samples = len(data.train_labels)
    if batch_size > samples:
        raise ValueError(f"batch size {batch_size} is larger than the {samples} training samples of {data.name}")
    batches: list[Batch] = []
    while len(batches) < POOL_BATCHES:
        order = generator.permutation(samples)
        for start in range(0, samples - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            batches.append(Batch(data.train_images[chosen], data.train_labels[chosen]))
    held_out = Batch(data.held_out_images, data.held_out_labels)
    return Pool(tuple(batches), held_out, data.name, False, _sha256((*batches, held_out)))


def _sha256(batches: tuple[Batch, ...]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for array in (batch.images, batch.labels):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
