"""MobileNetV3 (Howard et al. 2019, arXiv:1905.02244), with torchvision's names and no dropout."""

# Shapes: N batch, H height, W width.

from collections.abc import Callable

import jax
from flax import nnx

from models._layers import BatchNorm, Conv, ConvNorm, Linear, SqueezeExcitation

ACTIVATIONS = {"RE": nnx.relu, "HS": nnx.hard_swish}

_Block = tuple[int, int, int, int, bool, str, int]


def build(blocks: tuple[_Block, ...], last: int, classes: int) -> nnx.Module:
    """Return a model that maps images (N, H, W, 3) to logits (N, classes), with ``last`` units before them.

    A block is (input channels, kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride)
    with "RE" or "HS" as its activation; channels are multiples of 8. Its weights are only shapes until
    ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _MobileNet(blocks, last, classes))


def _conv(
    inputs: int,
    outputs: int,
    kernel: int,
    activation: Callable[[jax.Array], jax.Array] | None,
    stride: int = 1,
    groups: int = 1,
) -> ConvNorm:
    norm = BatchNorm(outputs, momentum=0.01, epsilon=1e-3)
    return ConvNorm(Conv(inputs, outputs, kernel, stride, groups=groups), norm, activation)


def _squeezed(channels: int) -> int:
    """Return a quarter of ``channels``, rounded to a multiple of 8 but down by no more than a tenth."""
    quarter = channels // 4
    rounded = max(8, (quarter + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * quarter else rounded


class _InvertedResidual(nnx.Module):
    def __init__(
        self, inputs: int, kernel: int, expanded: int, outputs: int, squeeze: bool, activation: str, stride: int
    ) -> None:
        act = ACTIVATIONS[activation]
        expand = [_conv(inputs, expanded, 1, act)] if expanded != inputs else []
        depthwise = _conv(expanded, expanded, kernel, act, stride, groups=expanded)
        scale = [SqueezeExcitation(expanded, _squeezed(expanded), nnx.relu, nnx.hard_sigmoid)] if squeeze else []
        self.block = nnx.List([*expand, depthwise, *scale, _conv(expanded, outputs, 1, None)])
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = x
        for layer in self.block:
            out = layer(out, train)
        return out + x if self.residual else out


class _MobileNet(nnx.Module):
    def __init__(self, blocks: tuple[_Block, ...], last: int, classes: int) -> None:
        outputs = blocks[-1][3]
        self.features = nnx.List(
            [
                _conv(3, blocks[0][0], 3, nnx.hard_swish, stride=2),
                *(_InvertedResidual(*block) for block in blocks),
                _conv(outputs, 6 * outputs, 1, nnx.hard_swish),
            ]
        )
        self.classifier = nnx.Dict({"0": Linear(6 * outputs, last), "3": Linear(last, classes)})

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for layer in self.features:
            x = layer(x, train)
        x = nnx.hard_swish(self.classifier["0"](x.mean((1, 2))))
        return self.classifier["3"](x)
