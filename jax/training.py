"""Training on one device: the whole optimizer step as one compiled program."""

import functools
import importlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

import devices
import weights
from duel.catalogue import Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import Device


def build(benchmark: Benchmark, size: str) -> nnx.Module:
    """The model of ``benchmark`` at ``size``, without weights."""
    return importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)


class Training:
    """SGD on the batches of ``pool``, which lie on the device from the start, taken in turn.

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
        self._half = precision == "bf16"
        recipe = benchmark.optimizer
        # torch.optim.SGD adds the decay before the momentum; the other order is another algorithm
        self._optimizer = optax.chain(
            optax.add_decayed_weights(recipe.weight_decay),
            optax.sgd(recipe.learning_rate, recipe.momentum),
        )
        model = build(benchmark, size)
        weights.load(model, arrays)
        self._trainable = weights.trainable(model)
        # Plain dictionaries of arrays from here on: nnx objects would be walked in Python at every step.
        self._graph, *states = nnx.split(model, nnx.Param, nnx.BatchStat)
        parameters, statistics = (self._put(nnx.to_pure_dict(state)) for state in states)
        moments = jax.device_put(self._optimizer.init(parameters), self._device)
        self._state = (parameters, statistics, moments)
        self._batches = [self._put_batch(batch) for batch in pool.batches]
        self._train = jax.jit(self._update, donate_argnums=0)

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
            images, labels = self._put_batch(chunk)
            logits, _ = self._evaluate(parameters, statistics, images)
            correct += int((logits.argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """The current weights, as ``weights.export`` names them."""
        parameters, statistics, _ = self._state
        return weights.export(nnx.merge(self._graph, parameters, statistics))

    def logits(self, index: int) -> npt.NDArray[Any]:
        """Logits (N, classes) of batch ``index`` with the running statistics, as in evaluation."""
        parameters, statistics, _ = self._state
        images, _ = self._batches[index % len(self._batches)]
        return np.array(self._evaluate(parameters, statistics, images)[0])

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """What a step on batch ``index`` would see, without taking it.

        The loss, the logits (N, classes) with the batch's own statistics, and the gradient by each trainable parameter.
        """
        parameters, statistics, _ = self._state
        batch = self._batches[index % len(self._batches)]
        (loss, (_, logits)), gradients = self._differentiate(parameters, statistics, *batch)
        named = weights.export(nnx.merge(self._graph, gradients, statistics))
        return float(loss), np.array(logits), {name: named[name] for name in self._trainable}

    def _update(self, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        parameters, statistics, moments = state
        (loss, (statistics, _)), gradients = self._loss_and_gradients(parameters, statistics, images, labels)
        updates, moments = self._optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), statistics, moments), loss

    def _loss_and_gradients(self, parameters: Any, statistics: Any, images: jax.Array, labels: jax.Array) -> Any:
        """((loss, (new running statistics, logits)), gradients)."""

        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            logits, changed = self._forward(parameters, statistics, images, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (changed, logits)

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    def _forward(self, parameters: Any, statistics: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        """(logits in full precision, running statistics after the pass)."""
        if self._half:
            parameters, images = _halve(parameters), images.astype(jnp.bfloat16)
        model = nnx.merge(self._graph, parameters, statistics)
        logits = model(images, train)
        return logits.astype(self._dtype), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    @functools.cached_property
    def _differentiate(self) -> Any:
        return jax.jit(self._loss_and_gradients)

    @functools.cached_property
    def _evaluate(self) -> Any:
        return jax.jit(functools.partial(self._forward, train=False))

    def _put(self, tree: Any) -> Any:
        """``tree`` on the device, in the policy's storage type."""

        def copy(array: Any) -> jax.Array:
            # never an alias of numpy's memory, which donation would then overwrite
            return jax.device_put(np.asarray(array, self._dtype), self._device, may_alias=False)

        return jax.tree.map(copy, tree)

    def _put_batch(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        images = self._put(batch.images.transpose(0, 2, 3, 1))  # NHWC, the layout of the models
        return images, jax.device_put(batch.labels, self._device)


def _halve(tree: Any) -> Any:
    """Kernels and biases of convolutions and linear layers in bfloat16; norms keep float32."""
    if not isinstance(tree, dict):
        return tree
    if "kernel" in tree:
        return {name: value.astype(jnp.bfloat16) for name, value in tree.items()}
    return {name: _halve(value) for name, value in tree.items()}
