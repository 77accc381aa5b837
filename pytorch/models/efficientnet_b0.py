"""EfficientNet (Tan and Le 2019, arXiv:1905.11946): torchvision's own, without dropout or stochastic depth."""

# Shapes: N batch, H height, W width.

from torch import nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig

_Stage = tuple[int, int, int, int, int, int]


def build(blocks: tuple[_Stage, ...], classes: int) -> nn.Module:
    """Return a model that maps images (N, 3, H, W) to logits (N, classes).

    Each entry of ``blocks`` is a stage: (expansion, kernel, stride, input channels, output channels, number of blocks);
    channels are multiples of 8. Its weights are meaningless until ``weights.load`` sets them.
    """
    settings = [MBConvConfig(*stage) for stage in blocks]
    return EfficientNet(settings, dropout=0.0, stochastic_depth_prob=0.0, num_classes=classes)
