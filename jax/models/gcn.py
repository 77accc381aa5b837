"""Two graph convolutions (Kipf and Welling 2016, arXiv:1609.02907) that label the nodes of a graph. Dropout is 0."""

# Shapes: N graphs in a batch.

import jax
import jax.numpy as jnp
from flax import nnx

from models._layers import joined, linear, segment_sum


def build(features: int, hidden: int, classes: int) -> nnx.Module:
    """Return a model that maps a batch of graphs, as in ``duel.measure.batches``, to logits (N, nodes, classes).

    Its weights are only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _GCN(features, hidden, classes))


class _Convolution(nnx.Module):
    """A linear layer, then for each node the weighted sum over its incoming edges, then the bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array, weights: jax.Array) -> jax.Array:
        # The edge weights are float32 whatever the products are computed in, and so are the sums.
        messages = weights[:, None] * linear(x, self.kernel[...])[senders]
        return segment_sum(messages, receivers, len(x), sorted_segments=True) + self.bias[...]


class _GCN(nnx.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        self.conv1, self.conv2 = _Convolution(features, hidden), _Convolution(hidden, classes)

    def __call__(
        self, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, weights: jax.Array, train: bool
    ) -> jax.Array:
        # The nodes of all graphs form one axis, and so do the edges.
        x = nodes.reshape(-1, nodes.shape[-1])
        edges = joined(senders, nodes.shape[1]), joined(receivers, nodes.shape[1]), weights.reshape(-1)
        x = nnx.relu(self.conv1(x, *edges))
        return self.conv2(x, *edges).reshape(*nodes.shape[:2], -1)
