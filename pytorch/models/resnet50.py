"""ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution): torchvision's own."""

# Shapes: N batch, H height, W width.

from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def build(layers: tuple[int, ...], width_per_group: int, classes: int) -> nn.Module:
    """Return a model that maps images (N, 3, H, W) to logits (N, classes).

    It has ``layers`` blocks per stage, (3, 4, 6, 3) for ResNet-50. The inner convolutions have ``width_per_group``
    channels in the first stage, 64 for ResNet-50, and twice as many in each later one. Its weights are meaningless
    until ``weights.load`` sets them.
    """
    return ResNet(Bottleneck, list(layers), num_classes=classes, width_per_group=width_per_group)
