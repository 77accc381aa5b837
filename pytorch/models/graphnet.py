"""Graph network (Battaglia et al. 2018, arXiv:1806.01261, algorithm 1) that labels whole graphs.

Sizes are those of AlgoPerf's OGBG model (Dahl et al. 2023, arXiv:2306.07179), and so is its addition to the paper: a
node sees the sum of the edges it sends as well as of those it receives. Dropout is 0.
"""

# Shapes: N graphs in a batch, size nodes or edges per graph.

import torch
from torch import nn
from torch.nn import functional

from models._layers import Sparse, joined, segment_sum, sparse_product, stored

EPSILON = 1e-6


def build(steps: int, width: int, node_features: int, edge_features: int, tasks: int) -> nn.Module:
    """Return a model that maps a batch of graphs, as in ``duel.measure.batches``, to logits (N, tasks).

    Its weights are meaningless until ``weights.load`` sets them.
    """
    return _GraphNet(steps, width, node_features, edge_features, tasks)


class _Update(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, width), nn.LayerNorm(width, EPSILON)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        x = self.linear(torch.cat(parts, -1))
        # Sums over neighbours add up what is returned here, so they are never in half precision. Without the cast,
        # autocast would give float32 on a GPU and half precision on a CPU.
        return functional.relu(self.norm(x.to(self.norm.weight.dtype)))


class _GraphNet(nn.Module):
    def __init__(self, steps: int, width: int, node_features: int, edge_features: int, tasks: int) -> None:
        super().__init__()
        self.node_embedding, self.edge_embedding = nn.Linear(node_features, width), nn.Linear(edge_features, width)
        given = [tasks] + [width] * (steps - 1)  # globals that each step receives
        self.edge_updates = nn.ModuleList([_Update(3 * width + more, width) for more in given])
        self.node_updates = nn.ModuleList([_Update(3 * width + more, width) for more in given])
        self.global_updates = nn.ModuleList([_Update(2 * width + more, width) for more in given])
        self.decoder = nn.Linear(width, tasks)
        self.tasks = tasks

    def forward(
        self,
        nodes: torch.Tensor,
        edges: torch.Tensor,
        senders: torch.Tensor,
        receivers: torch.Tensor,
        node_mask: torch.Tensor,
        edge_mask: torch.Tensor,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        # The nodes of all graphs form one axis, and so do the edges.
        graphs, count = len(nodes), node_mask.numel()
        senders, receivers = joined(senders, nodes.shape[1]), joined(receivers, nodes.shape[1])
        nodes = self.node_embedding(nodes.flatten(0, 1))
        edges = self.edge_embedding(edges.flatten(0, 1))
        context = node_mask.new_zeros(graphs, self.tasks)
        for update_edges, update_nodes, update_globals in zip(
            self.edge_updates, self.node_updates, self.global_updates, strict=True
        ):
            ends = nodes.index_select(0, senders), nodes.index_select(0, receivers)
            edges = update_edges(edges, *ends, _repeat(context, edge_mask.shape[1]))
            if matrices:
                sent, received = sparse_product(matrices[:6], edges), sparse_product(matrices[6:], edges)
            else:
                sent, received = segment_sum(edges, senders, count), segment_sum(edges, receivers, count)
            nodes = update_nodes(nodes, sent, received, _repeat(context, node_mask.shape[1]))
            context = update_globals(_sum(nodes, node_mask), _sum(edges, edge_mask), context)
        return self.decoder(context)

    def matrices(self, nodes: torch.Tensor, edges: torch.Tensor, *ends: torch.Tensor) -> Sparse:
        """Return the sums over edges sent and received as matrices, which ``forward`` takes after these inputs."""
        count = nodes.shape[0] * nodes.shape[1], ends[0].numel()
        ones, all_edges = edges.new_ones(count[1]), torch.arange(count[1], device=edges.device)
        sent, received = (stored(joined(end, nodes.shape[1]), all_edges, ones, count) for end in ends[:2])
        return *sent, *received


def _repeat(context: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each graph's ``context`` (N, ...) for each of its nodes or edges: (N * times, ...)."""
    return context[:, None].expand(-1, times, -1).flatten(0, 1)


def _sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum ``values`` (N * size, ...) by graph into (N, ...), without padding, which is 0 in ``mask`` (N, size)."""
    return (values.unflatten(0, mask.shape) * mask[..., None]).sum(1)
