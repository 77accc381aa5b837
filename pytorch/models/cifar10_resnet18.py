"""ResNet of basic blocks (He et al. 2015, arXiv:1512.03385) for 32x32 images, built from torchvision's blocks.

The stem is the 3x3 convolution of the paper's section 4.2, without pooling; the rest is ResNet-18. torchvision's own
``ResNet`` has a different stem and always 64 channels.
"""

# Shapes: N batch, H height, W width.

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock


def build(layers: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Return a model that maps images (N, 3, H, W) to logits (N, classes).

    It has ``layers`` blocks per stage, with ``width`` channels in the first. Its weights are meaningless until
    ``weights.load`` sets them.
    """
    return _ResNet(layers, width, classes)


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    project = None
    if stride != 1 or inputs != outputs:
        project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    rest = (BasicBlock(outputs, outputs) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(inputs, outputs, stride, project), *rest)


class _ResNet(nn.Module):
    def __init__(self, layers: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.stages = tuple(f"layer{number}" for number in range(1, len(layers) + 1))
        for name, blocks in zip(self.stages, layers, strict=True):
            stride = 1 if name == "layer1" else 2
            setattr(self, name, _stage(width, stride * width, blocks, stride))
            width *= stride
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.fc(x.mean((2, 3)))
