"""The kinds of work that a step's time is divided into: one vocabulary for both frameworks.

An operation has the kind of the first line of ``KINDS`` that its name matches. In some layers it counts as that layer's
own work (``LAYERS``): what is one kernel in a framework may be a row of sums and products in the other. A kernel or a
fused loop is of the first kind in the order of ``KINDS`` that any of its operations has.
"""

import fnmatch
import functools
import re
from collections.abc import Iterable

from duel.catalogue import FRAMEWORKS
from duel.trace import Operation

COLLECTIVE, ATTENTION, DEPTHWISE = "collective", "attention", "depthwise convolution"
CONVOLUTION, PRODUCT, MOVES = "convolution", "matrix product", "scatter and gather"
RANDOM, NORMS, ELEMENTWISE = "random", "normalisation and reduction", "elementwise"
COPIES, OPTIMIZER, HOST = "copy and layout", "optimizer", "host"
OTHER, IDLE = "other", "idle"

# For each kind: the operations of XLA's HLO, and those of PyTorch without a namespace or a final underscore; "*" is any
# text. A custom call of HLO is "custom-call:" and its target. The order is from the most to the least telling.
KINDS: dict[str, tuple[str, str]] = {
    HOST: (
        """custom-call:*callback* infeed outfeed send* recv*""",
        """item _local_scalar_dense""",
    ),
    COLLECTIVE: (
        """all-reduce* all-gather* all-to-all reduce-scatter* collective-*""",
        """c10d::* nccl* gloo* allreduce* all_reduce* allgather* all_gather* reduce_scatter* broadcast_coalesced""",
    ),
    ATTENTION: (
        """custom-call:*fmha* custom-call:*attention*""",
        """*scaled_dot_product* *flash_attention* *efficient_attention* *cudnn_attention*""",
    ),
    DEPTHWISE: ("", """*conv_depthwise* *depthwise_conv*"""),
    CONVOLUTION: (
        """convolution custom-call:*conv*""",
        """conv1d conv2d conv3d convolution* _convolution* mkldnn_conv* cudnn_conv* thnn_conv* slow_conv* _slow_conv*
        _nnpack_spatial_conv* miopen_conv* mps_conv* conv_*""",
    ),
    PRODUCT: (
        """dot ragged-dot custom-call:*gemm* custom-call:*matmul* custom-call:*dot* custom-call:*triangular*""",
        """mm mm_* bmm bmm_* addmm addmm_* _addmm* baddbmm addbmm addmv mv dot vdot matmul linear linear_* _linear*
        mkl_linear mkldnn_linear _mkl_linear _sparse_*mm* sparse_mm* *sparse_product* einsum bilinear tensordot""",
    ),
    MOVES: (
        """scatter gather dynamic-slice dynamic-update-slice sort custom-call:*sort* custom-call:*TopK*""",
        """gather gather_* scatter* index index_* _index_* _unsafe_index* embedding* take* sort topk argsort nonzero
        max_unpool* put bincount segment_reduce repeat_interleave masked_select""",
    ),
    RANDOM: (
        """rng* custom-call:*threefry*""",
        """rand* normal bernoulli* dropout* native_dropout* uniform multinomial philox*""",
    ),
    NORMS: (
        """reduce reduce-window select-and-scatter batch-norm-* cumsum""",
        """*batch_norm* *layer_norm* *group_norm* *instance_norm* *rms_norm* sum mean nansum var std var_mean std_mean
        max min amax amin argmax argmin prod logsumexp norm linalg_norm linalg_vector_norm linalg_matrix_norm
        softmax* _softmax* _safe_softmax log_softmax* _log_softmax* nll_loss* cross_entropy* cumsum cumprod all any
        *pool1d* *pool2d* *pool3d* *max_pool* count_nonzero _foreach_norm""",
    ),
    ELEMENTWISE: (
        """abs add and atan2 cbrt ceil clamp compare complex convert cosine divide erf exponential
        exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum multiply negate not or
        popcnt power real reduce-precision remainder round-nearest-* rsqrt select shift-* sign sine sqrt subtract tan
        tanh xor""",
        """abs add sub rsub mul div true_divide floor_divide remainder pow addcmul addcdiv lerp neg exp expm1 log log1p
        sqrt rsqrt reciprocal square sign sin cos tanh* sigmoid* log_sigmoid* erf* relu* leaky_relu* threshold*
        hardtanh* hardswish* hardsigmoid* gelu* silu* elu* softplus* clamp* clip where maximum minimum eq ne lt le gt ge
        logical_* bitwise_* isfinite isnan is*inf masked_fill floor ceil round trunc nan_to_num binary_cross_entropy*
        type_as convert_element_type _foreach_* _fused_*""",
    ),
    COPIES: (
        """bitcast bitcast-convert broadcast concatenate copy copy-start copy-done iota pad reshape reverse slice
        transpose dynamic-reshape""",
        """copy clone contiguous cat stack hstack vstack pad constant_pad_nd repeat tile flip roll im2col col2im unfold*
        fill scalar_tensor zero zeros* ones* full* arange linspace eye tril triu one_hot to _to_copy reorder*
        _reshape_copy select_backward slice_backward _pin_memory to_dense to_mkldnn""",
    ),
}
# An update of a weight that is fused with what makes its gradient counts as the optimizer's.
ORDER = {kind: place for place, kind in enumerate((*list(KINDS)[:-2], OPTIMIZER, ELEMENTWISE, COPIES, OTHER))}
# Allocations and views do no work: they count with the operation that calls them. What is a view in PyTorch is one in
# HLO only as a bitcast: a transpose or slice that is left in a compiled program copies.
NO_WORK = (
    """
    parameter constant tuple get-tuple-element after-all partition-id replica-id opt-barrier
    """,
    """
    empty* view* reshape _reshape* as_strided t transpose permute expand* slice select split* unsafe_split* chunk unbind
    squeeze unsqueeze narrow detach alias lift_fresh resize* set new_* result_type is_* _unsafe_view flatten
    unflatten reshape_as movedim swapaxes numpy_T ravel broadcast_to _has_* size stride data requires_grad _conj
    _nnpack_available resolve_* sparse_*tensor* _sparse_*tensor* crow_indices col_indices values _nnz
    """,
)
# By the kind of a layer ("norm", "depthwise", "convolution", "attention"): which kinds count as its own work.
LAYERS: dict[str, dict[str, str]] = {
    "norm": {ELEMENTWISE: NORMS},
    "depthwise": dict.fromkeys((CONVOLUTION, PRODUCT, NORMS, ELEMENTWISE), DEPTHWISE),
    "convolution": {PRODUCT: CONVOLUTION},
    "attention": dict.fromkeys((PRODUCT, NORMS, ELEMENTWISE), ATTENTION),
}


