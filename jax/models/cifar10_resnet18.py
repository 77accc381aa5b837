"""ResNet of basic blocks (He et al. 2015, arXiv:1512.03385) for 32x32 images, with torchvision's names.

The stem is the 3x3 convolution of the paper's section 4.2, without pooling; the rest is ResNet-18.
"""

# Shapes: N batch, H height, W width.

import jax
from flax import nnx

from models._layers import BatchNorm, Conv, Linear


def build(layers: tuple[int, ...], width: int, classes: int) -> nnx.Module:
    """Return a model that maps images (N, H, W, 3) to logits (N, classes).

    It has ``layers`` blocks per stage, with ``width`` channels in the first. Its weights are only shapes until
    ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _ResNet(layers, width, classes))


class _BasicBlock(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        self.conv1, self.bn1 = Conv(inputs, outputs, 3, stride), BatchNorm(outputs)
        self.conv2, self.bn2 = Conv(outputs, outputs, 3), BatchNorm(outputs)
        project = stride != 1 or inputs != outputs
        self.downsample = nnx.List([Conv(inputs, outputs, 1, stride), BatchNorm(outputs)] if project else [])

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = nnx.relu(self.bn1(self.conv1(x), train))
        out = self.bn2(self.conv2(out), train)
        if self.downsample:
            conv, norm = self.downsample
            x = norm(conv(x), train)
        return nnx.relu(out + x)


class _ResNet(nnx.Module):
    def __init__(self, layers: tuple[int, ...], width: int, classes: int) -> None:
        self.conv1, self.bn1 = Conv(3, width, 3), BatchNorm(width)
        inputs, self.stages = width, tuple(f"layer{number}" for number in range(1, len(layers) + 1))
        for name, blocks in zip(self.stages, layers, strict=True):
            stage = []
            for block in range(blocks):
                stride = 2 if block == 0 and name != "layer1" else 1
                stage.append(_BasicBlock(inputs, inputs * stride, stride))
                inputs *= stride
            setattr(self, name, nnx.List(stage))
        self.fc = Linear(inputs, classes)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x), train))
        for stage in self.stages:
            for block in getattr(self, stage):
                x = block(x, train)
        return self.fc(x.mean((1, 2)))
