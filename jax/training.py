"""Training on one device: the whole optimizer step as one compiled program."""

import contextlib
import functools
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

import devices
import weights
from duel.catalogue import PRECISIONS, SGD, AdamW, Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import Device
from models import _layers

COMPUTE = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def build(benchmark: Benchmark, size: str) -> nnx.Module:
    """The model of ``benchmark`` at ``size``, without weights."""
    return importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)


class Training:
    """The benchmark's optimizer on the batches of ``pool``, which lie on the device from the start, taken in turn.

    ``arrays`` are the initial weights. ``precision`` is a policy of the catalogue or "float64".
    """

    execution = "jit"

    def __init__(
        self,
        benchmark: Benchmark,
        size: str,
        pool: Pool,
        arrays: Mapping[str, npt.NDArray[Any]],
        precision: str,
        device: Device,
    ) -> None:
        devices.set_precision(precision)
        self._device = devices.native(device)
        self._dtype = jnp.float64 if precision == "float64" else jnp.float32
        self._compute = COMPUTE.get(precision)
        self._loss_scale = PRECISIONS[precision].loss_scale if precision in PRECISIONS else 1.0
        self._loss = LOSSES[benchmark.loss]
        self._optimizer = _optimizer(benchmark.optimizer)
        self._model = build(benchmark, size)
        self._trainable = weights.trainable(self._model)
        self.load(arrays)
        self._batches = [self._put_batch(batch) for batch in pool.batches]
        self._train = jax.jit(self._update, donate_argnums=0)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin anew from other weights; what is compiled stays."""
        weights.load(self._model, arrays)
        # Plain dictionaries of arrays from here on: nnx objects would be walked in Python at every step.
        self._graph, *states = nnx.split(self._model, nnx.Param, nnx.BatchStat)
        parameters, statistics = (self._put(nnx.to_pure_dict(state)) for state in states)
        moments = jax.device_put(self._optimizer.init(parameters), self._device)
        self._state = (parameters, statistics, moments)

    def compile(self) -> float | None:
        """Compile the step ahead of time, by which ``step`` then runs; seconds of trace, lower and compile."""
        start = time.perf_counter()
        compiled = self._train.trace(self._state, *self._batches[0]).lower().compile()
        seconds = time.perf_counter() - start
        # Without donation the step would hold parameters and optimizer state twice.
        assert compiled.memory_analysis().alias_size_in_bytes > 0, "the step's state was not donated"
        self._train = compiled
        return seconds

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; its loss, which may not be ready yet."""
        self._state, loss = self._train(self._state, *self._batches[index % len(self._batches)])
        return loss

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""
        handle.block_until_ready()  # all results of one program become ready together

    def loss(self, handle: Any) -> float:
        """The loss behind ``handle``."""
        return float(handle)

    def accuracy(self, batch: Batch) -> float:
        """Share of ``batch`` that the model, with its running statistics, classifies rightly."""
        parameters, statistics, _ = self._state
        correct = 0
        for chunk in batch.chunks():
            inputs, labels = self._put_batch(chunk)
            logits, _ = self._evaluate(parameters, statistics, inputs)
            correct += int((logits.argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """The current weights, as ``weights.export`` names them."""
        parameters, statistics, _ = self._state
        return weights.export(nnx.merge(self._graph, parameters, statistics))

    def layers(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """What each module gives for batch ``index`` in evaluation, by its name and in the order of the calls.

        The whole model's name is empty: the logits. Images are (N, channels, height, width).
        """
        parameters, statistics, _ = self._state
        values = self._record(parameters, statistics, self._batches[index % len(self._batches)][0])
        arrays = [np.array(value) for value in values]
        return {
            name: array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
            for name, array in zip(self._recorded, arrays, strict=True)
        }

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """What a step on batch ``index`` would see, without taking it.

        The loss, the logits (N, classes) with the batch's own statistics, and the gradient by each trainable parameter.
        """
        parameters, statistics, _ = self._state
        batch = self._batches[index % len(self._batches)]
        (loss, (_, logits)), gradients = self._differentiate(parameters, statistics, *batch)
        named = weights.export(nnx.merge(self._graph, gradients, statistics))
        return float(loss), np.array(logits), {name: named[name] for name in self._trainable}

    def _update(self, state: Any, inputs: Any, labels: jax.Array) -> tuple[Any, jax.Array]:
        parameters, statistics, moments = state
        (loss, (statistics, _)), gradients = self._loss_and_gradients(parameters, statistics, inputs, labels)
        updates, moments = self._optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), statistics, moments), loss

    def _loss_and_gradients(self, parameters: Any, statistics: Any, inputs: Any, labels: jax.Array) -> Any:
        """((loss, (new running statistics, logits)), gradients)."""

        def scaled(parameters: Any) -> tuple[jax.Array, Any]:
            logits, changed = self._forward(parameters, statistics, inputs, train=True)
            loss = self._loss(logits, labels)
            return loss * self._loss_scale, (loss, (changed, logits))

        (_, result), gradients = jax.value_and_grad(scaled, has_aux=True)(parameters)
        return result, jax.tree.map(lambda gradient: gradient / self._loss_scale, gradients)

    def _forward(self, parameters: Any, statistics: Any, inputs: Any, train: bool) -> tuple[jax.Array, Any]:
        """(logits in full precision, running statistics after the pass)."""
        model = nnx.merge(self._graph, parameters, statistics)
        with _layers.autocast(self._compute):
            logits = model(*inputs, train=train)
        return logits.astype(self._dtype), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    @functools.cached_property
    def _differentiate(self) -> Any:
        return jax.jit(self._loss_and_gradients)

    @functools.cached_property
    def _evaluate(self) -> Any:
        return jax.jit(functools.partial(self._forward, train=False))

    @functools.cached_property
    def _record(self) -> Any:
        """Compiled, what ``layers`` gives, in the order of the names that it leaves in ``_recorded``."""

        def forward(parameters: Any, statistics: Any, inputs: Any) -> list[jax.Array]:
            model = nnx.merge(self._graph, parameters, statistics)
            with _recording(model) as recorded, _layers.autocast(self._compute):
                model(*inputs, train=False)
            self._recorded = list(recorded)
            return [value.astype(self._dtype) for value in recorded.values()]

        return jax.jit(forward)

    def _put(self, tree: Any) -> Any:
        """``tree`` on the device, its floats in the policy's storage type."""

        def copy(array: Any) -> jax.Array:
            whole = np.issubdtype(array.dtype, np.integer)
            # never an alias of numpy's memory, which donation would then overwrite
            return jax.device_put(np.asarray(array, None if whole else self._dtype), self._device, may_alias=False)

        return jax.tree.map(copy, tree)

    def _put_batch(self, batch: Batch) -> tuple[tuple[jax.Array, ...], jax.Array]:
        # images as NHWC, the layout of the models
        inputs = tuple(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array for array in batch.inputs)
        return self._put(inputs), self._put(batch.labels)


def _optimizer(recipe: SGD | AdamW) -> optax.GradientTransformation:
    match recipe:
        case SGD():
            # torch.optim.SGD adds the decay before the momentum; the other order is another algorithm
            return optax.chain(
                optax.add_decayed_weights(recipe.weight_decay),
                optax.sgd(recipe.learning_rate, recipe.momentum),
            )
        case AdamW():
            return optax.adamw(
                recipe.learning_rate, *recipe.betas, eps=recipe.epsilon, weight_decay=recipe.weight_decay
            )


def _softmax_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of ``logits`` (..., classes) over all ``labels`` (...) that are not -1."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return each.mean(where=labels >= 0)


def _sigmoid_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean binary cross-entropy of ``logits`` (...) over all ``labels`` (...) that are not -1."""
    each = optax.sigmoid_binary_cross_entropy(logits, jnp.maximum(labels, 0).astype(logits.dtype))
    return each.mean(where=labels >= 0)


LOSSES = {"softmax": _softmax_loss, "sigmoid": _sigmoid_loss}


@contextlib.contextmanager
def _recording(model: nnx.Module) -> Iterator[dict[str, jax.Array]]:
    """What each module of ``model`` gives while it is called, by its name; the children's come before the parent's."""
    modules = list(nnx.iter_modules(model))
    names = {id(module): ".".join(str(part) for part in path) for path, module in modules}
    recorded: dict[str, jax.Array] = {}
    calls = {kind: vars(kind)["__call__"] for kind in {type(m) for _, m in modules} if "__call__" in vars(kind)}

    def recorder(call: Any) -> Any:
        def recorded_call(module: nnx.Module, *arguments: Any, **options: Any) -> Any:
            result = call(module, *arguments, **options)
            recorded[names[id(module)]] = result
            return result

        return recorded_call

    try:
        for kind, call in calls.items():
            kind.__call__ = recorder(call)
        yield recorded
    finally:
        for kind, call in calls.items():
            kind.__call__ = call
