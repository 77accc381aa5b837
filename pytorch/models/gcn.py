"""Two graph convolutions (Kipf and Welling 2016, arXiv:1609.02907) that label the nodes of a graph. Dropout is 0."""

# Shapes: N graphs in a batch.

import torch
from torch import nn
from torch.nn import functional

from models._layers import Sparse, joined, segment_sum, sparse_product, stored


def build(features: int, hidden: int, classes: int) -> nn.Module:
    """Return a model that maps a batch of graphs, as in ``duel.measure.batches``, to logits (N, nodes, classes).

    Its weights are meaningless until ``weights.load`` sets them.
    """
    return _GCN(features, hidden, classes)


class _Convolution(nn.Module):
    """A linear layer, then for each node the weighted sum over its incoming edges, then the bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(
        self, x: torch.Tensor, senders: torch.Tensor, receivers: torch.Tensor, weights: torch.Tensor, matrix: Sparse
    ) -> torch.Tensor:
        x = functional.linear(x, self.weight)
        # The edge weights are float32 whatever the products are computed in, and so are the sums.
        if matrix:
            return sparse_product(matrix, x) + self.bias
        return segment_sum(weights[:, None] * x.index_select(0, senders), receivers, len(x)) + self.bias


class _GCN(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _Convolution(features, hidden), _Convolution(hidden, classes)

    def forward(
        self,
        nodes: torch.Tensor,
        senders: torch.Tensor,
        receivers: torch.Tensor,
        weights: torch.Tensor,
        *matrix: torch.Tensor,
    ) -> torch.Tensor:
        # The nodes of all graphs form one axis, and so do the edges.
        x = nodes.flatten(0, 1)
        edges = joined(senders, nodes.shape[1]), joined(receivers, nodes.shape[1]), weights.flatten()
        x = functional.relu(self.conv1(x, *edges, matrix))
        return self.conv2(x, *edges, matrix).unflatten(0, nodes.shape[:2])

    def matrices(
        self, nodes: torch.Tensor, senders: torch.Tensor, receivers: torch.Tensor, weights: torch.Tensor
    ) -> Sparse:
        """Return the sum over edges of these inputs as a matrix, which ``forward`` takes after them."""
        count = nodes.shape[0] * nodes.shape[1]
        senders, receivers = joined(senders, nodes.shape[1]), joined(receivers, nodes.shape[1])
        return stored(receivers, senders, weights.flatten(), (count, count))
