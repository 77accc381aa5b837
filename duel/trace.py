"""What a traced step consists of, and where its time goes.

A framework's tracer reports kernels: intervals in which something ran, each with the operations inside it. At every
moment of a step the kernels that run share the time equally, and when none does the device is idle. So the parts of a
step add up to its wall time, however many threads or streams there are.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec


class Operation(msgspec.Struct, frozen=True):
    """An operation inside a kernel, and where in the model it belongs."""

    name: str  # HLO's opcode, or PyTorch's name
    module: str = ""  # the model's module, by name; "" is the model itself, or what is around it
    layer: str = ""  # what that module is: "norm", "depthwise", "convolution", "attention", or "" for anything else
    stage: str = ""  # "forward", "backward", "optimizer", or "" where there is but one
    detail: str = ""  # shapes and parameters, from which it can be repeated


class Kernel(msgspec.Struct, frozen=True):
    """An interval of time, in seconds, in which a device or a thread ran ``operations``.

    Of kernels in one ``lane`` the innermost runs; without one it runs beside all others. A ``container`` only runs
    where nothing else does: a loop has no work of its own.
    """

    name: str
    start: float
    end: float
    operations: tuple[Operation, ...] = ()
    flops: int = 0
    bytes: int = 0
    lane: int | None = None
    calls: int = 1  # 0 for a part of a call that another thread ran
    container: bool = False
    counted: bool = True  # whether its FLOP are known


class Trace(msgspec.Struct):
    """What a framework's tracer reports of some steps, one after the other."""

    steps: list[tuple[float, float]]  # begin and end of each, in seconds
    kernels: list[Kernel]


def shared(kernels: Sequence[Kernel], begin: float, end: float) -> tuple[dict[int, float], float]:
    """Return the seconds of each of ``kernels`` between ``begin`` and ``end``, by its place, and the idle seconds."""
    marks = []
    for place, kernel in enumerate(kernels):
        first, last = max(kernel.start, begin), min(kernel.end, end)
        if first < last:
            # At the same moment what ends comes first; a longer kernel begins before those inside it.
            marks += [(first, 1, -last, place), (last, 0, -first, place)]
    lanes: dict[tuple[int, int], list[int]] = defaultdict(list)
    seconds: dict[int, float] = defaultdict(float)
    idle, now = 0.0, begin
    for moment, starts, _, place in sorted(marks):
        if moment > now:
            running = _running(kernels, lanes.values())
            for one in running:
                seconds[one] += (moment - now) / len(running)
            idle += 0.0 if running else moment - now
            now = moment
        lane = kernels[place].lane
        key = (0, lane) if lane is not None else (1, place)
        if starts:
            lanes[key].append(place)
        else:
            lanes[key].remove(place)
            if not lanes[key]:
                del lanes[key]
    return dict(seconds), idle + end - now


def _running(kernels: Sequence[Kernel], lanes: Iterable[list[int]]) -> list[int]:
    innermost = [lane[-1] for lane in lanes]
    return [place for place in innermost if not kernels[place].container] or innermost
