"""ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution): torchvision's own."""

from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def build(layers: tuple[int, ...], classes: int) -> nn.Module:
    """``layers`` blocks per stage, (3, 4, 6, 3) for ResNet-50; maps images (N, 3, H, W) to logits (N, classes).

    Its weights mean nothing until ``weights.load`` has set them.
    """
    return ResNet(Bottleneck, list(layers), num_classes=classes)
