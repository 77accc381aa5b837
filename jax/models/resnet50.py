"""ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution), with torchvision's names.

Layout: images and activations are (N, height, width, channels), which XLA prefers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

EXPANSION = 4  # a bottleneck gives this many times the channels of its inner convolutions
MOMENTUM, EPSILON = 0.1, 1e-5  # of torch.nn.BatchNorm2d; momentum is the weight of the new value


def build(layers: tuple[int, ...], classes: int) -> nnx.Module:
    """``layers`` blocks per stage, (3, 4, 6, 3) for ResNet-50; maps images (N, H, W, 3) to logits (N, classes).

    It has shapes but no weights until ``weights.load`` has set them.
    """
    return nnx.eval_shape(lambda: _ResNet(layers, classes, nnx.Rngs(0)))


class _BatchNorm(nnx.Module):
    """Batch norm as ``torch.nn.BatchNorm2d`` defines it.

    Flax's own differs: its running variance is the biased one (n instead of n - 1), and its variance may be the
    one-pass E[x²] - E[x]². Statistics are at least float32, the result has the type of the input.
    """

    def __init__(self, channels: int) -> None:
        self.weight = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.running_mean = nnx.BatchStat(jnp.zeros(channels))
        self.running_var = nnx.BatchStat(jnp.ones(channels))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if train:
            count = x.size // x.shape[-1]
            mean = wide.mean((0, 1, 2))
            var = jnp.square(wide - mean).mean((0, 1, 2))
            self._follow(self.running_mean, mean)
            self._follow(self.running_var, var * (count / (count - 1)))
        else:
            mean, var = self.running_mean[...], self.running_var[...]
        result = (wide - mean) * (jax.lax.rsqrt(var + EPSILON) * self.weight[...]) + self.bias[...]
        return result.astype(x.dtype)

    def _follow(self, running: nnx.BatchStat, value: jax.Array) -> None:
        running[...] = (1 - MOMENTUM) * running[...] + MOMENTUM * value


class _Bottleneck(nnx.Module):
    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        outputs = EXPANSION * width
        self.conv1, self.bn1 = _conv(inputs, width, 1, 1, rngs), _BatchNorm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride, rngs), _BatchNorm(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1, 1, rngs), _BatchNorm(outputs)
        project = stride != 1 or inputs != outputs
        self.downsample = nnx.List([_conv(inputs, outputs, 1, stride, rngs), _BatchNorm(outputs)] if project else [])

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = nnx.relu(self.bn1(self.conv1(x), train))
        out = nnx.relu(self.bn2(self.conv2(out), train))
        out = self.bn3(self.conv3(out), train)
        if self.downsample:
            conv, norm = self.downsample
            x = norm(conv(x), train)
        return nnx.relu(out + x)


class _ResNet(nnx.Module):
    def __init__(self, layers: tuple[int, ...], classes: int, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1 = _conv(3, 64, 7, 2, rngs), _BatchNorm(64)
        inputs = 64
        stages = []
        for number, blocks in enumerate(layers):
            width, stage = 64 * 2**number, []
            for block in range(blocks):
                stride = 2 if block == 0 and number > 0 else 1
                stage.append(_Bottleneck(inputs, width, stride, rngs))
                inputs = EXPANSION * width
            stages.append(nnx.List(stage))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = block(x, train)
        return self.fc(x.mean((1, 2)))


def _conv(inputs: int, outputs: int, kernel: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    """A convolution without bias, padded alike on every side: "SAME" would pad (0, 1) at stride 2."""
    pad = (kernel // 2, kernel // 2)
    return nnx.Conv(inputs, outputs, (kernel, kernel), strides=stride, padding=(pad, pad), use_bias=False, rngs=rngs)
