"""What the network is, and its source (authors, year, arXiv number)."""

import jax
from flax import nnx

from models._layers import Conv, Linear


# The parameters are the keys of ``model`` in the catalogue, in this order, and the same in the twin.
def build(width: int, classes: int) -> nnx.Module:
    """Maps images (N, height, width, 3) to logits (N, classes).

    It has shapes but no weights until ``weights.load`` has set them.
    """
    return nnx.eval_shape(lambda: _Network(width, classes))


class _Network(nnx.Module):
    # A runnable stand-in: replace the layers by those of the network, on both sides in the same order. Attributes have
    # the same names as in the twin, because weights and layers are compared by them.
    def __init__(self, width: int, classes: int) -> None:
        self.conv = Conv(3, width, 3, stride=2, bias=True)
        self.fc = Linear(width, classes)

    # ``train`` is for batch norms. Images are (N, height, width, channels) here.
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nnx.relu(self.conv(x))  # half the height and width
        return self.fc(x.mean((1, 2)))
