"""The CNN of fast-dpsgd for 32x32 images (Subramani et al. 2021, arXiv:2010.09063)."""

# Shapes: N batch, H height, W width.

import itertools

import jax
from flax import nnx

from models._layers import Conv


def build(channels: tuple[int, int, int, int], classes: int) -> nnx.Module:
    """Return a model of eight 3x3 convolutions that maps images (N, H, W, 3) to logits (N, classes).

    Two convolutions to each of the first three ``channels``, each pair followed by an average pool that halves height
    and width, one to the fourth, and one to ``classes``, whose mean over the image gives the logits. The weights are
    only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _Network(channels, classes))


class _Network(nnx.Module):
    def __init__(self, channels: tuple[int, int, int, int], classes: int) -> None:
        first, second, third, fourth = channels
        sizes = (3, first, first, second, second, third, third, fourth, classes)
        self.convs = nnx.List([Conv(*pair, 3, bias=True) for pair in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        *inner, last = self.convs
        for number, conv in enumerate(inner):
            x = nnx.relu(conv(x))
            if number in (1, 3, 5):
                x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return last(x).mean((1, 2))
