"""BERT (Devlin et al. 2018, arXiv:1810.04805) with the pooler and a sequence classifier.

As in the original: norms after attention and MLP, GELU with the error function. All tokens have the first of two types,
and there is no padding mask, because all sequences are full. Dropout is 0.
"""

# Shapes: N batch, T tokens in a sequence.

import jax
import jax.numpy as jnp
from flax import nnx

from models._layers import Embedding, LayerNorm, Linear, attention

EPSILON = 1e-12
TYPES = 2  # token types: first and second sentence


def build(layers: int, heads: int, width: int, hidden: int, length: int, vocabulary: int, classes: int) -> nnx.Module:
    """Return a model that maps ids (N, T) of at most ``length`` tokens to logits (N, classes).

    Its weights are only shapes until ``weights.load`` sets them.
    """
    return nnx.eval_shape(lambda: _BERT(layers, heads, width, hidden, length, vocabulary, classes))


class _Embeddings(nnx.Module):
    def __init__(self, width: int, length: int, vocabulary: int) -> None:
        self.word, self.position = Embedding(vocabulary, width), Embedding(length, width)
        self.token_type = Embedding(TYPES, width)
        self.norm = LayerNorm(width, EPSILON)

    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = self.position(jnp.arange(ids.shape[1]))
        # one row for all tokens: with a lookup for each, its gradient would scatter everything to one place
        token_type = self.token_type(jnp.zeros(1, ids.dtype))
        return self.norm(self.word(ids) + positions + token_type)


class _Attention(nnx.Module):
    def __init__(self, heads: int, width: int) -> None:
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.output = Linear(width, width)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(attention(self.query(x), self.key(x), self.value(x), self.heads))


class _Layer(nnx.Module):
    def __init__(self, heads: int, width: int, hidden: int) -> None:
        self.attention, self.attention_norm = _Attention(heads, width), LayerNorm(width, EPSILON)
        self.intermediate, self.output = Linear(width, hidden), Linear(hidden, width)
        self.output_norm = LayerNorm(width, EPSILON)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.output(nnx.gelu(self.intermediate(x), approximate=False)))


class _BERT(nnx.Module):
    def __init__(
        self, layers: int, heads: int, width: int, hidden: int, length: int, vocabulary: int, classes: int
    ) -> None:
        self.embeddings = _Embeddings(width, length, vocabulary)
        self.layer = nnx.List([_Layer(heads, width, hidden) for _ in range(layers)])
        self.pooler = Linear(width, width)
        self.classifier = Linear(width, classes)
        self.length = length

    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        tokens = ids.shape[1]
        if tokens > self.length:
            raise ValueError(f"sequences of {tokens} tokens; the model has positions for at most {self.length}")
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        return self.classifier(jnp.tanh(self.pooler(x[:, 0])))
