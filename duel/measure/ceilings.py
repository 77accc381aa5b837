"""The device's ceilings: the bandwidth of a copy and the rate of a matrix product, measured by the same process.

Work is compared with them: its model FLOP utilisation, and which of the two bounds it (Williams et al. 2009,
doi:10.1145/1498765.1498785).
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duel.catalogue import SGD, Citations, Images, Molecules, Tokens
from duel.measure import device
from duel.measure.device import Setting
from duel.measure.probes import usable_cpus

# By kind of device: elements of the copied array, on CPUs at least, and width of the matrices. Larger than caches, done
# within a second.
COPIED = {"cpu": 2**24, "gpu": 2**28, "tpu": 2**28, "mps": 2**26}
WIDTHS = {"cpu": 1024, "gpu": 8192, "tpu": 8192, "mps": 4096}
SECONDS, BLOCK_SECONDS = 1.0, 0.05
CACHES = 4  # times the CPUs' last-level caches that a copied array takes, up to a share of the memory
MEMORY_SHARE = 1 / 8
CPUS = Path("/sys/devices/system/cpu")
# Loops of a side: each takes a number of rounds, runs them, and waits for the last.
Loops = dict[str, Callable[[int], None]]


def measure(loops: Loops, setting: Setting, thorough: bool = True) -> dict[str, float]:
    """Return the row's columns for the ceilings: the best of the blocks that fit in a second, or in a fifth of one."""
    kind, seconds = setting.device.kind, SECONDS if thorough else SECONDS / 5
    return {
        "copy_bytes_per_second": 2 * 4 * copied(kind) * _best(loops["copy"], seconds),  # read and written
        "matmul_flops_per_second": 2 * WIDTHS[kind] ** 3 * _best(loops["matmul"], seconds),
    }


@functools.cache
def copied(kind: str) -> int:
    """Return how many float32 numbers are copied on a device of ``kind``."""
    if kind != "cpu":
        return COPIED[kind]
    most = MEMORY_SHARE * (device.cpu().memory_bytes or 0)
    return int(min(max(4 * COPIED[kind], CACHES * _caches_bytes()), most)) // 4


def _caches_bytes() -> int:
    """Return the bytes of the last-level caches of the CPUs that this process may use; 0 if the kernel tells none."""
    found: dict[str, int] = {}
    for cpu in usable_cpus():
        with contextlib.suppress(OSError, ValueError):  # virtual machines may tell nothing, or in words of their own
            folders = sorted((CPUS / f"cpu{cpu}" / "cache").glob("index*"), key=lambda path: int(path.name[5:]))
            for last in folders[-1:]:
                kibibytes = (last / "size").read_text().strip().removesuffix("K")
                found[(last / "shared_cpu_list").read_text()] = int(kibibytes) * 1024
    return sum(found.values())


def _best(loop: Callable[[int], None], at_most: float = SECONDS) -> float:
    """Return the best rate in rounds per second."""
    loop(1)
    rounds, best = 1, 0.0
    end = time.perf_counter() + at_most
    while time.perf_counter() < end:
        start = time.perf_counter()
        loop(rounds)
        seconds = time.perf_counter() - start
        if seconds < BLOCK_SECONDS:
            rounds = max(rounds + 1, math.ceil(rounds * BLOCK_SECONDS / max(seconds, 1e-9)))
        else:
            best = max(best, rounds / seconds)
    return best or rounds / seconds


def step_flops(setting: Setting, module: str, batch_size: int) -> int:
    """Return the FLOP of a step, two per multiply-add; a backward pass counts as two forward passes."""
    return (1 if module == "inference" else 3) * setting.benchmark.sizes[setting.size].flops * batch_size


def least_bytes(setting: Setting, module: str, batch_size: int, parameters: int) -> int:
    """Return the least bytes a step must move, in float32: weights, what is made of their gradients, its samples once.

    Activations are left out, since they may stay in caches, so the reported arithmetic intensity is an upper bound.
    """
    inputs = setting.benchmark.sizes[setting.size].inputs
    match inputs:
        case Images():
            sample = inputs.channels * inputs.height * inputs.width
        case Tokens():
            sample = inputs.length
        case Molecules(node_features=features) | Citations(features=features):  # of nodes, and both ends of edges
            sample = inputs.nodes * features + 2 * inputs.edges
    arrays = parameters
    if module == "training":  # weights, gradients and each of the optimizer's moments, read and written
        moments = 1 if isinstance(setting.benchmark.optimizer, SGD) else 2
        arrays = (4 + 2 * moments) * parameters
    elif module == "per_sample_gradients":
        arrays = {"materialised": 1 + batch_size, "norms": 1, "clipped_sum": 2}[setting.product] * parameters
    return 4 * (arrays + sample * batch_size)


def utilisation(found: dict[str, float], flops: int, least: int, step_seconds: float) -> dict[str, Any]:
    """Return the row's columns for a step of ``flops`` and at least ``least`` bytes."""
    computing, moving = flops / found["matmul_flops_per_second"], least / found["copy_bytes_per_second"]
    return {"mfu": computing / step_seconds, "bound": "compute" if computing >= moving else "memory"}
