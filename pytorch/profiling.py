"""Traced steps: what each operation, compiled loop or kernel computes, by module of the model."""

import contextlib
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn

import _accounting
import _inductor
import _repeatable
from _counting import Amount, Counting
from duel import kinds, profile
from duel.trace import Kernel, Operation, Trace

STEP = "duel step"
MODULE = "module:"
CAST = "prims::convert_element_type"  # as it is called in a compiled graph
LOOPS = ("graph_", "cpp_", "triton_")  # how Inductor's begin
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what ran on a GPU
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
NOTHING = Amount()
T = TypeVar("T")
Operations = tuple[Operation, ...]


def _layer(module: nn.Module) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):
        return ":depthwise" if module.groups > 1 else ":convolution"
    return ":norm" if isinstance(module, NORMS) else ""


@contextlib.contextmanager
def _scopes(model: nn.Module) -> Iterator[None]:
    """Mark the calls of each module in a trace; what is compiled has no such calls."""
    open_scopes: list[Any] = []

    def before(name: str) -> None:
        open_scopes.append(torch.profiler.record_function(name))
        open_scopes[-1].__enter__()

    hooks = []
    for path, module in model.named_modules():
        name = f"{MODULE}{path}{_layer(module)}"
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: before(name)))
        hooks.append(module.register_forward_hook(lambda *_: open_scopes.pop().__exit__(None, None, None)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def named(kind: Any) -> Any:
    """Return the class of work ``kind``, which takes note of what it has compiled and captures no CUDA graphs."""

    class Named(kind):  # type: ignore[misc]  # mypy knows no base that is a value
        graphs: _inductor.Graphs | None = None
        _captures = False  # in a replay no operation runs on the host that a kernel could be traced to

        def _compiled(self, function: Any) -> Any:
            if self._setting.on("compile"):
                self.graphs = _inductor.Graphs({path: _layer(one)[1:] for path, one in self._model.named_modules()})
            return super()._compiled(function)

    return Named


def traced(work: Any, first: int, count: int, folder: Path) -> Trace:
    """Trace steps ``first`` to ``first + count`` of ``work`` into ``folder``; return what ran in them."""
    if work._device.type not in ("cpu", "cuda"):  # there would only be what the host did
        raise ValueError(f"PyTorch's tracer shows no kernels of {work._device.type}")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if work._device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    scopes = _scopes(work._model) if work.graphs is None else contextlib.nullcontext()
    with scopes, torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for index in range(first, first + count):
            with torch.profiler.record_function(STEP):
                work.synchronize(work.step(index))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    compiled = _inductor.Compiled({}, {}) if work.graphs is None else work.graphs.compiled()
    # Under vmap the operations that are counted are not those that the trace names.
    known = work.graphs is not None or not work._per_sample
    found = _read(file, compiled, _counted(work, first) if known else {}, hasattr(work, "moments"))
    if not known:
        found = Trace(found.steps, [msgspec.structs.replace(kernel, counted=False) for kernel in found.kernels])
    if work._device.type == "cuda" and all(kernel.lane is not None for kernel in found.kernels):
        raise ValueError(profile.DENIED)  # there is only what the host did
    if not found.kernels:
        raise ValueError("no operation of the step is in the trace: this version of PyTorch may write it otherwise")
    return found


def programs(work: Any) -> list[profile.Program]:
    """Return the graphs that were compiled so far."""
    return _accounting.programs() if work.graphs is not None else []


def account(work: Any, index: int, found: profile.Profile) -> None:
    """Note what the memory of ``work`` is for, and its layers; it takes two steps."""
    found.memory = _accounting.memory(work, index)
    found.layers = _repeatable.layers(work)


def _counted(work: Any, index: int) -> dict[str, list[Amount]]:
    """Return the amounts of one step's operations that are not compiled; it takes another step, or part of one."""
    with Counting() as counting:
        if work.graphs is None:
            work.step(index)
        elif hasattr(work, "moments"):
            work._optimizer.step()
    return counting.found


def _read(file: Path, compiled: _inductor.Compiled, counted: Mapping[str, list[Amount]], training: bool) -> Trace:
    """Return the trace in ``file``, in Chrome's format, of steps that run what is ``compiled`` and ``counted``."""
    with gzip.open(profile.bounded([file])) as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]
    reader = _Reader(compiled, counted, training)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        reader.take(event)
    return Trace(reader.steps, reader.on_device() or reader.on_host)


class _Where(NamedTuple):
    """What an event knows of those that it is inside of."""

    end: float
    module: str = ""
    layer: str = ""
    stage: str = ""
    operations: Operations = ()
    amount: Amount = NOTHING
    counted: bool = False  # whether the amount is of this or of something around it
    left: list[Amount] | None = None  # the same until a kernel of a GPU has it: the first of all that it launches
    region: _inductor.Region | None = None
    calls: Counter[str] | None = None  # of kernels so far in the region or, outside, in the step


class _Reader:
    """Takes a trace's events in the order of their beginnings, those around others first."""

    def __init__(self, compiled: _inductor.Compiled, counted: Mapping[str, list[Amount]], training: bool) -> None:
        self.steps: list[tuple[float, float]] = []
        self.on_host: list[Kernel] = []
        self._compiled, self._counted = compiled, counted
        self._top = _Where(float("inf"), stage="forward" if training else "")
        self._calls: Counter[str] | None = None  # of kernels so far in the step, in whichever thread
        self._open: dict[Any, list[_Where]] = defaultdict(list)  # by thread
        self._forward: dict[int, _Where] = {}  # by sequence number: what a backward operation belongs to
        self._launched: dict[Any, _Where] = {}
        self._on_device: list[tuple[Any, float, float]] = []

    def take(self, event: Any) -> None:
        name, start, end = event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        category, known = event.get("cat"), event.get("args", {})
        if category in DEVICE:
            self._on_device.append((event, start, end))
        if category not in ("cpu_op", "user_annotation"):
            return
        lane = self._open[event["tid"]]
        while lane and lane[-1].end <= start:
            lane.pop()
        here = self._inside(name, lane[-1] if lane else self._top, known)._replace(end=end)
        lane.append(here)
        if name == STEP:
            self.steps.append((start, end))
        sequence = known.get("Sequence number", -1)
        if sequence >= 0 and here.stage != "backward":
            self._forward[sequence] = here
        if category == "cpu_op":
            self._launched[known.get("External id")] = here
            if here.operations:
                self.on_host.append(Kernel(name, start, end, here.operations, *here.amount, lane=int(event["tid"])))

    def _inside(self, name: str, around: _Where, known: Mapping[str, Any]) -> _Where:
        """Return what holds inside the event ``name``, which is inside ``around``."""
        around = around._replace(amount=NOTHING)
        if name == STEP:
            self._calls = Counter()
            return around._replace(calls=self._calls)
        if name.startswith(MODULE):
            path, _, layer = name.removeprefix(MODULE).partition(":")
            return around._replace(module=path, layer=layer, operations=())
        if name.startswith("Optimizer."):
            return around._replace(module="", layer="", stage="optimizer", operations=())
        if name.startswith("Torch-Compiled Region"):
            return around._replace(region=(name, False), calls=Counter())
        if name.startswith("autograd::engine::evaluate_function"):
            belongs = self._forward.get(known.get("Sequence number", -1), around)
            region = (belongs.region[0], True) if belongs.region else None
            backward = belongs._replace(stage="backward", operations=(), region=region)
            backward = backward._replace(amount=NOTHING, counted=False, left=None)  # those are of the forward operation
            return backward._replace(calls=Counter() if region else self._calls)
        if around.region and (loop := self._compiled.loop(name, around.region)):
            return around._replace(**loop._asdict())
        if around.region and name.startswith(LOOPS):  # which Inductor has not told of: another version may name them
            return around._replace(operations=(Operation(name, stage=around.stage),))
        if "::" not in name or name.startswith("torch::") or not kinds.works(name, "pytorch"):
            return around  # autograd's own bookkeeping, for one
        if around.region and around.operations:
            return around  # a part of a graph's kernel
        if around.region:
            calls = self._compiled.calls.get(around.region, {}).get(name.rpartition("::")[2], [])
            if loop := _next(calls, around.calls, name):
                return around._replace(**loop._asdict())
        # Of a compiled model, the optimizer's operations alone were counted.
        counts = not around.counted and (around.stage == "optimizer" or not self._compiled.calls)
        if amount := _next(self._counted.get(name, []) if counts else [], around.calls, name):
            around = around._replace(amount=amount, counted=True, left=[amount])
        if kinds.named(name, "pytorch") == kinds.ATTENTION:  # with the products and the softmax that it may call
            around = around._replace(layer="attention")
        return around._replace(operations=self._of_call(name, around, known))

    def _of_call(self, name: str, around: _Where, known: Mapping[str, Any]) -> Operations:
        """Return what the call of PyTorch's own operation ``name`` is."""
        types = known.get("Input type", "")
        if name == "aten::copy_" and len(set(types[:2])) == 2:
            name = CAST  # of the second array into the first
        detail = f"{known.get('Input Dims', '')} {types}"
        return (Operation(name, around.module, around.layer, around.stage, detail[:400]),)

    def on_device(self) -> list[Kernel]:
        """Return what ran on a GPU."""
        return [self._kernel(*each) for each in self._on_device]

    def _kernel(self, event: Any, start: float, end: float) -> Kernel:
        name, launch = event["name"], self._launched.get(event["args"].get("External id"), self._top)
        loop = self._compiled.loop(name, launch.region)
        amount = launch.left.pop() if launch.left and event["cat"] == "kernel" else NOTHING
        operations, amount = loop or (launch.operations, amount)
        if "nccl" in name.lower():
            operations = (Operation("nccl", stage="backward"),)
        elif event["cat"] != "kernel" and not operations:
            operations = (Operation("copy"),)
        return Kernel(name, start, end, operations, *amount)


def _next(every: list[T], calls: Counter[str] | None, name: str) -> T | None:
    """Return what ``every`` has for the next call of ``name``; None outside of steps, or if there are more calls."""
    if calls is None or not every:
        return None
    place = calls[name]
    calls[name] += 1
    return every[place] if place < len(every) else None
