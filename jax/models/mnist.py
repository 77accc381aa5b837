"""The small CNN of fast-dpsgd for 28x28 images (Subramani et al. 2021, arXiv:2010.09063)."""

import jax
from flax import nnx


def build(channels: tuple[int, int], hidden: int, classes: int) -> nnx.Module:
    """Two convolutions of ``channels``, then ``hidden`` units; maps images (N, 28, 28, 1) to logits (N, classes).

    It has shapes but no weights until ``weights.load`` has set them.
    """
    return nnx.eval_shape(lambda: _Network(channels, hidden, classes, nnx.Rngs(0)))


class _Network(nnx.Module):
    def __init__(self, channels: tuple[int, int], hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, channels[0], (8, 8), strides=2, padding=((3, 3), (3, 3)), rngs=rngs)
        self.conv2 = nnx.Conv(channels[0], channels[1], (4, 4), strides=2, padding=((0, 0), (0, 0)), rngs=rngs)
        self.fc1 = nnx.Linear(channels[1] * 4 * 4, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = _max_pool(nnx.relu(self.conv1(x)))  # 28 -> 14 -> 13
        x = _max_pool(nnx.relu(self.conv2(x)))  # 13 -> 5 -> 4
        x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # the order in which PyTorch flattens: channels first
        return self.fc2(nnx.relu(self.fc1(x)))


def _max_pool(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (2, 2), strides=(1, 1), padding=((0, 0), (0, 0)))
