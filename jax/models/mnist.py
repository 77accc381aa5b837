"""The small CNN of fast-dpsgd for 28x28 images (Subramani et al. 2021, arXiv:2010.09063)."""

# Shapes: N batch; images are (N, height, width, channels).

import jax
from flax import nnx

from models._layers import Conv, Linear


def build(channels: tuple[int, int], hidden: int, classes: int) -> nnx.Module:
    """Return a model that maps images (N, 28, 28, 1) to logits (N, classes).

    It has two convolutions with ``channels``, then ``hidden`` units. Its weights are only shapes until
    ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _Network(channels, hidden, classes))


class _Network(nnx.Module):
    def __init__(self, channels: tuple[int, int], hidden: int, classes: int) -> None:
        self.conv1 = Conv(1, channels[0], 8, stride=2, padding=3, bias=True)
        self.conv2 = Conv(channels[0], channels[1], 4, stride=2, padding=0, bias=True)
        self.fc1 = Linear(channels[1] * 4 * 4, hidden)
        self.fc2 = Linear(hidden, classes)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = _max_pool(nnx.relu(self.conv1(x)))  # 28 -> 14 -> 13
        x = _max_pool(nnx.relu(self.conv2(x)))  # 13 -> 5 -> 4
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)  # flattened as (channels, height, width), as the twin does
        x = nnx.relu(self.fc1(x))
        return self.fc2(x)


def _max_pool(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (2, 2), strides=(1, 1))
