"""What several models need beside ``torch.nn``."""

from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional


class _AllReduce(torch.autograd.Function):
    """The sum over all processes; the gradient of every process's result comes back to each."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics in training are those of all processes' batches, which are of one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        world, axes = distributed.get_world_size(), (0, 2, 3)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = _AllReduce.apply(wide.mean(axes)) / world
        centred = wide - mean[:, None, None]
        var = _AllReduce.apply(centred.square().mean(axes)) / world
        with torch.no_grad():
            count = world * x.numel() // x.shape[1]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        scale = torch.rsqrt(var + self.eps) * self.weight
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


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
