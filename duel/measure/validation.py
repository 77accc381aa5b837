"""What one side computes, recorded for comparison with the other.

The comparison and its bounds are in ``duel.report.parity``. This module chooses what is computed: everything that could
differ. Weights, norms and running statistics are random throughout, since at the usual initial values many terms are
zero or one and a mistake in them would not show.
"""

import dataclasses
import importlib
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duel import datasets
from duel.catalogue import FRAMEWORK_DEFAULT, PRECISIONS, PRODUCTS, SGD, AdamW, Benchmark, Tokens
from duel.certificate import RATE, STEPS
from duel.measure import batches, parameters
from duel.measure.device import Device, Setting

MOST_TOKENS = 128  # per sequence
LARGE = 4_000_000  # parameters
# Larger activations are compared at this many evenly spaced elements.
MOST_ELEMENTS = 2**20
# Images with mean 100 and standard deviation 0.1: in float32, E[x²] - E[x]² has few digits left there. Kernels reduced
# to their middle pass them on: with others, padding would make far larger differences along the border.
SHIFT, SPREAD = 100.0, 0.1
# Weights are moved, relative to themselves, by what rounding to float32 does to a layer's values, as the two frameworks
# round differently, or by a little more. And the number of trials.
ROUNDING, TRIALS = 4e-6, 3
RECIPES: Mapping[str, SGD | AdamW] = {"sgd": SGD(RATE / 10), "adamw": AdamW(RATE)}

Arrays = dict[str, npt.NDArray[Any]]


