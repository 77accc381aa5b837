"""Load and export the weights of a Flax model, under torchvision's names and in its layouts.

One rule for every model: attribute names are already torchvision's; ``kernel`` is called ``weight`` there and has its
axes in another order: (height, width, in, out) for (out, in, height, width), and (in, out) for (out, in).
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from duel.measure import parameters

# By a kernel's number of dimensions: the transpose to torchvision's axis order, and its inverse.
TO_TORCHVISION = {2: (1, 0), 4: (3, 2, 0, 1)}
TO_FLAX = {2: (1, 0), 4: (2, 3, 1, 0)}


def shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter and running statistic."""
    return {_name(path): tuple(value.shape[axis] for axis in _axes(path, value)) for path, value in _leaves(model)}


def trainable(model: nnx.Module) -> tuple[str, ...]:
    """Return the names of what the optimizer changes: all but the running statistics."""
    return tuple(_name(path) for path, _ in _leaves(model, nnx.Param))


def load(model: nnx.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set every parameter and running statistic; ValueError lists everything missing, extra or of another shape."""
    parameters.check(shapes(model), arrays)

    def value(path: tuple[Any, ...], _: Any) -> npt.NDArray[Any]:
        array = arrays[_name(path)]
        return array.transpose(TO_FLAX[array.ndim]) if path[-1].key == "kernel" else array

    nnx.update(model, jax.tree_util.tree_map_with_path(value, nnx.to_pure_dict(nnx.state(model))))


def export(model: nnx.Module) -> dict[str, npt.NDArray[Any]]:
    """Return copies of every parameter and running statistic."""
    return {
        _name(path): np.array(np.asarray(value).transpose(_axes(path, value)), order="C")
        for path, value in _leaves(model)
    }


def _leaves(model: nnx.Module, kind: Any = ...) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the path and value of every variable of ``kind``; a path is a tuple of dictionary keys."""
    return jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, kind)))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join("weight" if part.key == "kernel" else str(part.key) for part in path)


def _axes(path: tuple[Any, ...], value: Any) -> tuple[int, ...]:
    return TO_TORCHVISION[value.ndim] if path[-1].key == "kernel" else tuple(range(value.ndim))
