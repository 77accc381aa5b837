"""What several models need besides ``torch.nn``."""

# Shapes: N batch, C channels; images are (N, C, height, width). A k x k kernel has L output positions per image.

from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional, grad

Pair = tuple[int, int]
# A sparse matrix and its transpose: of each the starts of its rows, its columns and its values (CSR).
Sparse = tuple[torch.Tensor, ...]


class _AllReduce(torch.autograd.Function):
    """The sum over all processes; the backward pass sums all processes' gradients."""

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
    """Batch norm whose training statistics cover all processes' batches, which have the same size."""

    running_mean: torch.Tensor  # never None here, nor is the momentum, unlike in other batch norms
    running_var: torch.Tensor
    momentum: float

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


class _Convolution(torch.autograd.Function):
    """A convolution whose weight gradient is a matrix product with the image's patches if these are few.

    With a (C, k, k) patch at each of the L output positions, that gradient is a sum of L products. Per sample,
    torch.func computes it as a convolution with one group per sample, which takes twice as long for small images with
    many channels, and less time for large ones with few.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Pair, padding: Pair
    ) -> torch.Tensor:
        return functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        for_x = grad.conv2d_input(x.shape, weight, gradient, ctx.stride, ctx.padding) if needs_x else None
        out, _, *kernel = weight.shape
        if gradient.shape[2] * gradient.shape[3] > out:
            for_weight = grad.conv2d_weight(x, weight.shape, gradient, ctx.stride, ctx.padding)
        else:
            (high, wide), (down, right) = ctx.padding, ctx.stride
            patches = functional.pad(x, (wide, wide, high, high)).unfold(2, kernel[0], down).unfold(3, kernel[1], right)
            patches = patches.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2)  # (C * k * k, N * L)
            for_weight = (gradient.transpose(0, 1).flatten(1) @ patches.T).view_as(weight)
        return for_x, for_weight, gradient.sum((0, 2, 3)) if needs_bias else None, None, None


class SampleConv2d(nn.Conv2d):
    """``nn.Conv2d`` without groups or dilation, for per-sample gradients by torch.func. Dynamo does not support it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: tuple[Any, ...] = (x, self.weight, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
            given = tuple(None if tensor is None else tensor.to(half) for tensor in given)
        return _Convolution.apply(*given, self.stride, self.padding)


_attention = functional.scaled_dot_product_attention


def half_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``functional.scaled_dot_product_attention`` under autocast, for per-sample gradients.

    On its own, autocast casts inside the operation, which torch.func differentiates without these casts: "expected
    scalar type Float but found BFloat16".
    """
    kind = query.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    given = (query.to(half), key.to(half), value.to(half))
    with torch.autocast(kind, enabled=False):
        return _attention(*given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, causal: bool = False) -> torch.Tensor:
    """Scaled dot-product attention with ``heads`` heads over (N, tokens, width)."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def joined(ends: torch.Tensor, nodes: int) -> torch.Tensor:
    """Turn positions (N, edges) within graphs of ``nodes`` nodes into positions (N * edges,) among all nodes."""
    return (ends + nodes * torch.arange(len(ends), device=ends.device)[:, None]).flatten()


def segment_sum(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Sum ``values`` (M, ...) by segment into (count, ...); ``segments`` (M,) holds each value's segment."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, segments, values)


def stored(rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: Pair) -> Sparse:
    """Return the matrix of ``shape`` with ``values`` (M,) at ``rows`` and ``columns`` (M,), for ``sparse_product``."""
    matrix = torch.sparse_coo_tensor(torch.stack((rows, columns)), values, shape).coalesce()
    kept = []
    for one in (matrix.to_sparse_csr(), matrix.t().coalesce().to_sparse_csr()):
        # Copies: Dynamo does not take views of sparse tensors.
        kept += [part.clone() for part in (one.crow_indices(), one.col_indices(), one.values())]
    return tuple(kept)


@torch.library.custom_op("duel::sparse_product", mutates_args=())
def _sparse_product(
    starts: torch.Tensor,
    columns: torch.Tensor,
    values: torch.Tensor,
    turned_starts: torch.Tensor,
    turned_columns: torch.Tensor,
    turned_values: torch.Tensor,
    dense: torch.Tensor,
) -> torch.Tensor:
    shape = len(starts) - 1, len(dense)
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False) @ dense


@_sparse_product.register_fake
def _(*arguments: torch.Tensor) -> torch.Tensor:
    return arguments[-1].new_empty(len(arguments[0]) - 1, arguments[-1].shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])


def _turned_product(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    matrix, turned = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    return *[None] * 6, _sparse_product(*turned, *matrix, gradient.contiguous())


_sparse_product.register_autograd(_turned_product, setup_context=_keep)


def sparse_product(matrix: Sparse, dense: torch.Tensor) -> torch.Tensor:
    """Return ``matrix``, made by ``stored``, times ``dense``, in the precision of the matrix.

    An operation of its own, because Dynamo does not take sparse tensors; its gradient is the product with the stored
    transpose, which PyTorch's own would make anew in each step.
    """
    product: torch.Tensor = _sparse_product(*matrix, dense.to(matrix[2].dtype))
    return product
