"""ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution), with torchvision's names."""

# Shapes: N batch, H height, W width; images and activations are (N, H, W, channels), which XLA prefers.

import jax
from flax import nnx

from models._layers import BatchNorm, Conv, Linear

CHANNELS = 256  # of the first stage's output; each later stage has twice as many


def build(layers: tuple[int, ...], width_per_group: int, classes: int) -> nnx.Module:
    """Return a model that maps images (N, H, W, 3) to logits (N, classes).

    It has ``layers`` blocks per stage, (3, 4, 6, 3) for ResNet-50. The inner convolutions have ``width_per_group``
    channels in the first stage, 64 for ResNet-50, and twice as many in each later one. Its weights are only
    shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _ResNet(layers, width_per_group, classes))


class _Bottleneck(nnx.Module):
    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        self.conv1, self.bn1 = Conv(inputs, width, 1), BatchNorm(width)
        self.conv2, self.bn2 = Conv(width, width, 3, stride), BatchNorm(width)
        self.conv3, self.bn3 = Conv(width, outputs, 1), BatchNorm(outputs)
        project = stride != 1 or inputs != outputs
        self.downsample = nnx.List([Conv(inputs, outputs, 1, stride), BatchNorm(outputs)] if project else [])

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = nnx.relu(self.bn1(self.conv1(x), train))
        out = nnx.relu(self.bn2(self.conv2(out), train))
        out = self.bn3(self.conv3(out), train)
        if self.downsample:
            conv, norm = self.downsample
            x = norm(conv(x), train)
        return nnx.relu(out + x)


class _ResNet(nnx.Module):
    def __init__(self, layers: tuple[int, ...], width: int, classes: int) -> None:
        self.conv1, self.bn1 = Conv(3, 64, 7, 2), BatchNorm(64)
        inputs = 64
        stages = []
        for number, blocks in enumerate(layers):
            outputs, stage = CHANNELS * 2**number, []
            for block in range(blocks):
                stride = 2 if block == 0 and number > 0 else 1
                stage.append(_Bottleneck(inputs, width * 2**number, outputs, stride))
                inputs = outputs
            stages.append(nnx.List(stage))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = Linear(inputs, classes)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = block(x, train)
        return self.fc(x.mean((1, 2)))
