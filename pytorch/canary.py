"""The canary's products, computed with the layers that the models are built from."""

from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

from duel.measure import canary
from models import _layers
from network import Network


@torch.no_grad()
def products(work: Network) -> npt.NDArray[Any]:
    """Return, in one axis, the products of ``duel.measure.canary.inputs``, computed as ``work`` computes its model."""
    return work.applied(_compute, work.placed(tuple(canary.inputs().values()))).cpu().numpy()


def _compute(a: Any, b: Any, image: Any, kernel: Any, q: Any, k: Any, v: Any, values: Any, segments: Any) -> Any:
    results = (
        functional.linear(a, b.T),
        functional.conv2d(image, kernel, padding=1),
        _layers.attention(q, k, v, canary.HEADS),
        _layers.segment_sum(values, segments, canary.SEGMENTS),
    )
    return torch.cat([result.flatten().float() for result in results])
