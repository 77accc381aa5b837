"""Per-sample gradients: the whole product as one compiled program."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.experimental import multihost_utils

import weights
from duel.catalogue import CLIP_NORM
from duel.measure.batches import Pool
from duel.measure.device import Setting
from network import ALL, PARTS, Network
from training import LOSSES


class PerSampleGradients(Network):
    """The setting's product on the batches of the pool, taken in turn, ``microbatch`` samples at a time.

    Each sample's gradient is that of its own loss. Group norms replace batch norms, which mix samples.
    """

    _per_sample = True

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._product, self._microbatch = setting.product, setting.microbatch
        self._loss_scale = setting.loss_scale
        self._loss = LOSSES[setting.benchmark.loss]
        super().__init__(setting, pool, arrays)

    def step(self, index: int) -> Any:
        """Dispatch the product of batch ``index`` modulo the pool and return it; it may not be ready yet.

        "materialised": (N, ...) by parameter. "norms": (N,). "clipped_sum": by parameter, the sum over samples, each
        clipped to a norm of at most ``CLIP_NORM``.
        """
        return self._program(*self._state, *self._batches[index % len(self._batches)])

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of ``handle``, as ``weights`` names and lays out parameters; norms are called "norms".

        If the product has samples, those of all devices or, where ``every`` leaves some out because all would be too
        large, this device's every ``every``-th one from ``first`` on.
        """
        if self._product != "clipped_sum":
            # Before they are gathered: all of them together may be more than a device's memory holds.
            handle = jax.tree.map(lambda array: self._of_this_device(array, every, first), handle)
        if self._mesh is not None and self._product != "clipped_sum" and every == 1:
            handle = jax.tree.map(_by_rank, multihost_utils.process_allgather(handle, tiled=True))
        if self._product == "norms":
            return {"norms": np.array(handle)}
        handle = jax.tree.map(np.asarray, handle)
        rows = [handle]
        if self._product == "materialised":
            rows = [jax.tree.map(lambda leaf, i=i: leaf[i], handle) for i in range(len(jax.tree.leaves(handle)[0]))]
        named = [weights.export(nnx.merge(self._graph, row, self._state[1])) for row in rows]
        if self._product == "clipped_sum":
            return named[0]
        return {name: np.stack([row[name] for row in named]) for name in named[0]}

    def _of_this_device(self, array: jax.Array, every: int, first: int) -> jax.Array:
        own = array if self._mesh is None else array.addressable_data(0)
        return own[first::every] if every > 1 else own

    def _trace(self) -> Any:
        results = ALL if self._product == "clipped_sum" else PARTS  # per-sample gradients stay where they were made
        program = self._over_devices(self._all, (ALL, ALL, PARTS, PARTS), results)
        return jax.jit(program).trace(*self._state, *self._batches[0])

    def _all(self, parameters: Any, statistics: Any, inputs: Any, labels: jax.Array) -> Any:
        def loss(parameters: Any, inputs: Any, label: jax.Array) -> jax.Array:
            logits, _ = self._forward(parameters, statistics, tuple(x[None] for x in inputs), train=True)
            return self._loss(logits, label[None]) * self._loss_scale

        def some(samples: Any) -> Any:
            gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(parameters, *samples)
            return self._reduced(jax.tree.map(lambda gradient: gradient / self._loss_scale, gradients))

        samples, size = (inputs, labels), self._microbatch
        summed = self._product == "clipped_sum"
        if size == len(labels):
            return self._sum(some(samples)) if summed else some(samples)
        split = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), samples)
        if not summed:
            return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), jax.lax.map(some, split))
        start = jax.tree.map(jnp.zeros_like, parameters)
        total, _ = jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, some(part)), None), start, split)
        return self._sum(total)

    def _reduced(self, gradients: Any) -> Any:
        """Return what the product keeps of a microbatch's gradients (N, ...)."""
        if self._product == "materialised":
            return gradients
        squares = [jnp.square(gradient).reshape(len(gradient), -1).sum(1) for gradient in jax.tree.leaves(gradients)]
        norms = jnp.sqrt(functools.reduce(jnp.add, squares))
        if self._product == "norms":
            return norms
        factors = jnp.minimum(1, CLIP_NORM / norms)  # of a gradient of zero: 1
        # Gradients are float32 where the policy has 16 bits for products, of which these are none.
        exact = None if self._compute is None else jax.lax.Precision.HIGHEST
        return jax.tree.map(lambda gradient: jnp.tensordot(factors, gradient, 1, precision=exact), gradients)


def _by_rank(gathered: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what all processes gave, (samples of all, ...), in their order; JAX gathers in that of its devices."""
    order = np.argsort([device.process_index for device in jax.devices()])
    return gathered.reshape(len(order), -1, *gathered.shape[1:])[order].reshape(gathered.shape)
