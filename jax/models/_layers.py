"""The layers that the models are built from. Parameters have the names that ``weights.py`` turns into torchvision's.

Weights are meaningless until ``weights.load`` sets them. Shapes: N batch; images are (N, height, width, channels).
"""

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from duel.catalogue import groups

T = TypeVar("T")
_compute_type: contextvars.ContextVar[jnp.dtype | None] = contextvars.ContextVar("compute_type", default=None)
_batch_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("batch_axis", default=None)
Kernel = Literal["xla", "cudnn", "heads_first"]  # JAX's names for implementations of attention, and our own
KERNELS: dict[str, Kernel] = {"math": "xla", "cudnn": "cudnn", "heads_first": "heads_first"}  # by value of the switch
_attention: contextvars.ContextVar[Kernel | None] = contextvars.ContextVar("attention", default=None)
# The program's names for what is not left to XLA, by switch and value.
BY_XLA = {"attention": "math", "depthwise": "grouped", "convolution": "framework"}
WAYS = {
    "attention": {"cudnn": "__cudnn$fmha", "heads_first": "attention_heads_first"},
    "depthwise": {"shifted": "shifted_products"},
    "convolution": {"products": "patch_products", "gradients": "kernel_products"},
}
_convolutions: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("convolutions", default=("", ""))


