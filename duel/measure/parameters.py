"""Initial weights, made once in numpy and loaded by both frameworks.

Names and layouts are those of torchvision's ``state_dict``: ``layer1.0.conv1.weight`` is (out, in, height, width),
``fc.weight`` is (out, in), a batch norm has ``weight``, ``bias``, ``running_mean`` and ``running_var``.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[np.float32]]


def initialise(shapes: Mapping[str, tuple[int, ...]], seed: int, randomise: bool = False) -> Arrays:
    """Return one float32 array per entry of ``shapes``, which must cover the whole model.

    The rule, by the last part of a name and the number of dimensions:

    ============  ============================  ==============================================
    last part     what it is                    value
    ============  ============================  ==============================================
    weight        4 dimensions: convolution     N(0, 2 / (out * height * width)), He et al. 2015 with fan-out
    weight        2 dimensions: linear layer,   N(0, 1 / in), LeCun et al. 1998
                  or embedding (count, in)
    weight        1 dimension: norm             1
    token,        3 dimensions, the first two   N(0, 0.02²), as in Dosovitskiy et al. 2020
    embedding     of which are for broadcasting
    bias          any                           0
    running_mean  batch norm                    0
    running_var   batch norm                    1
    ============  ============================  ==============================================

    A last part is matched by its ending: ``in_proj_weight`` is a weight.

    Each array has its own generator, seeded by ``seed`` and its name, so neither order nor selection changes a value.

    ``randomise`` draws what would otherwise be constant: norm weights and running variances from U(0.5, 1.5), biases
    and running means from N(0, 0.1²). Parity tests need it: with constants, they would miss such terms.
    Raises ValueError for a tensor the rule does not cover.
    """
    return {name: _draw(name, shape, seed, randomise) for name, shape in shapes.items()}


def known(shapes: Mapping[str, tuple[int, ...]], seed: int, smooth: bool) -> Arrays:
    """Return weights as ``initialise`` does with ``randomise``; unless the network is ``smooth``, norm weights are from
    U(0.25, 0.75) and norm biases from N(1, 0.1²).

    The bound on a result is the effect of rounding on it, which a deep network of norms and ReLUs magnifies: if weights
    change by one rounding of bfloat16, the gradient of ResNet-50 at full size (8 images, fp32, on a CPU) changes by
    133 %, so that nothing could be distinguished, but with these weights, which leave few activations near their kink,
    by 0.9 %. Attention and GELU have no kinks, and such norms hurt them: all tokens become alike, so that gradients are
    small differences of large numbers and shrink by a factor of 2.6 from one layer of BERT-Base to the one before.
    """
    arrays = initialise(shapes, seed, randomise=True)
    for name, array in () if smooth else arrays.items():
        stem, _, last = name.rpartition(".")
        if last in ("weight", "bias") and len(shapes.get(f"{stem}.weight", ())) == 1:
            # ``initialise`` drew them from U(0.5, 1.5) and N(0, 0.1²).
            arrays[name] = np.asarray(array / 2 if last == "weight" else array + 1, np.float32)
    return arrays


def _draw(name: str, shape: tuple[int, ...], seed: int, randomise: bool) -> npt.NDArray[np.float32]:
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4")
    generator = np.random.default_rng([seed, *(int(word) for word in words)])
    last = name.rpartition(".")[2]
    if last.endswith("weight") and len(shape) == 4:
        scale = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
    elif last.endswith("weight") and len(shape) == 2:
        scale = math.sqrt(1 / shape[1])
    elif last.endswith(("token", "embedding")) and len(shape) == 3:
        scale = 0.02
    elif len(shape) == 1 and last.endswith(("weight", "running_var")):
        return generator.uniform(0.5, 1.5, shape).astype(np.float32) if randomise else np.ones(shape, np.float32)
    elif len(shape) == 1 and last.endswith(("bias", "running_mean")):
        scale = 0.1 if randomise else 0.0
    else:
        raise ValueError(
            f"{name} {shape}: no rule for it; known are weight (4, 2 or 1 dimensions), token and embedding "
            "(3 dimensions), bias, running_mean and running_var (1 dimension)"
        )
    return np.asarray(scale * generator.standard_normal(shape) + 0.0, np.float32)  # + 0.0: no negative zeros


def trainable(named: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of ``named`` that an optimizer changes: all but running statistics."""
    return {name: value for name, value in named.items() if ".running_" not in name}


def check(shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise one ValueError that lists every array that is missing, extra or of the wrong shape for ``shapes``."""
    wrong = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in arrays]
    wrong += [f"extra: {name} {array.shape}" for name, array in arrays.items() if name not in shapes]
    wrong += [
        f"wrong shape: {name} {arrays[name].shape}, the model has {shape}"
        for name, shape in shapes.items()
        if name in arrays and arrays[name].shape != tuple(shape)
    ]
    if wrong:
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(wrong))


def sha256(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the hash of names, types, shapes and values, whatever the order of the mapping."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def read(path: Path) -> Arrays:
    """Read the arrays of a safetensors file.

    Raises ValueError if it is damaged or holds anything but float32, OSError if it cannot be opened.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            others = sorted({file.get_slice(name).get_dtype() for name in names} - {"F32"})
            if others:
                raise ValueError(f"{path} holds {', '.join(others)}; F32 (float32) is valid")
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error


def write(path: Path, arrays: Arrays) -> None:
    """Write ``arrays`` to a safetensors file, whole or not at all."""
    from safetensors.numpy import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
