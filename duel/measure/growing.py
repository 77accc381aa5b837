"""The largest batch that fits a device: which batch is tried next, and what one try does.

Each try is a fresh process that compiles and takes one step: what does not fit ends it, and is an answer. Batches are
doubled until one does not fit, then the interval is halved until it is an eighth of the batch.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from duel.catalogue import Benchmark
from duel.datasets import SYNTHETIC
from duel.measure import batches, preparing
from duel.measure.measurement import Columns, Measurement
from duel.record import Row
from duel.results import Run
from duel.states import FINISHED

MOST_DOUBLINGS = 14
TOO_LARGE = ("out of memory", "killed")  # what becomes of a row that does not fit; the kernel kills on a CPU


def rows(run: Run, planned: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of each side in turn, each to be tried before the next is drawn."""
    for first in planned:
        yield first
        tried = run.read_row(first.row or 0)
        if tried.batch_size is None:  # it did not get as far as its device
            continue
        low, high = 0, 0
        while True:
            if tried.status == FINISHED:
                low = tried.batch_size or 0
            elif tried.why in TOO_LARGE:
                high = tried.batch_size or 0
            else:
                break  # an error of another kind says nothing about memory
            size = following(low, high)
            if size is None or size > 2**MOST_DOUBLINGS * (first.batch_size or tried.batch_size or 1):
                break
            number = len(run.rows())
            yield first.replace(row=number, point=number, batch_size=size)
            tried = run.read_row(number)


def following(low: int, high: int) -> int | None:
    """Return the batch to try next if ``low`` fits and ``high`` does not (0: unknown); None if that is close enough."""
    if not high:
        return 2 * low
    if not low:
        return high // 2 or None
    return (low + high) // 2 if high - low > max(1, low // 8) else None


def repeated(benchmark: Benchmark, size: str, batch_size: int) -> batches.Pool:
    """Return a pool of one batch, whose samples are all the same and take the memory of one on the host."""
    made = dataclasses.replace(benchmark, dataset=SYNTHETIC)
    one = batches.pool(made, size, 1, 0, Path()).batches[0]
    arrays = [np.broadcast_to(array, (batch_size, *array.shape[1:])) for array in (*one.inputs, one.labels)]
    return batches.Pool((batches.Batch(tuple(arrays[:-1]), arrays[-1]),), None, SYNTHETIC, True, "")


def load(m: Measurement) -> Columns:
    """Put weights and one batch on the device, as a training has it there."""
    return preparing.load(m, repeated(m.benchmark, str(m.row.size), m.row.batch_size or 0))
