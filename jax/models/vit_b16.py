"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), with torchvision's names and no dropout."""

# Shapes: N batch; images are (N, height, width, channels), tokens (N, 1 + patches, width).

import jax
import jax.numpy as jnp
from flax import nnx

from models._layers import Conv, LayerNorm, Linear, attention, linear

EPSILON = 1e-6  # of every layer norm


def build(image: int, patch: int, layers: int, heads: int, width: int, hidden: int, classes: int) -> nnx.Module:
    """Return a model that maps images (N, ``image``, ``image``, 3) to logits (N, classes).

    Images are cut into squares of ``patch`` x ``patch`` pixels. Each layer's MLP has ``hidden`` units. The weights are
    only shapes until ``weights.load`` sets them.
    """
    if image % patch:
        raise ValueError(f"vit_b16: an image of {image} pixels is no multiple of a patch of {patch}")
    return nnx.eval_shape(lambda: _VisionTransformer(image, patch, layers, heads, width, hidden, classes))


class _Attention(nnx.Module):
    """``torch.nn.MultiheadAttention``: one matrix for queries, keys and values, stored as (out, in), as it is there."""

    def __init__(self, width: int, heads: int) -> None:
        self.in_proj_weight = nnx.Param(jnp.zeros((3 * width, width)))
        self.in_proj_bias = nnx.Param(jnp.zeros(3 * width))
        self.out_proj = Linear(width, width)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(linear(x, self.in_proj_weight[...].T, self.in_proj_bias[...]), 3, axis=-1)
        return self.out_proj(attention(q, k, v, self.heads))


class _Layer(nnx.Module):
    def __init__(self, heads: int, width: int, hidden: int) -> None:
        self.ln_1 = LayerNorm(width, EPSILON)
        self.self_attention = _Attention(width, heads)
        self.ln_2 = LayerNorm(width, EPSILON)
        self.mlp = nnx.Dict({"0": Linear(width, hidden), "3": Linear(hidden, width)})

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attention(self.ln_1(x))
        inner = jax.nn.gelu(self.mlp["0"](self.ln_2(x)), approximate=False)
        return x + self.mlp["3"](inner)


class _Encoder(nnx.Module):
    def __init__(self, tokens: int, layers: int, heads: int, width: int, hidden: int) -> None:
        self.pos_embedding = nnx.Param(jnp.zeros((1, tokens, width)))
        self.layers = nnx.Dict({f"encoder_layer_{n}": _Layer(heads, width, hidden) for n in range(layers)})
        self.ln = LayerNorm(width, EPSILON)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.pos_embedding[...]
        for number in range(len(self.layers)):  # by number: nnx.merge puts "encoder_layer_10" before "encoder_layer_2"
            x = self.layers[f"encoder_layer_{number}"](x)
        return self.ln(x)


class _VisionTransformer(nnx.Module):
    def __init__(self, image: int, patch: int, layers: int, heads: int, width: int, hidden: int, classes: int) -> None:
        self.conv_proj = Conv(3, width, patch, stride=patch, padding=0, bias=True)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.encoder = _Encoder((image // patch) ** 2 + 1, layers, heads, width, hidden)
        self.heads = nnx.Dict(head=Linear(width, classes))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        patches = self.conv_proj(x)
        count, _, _, width = patches.shape
        token = jnp.broadcast_to(self.class_token[...], (count, 1, width))
        x = self.encoder(jnp.concatenate([token, patches.reshape(count, -1, width)], axis=1))
        return self.heads["head"](x[:, 0])
