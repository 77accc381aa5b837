"""What several models need beside ``torch.nn``."""

import torch
from torch.nn import functional


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, causal: bool = False) -> torch.Tensor:
    """Scaled dot-product attention with ``heads`` heads of (N, tokens, width)."""
    split = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)


def joined(ends: torch.Tensor, nodes: int) -> torch.Tensor:
    """(N * edges,): positions (N, edges) within graphs of ``nodes`` nodes, as positions among all nodes."""
    return (ends + nodes * torch.arange(len(ends), device=ends.device)[:, None]).flatten()


def segment_sum(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """(count, ...): for each segment the sum of its ``values`` (M, ...); ``segments`` (M,) says which is whose."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, segments, values)
