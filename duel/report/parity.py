"""Do both sides compute the same function? The bounds, and the comparison of what both ``parity.py`` wrote."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Bounds:
    """What one precision allows.

    ``logits``: largest absolute difference / max(``least_logit``, largest logit); the loss alike.
    ``gradient``, per tensor: ‖difference‖ / max(‖tensor‖, 1e-6 ‖whole gradient‖). The floor is for a tensor whose true
    gradient is zero, where a plain relative error means nothing.
    ``losses``: largest relative difference of the losses of the optimizer steps.
    ``after``, per tensor after these steps: ‖difference‖ / ‖tensor‖; None where rounding alone decides.
    """

    logits: float
    least_logit: float
    gradient: float
    losses: float
    after: float | None


BOUNDS = {
    "float64": Bounds(logits=1e-10, least_logit=1.0, gradient=1e-10, losses=1e-9, after=1e-9),
    "fp32": Bounds(logits=1e-5, least_logit=0.0, gradient=1e-5, losses=1e-4, after=None),
}
ZERO_GRADIENT = 1e-6


@dataclass(frozen=True)
class Deviation:
    """How far one array of the two sides differs; ``error`` is infinite where the two cannot be compared."""

    name: str
    error: float
    bound: float
    note: str = ""

    @property
    def accepted(self) -> bool:
        return self.error <= self.bound  # a NaN is not accepted

    def __str__(self) -> str:
        return f"{self.name}: {self.note or f'error {self.error:.2e}, bound {self.bound:.0e}'}"


def deviations(first: Arrays, second: Arrays, precision: str) -> list[Deviation]:
    """One entry per array that either side has and ``precision`` ("float64" or "fp32") has a bound for.

    Both sides are scaled by the smaller of their two magnitudes, so their order changes nothing.
    """
    bounds = BOUNDS[precision]
    names = sorted(first.keys() | second.keys())
    whole = min(_norm([side[name] for name in side if _kind(name) == "gradient"]) for side in (first, second))
    found = []
    for name in names:
        kind = _kind(name)
        bound = (
            {"sha256": 0.0, "loss": bounds.logits}.get(kind) if kind in ("sha256", "loss") else getattr(bounds, kind)
        )
        if bound is None:
            continue
        note = _incomparable(name, first, second)
        error = float("inf") if note else _error(kind, first[name], second[name], bounds.least_logit, whole)
        found.append(Deviation(name, error, bound, note))
    return found


def failures(first: Arrays, second: Arrays, precision: str) -> list[str]:
    """What differs by more than its bound, in words that name the array; empty where both sides agree."""
    return [str(deviation) for deviation in deviations(first, second, precision) if not deviation.accepted]


def _kind(name: str) -> str:
    return "sha256" if name.endswith("_sha256") else name.partition("/")[0]


def _incomparable(name: str, first: Arrays, second: Arrays) -> str:
    if name not in first or name not in second:
        return "only one side has it"
    if first[name].shape != second[name].shape:
        return f"shapes {first[name].shape} and {second[name].shape}"
    return ""


def _norm(arrays: list[npt.NDArray[Any]]) -> float:
    return float(np.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays)))


def _error(
    kind: str, first: npt.NDArray[Any], second: npt.NDArray[Any], least_logit: float, whole_gradient: float
) -> float:
    if kind == "sha256":
        return 0.0 if first == second else float("inf")
    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind in ("logits", "loss"):
        scale = max(least_logit, min(float(np.abs(a).max()), float(np.abs(b).max())))
        return _ratio(float(np.abs(a - b).max()), scale)
    if kind == "losses":
        return max(_ratio(abs(x - y), min(abs(x), abs(y))) for x, y in zip(a, b, strict=True))
    floor = ZERO_GRADIENT * whole_gradient if kind == "gradient" else 0.0
    return _ratio(_norm([a - b]), max(min(_norm([a]), _norm([b])), floor))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")
