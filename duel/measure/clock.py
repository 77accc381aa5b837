"""The clock is proved, too: that a step has ended when it stops, that the steps it counts were taken, and of how many
samples each.

What is waited for here is a result on the host, which no device can give before it has one, and not ``synchronize``.
"""

import math
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from duel.errors import Disproved
from duel.measure import timing, twin
from duel.measure.evidence import project

# Steps, each waited for, that the time of one is the fastest of: others on the machine only add to it. Of long steps
# fewer, as many as fit into some seconds.
WAITED, FEWEST_WAITED, WAITED_SECONDS = 10, 3, 2.0
BLOCK_SECONDS, MOST_STEPS = 0.05, 200  # the block whose end is looked at
UNFINISHED, SHORTEST = 0.1, 2e-3  # share of a block, and seconds, that may be left to do when the clock has stopped
TRIES = 3  # of which one must do: others on the machine only add to what seems to be left
# FLOP in excess of the measured ceiling: Winograd's algorithm needs up to so many fewer multiplications than the table
# counts (Lavin and Gray 2015, arXiv:1509.09308, F(4x4, 3x3)).
FEWER_PRODUCTS = 4.0


def waited(work: twin.Work, first_step: int) -> tuple[float, int]:
    """(seconds of a step that is waited for, index of the next step).

    All ranks call it together. Raises Disproved where steps go on after ``synchronize``.
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
        f"the clock: {left:.2g} s of work were left to do when {steps} steps were said to have taken {block:.2g} s"
    )


def _left(work: twin.Work, index: int, steps: int, step_seconds: float) -> tuple[float, float]:
    """(seconds of work that is left to do after a block, seconds of the block)."""
    block, handle = timing.time_block(work, index, steps)
    start = time.perf_counter()
    work.read(handle)
    rest = time.perf_counter() - start
    handle = work.step(index + steps)
    time.sleep(min(2 * step_seconds, 1.0))
    work.synchronize(handle)
    start = time.perf_counter()
    work.read(handle)  # what has long been there
    return rest - (time.perf_counter() - start), block


def samples(work: twin.Work, batch_size: int) -> None:
    """Raise Disproved where a step takes another number of samples than ``batch_size``."""
    taken = work.samples()
    if taken != batch_size:
        raise Disproved(f"the clock: a step takes {taken} samples, the batch size is {batch_size}")


def positions(work: twin.Work) -> dict[str, npt.NDArray[np.float64]]:
    """Where all parameters are, for ``counted``."""
    return {name: project(name, array) for name, array in work.export().items() if ".running_" not in name}


def counted(work: twin.Training, steps: int, before: int | None, then: Mapping[str, npt.NDArray[np.float64]]) -> None:
    """Raise Disproved where ``steps`` optimizer steps are not what was taken since it counted ``before`` and parameters
    were where ``then`` says."""
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
        raise Disproved(f"the clock: {steps} steps were timed, and left where they were: {', '.join(still) or 'all'}")


def possible(step_flops: int, step_seconds: float, flops_per_second: float) -> None:
    """Raise Disproved for a rate that the device, by its measured ceiling, cannot have."""
    rate = step_flops / step_seconds
    if rate > FEWER_PRODUCTS * flops_per_second:
        raise Disproved(
            f"the clock: {rate:.2g} FLOP/s is {rate / flops_per_second:.0f} times what this device was measured to do"
        )
