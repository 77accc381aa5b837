"""The largest batch that fits a device (``duel.tries`` says which is tried next).

Each try is a fresh process that compiles and takes one step: what does not fit ends it, and is an answer.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from duel import datasets
from duel.catalogue import Benchmark
from duel.datasets import SYNTHETIC
from duel.errors import UserError
from duel.files import Damaged, read_object
from duel.measure import batches, preparing
from duel.measure.measurement import Columns, Measurement
from duel.record import Row
from duel.results import Run
from duel.states import FINISHED
from duel.tries import TOO_LARGE, expected_batch, next_batch


def rows(run: Run, planned: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of each side in turn, each to be tried before the next is drawn."""
    for first in planned:
        yield first
        tried = _last_try(run, first.point or 0)
        begun, low, high = tried.batch_size, 0, 0  # None if it did not get as far as its device
        plans: dict[int, int] = {}
        while begun:
            if tried.status == FINISHED:
                low = tried.batch_size or 0
                plans |= {low: tried.planned_bytes} if tried.planned_bytes else {}
            elif tried.why in TOO_LARGE:
                high = tried.batch_size or 0
            else:
                break  # an error of another kind says nothing about memory
            if (size := next_batch(begun, low, high, expected=_expected(run, plans))) is None:
                break
            number = len(run.rows())
            yield first.replace(row=number, point=number, batch_size=size)
            tried = _last_try(run, number)


def _last_try(run: Run, point: int) -> Row:
    """Return the last row of ``point``: where XLA's autotuner crashed, it was tried again without it."""
    return [row for row in run.rows() if row.point == point][-1]


def _expected(run: Run, plans: dict[int, int]) -> int:
    """Return the largest batch that ``plans`` let expect on the run's accelerator; 0 without a guess.

    A CPU's memory is the host's, of which a job may have less.
    """
    try:
        device = read_object(run.environment)["device"]
        memory = int(device["memory_bytes"] or 0) if device["kind"] != "cpu" else 0
    except (OSError, Damaged, KeyError, TypeError, ValueError):
        return 0
    return expected_batch(plans, memory) if memory else 0


def repeated(benchmark: Benchmark, size: str, batch_size: int) -> batches.Pool:
    """Return a pool of as many batches as a row has, whose samples are all the same: one in the host's memory."""
    made = dataclasses.replace(benchmark, dataset=SYNTHETIC)
    one = batches.pool(made, size, 1, 0, Path()).batches[0]
    arrays = [np.broadcast_to(array, (batch_size, *array.shape[1:])) for array in (*one.inputs, one.labels)]
    batch = batches.Batch(tuple(arrays[:-1]), arrays[-1])
    return batches.Pool((batch,) * batches.POOL_BATCHES, None, SYNTHETIC, True, "")


def load(m: Measurement) -> Columns:
    """Put weights and as many batches as a measured row has on the device.

    Raises UserError if the benchmark's data set has fewer samples than the batch: no row could measure that.
    """
    if m.benchmark.dataset != SYNTHETIC:
        try:
            batches.check_size(m.row.batch_size or 0, datasets.load(m.benchmark.dataset, m.data))
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error
    return preparing.load(m, repeated(m.benchmark, str(m.row.size), m.row.batch_size or 0))
