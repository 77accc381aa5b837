"""Do both sides compute the same function? The bounds, and the comparison of what both sides of a validation wrote.

``duel.measure.validation`` describes the arrays and their names.
"""

import json
import math
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.certificate import FORMAT, RATE, STEPS
from duel.files import Damaged, opened, utc
from duel.results import Run

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

# Largest |difference| / max(1, largest |value|) in float64, / largest |value| in float32.
VALUES = {"float64": 1e-10, "fp32": 1e-5}
# Per tensor ‖difference‖ / max(‖tensor‖, ZERO_GRADIENT ‖whole gradient‖). The floor is for tensors whose true gradient
# is zero, for which a plain relative error is meaningless: less than one rounding of the whole gradient does not count.
#
# The float32 bound is TIMES what moving the weights by a rounding does to the gradient in float64, if that is more: a
# property of the function, on which both sides must agree, so that neither side's own noise widens its bound. A
# gradient jumps when the input of a ReLU, a max pool or a hard swish crosses a kink; among a large model's millions of
# activations, some are so close to one that rounding decides, at random on each side, and a gradient then moves by as
# much as 1e-2 although all layers agree. float64, which rounds 1e9 times finer, keeps its bound without exception.
GRADIENTS = {"float64": 1e-10, "fp32": 1e-5}
GRADIENT_KINDS = ("gradients", "per-sample materialised", "per-sample clipped_sum")
ZERO_GRADIENT = {
    "float64": float(np.finfo(np.float64).eps) / GRADIENTS["float64"],
    "fp32": float(np.finfo(np.float32).eps) / GRADIENTS["fp32"],
}
# Largest relative difference of the losses of the optimizer's steps; in float32, TIMES what that rounding does to them,
# if that is more.
LOSSES = {"float64": 1e-9, "fp32": 1e-4}
# Per tensor after the steps, ‖difference‖ / ‖tensor‖: SGD's parameters, and running statistics.
AFTER = 1e-9
# AdamW divides by the size of the gradient: largest |difference| / (learning rate * steps), over all elements but those
# whose gradient is zero up to rounding, which walk at random on either side.
AFTER_ADAMW = 1e-6
# For images with mean 100 and standard deviation 0.1: rounding them costs 1e-4, a one-pass variance 1e-1.
SHIFTED = 1e-2
# Two sides that round differently are about equally far from the exact result, and move about equally far.
TIMES = 2.0

# Checks whose worst error is in the table, and their titles there.
SHOWN = {
    "float64 layers": "f64 layer",
    "float64 gradients": "gradient",
    "float64 sgd after": "10 SGD",
    "float64 adamw after": "10 AdamW",
    "fp32 layers": "f32 layer",
    "fp32 gradients": "gradient",
    "bf16 error": "bf16 x",
    "fp16 error": "fp16 x",
}


@dataclass(frozen=True)
class Deviation:
    """How far the two sides differ in one quantity; ``error`` is infinite if they cannot be compared."""

    check: str  # which kind of comparison
    name: str  # the layer or parameter it is of, or empty
    error: float
    bound: float
    note: str = ""

    @property
    def accepted(self) -> bool:
        return self.error <= self.bound and self.error < math.inf  # a NaN is not accepted, either

    def __str__(self) -> str:
        what = f"{self.check} {self.name}".strip()
        return f"{what}: {self.note or f'error {self.error:.2e}, bound {self.bound:.0e}'}"


