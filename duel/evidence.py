"""Evidence: what the program of a measured row computed from known weights, and whether two rows computed the same.

``duel.measure.evidence`` records it in the timed process. It is small: the norm of each tensor and ``BUCKETS`` random
projections, whose distance between two sides estimates ‖difference‖. Each rank has its file,
results/runs/<run>/evidence/<row>-<rank>.npz; the row has their hash.

Passes: "before" the clock and "after" it, with different weights and batches; for each, "moved" trials from weights
that are moved by a little more than a rounding; in half precision, "grain 1" and "grain 2" from weights that are moved
by far less than one, and by twice as much in the same direction.

=================  ====================================================================================================
quantity           meaning
=================  ====================================================================================================
losses             loss of each step
moments/<name>     what the optimizer keeps of the gradients
change/<name>      parameter change, each element times its moment's size: without a gradient AdamW moves it at random
statistics/<name>  change of running statistics
result <n>/<name>  all that per-sample gradients or inference return for the n-th batch
=================  ====================================================================================================
"""

import hashlib
import io
import json
import math
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

BUCKETS = 8
GRAIN = 4e-6  # relative; float32 rounds finer, all half precisions far coarser
# How far rounding moves a layer's values when two frameworks round differently, or a little more. For half precision:
# twice the largest rounding of one number (2^-9 for bfloat16, 2^-11 for float16 and TF32).
ROUNDING: Mapping[str, float] = {"fp32": 1e-5, "float64": 1e-14, "bf16": 2.0**-8, "fp16": 2.0**-10, "tf32": 2.0**-10}
# The ‖difference‖, relative to the tensor, that is always allowed, whatever rounding does. float32 as in
# duel.report.parity; for half precision a few roundings in a row.
BASE: Mapping[str, float] = {"fp32": 1e-5, "float64": 1e-10, "bf16": 2.0**-6, "fp16": 2.0**-8, "tf32": 2.0**-8}
# The bound of a tensor is TIMES what rounding moves it by, if that is more: the largest of all trials, since a kink
# (see duel.report.parity) is met by chance. In half precision a side rounds some six results for each weight that
# "moved" moves (convolution, norm and activation, forward and back), and the two sides round them independently:
# sqrt(2 * 6). The smaller movement of the two sides counts, so that neither side's noise widens the bound. A single
# tensor in half precision is the exception: there it is the root mean square of both, since a side that fuses
# operations rounds less, but at most WIDER times the smaller one: a side's noise widens that bound by half, and no
# more. (Of eleven benchmarks without a mistake, the widest needs 1.06.)
TIMES: Mapping[str, float] = {"fp32": 2.0, "float64": 2.0, "bf16": 3.5, "fp16": 3.5, "tf32": 3.5}
WIDER = 1.5
# A tensor's scale is at least this share of that of its whole kind: the gradient of a key's bias is zero, and what is
# left of it is rounding of the others.
LEAST = 1e-2
# A kind whose bound, relative to all of it, exceeds this is not proved: a part that does not move is off by 1.
BLIND = 0.9
# ‖"grain 2" - 2 "grain 1"‖ relative to the former. Below PROPORTIONAL a result follows weights that are moved by less
# than its precision can show; above ROUNDED it does not. A bias that is added to the logits in float32 lets both sides
# follow (gcn: 0.03 and 0.06; all others have 0.6 to 9), so what counts is the difference between the sides.
PROPORTIONAL, ROUNDED = 0.2, 0.4
# The mean difference of opening losses, relative to them, that is always allowed, whatever rounding does.
OPENING: Mapping[str, float] = {"fp32": 1e-3, "float64": 1e-9, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
TRIALS: Mapping[str, int] = {"fp32": 1, "float64": 1, "bf16": 2, "fp16": 2, "tf32": 2}
FEW_STEPS = 10  # opening steps that are compared separately: later ones magnify every rounding
NAMED = 3  # deviations that a verdict names

UNPACKED_BYTES = 1 << 28
Policy = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(BASE)})$")]
Pass = dict[str, npt.NDArray[np.float64]]  # (1 + BUCKETS,): the norm, the projections


class _About(msgspec.Struct):
    """What a file has besides its arrays."""

    policy: Policy
    names: list[str]
    shapes: list[list[int]]
    floors: dict[str, dict[str, float]]
    curves: tuple[list[float], list[float]]
    notes: list[str]


