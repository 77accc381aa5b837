"""Where the time of a row's step goes: results/runs/<run>/profiles/<row>.json, made from a trace.

The trace is of the row's own program, in a process of its own after the row's: a tracer slows down what it watches.
What ran in it is divided into parts by kind of work (``duel.kinds``), module of the model and stage. They add up to the
wall time of the traced steps; of the row's own step they are taken to be the same shares.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from duel import kinds
from duel.files import FORMAT, read_record, write_atomically
from duel.trace import Kernel, Operation, Trace, shared

COUNTING = 1  # the way in which FLOP and bytes are counted: those of an earlier way are not shown
MOST = 3  # repeats of a point that are profiled
LONGEST, BARS = 40, 200  # kernels that are listed, and that a timeline has
COSTLIEST = 10  # programs that are listed
# What memory is for. Temporaries are all that a step holds in between, at their peak.
PARAMETERS, STATISTICS, OPTIMIZER, BATCH = "parameters", "running statistics", "optimizer", "a batch"
TEMPORARIES, GRADIENTS, ACTIVATIONS = "temporaries", "gradients", "activations"
# What to do about a GPU that shows nothing.
DENIED = (
    "no kernel of the device was traced; if its driver keeps performance counters for administrators "
    "(ERR_NVGPUCTRPERM), one of them must set NVreg_RestrictProfilingToAdminUsers=0 for the kernel module nvidia"
)
# What a tool that watches a process may need. docs/explain.md says more.
ADVICE = {
    "perf": "it may need /proc/sys/kernel/perf_event_paranoid of 2 or less",
    "nsys": "it may need NVreg_RestrictProfilingToAdminUsers=0 for the kernel module nvidia",
}
MOST_BYTES = 1 << 30  # of a trace that is read
MEMORY = (PARAMETERS, STATISTICS, OPTIMIZER, BATCH, TEMPORARIES, GRADIENTS, ACTIVATIONS)


class Part(msgspec.Struct):
    """Work of one kind in one place. All figures are for one step."""

    kind: str
    module: str
    stage: str
    seconds: float
    calls: float = 0.0
    flops: float = 0.0  # of matrix products and convolutions, two per multiply-add
    bytes: float = 0.0  # that its kernels read and write at least
    counted: bool = True  # whether the FLOP of all its kernels are known


class Long(Part):
    """A kernel, with all of its calls in a step."""

    name: str = ""
    detail: str = ""


class Bar(msgspec.Struct, array_like=True):
    """A kernel of a single step, from ``begin`` to ``end`` in microseconds."""

    begin: float
    end: float
    kind: str
    module: str


class Layer(msgspec.Struct):
    """What a module of the model computes, so that it can be repeated alone. Images are (N, channels, height, width).

    ``kind`` is "convolution", "batch norm", "layer norm", "linear" or "sum over edges".
    """

    kind: str
    shape: list[int]  # of its input
    outputs: int = 0  # channels, features or nodes of its result
    kernel: list[int] = []
    stride: list[int] = []
    padding: list[int] = []
    groups: int = 1
    epsilon: float = 0.0


class Program(msgspec.Struct):
    """A program or graph that was compiled, with the seconds of each phase."""

    name: str
    seconds: dict[str, float]


class Profile(msgspec.Struct):
    """The profile of one row, or ``why`` there is none."""

    run_id: str
    row: int
    framework: str
    why: str = ""
    format: int = FORMAT
    counting: int = 0
    steps: int = 0  # that were traced
    step_seconds: float = 0.0  # in the same process, before the trace
    traced_seconds: float = 0.0  # of a traced step
    proof: str = ""  # how the program was shown to be the row's
    parts: list[Part] = []
    longest: list[Long] = []
    timeline: list[Bar] = []  # of one step
    layers: dict[str, Layer] = {}  # by module; PyTorch's profile has those of both sides
    memory: dict[str, int] = {}  # bytes by what they are for
    programs: list[Program] = []  # that took longest to compile, of all
    unknown: dict[str, float] = {}  # seconds by name of an operation that ``duel.kinds`` does not know
    notes: list[str] = []

    def seconds(self, **wanted: str) -> float:
        """Return the seconds of all parts that have these values."""
        return sum(p.seconds for p in self.parts if all(getattr(p, name) == value for name, value in wanted.items()))

    @property
    def explained(self) -> float:
        """The share of the step that is of a known kind, or idle."""
        return 1 - self.seconds(kind=kinds.OTHER) / self.traced_seconds if self.traced_seconds else 0.0


def path(run: Path, row: int) -> Path:
    """Return the file for row number ``row`` in the folder of a run; its traces are in the folder of that name."""
    return run / "profiles" / f"{row:03d}.json"


_KNOWN = {*kinds.ORDER, kinds.IDLE}


def read(run: Path, row: int) -> Profile | None:
    """Return the profile of ``row`` in the folder of a run, None if there is none. Raises Damaged.

    Kinds of work that this version does not know are *other*; FLOP and bytes that were counted otherwise are left out.
    """
    try:
        found = read_record(path(run, row), Profile)
    except FileNotFoundError:
        return None
    items: list[Part | Bar] = [*found.parts, *found.longest, *found.timeline]
    for item in items:
        item.kind = item.kind if item.kind in _KNOWN else kinds.OTHER
    if found.counting != COUNTING:
        for part in (*found.parts, *found.longest):
            part.flops, part.bytes, part.counted = 0.0, 0.0, False
    return found


def write(run: Path, profile: Profile) -> None:
    file = path(run, profile.row)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, msgspec.json.encode(profile).decode() + "\n")


def note(run: Path, row: int, text: str) -> None:
    """Add ``text`` to what is said of the profile of ``row``, if it has one."""
    found = read(run, row)
    if found is not None:
        write(run, msgspec.structs.replace(found, notes=[*found.notes, text]))


def bounded(files: Sequence[Path]) -> Path:
    """Return the only one of ``files``, a trace. Raises ValueError without one, or if it is too large to be read."""
    if len(files) != 1:
        raise ValueError(f"the tracer left {len(files)} traces in place of one")
    if (size := files[0].stat().st_size) > MOST_BYTES:
        most = f"{MOST_BYTES / 2**20:.0f}"
        raise ValueError(f"the trace has {size / 2**20:.0f} MiB, of which at most {most} are read; it is kept as it is")
    return files[0]


def divide(trace: Trace, profile: Profile) -> None:
    """Fill ``profile`` with the parts of the steps in ``trace``, whose mean counts. Raises ValueError without one."""
    if not trace.steps:
        raise ValueError("the trace has no whole step")
    count = len(trace.steps)
    parts: dict[tuple[str, str, str], Part] = {}
    longest: dict[tuple[str, str, str, str], Long] = {}
    unknown: dict[str, float] = defaultdict(float)
    idle = 0.0
    for begin, end in trace.steps:
        here = [kernel for kernel in trace.kernels if kernel.start < end and kernel.end > begin]
        seconds, rest = shared(here, begin, end)
        idle += rest / count
        for place, taken in seconds.items():
            kernel = here[place]
            kind, one = _told(kernel, profile.framework)
            if kind == kinds.OTHER:
                unknown[one.name] += taken / count
            where = (kind, one.module, one.stage)
            _add(parts.setdefault(where, Part(*where, 0.0)), kernel, taken, count)
            _add(longest.setdefault((kernel.name, *where), Long(*where, 0.0, name=kernel.name)), kernel, taken, count)
            longest[(kernel.name, *where)].detail = one.detail
    profile.steps, profile.counting = count, COUNTING
    profile.traced_seconds = statistics.fmean(end - begin for begin, end in trace.steps)
    profile.parts = [*sorted(parts.values(), key=lambda part: -part.seconds), Part(kinds.IDLE, "", "", idle)]
    profile.longest = sorted(longest.values(), key=lambda one: -one.seconds)[:LONGEST]
    profile.unknown = dict(sorted(unknown.items(), key=lambda each: -each[1]))
    profile.timeline = _timeline(trace, profile.framework)


def _told(kernel: Kernel, framework: str) -> tuple[str, Operation]:
    """Return the kind of ``kernel`` and the operation that it counts for."""
    return kinds.telling(kernel.operations, framework) or (kinds.OTHER, Operation(kernel.name))


def _add(part: Part, kernel: Kernel, seconds: float, steps: int) -> None:
    part.seconds += seconds / steps
    part.calls += kernel.calls / steps
    part.flops += kernel.calls * kernel.flops / steps
    part.bytes += kernel.calls * kernel.bytes / steps
    part.counted = part.counted and kernel.counted


def _timeline(trace: Trace, framework: str) -> list[Bar]:
    """Return the longest kernels of the step whose duration is the median, in order."""
    begin, end = sorted(trace.steps, key=lambda step: step[1] - step[0])[len(trace.steps) // 2]
    inside: list[Kernel] = []
    ends: dict[int | None, float] = {}  # by lane: a kernel inside another of its lane is part of it
    for each in sorted(trace.kernels, key=lambda kernel: (kernel.start, -kernel.end)):
        if each.start >= begin and each.end <= end and not each.container:
            if each.lane is None or each.end > ends.get(each.lane, begin):
                inside.append(each)
            ends[each.lane] = max(each.end, ends.get(each.lane, begin))
    bars = []
    for kernel in sorted(inside, key=lambda kernel: kernel.start - kernel.end)[:BARS]:
        kind, one = _told(kernel, framework)
        first, last = (round(1e6 * (moment - begin), 1) for moment in (kernel.start, kernel.end))
        bars.append(Bar(first, last, kind, one.module))
    return sorted(bars, key=lambda bar: bar.begin)