def certify(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the certificate of one benchmark from both sides' finished validations, by framework."""
    sides = {framework: _read(runs[framework]) for framework in FRAMEWORKS}
    rows = [run.rows()[0] for run in runs.values()]
    row = rows[0]
    first, last = sides.values()
    found = deviations(first, last, RATE)
    for column in ("device_kind", "code_sha256"):
        if len(values := {str(getattr(row, column)) for row in rows}) > 1:
            found.insert(0, Deviation(column, "", np.inf, 0.0, f"they are {' and '.join(sorted(values))}"))
    found += _flops(str(row.benchmark), sides)
    failures = [str(deviation) for deviation in found if not deviation.accepted]
    shapes = json.loads(str(last["shapes"]))
    precisions = dict.fromkeys(name.partition("/")[0] for name in last if "/" in name)
    return {
        "format": FORMAT,
        "passed": not failures,
        "benchmark": row.benchmark,
        "size": row.size,
        "device_kind": row.device_kind,
        "device_name": row.device_name,
        "made": utc(),
        "code_sha256": row.code_sha256,
        "weights_sha256": sorted({str(last["weights_sha256"]), str(last["per-sample weights_sha256"])}),
        "versions": {framework: json.loads(str(side["versions"])) for framework, side in sides.items()},
        "precisions": list(precisions),
        "parameters": sum(math.prod(shape) for name, shape in shapes["parameters"].items() if ".running_" not in name),
        "failures": failures,
        "checks": [_summary(check, found) for check in dict.fromkeys(deviation.check for deviation in found)],
        "shapes": shapes,
    }


def _read(run: Run) -> Arrays:
    """Return the arrays of a validation. Raises Damaged if the file is not what a validation writes."""
    try:
        with opened(run.parity) as file, np.load(file) as arrays:  # allow_pickle is off: nothing in it is executed
            return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise Damaged(f"{run.parity} is damaged: {error}") from error


def unfinished(runs: Mapping[str, Run]) -> list[str]:
    """Return the differences in what both sides computed before one of them failed; the first is where it began.

    Deletes the computed arrays.
    """
    sides = [_read(run) for run in runs.values() if run.parity.exists()]
    for run in runs.values():
        run.parity.unlink(missing_ok=True)
    if len(sides) < len(FRAMEWORKS) or not all("shapes" in side for side in sides):
        return []
    first, last = ({name: side[name] for name in side if all(name in one for one in sides)} for side in sides)
    return [str(deviation) for deviation in deviations(first, last, RATE) if not deviation.accepted]


def _flops(benchmark: str, sides: Mapping[str, Arrays]) -> Iterator[Deviation]:
    """Compare, by size, the catalogue's FLOPs with what each side counted in its own program."""
    counted = {framework: json.loads(str(side["flops"])) for framework, side in sides.items()}
    for size, entry in BENCHMARKS[benchmark].sizes.items():
        found = {framework: counts[size] for framework, counts in counted.items()}
        if set(found.values()) == {entry.flops}:
            yield Deviation("flops", size, 0.0, 0.0)
            continue
        counts = ", ".join(f"{framework} computes {count:_}" for framework, count in found.items())
        yield Deviation("flops", size, np.inf, 0.0, f"the catalogue says {entry.flops:_}; {counts}")


def _summary(check: str, found: list[Deviation]) -> dict[str, Any]:
    """Return one certificate line: how many quantities were compared, and the one nearest to its bound or beyond."""
    those = [deviation for deviation in found if deviation.check == check]
    worst = max(those, key=lambda d: math.inf if math.isnan(d.error) else d.error / d.bound if d.bound else d.error)
    beyond = [deviation for deviation in those if not deviation.accepted]
    shown = beyond[0] if beyond else worst
    return {
        "check": check,
        "compared": len(those),
        "failed": len(beyond),
        "error": float(shown.error) if math.isfinite(shown.error) else str(shown.error),  # JSON has no infinity
        "bound": shown.bound,
        "of": shown.name,
    }


def heading() -> str:
    """Return the first line of the table."""
    titles = [f"{title:>9}" for title in SHOWN.values()]
    return "  ".join([f"{'benchmark':18}", f"{'parameters':>11}", *titles, "verdict"])


def line(certificate: Mapping[str, Any]) -> str:
    """Return a benchmark's line in the table: the worst errors of the most telling checks."""
    verdict = "passed" if certificate["passed"] else "FAILED"
    parameters = f"{certificate['parameters']:>11,}"
    errors = [f"{text:>9}" for text in _errors(certificate)]
    return "  ".join([f"{certificate['benchmark']:18}", parameters, *errors, verdict])


def paragraph(certificate: Mapping[str, Any], width: int) -> str:
    """Return the same as a paragraph ``width`` columns wide, for when the table is too wide."""
    verdict = "passed" if certificate["passed"] else "FAILED"
    errors = [f"{title} {text}" for title, text in zip(SHOWN.values(), _errors(certificate), strict=True)]
    head = f"{certificate['benchmark']:18}  {verdict}, {certificate['parameters']:,} parameters"
    indent = " " * 4
    body = textwrap.wrap(", ".join(errors), width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([head, *body])


def _errors(certificate: Mapping[str, Any]) -> list[str]:
    errors = {summary["check"]: summary["error"] for summary in certificate["checks"]}
    figures = [errors.get(check, "-") for check in SHOWN]
    return [f"{figure:.1e}" if isinstance(figure, float) else figure for figure in figures]


def deviations(first: Arrays, second: Arrays, learning_rate: float) -> list[Deviation]:
    """Return one entry for each quantity compared, in the order in which the second side computed them.

    Both sides are scaled by the smaller of their two magnitudes, so which one is first changes only the order.
    """
    shapes = [json.loads(str(side["shapes"])) for side in (first, second)]
    common = [name for name in shapes[1]["layers"] if name in shapes[0]["layers"]]
    skipped = {f"{p}/layers/{name}" for p in VALUES for s in shapes for name in s["layers"] if name not in common}
    skipped |= {"shapes", "versions", "flops"}
    checks = [f"{precision} {kind}" for precision in GRADIENTS for kind in GRADIENT_KINDS]
    whole = {check: min(_whole_gradient(side, check) for side in (first, second)) for check in checks}
    found = [*_structure(shapes[0], shapes[1], common)]
    for name in [*second, *(name for name in first if name not in second)]:
        if name in skipped:
            continue
        check, _, what = name.rpartition("/") if name.count("/") == 2 else (name, "", "")
        check = check.replace("/", " ")
        if name not in first or name not in second:
            found.append(Deviation(check, what, np.inf, 0.0, "only one side has it"))
        elif first[name].shape != second[name].shape:
            found.append(Deviation(check, what, np.inf, 0.0, f"shapes {first[name].shape} and {second[name].shape}"))
        elif name.endswith("_sha256"):
            found.append(Deviation(check, "", 0.0 if first[name] == second[name] else np.inf, 0.0, "they differ"))
        elif check == "float64 adamw after" and _shape(first, f"float64/gradients/{what}") == first[name].shape:
            there = _has_gradient(first[f"float64/gradients/{what}"], whole["float64 gradients"])
            error = _largest((first[name] - second[name])[there]) / (learning_rate * STEPS)
            found.append(Deviation(check, what, error, AFTER_ADAMW))
        elif check == "float64 sensitivity":
            scale, bound = 1.0, LOSSES["float64"]
            if (gradient := f"float64/gradients/{what}") in second and gradient in first:
                scale = _gradient_scale(first[gradient], second[gradient], "float64", whole["float64 gradients"])
                bound = GRADIENTS["float64"]
            found.append(Deviation(check, what, _ratio(abs(float(first[name] - second[name])), scale), bound))
        else:
            error, bound = _compared(check, first[name], second[name], whole)
            if check in ("fp32 gradients", "fp32 sgd losses"):
                moved = f"float64/sensitivity/{what or 'losses'}"
                moves = min(float(np.min(side.get(moved, np.zeros(1)))) for side in (first, second))
                scale = _gradient_scale(first[name], second[name], "fp32", whole["fp32 gradients"]) if what else 1.0
                bound = max(bound, TIMES * _ratio(moves, scale))
            found.append(Deviation(check, what, error, bound))
    return found


def _structure(first: dict[str, Any], second: dict[str, Any], common: list[str]) -> Iterator[Deviation]:
    """Compare names and shapes of parameters and layers; every parameter must belong to a layer that is compared."""
    parameters = [*second["parameters"], *(name for name in first["parameters"] if name not in second["parameters"])]
    for kind, names in (("parameters", parameters), ("layers", common)):
        for name in names:
            a, b = first[kind].get(name), second[kind].get(name)
            yield Deviation(f"shapes of {kind}", name, 0.0 if a == b else np.inf, 0.0, "" if a == b else f"{a} and {b}")
    for name in second["parameters"]:
        owner = name.rpartition(".")[0] or "logits"  # a parameter of no inner module is the whole network's
        seen = not {owner, owner.rpartition(".")[0]}.isdisjoint(common)
        note = "" if seen else "no layer with it is known to both sides"
        yield Deviation("layers with parameters", name, 0.0 if seen else np.inf, 0.0, note)


def _compared(check: str, first: Array, second: Array, whole: dict[str, float]) -> tuple[float, float]:
    """Return (error, bound) of one quantity, whose shape is the same on both sides."""
    precision, _, kind = check.partition(" ")
    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "error":
        return max(_ratio(float(a), float(b)), _ratio(float(b), float(a))), TIMES
    if kind in GRADIENT_KINDS:
        return _ratio(_norm(a - b), _gradient_scale(a, b, precision, whole[check])), GRADIENTS[precision]
    if kind.endswith("losses"):
        return max(_ratio(abs(x - y), min(abs(x), abs(y))) for x, y in zip(a, b, strict=True)), LOSSES[precision]
    if kind.endswith("after"):
        return _ratio(_norm(a - b), min(_norm(a), _norm(b))), AFTER
    smallest = 1.0 if precision == "float64" else 0.0
    bound = SHIFTED if kind == "shifted logits" else VALUES[precision]
    return _ratio(_largest(a - b), max(smallest, min(_largest(a), _largest(b)))), bound


def _shape(side: Arrays, name: str) -> tuple[int, ...] | None:
    return side[name].shape if name in side else None


def _gradient_scale(first: Array, second: Array, precision: str, whole: float) -> float:
    return max(min(_norm(first), _norm(second)), ZERO_GRADIENT[precision] * whole)


def _has_gradient(gradient: Array, whole: float) -> npt.NDArray[np.bool_]:
    """Return which elements of a tensor have a ``gradient`` that is more than rounding."""
    zero = ZERO_GRADIENT["float64"]
    least = zero * max(_norm(gradient), zero * whole) / math.sqrt(gradient.size)
    return np.asarray(np.abs(gradient) > least)


def _whole_gradient(side: Arrays, check: str) -> float:
    norms = [_norm(side[name]) for name in side if name.startswith(f"{check.replace(' ', '/', 1)}/")]
    return float(np.linalg.norm(norms))


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")
