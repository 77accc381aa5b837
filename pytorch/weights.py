"""Weights in and out of a PyTorch model, under torchvision's names and in its layouts.

They are the ``state_dict`` itself, without ``num_batches_tracked``: it counts steps and changes nothing at a fixed
momentum.
"""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from duel.measure import parameters


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter and running statistic."""
    return {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}


def trainable(model: nn.Module) -> tuple[str, ...]:
    """Names of what the optimizer changes: all but the running statistics."""
    return tuple(name for name, _ in model.named_parameters())


def load(model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set every parameter and running statistic; ValueError listing all that is missing, extra or misshapen."""
    parameters.check(shapes(model), arrays)
    for name, tensor in _tensors(model).items():
        tensor.copy_(torch.from_numpy(arrays[name]))


def export(model: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """Copies of every parameter and running statistic."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in _tensors(model).items()}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors, detached: what is written into them is written into the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
