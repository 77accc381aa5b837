"""What the network is, and its source (authors, year, arXiv number)."""

import torch
from torch import nn
from torch.nn import functional


# The parameters are the keys of ``model`` in the catalogue, in this order, and the same in the twin.
def build(width: int, classes: int) -> nn.Module:
    """Maps images (N, 3, height, width) to logits (N, classes).

    Its weights mean nothing until ``weights.load`` has set them.
    """
    return _Network(width, classes)


class _Network(nn.Module):
    # A runnable stand-in: replace the layers by those of the network, on both sides in the same order. Attributes have
    # the same names as in the twin, because weights and layers are compared by them.
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.fc = nn.Linear(width, classes)

    # Images are (N, channels, height, width) here.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv(x))  # half the height and width
        return self.fc(x.mean((2, 3)))
