"""The canary's products, computed with the layers that the models are built from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from duel.measure import canary
from models import _layers
from network import Network


def products(work: Network) -> npt.NDArray[Any]:
    """Return, in one axis, the products of ``duel.measure.canary.inputs``, computed as ``work`` computes its model."""
    given = canary.inputs()
    given |= {"image": given["image"].transpose(0, 2, 3, 1), "kernel": given["kernel"].transpose(2, 3, 1, 0)}
    arrays = work.placed(tuple(given.values()))
    compiled = work._compiled(jax.jit(lambda arrays: work.applied(_compute, arrays)).lower(arrays))
    return np.array(compiled(arrays))


def _compute(a: Any, b: Any, image: Any, kernel: Any, q: Any, k: Any, v: Any, values: Any, segments: Any) -> jax.Array:
    convolved = jax.lax.conv_general_dilated(
        *(_layers.cast(image), _layers.cast(kernel), (1, 1), [(1, 1), (1, 1)]),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    results = (
        _layers.linear(a, b),
        convolved.transpose(0, 3, 1, 2),
        _layers.attention(q, k, v, canary.HEADS),
        _layers.segment_sum(values, segments, canary.SEGMENTS),
    )
    return jnp.concatenate([result.reshape(-1).astype(jnp.float32) for result in results])