def _pattern(names: str) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, names.split())))


_BY_FRAMEWORK = {
    framework: {kind: _pattern(names[side]) for kind, names in KINDS.items() if names[side]}
    for side, framework in enumerate(FRAMEWORKS)
}
_NO_WORK = {framework: _pattern(names) for framework, names in zip(FRAMEWORKS, NO_WORK, strict=True)}
_NAMESPACE = re.compile("^(aten|mkldnn|mkl|quantized|sparse|prims|inductor)::")


def kind(operation: Operation, framework: str) -> str:
    """Return the kind of ``operation``: a key of ``KINDS``, ``OPTIMIZER``, or ``OTHER`` if nobody knows its name."""
    found = named(operation.name, framework)
    if operation.stage == "optimizer" and found != COLLECTIVE:
        return OPTIMIZER
    return LAYERS.get(operation.layer, {}).get(found, found)


@functools.cache
def named(name: str, framework: str) -> str:
    """Return the kind that an operation's name stands for, ``OTHER`` if it is not in the table."""
    short = _short(name, framework, _NAMESPACE.sub("", name))
    return next((kind for kind, names in _BY_FRAMEWORK[framework].items() if names.match(short)), OTHER)


def works(name: str, framework: str) -> bool:
    """Return whether an operation does more than allocate, or look at an array in another way."""
    return not _NO_WORK[framework].match(_short(name, framework, name.rpartition("::")[2]))


def _short(name: str, framework: str, bare: str) -> str:
    """Return ``name`` as the tables have it: of PyTorch's, what is ``bare`` of a namespace, without a final underscore.

    An opcode of HLO has neither; the target of a custom call may have both.
    """
    return name if framework == "jax" else bare.rstrip("_")


def telling(operations: Iterable[Operation], framework: str) -> tuple[str, Operation] | None:
    """Return the operation that a kernel's time counts for, with its kind; None if there is none that works."""
    found = [(kind(one, framework), one) for one in operations if works(one.name, framework)]
    return min(found, key=lambda each: ORDER[each[0]], default=None)
