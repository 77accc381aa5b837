"""The small CNN of fast-dpsgd for 28x28 images (Subramani et al. 2021, arXiv:2010.09063)."""

# Shapes: N batch; images are (N, channels, height, width).

import torch
from torch import nn
from torch.nn import functional


def build(channels: tuple[int, int], hidden: int, classes: int) -> nn.Module:
    """Return a model that maps images (N, 1, 28, 28) to logits (N, classes).

    It has two convolutions with ``channels``, then ``hidden`` units. Its weights are meaningless until
    ``weights.load`` sets them.
    """
    return _Network(channels, hidden, classes)


class _Network(nn.Module):
    def __init__(self, channels: tuple[int, int], hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels[0], 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 4, stride=2)
        self.fc1 = nn.Linear(channels[1] * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2, stride=1)  # 28 -> 14 -> 13
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, stride=1)  # 13 -> 5 -> 4
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)