@dataclass
class Evidence:
    """What one rank recorded.

    ``floors`` holds, for each pass, the norms of what storing a parameter in float32 rounds off its change; ``curve``
    holds the opening losses, ``moved_curve`` those from weights moved by a rounding; ``notes`` lists what is
    incomplete, such as samples that were left out.
    """

    policy: str
    passes: dict[str, Pass] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    floors: dict[str, dict[str, float]] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    moved_curve: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Summarise what was recorded."""
        kinds = Counter(name.partition("/")[0] for name in self.shapes)
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return "; ".join([f"from known weights before and after the clock: {what}", *self.notes])

    def to_bytes(self) -> bytes:
        about = {
            "policy": self.policy,
            "names": list(self.shapes),
            "shapes": list(self.shapes.values()),
            "floors": self.floors,
            "curves": [self.curve, self.moved_curve],
            "notes": self.notes,
        }
        arrays: dict[str, Any] = {
            name: np.array([found[what] for what in self.shapes]) for name, found in self.passes.items()
        }
        file = io.BytesIO()
        np.savez(file, about=np.array(json.dumps(about)), **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Evidence":
        """Read back what ``to_bytes`` wrote. Raises ValueError for any other ``data``."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                size = sum(part.file_size for part in archive.infolist())
            if size > UNPACKED_BYTES:
                raise ValueError(f"{size} bytes; at most {UNPACKED_BYTES} are allowed")
            with np.load(io.BytesIO(data)) as file:  # allow_pickle is off: nothing in it is executed
                arrays = dict(file)
            about = msgspec.convert(json.loads(str(arrays.pop("about"))), _About)
            for name, array in arrays.items():
                if array.dtype != np.float64 or (about.names and array.shape[1:] != (1 + BUCKETS,)):
                    raise ValueError(f"{name} has {array.dtype} numbers of shape {array.shape}")
            passes = {name: dict(zip(about.names, array, strict=True)) for name, array in arrays.items()}
            shapes = {name: tuple(shape) for name, shape in zip(about.names, about.shapes, strict=True)}
            return cls(about.policy, passes, shapes, about.floors, *about.curves, about.notes)
        except Exception as error:  # anything, for changed bytes; the size is bounded: MemoryError is a false shape
            raise ValueError(f"not an evidence file: {str(error) or type(error).__name__}") from error


def sha256(files: Iterable[bytes]) -> str:
    """Return the hash of a row's evidence: the files of all its ranks, in order."""
    digest = hashlib.sha256()
    for data in files:
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def disagreements(one: Sequence[Evidence], other: Sequence[Evidence]) -> list[str]:
    """Return how the evidence of two sides, of each rank, differs; empty if they computed the same."""
    if len(one) != len(other):
        return [f"ranks ({len(one)} | {len(other)})"]
    found: list[str] = []
    for rank, sides in enumerate(zip(one, other, strict=True)):
        where = f"rank {rank}: " if len(one) > 1 else ""
        found += [where + text for text in disagreements_of(*sides)]
    return found


def disagreements_of(one: Evidence, other: Evidence, passes: Sequence[str] = ("before", "after")) -> list[str]:
    """Return what differs between the evidence of one rank on both sides, in these passes."""
    names = [*other.shapes, *(name for name in one.shapes if name not in other.shapes)]
    apart = [name for name in names if one.shapes.get(name) != other.shapes.get(name)]
    found = [f"shape of {name} ({one.shapes.get(name)} | {other.shapes.get(name)})" for name in apart]
    beyond: list[tuple[float, str]] = []
    for when in passes:
        if when not in one.passes or when not in other.passes:
            found.append(f"nothing was recorded {when} the clock")
            continue
        beyond += _compared(one, other, when, [name for name in names if name not in apart])
    worst = sorted(beyond, reverse=True)
    found += [text for _, text in worst[:NAMED]]
    return [*found, f"and {len(worst) - NAMED} more"] if len(worst) > NAMED else found


def _compared(one: Evidence, other: Evidence, when: str, names: list[str]) -> list[tuple[float, str]]:
    """Return (error / bound, text) for every quantity beyond its bound, and every kind that rounding hides."""
    policy, times = one.policy, TIMES[one.policy]
    a, b = one.passes[when], other.passes[when]
    found = []
    for kind in dict.fromkeys(name.partition("/")[0] for name in names):
        these = [name for name in names if name.partition("/")[0] == kind]
        whole = math.hypot(*(min(a[name][0], b[name][0]) for name in these))
        movement = min(_movement(side, these) for side in (one, other))
        if times * movement > BLIND:
            found.append((math.inf, f"{kind} {when} the clock: rounding alone moves it by {movement:.0%}"))
            continue
        rounded = _rounded(one, other, these)
        for name in these:
            scale = max(min(a[name][0], b[name][0]), LEAST * whole)
            error = float(np.linalg.norm(a[name][1:] - b[name][1:]))
            bound = scale * max(BASE[policy], times * rounded[name])
            bound += max(side.floors.get(when, {}).get(name, 0.0) for side in (one, other))
            if not error <= bound:
                size = scale or 1.0
                text = f"{name} {when} the clock (apart by {error / size:.1e}, bound {bound / size:.0e})"
                found.append((error / bound if bound else math.inf, text))
    return found


