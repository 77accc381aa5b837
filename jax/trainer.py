"""Training to accuracy: the optimizer step by a recipe, on batches that arrive while it runs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import NamedSharding

from duel.measure.batches import Batch, Pool
from duel.measure.device import Setting
from network import ALL, PARTS
from training import LOSSES, Training

TOP = 5
OPENING = 0.1  # of the highest rate, which without a warm-up would raise the losses of the first steps


class Trainer(Training):
    """A recipe's optimizer, with another rate at each step, smoothed labels and an average of the weights."""

    _inputs_at = 3

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        assert setting.recipe is not None
        optimizer = setting.benchmark.optimizer
        self._rate, self._decay = optimizer.learning_rate, setting.recipe.average
        self._average: Any = ()
        # Updates are multiplied by the step's rate: with an optimizer of rate 1, that is the optimizer of that rate.
        benchmark = dataclasses.replace(setting.benchmark, optimizer=dataclasses.replace(optimizer, learning_rate=1.0))
        super().__init__(dataclasses.replace(setting, benchmark=benchmark), pool, arrays)
        if setting.recipe.smoothing:
            self._loss = functools.partial(_smoothed, setting.recipe.smoothing)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        super().load(arrays)
        self._average = jax.tree.map(jnp.copy, self._state[:2]) if self._decay else ()

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; return its loss, which may not be ready."""
        return self.advance(self._batches[index % len(self._batches)], OPENING * self._rate)

    def put(self, batch: Batch, present: int) -> Any:
        """Begin to copy ``batch``, this rank's part, to the device; ``present`` counts the labels of all ranks."""
        if self._mesh is None:
            return self._turned(self._put(batch.inputs)), self._put(batch.labels)
        whole = functools.partial(jax.make_array_from_process_local_data, NamedSharding(self._mesh, PARTS))
        inputs = self._turned(tuple(map(whole, batch.inputs)))
        return inputs, whole(batch.labels), self._put(np.array(present))

    @functools.cached_property
    def _turned(self) -> Any:
        """Images as NHWC, turned on the device: XLA copies a strided array to a GPU by one thread of the host."""
        return jax.jit(lambda inputs: tuple(a.transpose(0, 2, 3, 1) if a.ndim == 4 else a for a in inputs))

    def advance(self, placed: Any, rate: float) -> Any:
        """Dispatch one optimizer step on what ``put`` returned, at ``rate``; return its loss."""
        given = np.asarray(rate, self._dtype)
        self._state, self._average, loss = self._program(self._state, self._average, given, *placed)
        return loss

    def evaluate(self, batch: Batch) -> tuple[float, int, int]:
        """Return (sum of the losses, labels that are right, labels among the first five) of ``batch``."""
        inputs, labels = self._put_batch(batch, ALL)
        logits = self._evaluate(*(self._average or self._state[:2]), inputs)
        loss, right, near = self._scored(logits, labels)
        return float(loss), int(right), int(near)

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of everything that the next step depends on."""
        leaves = jax.tree.leaves((self._state, self._average))
        return {f"{number:05d}": np.array(leaf.addressable_data(0)) for number, leaf in enumerate(leaves)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what ``snapshot`` returned."""
        leaves, tree = jax.tree.flatten((self._state, self._average))
        kept = [arrays[f"{number:05d}"] for number in range(len(leaves))]
        self._state, self._average = self._put(jax.tree.unflatten(tree, kept))

    def _learn(
        self, state: Any, average: Any, rate: jax.Array, inputs: Any, labels: jax.Array, count: Any = None
    ) -> tuple[Any, Any, jax.Array]:
        parameters, statistics, moments = state
        (loss, (statistics, _)), gradients = self._loss_and_gradients(parameters, statistics, inputs, labels, count)
        loss, gradients = self._sum((loss, gradients))
        updates, moments = self._optimizer.update(gradients, moments, parameters)
        parameters = optax.apply_updates(parameters, jax.tree.map(lambda update: rate * update, updates))
        if self._decay:
            average = optax.incremental_update((parameters, statistics), average, 1 - self._decay)
        return (parameters, statistics, moments), average, loss

    @functools.cached_property
    def _train(self) -> Any:
        learn = self._over_devices(self._learn, (ALL, ALL, ALL, PARTS, PARTS, ALL), (ALL, ALL, ALL))
        return jax.jit(learn, donate_argnums=(0, 1) if self._donates else ())

    def _trace(self) -> Any:
        given = np.asarray(self._rate, self._dtype)
        return self._train.trace(self._state, self._average, given, *self._batches[0])

    @functools.cached_property
    def _scored(self) -> Any:
        def scored(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            there = labels >= 0
            loss = self._evaluated(logits, labels, jnp.ones(()))
            if self._setting.benchmark.loss == "sigmoid":
                right = (logits > 0) == (labels > 0)
                return loss, (right & there).sum(), (right & there).sum()
            _, first = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
            hits = (first == labels[..., None]) & there[..., None]
            return loss, hits[..., 0].sum(), hits.sum()

        return jax.jit(scored)

    def _evaluated(self, logits: jax.Array, labels: jax.Array, count: jax.Array) -> jax.Array:
        """Return the loss as it is evaluated, of the labels as they are."""
        return LOSSES[self._setting.benchmark.loss](logits, labels, count)


def _smoothed(share: float, logits: jax.Array, labels: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Return the cross-entropy with all ``labels`` (...) that are not -1; ``share`` of each goes to all classes.

    The mean, or with ``count`` the sum divided by that.
    """
    there = labels >= 0
    targets = optax.smooth_labels(jax.nn.one_hot(jnp.maximum(labels, 0), logits.shape[-1]), share)
    each = optax.softmax_cross_entropy(logits, targets)
    return each.mean(where=there) if count is None else each.sum(where=there) / count
