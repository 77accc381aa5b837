"""GPT-2 (Radford et al. 2019, 'Language Models are Unsupervised Multitask Learners'), with the original's names.

As in the original: norms before attention and MLP, the tanh approximation of GELU, and token embeddings that are also
the output layer. Dropout is 0. Linear layers store their weights as usual, not transposed as in the original.
"""

# Shapes: N batch, T tokens in a sequence.

import jax
import jax.numpy as jnp
from flax import nnx

from models._layers import Embedding, LayerNorm, Linear, attention, linear

EPSILON = 1e-5
EXPANSION = 4  # an MLP's hidden units, in multiples of the width


def build(layers: int, heads: int, width: int, length: int, vocabulary: int) -> nnx.Module:
    """Return a model that maps ids (N, T) of at most ``length`` tokens to next-token logits (N, T, vocabulary).

    Its weights are only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _GPT2(layers, heads, width, length, vocabulary))


class _Attention(nnx.Module):
    def __init__(self, heads: int, width: int) -> None:
        self.c_attn = Linear(width, 3 * width)
        self.c_proj = Linear(width, width)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.c_attn(x), 3, -1)
        return self.c_proj(attention(q, k, v, self.heads, causal=True))


class _MLP(nnx.Module):
    def __init__(self, width: int) -> None:
        self.c_fc = Linear(width, EXPANSION * width)
        self.c_proj = Linear(EXPANSION * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(nnx.gelu(self.c_fc(x), approximate=True))


class _Block(nnx.Module):
    def __init__(self, heads: int, width: int) -> None:
        self.ln_1, self.attn = LayerNorm(width, EPSILON), _Attention(heads, width)
        self.ln_2, self.mlp = LayerNorm(width, EPSILON), _MLP(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _GPT2(nnx.Module):
    def __init__(self, layers: int, heads: int, width: int, length: int, vocabulary: int) -> None:
        self.wte, self.wpe = Embedding(vocabulary, width), Embedding(length, width)
        self.h = nnx.List([_Block(heads, width) for _ in range(layers)])
        self.ln_f = LayerNorm(width, EPSILON)
        self.length = length

    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        tokens = ids.shape[1]
        if tokens > self.length:
            raise ValueError(f"sequences of {tokens} tokens; the model has positions for at most {self.length}")
        x = self.wte(ids) + self.wpe(jnp.arange(tokens))
        for block in self.h:
            x = block(x)
        return linear(self.ln_f(x), self.wte.weight[...].T)
