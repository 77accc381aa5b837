"""The CNN of fast-dpsgd for 32x32 images (Subramani et al. 2021, arXiv:2010.09063)."""

# Shapes: N batch, H height, W width.

import itertools

import torch
from torch import nn
from torch.nn import functional


def build(channels: tuple[int, int, int, int], classes: int) -> nn.Module:
    """Return a model of eight 3x3 convolutions that maps images (N, 3, H, W) to logits (N, classes).

    Two convolutions to each of the first three ``channels``, each pair followed by an average pool that halves height
    and width, one to the fourth, and one to ``classes``, whose mean over the image gives the logits. The weights are
    meaningless until ``weights.load`` sets them.
    """
    return _Network(channels, classes)


class _Network(nn.Module):
    def __init__(self, channels: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        first, second, third, fourth = channels
        sizes = (3, first, first, second, second, third, third, fourth, classes)
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *inner, last = self.convs
        for number, conv in enumerate(inner):
            x = functional.relu(conv(x))
            if number in (1, 3, 5):
                x = functional.avg_pool2d(x, 2)
        return last(x).mean((2, 3))