def _rounded(one: Evidence, other: Evidence, kind: Sequence[str]) -> dict[str, float]:
    """Return how far rounding moves each tensor of a kind, relative to it: what ``TIMES`` multiplies."""
    sides = [(side, _least(side, kind)) for side in (one, other)]
    own = {name: [_movement(side, [name], least) for side, least in sides] for name in kind}
    if one.policy in ("fp32", "float64"):
        found = {name: min(moved) for name, moved in own.items()}
        # A gradient's movement comes from few kinks: the trial meets them in some tensors, the other side in others.
        least = max(found.values()) if kind[0].startswith(("moments", "result")) else 0.0
    else:
        found = {name: min(math.hypot(*moved) / math.sqrt(2), WIDER * min(moved)) for name, moved in own.items()}
        # A single tensor's movement comes from few roundings, so that of all together counts as well.
        least = min(_movement(side, kind) for side in (one, other))
    return {name: max(least, moved) for name, moved in found.items()}


def _least(side: Evidence, kind: Sequence[str]) -> dict[str, float]:
    """Return for each pass the least scale of a tensor: ``LEAST`` of all ``kind``, which has all names of a kind."""
    return {
        when: LEAST * math.hypot(*(float(here[name][0]) for name in kind))
        for when, here in side.passes.items()
        if all(name in here for name in kind)
    }


def _movement(side: Evidence, names: Sequence[str], least: Mapping[str, float] | None = None) -> float:
    """Return how far ``names`` together move with the weights, relative to them: the largest of all trials.

    Their scale is at least what ``least`` has for the trial's pass, if it is given.
    """
    found = [0.0]
    for trial, there in side.passes.items():
        when, _, moved_by = trial.partition(", moved")
        here = side.passes.get(when, {})
        if moved_by and all(name in here and name in there for name in names):
            moved = math.hypot(*(float(np.linalg.norm(here[name][1:] - there[name][1:])) for name in names))
            whole = math.hypot(*(float(here[name][0]) for name in names))
            whole = max(whole, least[when]) if least is not None else whole
            found.append(moved / whole if whole else 0.0)
    return max(found)


def finer(side: Evidence, other: Evidence) -> str:
    """Return what shows that ``side``, unlike ``other``, does not round to half precision; empty if nothing does."""
    here, there = _follows(side), _follows(other)
    for kind in here.keys() & there.keys():
        if here[kind] < PROPORTIONAL and there[kind] > ROUNDED:
            return f"computed in more than {side.policy}: {kind} follows weights that are moved by {GRAIN:.0e}"
    return ""


def _follows(side: Evidence) -> dict[str, float]:
    """Return for each kind the median over its tensors of ‖"grain 2" - 2 "grain 1"‖, relative to the former."""
    if not {"before", "before, grain 1", "before, grain 2"} <= side.passes.keys():
        return {}
    before, once, twice = (side.passes[name] for name in ("before", "before, grain 1", "before, grain 2"))
    kinds: dict[str, list[float]] = {}
    for name in before:
        kind = name.partition("/")[0]
        if kind.startswith(("moments", "result")) and math.prod(side.shapes[name]) >= BUCKETS:
            first, second = once[name][1:] - before[name][1:], twice[name][1:] - before[name][1:]
            size = float(np.linalg.norm(second))
            kinds.setdefault(kind, []).append(float(np.linalg.norm(second - 2 * first)) / size if size else math.inf)
    return {kind: statistics.median(found) for kind, found in kinds.items()}


def curves_apart(one: Evidence, other: Evidence) -> list[str]:
    """Return where opening losses differ by more than rounding explains: the first, the first ten, or all on average.

    If it is unknown how far rounding moves them, only the first is compared.
    """
    if len(one.curve) != len(other.curve):
        return [f"opening losses ({len(one.curve)} | {len(other.curve)} of them)"]
    policy = one.policy
    for count in (1, FEW_STEPS, len(one.curve)) if one.moved_curve and other.moved_curve else (1,):
        ours, others = one.curve[:count], other.curve[:count]
        whole, apart = sum(map(abs, ours)), _between(ours, others)
        moved = min(_between(side.curve[:count], side.moved_curve) for side in (one, other))
        if not apart <= max(OPENING[policy] * whole, TIMES[policy] * moved):
            size = whole or 1.0
            text = f"apart by {apart / size:.1e} to step {len(ours)}, rounding moves them by {moved / size:.0e}"
            return [f"opening losses ({text}; {ours[-1]:.6g} | {others[-1]:.6g})"]
    return []


def _between(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the sum of absolute differences over the steps that both have."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=False))
