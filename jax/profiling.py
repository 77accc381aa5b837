"""Traced steps of a compiled program: what each of its thunks or kernels computes, by module of the model."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
from flax import nnx

import _accounting
from _hlo import CONTAINERS, MODULE, Program
from duel import profile
from duel.trace import Kernel, Trace
from models import _layers

STEP = "duel step"
NOTHING = "no instruction of the program is in the trace: this version of JAX may write it otherwise"
DERIVED = ("XLA ", "Framework ", "Steps")  # lines of a trace that repeat the events of others
TPU, ON_TPU = "/device:TPU:", "XLA Ops"  # whose planes have the instructions themselves in this line


def named(kind: Any) -> Any:
    """Return the class of work ``kind`` with the names of the model's modules in its program, which is otherwise the
    same."""

    class Named(kind):  # type: ignore[misc]  # mypy knows no base that is a value
        def __init__(self, *arguments: Any) -> None:
            self.compilations = _accounting.Compilations()
            super().__init__(*arguments)

        def applied(self, model: Any, inputs: tuple[Any, ...]) -> jax.Array:
            with _scopes(model, f"models.{self._setting.benchmark.name}"):
                return super().applied(model, inputs)

    return Named


@contextlib.contextmanager
def _scopes(model: Any, where: str) -> Iterator[None]:
    """Name what each module of ``model`` traces inside, and attention in the Python module ``where``."""
    model = model.func if isinstance(model, functools.partial) else model
    modules = list(nnx.iter_modules(model))
    names = {id(module): f"{'.'.join(map(str, path))}{_layer(module)}" for path, module in modules}
    kinds: set[Any] = {type(module) for _, module in modules}  # Any: their methods are replaced
    calls = {kind: vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind)}
    defined: Any = importlib.import_module(where)
    attention = getattr(defined, "attention", None)

    def scoped(call: Any) -> Any:
        def scoped_call(module: nnx.Module, *arguments: Any, **options: Any) -> Any:
            with jax.named_scope(MODULE + names[id(module)]):
                return call(module, *arguments, **options)

        return scoped_call

    try:
        for kind, call in calls.items():
            kind.__call__ = scoped(call)
        if attention is not None:
            defined.attention = jax.named_scope(f"{MODULE}:attention")(attention)
        yield
    finally:
        for kind, call in calls.items():
            kind.__call__ = call
        if attention is not None:
            defined.attention = attention


def _layer(module: Any) -> str:
    if isinstance(module, _layers.Conv):
        return ":depthwise" if module.groups > 1 else ":convolution"
    return ":norm" if isinstance(module, _layers.BatchNorm | _layers.GroupNorm | _layers.LayerNorm) else ""


def traced(work: Any, first: int, count: int, folder: Path) -> Trace:
    """Trace steps ``first`` to ``first + count`` of ``work`` into ``folder``; return what ran in them."""
    with jax.profiler.trace(str(folder)):
        for index in range(first, first + count):
            with jax.profiler.StepTraceAnnotation(STEP, step_num=index):
                work.synchronize(work.step(index))
    text = work._program.as_text()
    (folder / "program.hlo.txt").write_text(text)
    file = profile.bounded(list(folder.rglob("*.xplane.pb")))
    nothing = profile.DENIED if work._setting.device.kind == "gpu" else NOTHING
    return _read(file, Program(text, hasattr(work, "moments")), nothing)


def programs(work: Any) -> list[profile.Program]:
    """Return the programs that were compiled since ``work`` was made."""
    return list(work.compilations.found())


def account(work: Any, index: int, found: profile.Profile) -> None:
    """Note what the memory of ``work`` is for."""
    found.memory = _accounting.memory(work)


def _read(file: Path, program: Program, nothing: str) -> Trace:
    """Return the trace in ``file`` of ``program``: kernels of a device, else what each thread of the host ran.

    Raises ValueError, which says ``nothing``, if there are neither.
    """
    steps: list[tuple[float, float]] = []
    on_device: list[Kernel] = []
    on_host: list[Kernel] = []
    # By the number of a task: the kernel that handed it to other threads, or the task that did.
    recorded: dict[Any, Any] = {}
    tasks: list[tuple[Any, float, float, int]] = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        tpu = plane.name.startswith(TPU)
        for lane, line in enumerate(plane.lines):
            if line.name != ON_TPU if tpu else line.name.startswith(DERIVED):
                continue
            open_kernels: list[Kernel] = []
            open_tasks: list[tuple[Any, float]] = []
            for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
                stats, start = dict(event.stats), event.start_ns / 1e9
                end = start + event.duration_ns / 1e9
                while open_kernels and open_kernels[-1].end <= start:
                    open_kernels.pop()
                if event.name == STEP:
                    steps.append((start, end))
                elif tpu:  # named by its text, as in '%fusion.2 = f32[8]{0} fusion(...)'
                    on_device.append(_kernel(event.name.partition(" ")[0].lstrip("%"), start, end, program))
                elif "hlo_op" in stats and plane.name.startswith("/device:"):
                    on_device.append(_kernel(str(stats["hlo_op"]), start, end, program))
                elif "hlo_op" in stats:
                    open_kernels.append(_kernel(str(stats["hlo_op"]), start, end, program, lane))
                    on_host.append(open_kernels[-1])
                elif event.name.endswith("::Record") and (open_kernels or open_tasks):
                    in_task = open_tasks and not (open_kernels and open_kernels[-1].start > open_tasks[-1][1])
                    recorded[stats.get("_p")] = open_tasks[-1][0] if in_task else open_kernels[-1]
                elif event.name.endswith("::Await") and open_kernels:  # for its tasks in other threads
                    waiting = msgspec.structs.replace(open_kernels[-1], start=start, end=end, calls=0, container=True)
                    on_host.append(waiting)
                elif event.name.endswith("::StartRegion"):
                    open_tasks.append((stats.get("_c"), start))
                elif event.name.endswith("::StopRegion") and open_tasks:
                    tasks.append((*open_tasks.pop(), start, lane))
    for number, start, end, lane in tasks:
        found = recorded.get(number)
        while found is not None and not isinstance(found, Kernel):
            found = recorded.get(found)
        if found is not None:
            on_host.append(msgspec.structs.replace(found, start=start, end=end, lane=lane, calls=0))
    if not on_device and not on_host:
        raise ValueError(nothing)
    return Trace(sorted(steps), on_device or on_host)


def _kernel(name: str, start: float, end: float, program: Program, lane: int | None = None) -> Kernel:
    one = program.instructions.get(name)
    container = one is not None and one.opcode in CONTAINERS
    inside, known = program.operations(name), program.counted(name)
    amounts = program.flops(name), program.bytes(name)
    return Kernel(name, start, end, inside, *amounts, lane=lane, container=container, counted=known)
