"""The one timing loop, the same for both frameworks.

Frameworks dispatch work ahead of the device, so a block of steps is timed from its first dispatch to one
synchronisation at its end; reading losses and writing records happen between blocks.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from duel.catalogue import Preset


class Work(Protocol):
    """What is timed: ``Training`` of either framework."""

    def step(self, index: int) -> Any:
        """Dispatch step ``index``; returns a handle of its loss without waiting for it."""

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""

    def loss(self, handle: Any) -> float:
        """The loss behind ``handle``."""


@dataclass(frozen=True)
class Block:
    """``steps`` steps that took ``seconds`` in all; ``loss`` is that of the last one."""

    first_step: int
    steps: int
    seconds: float
    loss: float


def time_block(work: Work, first_step: int, steps: int) -> tuple[float, Any]:
    """Seconds for ``steps`` steps with one synchronisation at the end, and the last step's handle."""
    start = time.perf_counter()
    for index in range(first_step, first_step + steps):
        handle = work.step(index)
    work.synchronize(handle)
    return time.perf_counter() - start, handle


def warm_up(work: Work, preset: Preset, first_step: int, since: float) -> tuple[int, int]:
    """Run until the preset's warm-up is over and a block is long enough.

    ``first_step`` steps were taken before; ``since`` is the ``time.perf_counter()`` at which the first of them ended.
    Returns the next step's index and the steps per block.
    """
    steps = 1
    while True:
        seconds, _ = time_block(work, first_step, steps)
        first_step += steps
        if seconds < preset.block_seconds:
            # 1.1: a block that is just long enough here would often be too short later
            steps = max(steps + 1, math.ceil(1.1 * steps * preset.block_seconds / seconds))
        elif first_step >= preset.warmup_steps and time.perf_counter() - since >= preset.warmup_seconds:
            return first_step, steps


def time_blocks(work: Work, preset: Preset, first_step: int, steps: int) -> Iterator[Block]:
    """Timed blocks of ``steps`` steps until the preset has enough of them."""
    taken, blocks = 0, 0
    start = time.perf_counter()
    while taken < preset.iterations or (blocks < preset.blocks and time.perf_counter() - start < preset.max_seconds):
        seconds, handle = time_block(work, first_step + taken, steps)
        yield Block(first_step + taken, steps, seconds, work.loss(handle))
        taken, blocks = taken + steps, blocks + 1


def summary(blocks: list[Block], batch_size: int) -> dict[str, float | int]:
    """The row's columns for ``blocks``, all of the same number of steps."""
    seconds = sorted(block.seconds / block.steps for block in blocks)
    median = statistics.median(seconds)
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {
        "iterations": sum(block.steps for block in blocks),
        "blocks": len(blocks),
        "steps_per_block": blocks[0].steps,
        "step_seconds_mean": statistics.fmean(seconds),
        "step_seconds_std": statistics.stdev(seconds),
        "step_seconds_p50": median,
        "step_seconds_p95": cuts[18],
        "throughput": batch_size / median,
    }


def opening_steps(work: Work, steps: int, emit: Callable[[int, float], None]) -> tuple[float, float, list[float]]:
    """The steps that both frameworks take alike, from the initial weights.

    Returns the seconds of the first step, the ``time.perf_counter()`` at which it ended, and every loss.
    """
    first_step_seconds, handle = time_block(work, 0, 1)
    since = time.perf_counter()
    handles = [handle, *(work.step(index) for index in range(1, steps))]
    losses = []
    for index, handle in enumerate(handles):
        losses.append(work.loss(handle))
        emit(index, losses[-1])
    return first_step_seconds, since, losses
