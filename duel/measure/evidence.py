"""What the timed callable computes from known weights, recorded by the process that times it.

``duel.evidence`` defines what is kept, and compares two sides.
"""

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.catalogue import Citations, Images, Molecules, Tokens
from duel.errors import Disproved
from duel.evidence import BASE, BUCKETS, GRAIN, ROUNDING, TRIALS, Evidence
from duel.measure import parameters, twin

MOST_ELEMENTS = 2**27  # of a result that are copied to the host and projected
CHUNK = 2**22  # elements projected at once
STORED = 2.0**-24  # the largest relative rounding of a float32
STORES = 2  # roundings of a parameter in a step of AdamW: decay and update

Arrays = Mapping[str, npt.NDArray[Any]]
# For one kind of work: what it computes from the weights on the batches of these indexes, by quantity; and floors.
# Of results with samples, every so many-th from a first one on.
Run = Callable[[Any, Arrays, tuple[int, ...], int, int], tuple[dict[str, npt.NDArray[Any]], dict[str, float]]]


def project(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the norm of ``array`` and its projections, (1 + BUCKETS,).

    A projection is the sum of every ``BUCKETS``-th element, with random signs. For two tensors of the same name and
    shape, ‖difference of their projections‖ estimates ‖their difference‖ (a count sketch, Charikar et al. 2002,
    doi:10.1007/3-540-45465-9_59). Raises Disproved if a number is not finite.
    """
    flat = array.reshape(-1)
    generator = np.random.default_rng(np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4"))
    squares, sums = 0.0, np.zeros(BUCKETS)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK].astype(np.float64)
        if not np.isfinite(part).all():
            raise Disproved(f"what is measured gives NaN or infinite numbers: {name}, from known weights")
        squares += float(part @ part)
        part.resize(-(-part.size // BUCKETS) * BUCKETS, refcheck=False)
        signs = np.unpackbits(np.frombuffer(generator.bytes(part.size // 8), np.uint8))
        sums += np.where(signs, part, -part).reshape(-1, BUCKETS).sum(0)
    return np.array([math.sqrt(squares), *sums])


def moved(arrays: Arrays, by: float, seed: int) -> parameters.Arrays:
    """Return ``arrays`` with each number moved up or down by ``by``, relative to itself."""
    generator = np.random.default_rng(seed)
    found = {}
    for name in sorted(arrays):  # the sides order them differently
        signs = 2.0 * generator.integers(0, 2, arrays[name].shape, np.int8) - 1
        found[name] = (arrays[name] * (1 + by * signs)).astype(np.float32)
    return found


def trained(
    work: twin.Training, arrays: Arrays, indexes: tuple[int, ...], every: int = 1, first: int = 0
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
    """Return what optimizer steps from ``arrays`` compute, and its floors."""
    work.load(arrays)
    found = {"losses": np.array([work.loss(work.step(index)) for index in indexes])}
    moments = work.moments()
    found |= {f"moments/{name}": array for name, array in moments.items()}
    floors = {}
    for name, array in work.export().items():
        difference = array.astype(np.float64) - arrays[name]
        if name not in moments:
            found[f"statistics/{name}"] = difference
            continue
        size = np.abs(moments[name])
        found[f"change/{name}"] = difference * size
        floors[f"change/{name}"] = len(indexes) * STORES * STORED * float(np.linalg.norm(arrays[name] * size))
    return found, floors


def produced(
    work: twin.PerSampleGradients, arrays: Arrays, indexes: tuple[int, ...], every: int = 1, first: int = 0
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
    """Return the results of steps from ``arrays``, for every ``every``-th sample from ``first`` on."""
    work.load(arrays)
    found = {}
    for place, index in enumerate(indexes):
        for name, array in work.named(work.step(index), every, first).items():
            found[f"result {place}/{name}"] = array
    return found, {}


def evaluated(
    work: twin.Inference, arrays: Arrays, indexes: tuple[int, ...], every: int = 1, first: int = 0, policy: str = "fp32"
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
    """Return the same as ``produced``. Raises Disproved if the program does not give the same result twice.

    Sums in another order may be rounded to other 16-bit numbers afterwards.
    """
    found, _ = produced(work, arrays, indexes, every, first)
    again, _ = produced(work, arrays, indexes[:1], every, first)
    for name, array in again.items():
        apart = float(np.linalg.norm(array.astype(np.float64) - found[name]) / (np.linalg.norm(array) or 1.0))
        if apart > max(NONDETERMINISTIC, BASE[policy]):
            raise Disproved(
                f"the model is not deterministic in evaluation: {name}, computed twice, differs by {apart:.1e}"
            )
    return found, {}


NONDETERMINISTIC = 1e-5  # ‖difference‖ / ‖result‖; kernels that add in a different order each time are far below
RUNS: Mapping[str, Run] = {"training": trained, "per_sample_gradients": produced, "inference": evaluated}


def outputs(inputs: Images | Tokens | Molecules | Citations) -> int:
    """Return how many numbers a model outputs for one sample."""
    match inputs:
        case Tokens(classes=None):
            return inputs.length * inputs.vocabulary
        case Molecules():
            return inputs.tasks
        case Citations():
            return inputs.nodes * inputs.classes
        case _:
            return inputs.classes or 1


class Recorder:
    """Records the evidence of one row.

    ``elements`` counts those of one step's result, ``samples`` its samples on each device, ``batches`` those of the
    pool; ``smooth``: the network has no kinks.
    """

    def __init__(
        self,
        work: Any,
        run: Run,
        shapes: Mapping[str, tuple[int, ...]],
        batches: int,
        elements: int,
        samples: int,
        policy: str,
        seed: int,
        smooth: bool,
    ) -> None:
        self._work, self._shapes, self._batches, self._seed = work, shapes, batches, seed
        self._run = functools.partial(evaluated, policy=policy) if run is evaluated else run
        self._smooth = smooth
        self._every, self._first, self._samples = math.ceil(elements / MOST_ELEMENTS), 0, samples
        self.evidence = Evidence(policy)
        self.step_seconds = math.inf  # of the fastest pass so far, including all that is recorded of a step
        if self._every > 1:
            self.evidence.notes.append(f"every {self._every}th sample")

    def before(self) -> None:
        """Record an early and a late batch of the pool, before the clock."""
        known = self._known("before", (0, self._batches - 1))
        if ROUNDING.get(self.evidence.policy, 0.0) > 100 * GRAIN:
            for times in (1, 2):
                little = moved(known, times * GRAIN, self._seed)
                self._record(f"before, grain {times}", little, (0, self._batches - 1))

    def after(self, index: int) -> None:
        """Record two other batches with other weights, after the clock; ``index`` is that of the next step.

        If samples are left out, these are others than before the clock.
        """
        self._first = min(self._every // 2, self._samples - 1)
        start = -(-index // self._batches) * self._batches
        self._seed += 1
        self._known("after", (start + self._batches // 2, start + 1))

    def _known(self, when: str, indexes: tuple[int, ...]) -> parameters.Arrays:
        known = parameters.known(self._shapes, self._seed + 1, self._smooth)
        self.evidence.floors[when] = self._record(when, known, indexes)
        policy = self.evidence.policy
        for trial in range(1, TRIALS.get(policy, 0) + 1):
            self._record(f"{when}, moved {trial}", moved(known, ROUNDING[policy], self._seed + trial), indexes)
        return known

    def _record(self, name: str, arrays: Arrays, indexes: tuple[int, ...]) -> dict[str, float]:
        start = time.perf_counter()
        found, floors = self._run(self._work, arrays, indexes, self._every, self._first)
        self.step_seconds = min(self.step_seconds, (time.perf_counter() - start) / len(indexes))
        self.evidence.passes[name] = {what: project(what, array) for what, array in found.items()}
        self.evidence.shapes |= {what: array.shape for what, array in found.items()}
        return floors
