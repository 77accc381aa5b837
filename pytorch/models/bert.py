"""BERT (Devlin et al. 2018, arXiv:1810.04805) with the pooler and a sequence classifier.

As in the original: norms after attention and MLP, GELU with the error function. All tokens have the first of two types,
and there is no padding mask, because all sequences are full. Dropout is 0.
"""

# Shapes: N batch, T tokens in a sequence.

import torch
from torch import nn
from torch.nn import functional

from models._layers import attention

EPSILON = 1e-12
TYPES = 2  # token types: first and second sentence


def build(layers: int, heads: int, width: int, hidden: int, length: int, vocabulary: int, classes: int) -> nn.Module:
    """Return a model that maps ids (N, T) of at most ``length`` tokens to logits (N, classes).

    Its weights are meaningless until ``weights.load`` sets them.
    """
    return _BERT(layers, heads, width, hidden, length, vocabulary, classes)


class _Embeddings(nn.Module):
    def __init__(self, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.token_type = nn.Embedding(TYPES, width)
        self.norm = nn.LayerNorm(width, EPSILON)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = self.position(torch.arange(ids.shape[1], device=ids.device))
        # one row for all tokens: with a lookup for each, its gradient would scatter everything to one place
        token_type = self.token_type(ids.new_zeros(1))
        return self.norm(self.word(ids) + positions + token_type)


class _Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(attention(self.query(x), self.key(x), self.value(x), self.heads))


class _Layer(nn.Module):
    def __init__(self, heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = _Attention(heads, width), nn.LayerNorm(width, EPSILON)
        self.intermediate, self.output = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.output_norm = nn.LayerNorm(width, EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.output(functional.gelu(self.intermediate(x))))


class _BERT(nn.Module):
    def __init__(
        self, layers: int, heads: int, width: int, hidden: int, length: int, vocabulary: int, classes: int
    ) -> None:
        super().__init__()
        self.embeddings = _Embeddings(width, length, vocabulary)
        self.layer = nn.ModuleList([_Layer(heads, width, hidden) for _ in range(layers)])
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        self.length = length

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        if tokens > self.length:
            raise ValueError(f"sequences of {tokens} tokens; the model has positions for at most {self.length}")
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))
