"""MobileNetV3 (Howard et al. 2019, arXiv:1905.02244): torchvision's own, without dropout."""

# Shapes: N batch, H height, W width.

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig, MobileNetV3
from torchvision.ops import SqueezeExcitation

_Block = tuple[int, int, int, int, bool, str, int]


def build(blocks: tuple[_Block, ...], last: int, classes: int) -> nn.Module:
    """Return a model that maps images (N, 3, H, W) to logits (N, classes), with ``last`` units before them.

    A block is (input channels, kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride)
    with "RE" or "HS" as its activation; channels are multiples of 8. Its weights are meaningless until
    ``weights.load`` sets them.
    """
    settings = [InvertedResidualConfig(*block, dilation=1, width_mult=1.0) for block in blocks]
    block = partial(InvertedResidual, se_layer=partial(SqueezeExcitation, scale_activation=_HardSigmoid))
    norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
    return MobileNetV3(settings, last, num_classes=classes, block=block, norm_layer=norm, dropout=0.0)


class _HardSigmoid(nn.Hardsigmoid):
    """torch's own, but exact in float64, where torch's backward pass multiplies by 1/6 in float32 (wrong by 3e-8)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu6(x + 3) / 6 if x.dtype == torch.float64 else super().forward(x)
