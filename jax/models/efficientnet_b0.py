"""EfficientNet (Tan and Le 2019, arXiv:1905.11946), with torchvision's names, no dropout and no stochastic depth."""

# Shapes: N batch, H height, W width.

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from models._layers import BatchNorm, Conv, ConvNorm, Linear, SqueezeExcitation

_Stage = tuple[int, int, int, int, int, int]


def build(blocks: tuple[_Stage, ...], classes: int) -> nnx.Module:
    """Return a model that maps images (N, H, W, 3) to logits (N, classes).

    Each entry of ``blocks`` is a stage: (expansion, kernel, stride, input channels, output channels, number of blocks);
    channels are multiples of 8. Its weights are only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _EfficientNet(blocks, classes))


def _conv(
    inputs: int,
    outputs: int,
    kernel: int,
    activation: Callable[[jax.Array], jax.Array] | None,
    stride: int = 1,
    groups: int = 1,
) -> ConvNorm:
    return ConvNorm(Conv(inputs, outputs, kernel, stride, groups=groups), BatchNorm(outputs), activation)


class _MBConv(nnx.Module):
    def __init__(self, expansion: int, kernel: int, stride: int, inputs: int, outputs: int) -> None:
        expanded = expansion * inputs
        expand = [_conv(inputs, expanded, 1, nnx.silu)] if expanded != inputs else []
        depthwise = _conv(expanded, expanded, kernel, nnx.silu, stride, groups=expanded)
        # a quarter of the block's input channels; MobileNetV3 takes a quarter of the expanded ones
        scale = SqueezeExcitation(expanded, max(1, inputs // 4), nnx.silu, nnx.sigmoid)
        self.block = nnx.List([*expand, depthwise, scale, _conv(expanded, outputs, 1, None)])
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = x
        for layer in self.block:
            out = layer(out, train)
        return out + x if self.residual else out


class _EfficientNet(nnx.Module):
    def __init__(self, blocks: tuple[_Stage, ...], classes: int) -> None:
        stages: list[Any] = []  # Any: to mypy, a module in an nnx.List is not iterable
        for expansion, kernel, stride, inputs, outputs, count in blocks:
            rest = [_MBConv(expansion, kernel, 1, outputs, outputs) for _ in range(count - 1)]
            stages.append(nnx.List([_MBConv(expansion, kernel, stride, inputs, outputs), *rest]))
        first, last = blocks[0][3], blocks[-1][4]
        stem, head = _conv(3, first, 3, nnx.silu, stride=2), _conv(last, 4 * last, 1, nnx.silu)
        self.features = nnx.List([stem, *stages, head])
        self.classifier = nnx.Dict({"1": Linear(4 * last, classes)})

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stem, *stages, head = self.features
        x = stem(x, train)
        for stage in stages:
            for block in stage:
                x = block(x, train)
        return self.classifier["1"](head(x, train).mean((1, 2)))
