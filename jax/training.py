"""Training on one device: the whole optimizer step as one compiled program."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

import weights
from duel.catalogue import SGD, AdamW
from duel.measure.batches import Pool
from duel.measure.device import Setting
from network import ALL, PARTS, Network


class Training(Network):
    """The benchmark's optimizer on the batches of the pool, taken in turn."""

    _inputs_at = 1

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._loss_scale = setting.loss_scale
        self._loss = LOSSES[setting.benchmark.loss]
        self._recipe = setting.benchmark.optimizer
        self._optimizer = _optimizer(self._recipe)
        self._donates = setting.on("donation")
        super().__init__(setting, pool, arrays)
        if setting.world.size > 1:
            counts = [self._put(np.array(batch.present)) for batch in pool.batches]
            self._batches = [(*batch, count) for batch, count in zip(self._batches, counts, strict=True)]
        self._trainable = weights.trainable(self._model)
        self._program: Any = self._train

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        super().load(arrays)
        # Both optimizers start at zero; calling optax's init would compile a program for each shape.
        shapes = jax.eval_shape(self._optimizer.init, self._state[0])
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        self._state = (*self._state, self._put(moments))

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; return its loss, which may not be ready."""
        self._state, loss = self._program(self._state, *self._batches[index % len(self._batches)])
        return loss

    def loss(self, handle: Any) -> float:
        """Return the loss of ``handle``."""
        return float(handle)

    def moments(self) -> dict[str, npt.NDArray[Any]]:
        """Return, by trainable parameter, what the optimizer keeps of its gradients: momentum, AdamW's first moment."""
        kept = "trace" if isinstance(self._recipe, SGD) else "mu"
        moments = optax.tree_utils.tree_get(self._state[2], kept)
        named = weights.export(nnx.merge(self._graph, moments, self._state[1]))
        return {name: named[name] for name in self._trainable}

    def count(self) -> int | None:
        """Return the steps since ``load`` by the optimizer's own count; None for SGD, which keeps none."""
        return None if isinstance(self._recipe, SGD) else int(optax.tree_utils.tree_get(self._state[2], "count"))

    def passes(self) -> dict[str, Callable[[int], Any]]:
        """Return compiled functions that each dispatch a part of ``step`` for batch ``index`` modulo the pool.

        "forward" is the loss, without keeping anything for a backward pass; "gradient" includes that pass. Both return
        the running statistics and leave the state of ``step`` as it is.
        """

        def alone(program: Any) -> Callable[[int], Any]:
            compiled = self._compiled(program.trace(*self._state[:2], *self._batches[0]).lower())
            return lambda index: compiled(*self._state[:2], *self._batches[index % len(self._batches)])

        return {"forward": alone(jax.jit(self._loss_alone)), "gradient": alone(self._differentiate)}

    def _loss_alone(self, parameters: Any, statistics: Any, inputs: Any, labels: jax.Array) -> tuple[jax.Array, Any]:
        """Return (loss, new running statistics)."""
        logits, changed = self._forward(parameters, statistics, inputs, train=True)
        return self._loss(logits, labels), changed

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Return what a step on batch ``index`` would see, without taking it.

        That is the loss, the logits (N, classes), or with more axes, with the batch's own statistics, and the gradient
        with respect to each trainable parameter.
        """
        parameters, statistics, _ = self._state
        batch = self._batches[index % len(self._batches)]
        (loss, (_, logits)), gradients = self._differentiate(parameters, statistics, *batch)
        named = weights.export(nnx.merge(self._graph, gradients, statistics))
        return float(loss), np.array(logits), {name: named[name] for name in self._trainable}

    def _update(self, state: Any, inputs: Any, labels: jax.Array, count: Any = None) -> tuple[Any, jax.Array]:
        parameters, statistics, moments = state
        (loss, (statistics, _)), gradients = self._loss_and_gradients(parameters, statistics, inputs, labels, count)
        loss, gradients = self._sum((loss, gradients))
        updates, moments = self._optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), statistics, moments), loss

    def _loss_and_gradients(
        self, parameters: Any, statistics: Any, inputs: Any, labels: jax.Array, count: Any = None
    ) -> Any:
        """Return ((loss, (new running statistics, logits)), gradients); with global ``count``, this device's share."""
        # In 16 bits a share must not be nearer to what is flushed to zero than a loss of this device alone.
        scale = self._loss_scale * (self._mesh.size if self._mesh is not None and self._loss_scale != 1 else 1)

        def scaled(parameters: Any) -> tuple[jax.Array, Any]:
            logits, changed = self._forward(parameters, statistics, inputs, train=True)
            loss = self._loss(logits, labels, count)
            return loss * scale, (loss, (changed, logits))

        (_, result), gradients = jax.value_and_grad(scaled, has_aux=True)(parameters)
        return result, jax.tree.map(lambda gradient: gradient / scale, gradients)

    @functools.cached_property
    def _train(self) -> Any:
        update = self._over_devices(self._update, (ALL, PARTS, PARTS, ALL), (ALL, ALL))
        return jax.jit(update, donate_argnums=0 if self._donates else ())

    def _trace(self) -> Any:
        return self._train.trace(self._state, *self._batches[0])

    @functools.cached_property
    def _differentiate(self) -> Any:
        return jax.jit(self._loss_and_gradients)


def _optimizer(recipe: SGD | AdamW) -> optax.GradientTransformation:
    match recipe:
        case SGD():
            # torch.optim.SGD adds the decay before the momentum; the other order is a different algorithm
            return optax.chain(
                optax.add_decayed_weights(recipe.weight_decay),
                optax.sgd(recipe.learning_rate, recipe.momentum),
            )
        case AdamW():
            return optax.adamw(
                recipe.learning_rate, *recipe.betas, eps=recipe.epsilon, weight_decay=recipe.weight_decay
            )


def _softmax_loss(logits: jax.Array, labels: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Return the cross-entropy of ``logits`` (..., classes) with all ``labels`` (...) that are not -1: sum / ``count``.

    Without ``count``, the mean.
    """
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return _mean(each, labels, count)


def _sigmoid_loss(logits: jax.Array, labels: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Return the binary cross-entropy of ``logits`` (...) with all ``labels`` (...) that are not -1, likewise."""
    each = optax.sigmoid_binary_cross_entropy(logits, jnp.maximum(labels, 0).astype(logits.dtype))
    return _mean(each, labels, count)


def _mean(each: jax.Array, labels: jax.Array, count: jax.Array | None) -> jax.Array:
    there = labels >= 0
    return each.mean(where=there) if count is None else each.sum(where=there) / count


LOSSES = {"softmax": _softmax_loss, "sigmoid": _sigmoid_loss}