@dataclass
class Proof:
    """All that is compared of one side, computed by its classes ``Training`` and ``PerSampleGradients``.

    ``shapes`` are those of all parameters and running statistics. ``given`` are weights to compute with instead of
    random ones. ``compute`` fills ``found``; if it raises, what was computed before is there.

    =====================================  =========================================================================
    name                                   what
    =====================================  =========================================================================
    shapes                                 JSON: of every parameter and statistic, and of every layer's output
    flops                                  JSON: by size, of one sample's forward pass in this side's program
    weights_sha256                         of the weights that rows start from
    per-sample weights_sha256              of those that rows of per-sample gradients start from: group norms have no
                                           running statistics
    used_sha256, data_sha256               of the weights and data used here
    <precision>/layers/<layer>             float64 and fp32: a layer's output in evaluation; the last is the logits
    <precision>/train logits, .../loss     with the batch's own statistics
    <precision>/gradients/<parameter>
    <precision>/<optimizer> losses         of ten steps: float64 with sgd and adamw, fp32 with sgd
    float64/<optimizer> after/<parameter>  parameters and running statistics after these steps
    fp32/shifted logits                    of images far from zero, with the batch's own statistics and kernels reduced
                                           to their middle
    float64/sensitivity/<parameter>        ‖difference‖ by which its gradient moves if all weights are moved by as much
                                           as float32 rounds values; for "losses", the largest relative difference. In
                                           float64: a property of the function, whatever this side's float32 does
    float64/per-sample <product>/<name>    products of per-sample gradients, with group norms; at full size without
                                           the gradients themselves
    <precision>/error/<quantity>           bf16, fp16, tf32: relative distance of the logits, and of all gradients
                                           together, from this side's own float64 result; the median over batches
    =====================================  =========================================================================
    """

    benchmark: Benchmark
    size: str
    device: Device
    seed: int
    training: Any
    per_sample: Any
    shapes: Mapping[str, tuple[int, ...]]
    given: parameters.Arrays | None
    say: Callable[[str], None]
    found: Arrays = field(default_factory=dict)

    def compute(self) -> None:
        self._prepare()
        self.say("computing in float64")
        self._in_float64()
        self.say("computing in fp32")
        self._in_fp32()
        for policy in PRECISIONS.values():
            if self.device.kind in policy.device_kinds and policy.name not in ("fp32", FRAMEWORK_DEFAULT):
                self.say(f"computing in {policy.name}")
                self._errors(policy.name)
        self.say("computing per-sample gradients in float64")
        self._products()

    def _prepare(self) -> None:
        """Make the weights and batches, and record their hashes and the FLOPs."""
        whole = dataclasses.replace(self.benchmark, dataset=datasets.SYNTHETIC)
        entry = whole.sizes[self.size]
        if isinstance(entry.inputs, Tokens):  # a thousand tokens show no more and take eight times as long
            inputs = dataclasses.replace(entry.inputs, length=min(entry.inputs.length, MOST_TOKENS))
            entry = dataclasses.replace(entry, inputs=inputs)
        self._benchmark = dataclasses.replace(whole, sizes={self.size: entry})
        self._samples = entry.batch_size["cpu"]  # on every device: more samples would not show more
        if self.given is None:
            initial = parameters.initialise(self.shapes, self.seed)
            self._arrays = parameters.initialise(self.shapes, self.seed, randomise=True)
        else:
            initial = self._arrays = self.given
        self._pool = batches.pool(self._benchmark, self.size, self._samples, self.seed, Path())
        self._has_images = self._pool.batches[0].inputs[0].ndim == 4
        if self._has_images:
            shifted = _shifted(self._pool.batches[0])
            self._pool = dataclasses.replace(self._pool, batches=(*self._pool.batches, shifted))
        # For half precision. In a small network, crossing a single kink (see ``duel.report.parity``) outweighs all of a
        # batch's rounding, hence the median of several. A large one has enough gradients in one batch.
        small = self.size == "tiny" or sum(map(math.prod, self.shapes.values())) < LARGE
        self._several = range(batches.POOL_BATCHES)
        self._some = self._several if small else range(1)
        self.found |= {
            "weights_sha256": _text(parameters.sha256(initial)),
            "per-sample weights_sha256": _text(parameters.sha256(parameters.trainable(initial))),
            "used_sha256": _text(parameters.sha256(self._arrays)),
            "data_sha256": _text(self._pool.sha256),
            "flops": _text(json.dumps({name: _flops(whole, name) for name in whole.sizes})),
        }

    def _start(self, optimizer: str, precision: str) -> Any:
        changed = dataclasses.replace(self._benchmark, optimizer=RECIPES[optimizer])
        return self.training(Setting(changed, self.size, precision, self.device), self._pool, self._arrays)

    def _pass(self, work: Any, precision: str) -> dict[str, npt.NDArray[Any]]:
        """Record one forward and one backward pass; return the gradients."""
        layers = {name or "logits": array for name, array in work.layers(0).items()}
        self.found |= {f"{precision}/layers/{name}": _thinned(array) for name, array in layers.items()}
        outputs = {name: array.shape for name, array in layers.items()}
        self.found["shapes"] = _text(json.dumps({"parameters": self.shapes, "layers": outputs}))
        gradients: dict[str, npt.NDArray[Any]]
        loss, logits, gradients = work.gradients(0)
        self.found |= {f"{precision}/train logits": _thinned(logits), f"{precision}/loss": np.array(loss)}
        self.found |= {f"{precision}/gradients/{name}": array for name, array in gradients.items()}
        return gradients

    def _in_float64(self) -> None:
        work = self._start("sgd", "float64")
        gradients = self._pass(work, "float64")
        self._exact_logits = [work.layers(index)[""] for index in self._several]
        self._exact_gradients = [work.gradients(index)[2] for index in self._some]
        for optimizer in RECIPES:
            work = work if optimizer == "sgd" else self._start(optimizer, "float64")
            work.load(self._arrays)
            work.compile()
            losses = _losses(work)
            self.found[f"float64/{optimizer} losses"] = losses
            self.found |= {f"float64/{optimizer} after/{name}": array for name, array in work.export().items()}
            if optimizer == "sgd":
                moves = _sensitivity(work, self._arrays, gradients, losses, self.seed)
                self.found |= {f"float64/sensitivity/{name}": np.array(distance) for name, distance in moves.items()}

    def _in_fp32(self) -> None:
        work = self._start("sgd", "fp32")
        self._pass(work, "fp32")
        if self._has_images:
            work.load({name: _middle(array) for name, array in self._arrays.items()})
            self.found["fp32/shifted logits"] = _thinned(work.gradients(batches.POOL_BATCHES)[1])
        work.load(self._arrays)
        work.compile()
        self.found["fp32/sgd losses"] = _losses(work)

    def _errors(self, precision: str) -> None:
        work = self._start("sgd", precision)
        logits = [_distance({"": work.layers(i)[""]}, {"": self._exact_logits[i]}) for i in self._several]
        gradients = [_distance(work.gradients(i)[2], self._exact_gradients[i]) for i in self._some]
        for name, distances in {"logits": logits, "gradients": gradients}.items():
            self.found[f"{precision}/error/{name}"] = np.array(statistics.median(distances))

    def _products(self) -> None:
        arrays = parameters.trainable(self._arrays)
        for product in PRODUCTS if self.size == "tiny" else ("norms", "clipped_sum"):
            microbatch = self._samples if product == "materialised" else 1
            setting = Setting(
                self._benchmark, self.size, "float64", self.device, product=product, microbatch=microbatch
            )
            work = self.per_sample(setting, self._pool, arrays)
            work.compile()
            named = work.named(work.step(0))
            self.found |= {f"float64/per-sample {product}/{name}": array for name, array in named.items()}


