"""Prove the clock: that a step has ended when it stops, that the steps it counts were taken, and how many samples each
took.

This waits for a result on the host, which no device can give before it has one, rather than for ``synchronize``.
"""

import math
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from duel.errors import Disproved, Diverged
from duel.measure import timing, twin
from duel.measure.evidence import project

# Steps that are each waited for; the fastest counts, since other load on the machine only adds time. Of long steps,
# only as many as fit into some seconds.
WAITED, FEWEST_WAITED, WAITED_SECONDS = 10, 3, 2.0
BLOCK_SECONDS, MOST_STEPS = 0.05, 200  # the block whose end is checked
UNFINISHED, SHORTEST = 0.1, 2e-3  # share of a block, and seconds, that may remain when the clock has stopped
TRIES = 3  # one must pass: other load on the machine only adds to what seems to remain
# How many times the measured ceiling a rate may be: Winograd's algorithm needs up to this many times fewer
# multiplications than the table counts (Lavin and Gray 2015, arXiv:1509.09308, F(4x4, 3x3)).
FEWER_PRODUCTS = 4.0


def waited(work: twin.Work, first_step: int) -> tuple[float, int]:
    """Return (seconds of a step that is waited for, index of the next step).

    All ranks call it together. Raises Disproved if steps continue after ``synchronize``.
    """
    index = first_step
    seconds: list[float] = []
    while len(seconds) < WAITED and (len(seconds) < FEWEST_WAITED or work.agree(sum(seconds)) < WAITED_SECONDS):
        start = time.perf_counter()
        work.read(work.step(index))
        seconds.append(time.perf_counter() - start)
        index += 1
    each = min(seconds)
    steps = int(work.agree(max(1, min(MOST_STEPS, math.ceil(BLOCK_SECONDS / each)))))
    for _ in range(TRIES):
        left, block = _left(work, index, steps, each)
        index += steps + 1
        if work.agree(float(left <= max(UNFINISHED * (block + left), SHORTEST))):
            return each, index
    raise Disproved(
        f"the clock: {left:.2g} s of work remained when {steps} steps were reported to have taken {block:.2g} s"
    )


def _left(work: twin.Work, index: int, steps: int, step_seconds: float) -> tuple[float, float]:
    """Return (seconds of work that remains after a block, seconds of the block)."""
    block, handle = timing.time_block(work, index, steps)
    start = time.perf_counter()
    work.read(handle)
    rest = time.perf_counter() - start
    handle = None  # the memory of a result is free for the next one
    handle = work.step(index + steps)
    time.sleep(min(2 * step_seconds, 1.0))
    work.synchronize(handle)
    start = time.perf_counter()
    work.read(handle)  # already there: the time of the read alone
    return rest - (time.perf_counter() - start), block


def samples(work: twin.Work, batch_size: int) -> None:
    """Raise Disproved if a step does not take ``batch_size`` samples."""
    taken = work.samples()
    if taken != batch_size:
        raise Disproved(f"the clock: a step takes {taken} samples, the batch size is {batch_size}")


def positions(work: twin.Work) -> dict[str, npt.NDArray[np.float64]]:
    """Return where all parameters are, for ``counted``. Raises Diverged if one is no longer finite."""
    arrays = {name: array for name, array in work.export().items() if ".running_" not in name}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise Diverged(f"{name} is no longer finite: the training diverged during the measurement")
    return {name: project(name, array) for name, array in arrays.items()}


def counted(work: twin.Training, steps: int, before: int | None, then: Mapping[str, npt.NDArray[np.float64]]) -> None:
    """Raise Disproved unless ``steps`` steps were taken since the optimizer counted ``before`` and parameters were
    where ``then`` says."""
    after = work.count()
    if before is not None and after is not None and after - before != steps:
        raise Disproved(f"the clock: the optimizer counts {after - before} steps, {steps} were timed")
    moments = work.moments()
    now = positions(work)
    whole = math.hypot(*(float(np.linalg.norm(moment)) for moment in moments.values()))
    still = [
        name
        for name, moment in moments.items()
        if np.array_equal(now[name], then[name]) and float(np.linalg.norm(moment)) > 1e-6 * whole
    ]
    if still or not whole:
        raise Disproved(f"the clock: {steps} steps were timed, but did not move {', '.join(still) or 'any parameter'}")


def possible(step_flops: int, step_seconds: float, flops_per_second: float) -> None:
    """Raise Disproved for a rate that the device, by its measured ceiling, cannot reach."""
    rate = step_flops / step_seconds
    if rate > FEWER_PRODUCTS * flops_per_second:
        raise Disproved(
            f"the clock: {rate:.2g} FLOP/s is {rate / flops_per_second:.0f} times the measured ceiling of this device"
        )
