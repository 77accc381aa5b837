"""ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution): torchvision's own."""

from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def build(layers: tuple[int, ...], width_per_group: int, classes: int) -> nn.Module:
    """``layers`` blocks per stage, (3, 4, 6, 3) for ResNet-50; maps images (N, 3, H, W) to logits (N, classes).

    ``width_per_group`` are the channels of the first stage's inner convolutions, 64 for ResNet-50; each later stage has
    twice as many. Its weights mean nothing until ``weights.load`` has set them.
    """
    return ResNet(Bottleneck, list(layers), num_classes=classes, width_per_group=width_per_group)
