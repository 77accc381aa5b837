"""The one timing loop, the same for both frameworks.

Frameworks dispatch work ahead of the device, so a block of steps is timed from its first dispatch to one
synchronisation at its end; reading losses and writing records happen between blocks.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from duel.catalogue import Preset
from duel.measure.twin import Timed, Training, Work

FEWEST = 5  # blocks, or calls, however long they take
WINDOW, DRIFT = 10, 0.01  # blocks that must be steady, and the drift they may have
COLLECTIVES = 20  # whose median time is taken
P99_CALLS = 1000  # fewer leave the 99th percentile to a handful of calls


@dataclass(frozen=True)
class Block:
    """``steps`` steps that took ``seconds`` in all."""

    first_step: int
    steps: int
    seconds: float


def time_block(work: Timed, first_step: int, steps: int) -> tuple[float, Any]:
    """Return the seconds of ``steps`` steps with one synchronisation at the end, and the last step's handle."""
    start = time.perf_counter()
    for index in range(first_step, first_step + steps):
        handle = None  # the memory of a result is free for the next one
        handle = work.step(index)
    work.synchronize(handle)
    return time.perf_counter() - start, handle


def warm_up(work: Timed, preset: Preset, first_step: int) -> tuple[int, int]:
    """Run until the preset's warm-up is over and a block is long enough; if steps are slow, as many as fit.

    ``first_step`` steps were taken before. Returns the next step's index and the steps per block.
    """
    steps, start = 1, time.perf_counter()
    while True:
        seconds = work.agree(time_block(work, first_step, steps)[0])
        first_step += steps
        if seconds < preset.block_seconds:
            # 1.1: a block that is just long enough here would often be too short later
            steps = max(steps + 1, math.ceil(1.1 * steps * preset.block_seconds / seconds))
            continue
        spent = work.agree(time.perf_counter() - start)
        if spent >= preset.max_seconds or (first_step >= preset.warmup_steps and spent >= preset.warmup_seconds):
            return first_step, steps


def settle(work: Timed, preset: Preset, first_step: int, steps: int) -> tuple[int, bool, list[float]]:
    """Run blocks until the last ones are steady, for at most the preset's ``settling_seconds``, or ``FEWEST`` blocks.

    Returns the next step's index, whether they became steady, and the seconds of every block.
    """
    blocks: list[float] = []
    start = time.perf_counter()
    fewest = FEWEST if preset.settling_seconds else 0
    while len(blocks) < WINDOW or not steady(blocks[-WINDOW:]):
        if work.agree(time.perf_counter() - start) >= preset.settling_seconds and len(blocks) >= fewest:
            return first_step, len(blocks) >= FEWEST and steady(blocks[-WINDOW:]), blocks
        blocks.append(work.agree(time_block(work, first_step, steps)[0]))
        first_step += steps
    return first_step, True, blocks


def steady(blocks: list[float]) -> bool:
    """Return whether ``blocks``, in the order they ran, show no trend, or one of less than ``DRIFT`` in all.

    By Kendall's rank correlation with time at 5 % (Mann 1945, doi:10.2307/1907187); the drift is between the medians of
    the two halves.
    """
    n = len(blocks)
    score = sum((b > a) - (b < a) for a, b in itertools.combinations(blocks, 2))
    trend = abs(score) > 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    first, last = statistics.median(blocks[: n // 2]), statistics.median(blocks[n // 2 :])
    return not trend or abs(last / first - 1) < DRIFT


def time_blocks(
    work: Timed, preset: Preset, first_step: int, steps: int, least_seconds: float = 0.0
) -> Iterator[tuple[Block, Any]]:
    """Yield timed blocks of ``steps`` steps, and the handle of each one's last step, until the preset has enough.

    If steps are slow, the preset's time ends before that: then there are as many as fit, and at least ``FEWEST``. In
    any case they last ``least_seconds``. Logits may be large: keeping a handle while the next block runs adds to the
    reported peak memory.
    """
    taken, blocks, seconds = 0, 0, 0.0
    start = time.perf_counter()
    while (
        blocks < FEWEST
        or seconds < least_seconds
        or ((taken < preset.iterations or blocks < preset.blocks) and seconds < preset.max_seconds)
    ):
        block_seconds, handle = time_block(work, first_step + taken, steps)
        yield Block(first_step + taken, steps, block_seconds), handle
        del handle
        taken, blocks = taken + steps, blocks + 1
        seconds = work.agree(time.perf_counter() - start)


def time_calls(work: Timed, preset: Preset, first_step: int) -> list[float]:
    """Return the seconds of calls synchronised one by one: as many as the preset wants, or as its time allows."""
    calls: list[float] = []
    start = time.perf_counter()
    while len(calls) < FEWEST or (len(calls) < preset.calls and time.perf_counter() - start < preset.max_seconds):
        calls.append(time_block(work, first_step + len(calls), 1)[0])
    return calls


def time_collective(work: Work) -> float:
    """Return the median seconds of an all-reduce that is synchronised before and after."""
    seconds = []
    for _ in range(COLLECTIVES + 1):
        start = time.perf_counter()
        work.synchronize(work.all_reduce())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first one sets up


def latency(seconds: list[float]) -> dict[str, Any]:
    """Return the row's columns for calls of ``seconds``."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    enough = len(seconds) >= P99_CALLS
    why = {} if enough else {"latency_seconds_p99": f"{len(seconds)} calls; {P99_CALLS} are needed"}
    return {
        "latency_calls": len(seconds),
        "latency_seconds_mean": statistics.fmean(seconds),
        "latency_seconds_std": statistics.stdev(seconds),
        "latency_seconds_p50": statistics.median(seconds),
        "latency_seconds_p95": cuts[94],
        "latency_seconds_p99": cuts[98] if enough else None,
        "missing": why,
    }


def summary(blocks: list[Block], batch_size: int) -> dict[str, float | int]:
    """Return the row's columns for ``blocks``, all of the same number of steps."""
    seconds = sorted(block.seconds / block.steps for block in blocks)
    median = statistics.median(seconds)
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {
        "iterations": sum(block.steps for block in blocks),
        "outliers": outliers(seconds),
        "blocks": len(blocks),
        "steps_per_block": blocks[0].steps,
        "step_seconds_mean": statistics.fmean(seconds),
        "step_seconds_std": statistics.stdev(seconds),
        "step_seconds_p50": median,
        "step_seconds_p95": cuts[18],
        "throughput": batch_size / median,
    }


def outliers(values: list[float]) -> int:
    """Return how many lie more than 1.5 interquartile ranges beyond the quartiles (Tukey 1977)."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = 1.5 * (high - low)
    return sum(value < low - reach or value > high + reach for value in values)


def opening_steps(work: Training, steps: int, emit: Callable[[int, float], None]) -> list[float]:
    """Return every loss of the opening steps, which both frameworks take alike from the initial weights."""
    handles = [work.step(index) for index in range(steps)]
    losses = []
    for index, handle in enumerate(handles):
        losses.append(work.loss(handle))
        emit(index, losses[-1])
    return losses
