"""GPT-2 (Radford et al. 2019, 'Language Models are Unsupervised Multitask Learners'), with the original's names.

As in the original: norms before attention and MLP, the tanh approximation of GELU, and token embeddings that are also
the output layer. Dropout is 0. Linear layers store their weights as usual, not transposed as in the original.
"""

# Shapes: N batch, T tokens in a sequence.

import torch
from torch import nn
from torch.nn import functional

from models._layers import attention

EPSILON = 1e-5
EXPANSION = 4  # an MLP's hidden units, in multiples of the width


def build(layers: int, heads: int, width: int, length: int, vocabulary: int) -> nn.Module:
    """Return a model that maps ids (N, T) of at most ``length`` tokens to next-token logits (N, T, vocabulary).

    Its weights are meaningless until ``weights.load`` sets them.
    """
    return _GPT2(layers, heads, width, length, vocabulary)


class _Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj(attention(q, k, v, self.heads, causal=True))


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, EXPANSION * width)
        self.c_proj = nn.Linear(EXPANSION * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, EPSILON), _Attention(heads, width)
        self.ln_2, self.mlp = nn.LayerNorm(width, EPSILON), _MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _GPT2(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([_Block(heads, width) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width, EPSILON)
        self.length = length

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        if tokens > self.length:
            raise ValueError(f"sequences of {tokens} tokens; the model has positions for at most {self.length}")
        x = self.wte(ids) + self.wpe(torch.arange(tokens, device=ids.device))
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)
