"""The canary: whether the precision policy is in force, judged by what this process really computes.

Each side computes four small products (``canary.products``, of JAX and of PyTorch) with the layers of its models,
through the same method by which the measured step calls its model. Their distance from float64 identifies the policy:
unit roundoffs are 6e-8 in float32, 5e-4 in TF32 and float16, 4e-3 in bfloat16.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.catalogue import FRAMEWORK_DEFAULT

HEADS = 4
SEGMENTS = 64
Arrays = dict[str, npt.NDArray[Any]]
# Bounds on ‖result - exact‖ / ‖exact‖ of each product. Additions are float32 under every policy.
STRICT, TEN_BITS, SEVEN_BITS = (0.0, 1e-5), (5e-5, 1e-3), (1e-3, 1e-2)
BOUNDS: Mapping[str, tuple[float, float]] = {
    "fp32": STRICT,
    "tf32": TEN_BITS,
    "fp16": TEN_BITS,
    "bf16": SEVEN_BITS,
}
SCATTER_ADD = "scatter_add"


def inputs() -> Arrays:
    """Return N(0, 1) samples: a (256, 256), b (256, 256); image (8, 64, 32, 32) and kernel (64, 64, 3, 3), channels
    first; q, k and v (2, 64, 64); values (4096, 16); and the segments (4096,) that the values are added to.

    The convolution is of a size at which TF32 is worth its while: libraries take whatever is fastest that they may.
    """
    generator = np.random.default_rng(0)
    shapes = {"a": (256, 256), "b": (256, 256), "image": (8, 64, 32, 32), "kernel": (64, 64, 3, 3)}
    shapes |= dict.fromkeys("qkv", (2, 64, 64)) | {"values": (4096, 16)}
    arrays: Arrays = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return arrays | {"segments": generator.integers(SEGMENTS, size=4096, dtype=np.int32)}


def exact(given: Arrays) -> Arrays:
    """Return the same products in float64."""
    wide = {name: array.astype(np.float64) for name, array in given.items() if name != "segments"}
    padded = np.pad(wide["image"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    split = [wide[name].reshape(2, 64, HEADS, -1).transpose(0, 2, 1, 3) for name in "qkv"]
    scores = np.exp(split[0] @ split[1].swapaxes(2, 3) / math.sqrt(split[0].shape[-1]))
    attended = scores / scores.sum(-1, keepdims=True) @ split[2]
    added = np.zeros((SEGMENTS, 16))
    np.add.at(added, given["segments"], wide["values"])
    return {
        "matmul": wide["a"] @ wide["b"],
        "convolution": np.einsum("nchwij,ocij->nohw", patches, wide["kernel"], optimize=True),
        "attention": attended.transpose(0, 2, 1, 3).reshape(2, 64, 64),
        SCATTER_ADD: added,
    }


def errors(computed: npt.NDArray[Any]) -> dict[str, float]:
    """Return each product's distance from float64, relative to it; ``computed`` is all of them concatenated."""
    right = exact(inputs())
    ends = np.cumsum([array.size for array in right.values()])
    assert computed.shape == (ends[-1],)
    parts = np.split(computed.astype(np.float64), ends[:-1])
    return {
        name: float(np.linalg.norm(part - array.ravel()) / np.linalg.norm(array))
        for part, (name, array) in zip(parts, right.items(), strict=True)
    }


def contradiction(found: Mapping[str, float], policy: str) -> str:
    """Return what in ``found`` contradicts ``policy``; empty if nothing does."""
    if policy == FRAMEWORK_DEFAULT:
        return ""
    wrong = []
    for name, error in found.items():
        low, high = STRICT if name == SCATTER_ADD else BOUNDS[policy]
        if policy == "tf32" and name == "attention":
            low = 0.0  # attention kernels may stay in float32
        if not low <= error <= high:
            wrong.append(f"{name} is {error:.1e} from float64, expected {low:.0e} to {high:.0e}")
    return "; ".join(wrong)


def said(found: Mapping[str, float]) -> str:
    """Return ``found`` as rows record it."""
    return " ".join(f"{name}={error:.1e}" for name, error in found.items())