@contextlib.contextmanager
def _while_tracing(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def batch_over(axis: str | None) -> contextlib.AbstractContextManager[None]:
    """Batch norms traced inside use the statistics over all devices of the mesh's ``axis``."""
    return _while_tracing(_batch_axis, axis)


def attention_by(implementation: Kernel | None) -> contextlib.AbstractContextManager[None]:
    """Attention traced inside uses this implementation; None leaves the choice to JAX."""
    return _while_tracing(_attention, implementation)


def convolved_by(depthwise: str, others: str) -> contextlib.AbstractContextManager[None]:
    """Convolutions traced inside are written as the values of the switches ``depthwise`` and ``convolution`` ask."""
    return _while_tracing(_convolutions, (depthwise, others))


def _over_batch(mean: jax.Array) -> jax.Array:
    """Return the mean over all devices' batches, which have the same size, from the mean over this one's."""
    axis = _batch_axis.get()
    return mean if axis is None else jax.lax.pmean(mean, axis)


def autocast(dtype: jnp.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Matrix products, convolutions and attention traced inside compute in ``dtype``; None changes nothing.

    Like ``torch.autocast`` on the other side: parameters stay as they are, norms return their input's type or a wider
    one, and sums take the wider type.
    """
    return _while_tracing(_compute_type, dtype)


def cast(x: jax.Array) -> jax.Array:
    """Return ``x`` in the type that products are computed in."""
    dtype = _compute_type.get()
    return x if dtype is None else x.astype(dtype)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return ``x`` (..., in) times ``kernel`` (in, out), plus ``bias`` (out,)."""
    # As one matrix: after a three-axis product, XLA's CPU compiler recomputes the whole sum of a residual stream's
    # gradients in every layer, which took an eighth of ViT-B/16's training step.
    rows = cast(x).reshape(-1, x.shape[-1])
    return _add(rows @ cast(kernel), bias).reshape(*x.shape[:-1], kernel.shape[-1])


def _add(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Broadcast before the cast, so that the bias's gradient is summed in its own type, not in half precision."""
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.kernel[...], None if self.bias is None else self.bias[...])


class Conv(nnx.Module):
    """A convolution with equal padding on all sides, by default such that stride 1 keeps height and width.

    "SAME" would pad (0, 1) at stride 2.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((kernel, kernel, inputs // groups, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.stride, self.groups = stride, groups
        self.padding = kernel // 2 if padding is None else padding

    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel = cast(x), cast(self.kernel[...])
        depthwise, others = _convolutions.get()
        if depthwise == "shifted" and self.groups == x.shape[-1] == kernel.shape[-1]:
            y = _depthwise(x, kernel[:, :, 0], self.stride, self.padding)
        elif others in WAYS["convolution"] and self.groups == 1:
            with jax.named_scope(WAYS["convolution"][others]):
                few = _count(x, kernel, self.stride, self.padding) <= kernel.shape[-1]
                other = _with_products if others == "gradients" else _convolution
                way = _of_patches if few or kernel.shape[:2] == (1, 1) else other
                y = way(x, kernel, self.stride, self.padding)
        else:
            y = _convolution(x, kernel, self.stride, self.padding, self.groups)
        return _add(y, None if self.bias is None else self.bias[...])


def _convolution(x: jax.Array, kernel: jax.Array, stride: int, padding: int, groups: int = 1) -> jax.Array:
    """XLA's own convolution. ``kernel`` is (height, width, in / groups, out)."""
    pads = [(padding, padding)] * 2
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=names, feature_group_count=groups
    )


def _count(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> int:
    """Return the number of positions in one sample's result."""
    sizes = zip(x.shape[1:3], kernel.shape[:2], strict=True)
    return math.prod((size + 2 * padding - side) // stride + 1 for size, side in sizes)


def _places(x: jax.Array, sides: tuple[int, ...], stride: int, padding: int) -> list[jax.Array]:
    """Return the part of ``x`` each position in a kernel with ``sides`` meets: (N, height, width, channels) each."""
    padded = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    last = [stride * ((size - side) // stride) + 1 for size, side in zip(padded.shape[1:3], sides, strict=True)]
    return [
        padded[:, row : row + last[0] : stride, column : column + last[1] : stride]
        for row, column in itertools.product(*map(range, sides))
    ]


@jax.named_scope(WAYS["depthwise"]["shifted"])
def _depthwise(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve channel by channel with ``kernel`` (height, width, channels), summing in at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    places = _places(x, kernel.shape[:2], stride, padding)
    weights = kernel.reshape(-1, kernel.shape[-1])
    return sum(
        (place.astype(wide) * weight.astype(wide) for place, weight in zip(places, weights, strict=True)),
        start=jnp.zeros(places[0].shape, wide),
    ).astype(x.dtype)


def _of_patches(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve by one matrix product: all patches of ``x`` times ``kernel``."""
    patches = jnp.concatenate(_places(x, kernel.shape[:2], stride, padding), -1)
    rows = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1])
    return rows.reshape(*patches.shape[:3], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _with_products(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """XLA's convolution; its kernel's gradient is one matrix product per position of the kernel."""
    return _convolution(x, kernel, stride, padding)


def _backward(
    stride: int, padding: int, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    (for_x,) = jax.vjp(lambda x: _convolution(x, kernel, stride, padding), x)[1](gradient)
    rows = gradient.reshape(-1, gradient.shape[-1])
    places = _places(x, kernel.shape[:2], stride, padding)
    return for_x, jnp.stack([place.reshape(-1, x.shape[-1]).T @ rows for place in places]).reshape(kernel.shape)


_with_products.defvjp(lambda x, kernel, *others: (_convolution(x, kernel, *others), (x, kernel)), _backward)


class BatchNorm(nnx.Module):
    """Batch norm as ``torch.nn.BatchNorm2d`` defines it; ``momentum`` is the weight of the new value.

    Flax's own differs: its running variance is the biased one (n instead of n - 1), and its variance may be the
    one-pass E[x²] - E[x]². Statistics are at least float32, the result has the type of the input.
    """

    def __init__(self, channels: int, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        self.weight = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.running_mean = nnx.BatchStat(jnp.zeros(channels))
        self.running_var = nnx.BatchStat(jnp.ones(channels))
        self.momentum, self.epsilon = momentum, epsilon

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if train:
            axis = _batch_axis.get()
            count = x.size // x.shape[-1] * (1 if axis is None else jax.lax.axis_size(axis))
            mean = _over_batch(wide.mean((0, 1, 2)))
            var = _over_batch(jnp.square(wide - mean).mean((0, 1, 2)))
            self._follow(self.running_mean, mean)
            self._follow(self.running_var, var * (count / (count - 1)))
        else:
            mean, var = self.running_mean[...], self.running_var[...]
        # One multiplication and one addition per value, as in PyTorch's CPU kernel: XLA does not fold them by itself.
        scale = jax.lax.rsqrt(var + self.epsilon) * self.weight[...]
        return (wide * scale + (self.bias[...] - mean * scale)).astype(x.dtype)

    def _follow(self, running: nnx.BatchStat[jax.Array], value: jax.Array) -> None:
        running[...] = (1 - self.momentum) * running[...] + self.momentum * value


class GroupNorm(nnx.Module):
    """Group norm (Wu and He 2018, arXiv:1803.08494) as ``torch.nn.GroupNorm`` defines it, with a two-pass variance."""

    def __init__(self, channels: int, groups: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.groups, self.epsilon = groups, epsilon

    @classmethod
    def instead_of(cls, norm: BatchNorm) -> "GroupNorm":
        """Return the group norm that replaces ``norm``: same channels, same epsilon, no weights."""
        channels = norm.weight.shape[0]
        return nnx.eval_shape(lambda: cls(channels, groups(channels), norm.epsilon))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        grouped = x.reshape(len(x), -1, self.groups, x.shape[-1] // self.groups)
        wide = grouped.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean((1, 3), keepdims=True)
        var = jnp.square(centred).mean((1, 3), keepdims=True)
        normal = (centred * jax.lax.rsqrt(var + self.epsilon)).reshape(x.shape)
        return (normal * self.weight[...] + self.bias[...]).astype(x.dtype)


class ConvNorm(nnx.Module):
    """torchvision's ``Conv2dNormActivation``: convolution "0", batch norm "1", then ``activation`` if any."""

    def __init__(self, conv: Conv, norm: BatchNorm, activation: Callable[[jax.Array], jax.Array] | None = None) -> None:
        setattr(self, "0", conv)
        setattr(self, "1", norm)
        self.activation = activation

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = getattr(self, "1")(getattr(self, "0")(x), train)
        return x if self.activation is None else self.activation(x)


class SqueezeExcitation(nnx.Module):
    """torchvision's: each channel times a number in [0, 1] computed from all channels' means (Hu et al. 2017)."""

    def __init__(
        self,
        channels: int,
        squeezed: int,
        activation: Callable[[jax.Array], jax.Array],
        scale: Callable[[jax.Array], jax.Array],
    ) -> None:
        self.fc1 = Conv(channels, squeezed, 1, bias=True)
        self.fc2 = Conv(squeezed, channels, 1, bias=True)
        self.activation, self.scale = activation, scale

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = x.mean((1, 2), keepdims=True)
        return x * self.scale(self.fc2(self.activation(self.fc1(mean))))


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in at least float32, with a two-pass variance; Flax's own takes one pass."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        var = jnp.square(centred).mean(-1, keepdims=True)
        result = centred * jax.lax.rsqrt(var + self.epsilon) * self.weight[...] + self.bias[...]
        return result.astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, count: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((count, width)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.weight[...][ids]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    """Scaled dot-product attention with ``heads`` heads over (N, tokens, width); softmax is in at least float32."""
    shape, kernel = q.shape, _attention.get()
    q, k, v = (cast(x).reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    # JAX's own always takes the softmax in float32, and does not support float16 on a CPU.
    if kernel == "heads_first":
        with jax.named_scope(WAYS["attention"][kernel]):
            return _heads_first(q, k, v, causal).reshape(shape)
    if q.dtype == jnp.float64 or (q.dtype == jnp.float16 and kernel != "cudnn"):
        return _heads_first(q, k, v, causal).reshape(shape)
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=kernel).reshape(shape)


def _heads_first(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """As ``jax.nn.dot_product_attention``, over (N, tokens, heads, width per head), but computed with heads first."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = jnp.einsum("nhqd,nhkd->nhqk", q / q.shape[-1] ** 0.5, k)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores).astype(v.dtype), v).swapaxes(1, 2)


def joined(ends: jax.Array, nodes: int) -> jax.Array:
    """Turn positions (N, edges) within graphs of ``nodes`` nodes into positions (N * edges,) among all nodes."""
    return (ends + nodes * jnp.arange(len(ends), dtype=ends.dtype)[:, None]).reshape(-1)


def segment_sum(values: jax.Array, segments: jax.Array, count: int, sorted_segments: bool = False) -> jax.Array:
    """Sum ``values`` (M, ...) by segment into (count, ...); ``segments`` (M,) holds each value's segment."""
    return jax.ops.segment_sum(values, segments, count, indices_are_sorted=sorted_segments)