def _flops(benchmark: Benchmark, size: str) -> int:
    """Return the FLOPs of one sample's forward pass, counted in the network itself, not taken from the catalogue."""
    sample = batches.pool(benchmark, size, 1, 0, Path()).batches[0]
    counted: int = importlib.import_module("network").count_flops(benchmark, size, sample.inputs)
    return counted


def _shifted(batch: batches.Batch) -> batches.Batch:
    images = np.float32(SHIFT) + np.float32(SPREAD) * batch.inputs[0]
    return dataclasses.replace(batch, inputs=(images, *batch.inputs[1:]))


def _middle(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a convolution's kernel (out, in, height, width) with all but its middle zero; anything else unchanged."""
    if array.ndim != 4:
        return array
    kept = np.zeros_like(array)
    y, x = (size // 2 for size in array.shape[2:])
    kept[:, :, y, x] = array[:, :, y, x]
    return kept


def _losses(work: Any) -> npt.NDArray[np.float64]:
    """Return the losses (STEPS,) of the next ``STEPS`` steps of ``work``."""
    return np.array([work.loss(work.step(index % batches.POOL_BATCHES)) for index in range(STEPS)])


def _sensitivity(
    work: Any, arrays: parameters.Arrays, gradients: Mapping[str, npt.NDArray[Any]], losses: Any, seed: int
) -> dict[str, float]:
    """Return how far results move if all of ``arrays`` are moved by a rounding: the largest of ``TRIALS`` distances.

    By parameter, ‖difference‖ from ``gradients``; for "losses", the largest relative difference from ``losses``.
    """
    trials: dict[str, list[float]] = {name: [] for name in (*gradients, "losses")}
    generator = np.random.default_rng(seed)
    for _ in range(TRIALS):
        # drawn in sorted order: the order of ``arrays`` differs between the sides
        factors = {name: 1 + ROUNDING * generator.standard_normal(arrays[name].shape) for name in sorted(arrays)}
        work.load({name: (arrays[name] * factors[name]).astype(np.float32) for name in arrays})
        for name, moved in work.gradients(0)[2].items():
            trials[name].append(float(np.linalg.norm(moved - gradients[name])))
        trials["losses"].append(float(np.max(np.abs(_losses(work) / losses - 1))))
    return {name: float(np.max(distances)) for name, distances in trials.items()}  # NaN if one is


def _thinned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.size <= MOST_ELEMENTS:
        return array
    return array.reshape(-1)[np.arange(MOST_ELEMENTS) * array.size // MOST_ELEMENTS]


def _distance(values: Mapping[str, npt.NDArray[Any]], exact: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return ‖values - exact‖ / ‖exact‖ over all arrays together."""
    difference = sum(float(np.square(values[name].astype(np.float64) - exact[name]).sum()) for name in exact)
    return math.sqrt(difference / sum(float(np.square(array).sum()) for array in exact.values()))


def _text(text: str) -> npt.NDArray[Any]:
    return np.array(text)
