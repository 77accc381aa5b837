"""Graph network (Battaglia et al. 2018, arXiv:1806.01261, algorithm 1) that labels whole graphs.

Sizes are those of AlgoPerf's OGBG model (Dahl et al. 2023, arXiv:2306.07179), and so is its addition to the paper: a
node sees the sum of the edges it sends as well as of those it receives. Dropout is 0.
"""

# Shapes: N graphs in a batch, size nodes or edges per graph.

import jax
import jax.numpy as jnp
from flax import nnx

from models._layers import LayerNorm, Linear, joined, segment_sum

EPSILON = 1e-6


def build(steps: int, width: int, node_features: int, edge_features: int, tasks: int) -> nnx.Module:
    """Return a model that maps a batch of graphs, as in ``duel.measure.batches``, to logits (N, tasks).

    Its weights are only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _GraphNet(steps, width, node_features, edge_features, tasks))


class _Update(nnx.Module):
    def __init__(self, inputs: int, width: int) -> None:
        self.linear, self.norm = Linear(inputs, width), LayerNorm(width, EPSILON)

    def __call__(self, *parts: jax.Array) -> jax.Array:
        x = self.linear(jnp.concatenate(parts, -1))
        # Sums over neighbours add up what is returned here, so they are never in half precision.
        return nnx.relu(self.norm(x.astype(self.norm.weight.dtype)))


class _GraphNet(nnx.Module):
    def __init__(self, steps: int, width: int, node_features: int, edge_features: int, tasks: int) -> None:
        self.node_embedding, self.edge_embedding = Linear(node_features, width), Linear(edge_features, width)
        given = [tasks] + [width] * (steps - 1)  # globals that each step receives
        self.edge_updates = nnx.List([_Update(3 * width + more, width) for more in given])
        self.node_updates = nnx.List([_Update(3 * width + more, width) for more in given])
        self.global_updates = nnx.List([_Update(2 * width + more, width) for more in given])
        self.decoder = Linear(width, tasks)
        self.tasks = tasks

    def __call__(
        self,
        nodes: jax.Array,
        edges: jax.Array,
        senders: jax.Array,
        receivers: jax.Array,
        node_mask: jax.Array,
        edge_mask: jax.Array,
        train: bool,
    ) -> jax.Array:
        # The nodes of all graphs form one axis, and so do the edges.
        graphs, count = len(nodes), node_mask.size
        senders, receivers = joined(senders, nodes.shape[1]), joined(receivers, nodes.shape[1])
        nodes = self.node_embedding(nodes.reshape(count, -1))
        edges = self.edge_embedding(edges.reshape(edge_mask.size, -1))
        context = jnp.zeros((graphs, self.tasks), node_mask.dtype)
        for update_edges, update_nodes, update_globals in zip(
            self.edge_updates, self.node_updates, self.global_updates, strict=True
        ):
            edges = update_edges(edges, nodes[senders], nodes[receivers], _repeat(context, edge_mask.shape[1]))
            sent = segment_sum(edges, senders, count)
            received = segment_sum(edges, receivers, count, sorted_segments=True)
            nodes = update_nodes(nodes, sent, received, _repeat(context, node_mask.shape[1]))
            context = update_globals(_sum(nodes, node_mask), _sum(edges, edge_mask), context)
        return self.decoder(context)


def _repeat(context: jax.Array, times: int) -> jax.Array:
    """Repeat each graph's ``context`` (N, ...) for each of its nodes or edges: (N * times, ...)."""
    return jnp.broadcast_to(context[:, None], (len(context), times, context.shape[1])).reshape(-1, context.shape[1])


def _sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum ``values`` (N * size, ...) by graph into (N, ...), without padding, which is 0 in ``mask`` (N, size)."""
    return (values.reshape(*mask.shape, -1) * mask[..., None]).sum(1)
