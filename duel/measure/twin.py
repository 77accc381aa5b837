"""The contract of a twin: everything that ``duel/measure`` may use of ``jax/`` or ``pytorch/``, as types.

Both sides have these classes and modules under these names (``DevicesModule`` is ``devices.py``), and no other public
method or function of them exists. mypy checks each side against this file, in ``tests/twin_contract.py``;
``tests/test_twins.py`` compares the names of parameters, which mypy does not check for a protocol.

Shapes: N samples in a batch. An index is any step's number: batches are taken modulo the pool. A handle is whatever
the framework returns before its device has computed it. "All ranks" marks what the processes of a world must call
together, in the same order; "one process" what exists only for a world of one. ``compile`` comes before the first
``step``, and unless a method says otherwise it may be called at any time and leaves the state (parameters, running
statistics, the optimizer's moments) as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from duel.catalogue import Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import ALONE, Device, Setting, World
from duel.profile import Profile, Program
from duel.trace import Trace

Arrays = Mapping[str, npt.NDArray[Any]]
W_co = TypeVar("W_co", covariant=True)


class Timed(Protocol):
    """What the timing loop needs."""

    def step(self, index: int) -> Any:
        """Dispatch step ``index`` without waiting for it; returns its handle. All ranks.

        Training moves the state; the others do not. A handle other than a loss is valid until the next step: with CUDA
        graphs, that one writes into the same memory.
        """

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""

    def agree(self, value: float) -> float:
        """Return rank 0's ``value``, as float32 in a world of several, for decisions that must be alike. All ranks.

        Waits for the device.
        """


class Work(Timed, Protocol):
    """What ``Training``, ``PerSampleGradients`` and ``Inference`` have in common."""

    execution: str  # "jit", "eager", "lazy" or "compiled"; known from the start

    def load(self, arrays: Arrays) -> None:
        """Start over from ``arrays``, every parameter and running statistic as ``WeightsModule.shapes`` has them.

        The optimizer starts over, too; what is compiled stays. ValueError lists everything that does not fit.
        """

    def compile(self) -> float | None:
        """Compile ``step`` ahead of time, before the first one and after ``forget``.

        Return seconds; None if nothing is compiled ahead, and the first steps may compile instead.
        """

    def compile_times(self) -> dict[str, float]:
        """Return the seconds in "trace_seconds", "lower_seconds" and "backend_seconds", those that are known.

        After ``compile`` and the first step.
        """

    def forget(self) -> None:
        """Drop what is compiled but not what is cached in files: the next ``compile`` is as in a second process."""

    def planned_bytes(self) -> int | None:
        """Return the bytes of memory that the compiled step plans to use at once; None without a plan.

        After ``compile``, before ``forget``.
        """

    def observed(self) -> dict[str, tuple[str, str]]:
        """Return, by switch, the value found in what was compiled or has run, and the evidence, as text.

        After the last step that counts, before ``forget``: it may move the state.
        """

    def read(self, handle: Any) -> None:
        """Copy a result of ``handle``'s step to the host, which waits for it whatever ``synchronize`` does."""

    def samples(self) -> int:
        """Return the samples a step takes, over all ranks, by the shapes of its program's inputs. After ``compile``."""

    def all_reduce(self) -> Any:
        """Dispatch one all-reduce over as many bytes as the gradients have; return a handle.

        All ranks, and only in a world of several.
        """

    def accuracy(self, batch: Batch) -> float:
        """Return the share, 0 to 1, of the samples of ``batch`` that are classified correctly, with running statistics.

        Labels are (N,). Each rank takes the whole batch.
        """

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the current weights, by name and shape as ``load`` takes them, in the storage type."""

    def held(self) -> Iterator[Batch]:
        """Yield the batches of the pool, copied back from the device: float32 (float64 under that policy) and int32.

        One process.
        """

    def layers(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return what each module returns for batch ``index`` in evaluation, by module name, in the order of the calls.

        First axis N, images (N, channels, height, width), in the storage type; "" is the whole model: the logits. One
        process.
        """

    def placed(self, arrays: tuple[npt.NDArray[Any], ...]) -> tuple[Any, ...]:
        """Return ``arrays`` on the device, floats in the storage type; each rank its own. For the canary."""

    def applied(self, model: Any, inputs: tuple[Any, ...]) -> Any:
        """Return ``model(*inputs)`` under the precision policy and switches, cast to the storage type. For the canary.

        Every measured pass goes through here; JAX traces it.
        """


class Training(Work, Protocol):
    """The optimizer's step."""

    def loss(self, handle: Any) -> float:
        """Return the mean loss, over all ranks' labels, of the step of ``handle``. Waits for it. All ranks."""

    def moments(self) -> dict[str, npt.NDArray[Any]]:
        """Return what the optimizer keeps of its gradients since ``load``, by parameter in the shapes of ``export``.

        SGD's momentum, AdamW's first moment; zero if a parameter has had no gradient.
        """

    def count(self) -> int | None:
        """Return the steps since ``load`` by the optimizer's own count; None for SGD, which keeps none."""

    def passes(self) -> dict[str, Callable[[int], Any]]:
        """Return functions that dispatch a part of ``step`` for an index and return a handle. One process.

        "forward" is the loss, without keeping anything for a backward pass; "gradient" includes that pass. They leave
        parameters and moments as they are, but running statistics may move. JAX compiles them when this is called.
        """

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Return what a step on batch ``index`` would see, without taking it: loss, logits, gradients. One process.

        Logits (N, classes), or more axes if labels have them, are with the batch's own statistics; gradients are by
        parameter, in the shapes of ``export``, without the loss scale. Needs no ``compile``.
        """


class Trainer(Training, Protocol):
    """The optimizer's step in a training to accuracy, by the recipe of its setting.

    ``step`` is at a tenth of its highest rate, which without a warm-up would raise the losses of the first steps.
    """

    def put(self, batch: Batch, present: int) -> Any:
        """Begin to copy ``batch``, this rank's part, to the device; ``present`` counts the labels of all ranks.

        Return what ``advance`` takes. Where the device can, the copy runs beside the steps.
        """

    def advance(self, placed: Any, rate: float) -> Any:
        """Dispatch one step on what ``put`` returned, at learning rate ``rate``; return its loss's handle. All ranks.

        ``placed`` cannot be used again.
        """

    def evaluate(self, batch: Batch) -> tuple[float, int, int]:
        """Return (sum of the losses, labels that are right, labels among the first five) of ``batch``, in evaluation.

        With the average of the weights, if the recipe has one. Each rank takes the whole batch. Losses are of labels
        that are not smoothed; of yes-or-no labels, the third number is the second.
        """

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of everything that the next step depends on, by names of this side's own. Waits for it."""

    def restore(self, arrays: Arrays) -> None:
        """Go on from what ``snapshot`` returned, to the same bits."""


class PerSampleGradients(Work, Protocol):
    """A product of the gradient of each sample's own loss."""

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return copies of what ``step`` made; waits for it. All ranks, and each gets those of all of them.

        Of a product with samples, where ``every`` is not 1, this rank's every ``every``-th from ``first`` on alone, of
        which it must have one.

        "materialised": (N, ...) by parameter, in the shapes of ``export``. "norms": (N,) as "norms". "clipped_sum": the
        sum over samples, by parameter.
        """


class Inference(Work, Protocol):
    """The forward pass in evaluation."""

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of what ``step`` made for every ``every``-th sample from ``first`` on; waits. One process.

        "logits" (N, classes), or with more axes.
        """


class Maker(Protocol[W_co]):
    """The constructor of such a class. ``arrays`` are weights as ``Work.load`` takes them."""

    def __call__(self, setting: Setting, pool: Pool, arrays: Arrays) -> W_co:
        """Set the policy and switches for the process, and put weights and batches on the device. All ranks."""


class DevicesModule(Protocol):
    """``devices.py``."""

    def select(self, kind: str | None, world: World = ALONE) -> Device:
        """Return the device of ``kind``, or the best for None; ValueError names what is available. All ranks.

        The first call to the framework: it joins the processes of ``world``, and may leave accelerators untouched.
        """

    def slowest(self, seconds: float, device: Device) -> float:
        """Return the largest of all processes' ``seconds``, as float32. All ranks, in a world of several."""

    def leave(self) -> None:
        """Leave the world, as the last call to the framework. All ranks, and only in a world of several."""

    def available(self) -> list[Device]:
        """Return all kinds of device, the best first, the CPU last. It takes hold of accelerators."""

    def native(self, device: Device) -> Any:
        """Return the framework's own object for this process's device of ``device.kind``. After ``select``."""

    def set_precision(self, policy: str) -> None:
        """Set the policy, of the catalogue or "float64", for what is traced or computed from now on."""

    def peak_memory_bytes(self) -> tuple[int, str]:
        """Return the peak bytes of this process so far, and what they count: "allocator_peak" or "host_peak_rss"."""

    def reserved_bytes(self) -> int | None:
        """Return the peak bytes that the allocator took from the device; None if unknown."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that decide what runs, by name."""


class WeightsModule(Protocol):
    """``weights.py``; ``model`` is what ``NetworkModule.build`` returns."""

    def shapes(self, model: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter and running statistic, by torchvision's names and in its layouts."""

    def trainable(self, model: Any) -> tuple[str, ...]:
        """Return the names of the parameters, without running statistics."""

    def load(self, model: Any, arrays: Arrays) -> None:
        """Set all of ``shapes``; ValueError lists everything missing, extra or of another shape."""

    def export(self, model: Any) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all of ``shapes``."""


class NetworkModule(Protocol):
    """``network.py``, apart from the class that the three kinds of work inherit from."""

    def build(self, benchmark: Benchmark, size: str, per_sample: bool = False) -> Any:
        """Return the model, without meaningful weights; ``per_sample`` has group norms in place of batch norms."""

    def count_flops(self, benchmark: Benchmark, size: str, inputs: tuple[npt.NDArray[Any], ...]) -> int:
        """Return the FLOPs of a forward pass in evaluation over ``inputs``, of which only the shapes matter."""


class CanaryModule(Protocol):
    """``canary.py``."""

    def products(self, work: Any) -> npt.NDArray[Any]:
        """Return, in one axis, the products of ``duel.measure.canary.inputs`` as this side's ``work`` computes them."""


class CeilingsModule(Protocol):
    """``ceilings.py``."""

    def loops(self, setting: Setting) -> dict[str, Callable[[int], None]]:
        """Return "copy" and "matmul" of ``duel.measure.ceilings``: each runs some rounds and waits; empty if neither.

        After ``select`` and ``set_precision``, on one device.
        """


class ProfilingModule(Protocol):
    """``profiling.py``: where the time of a step goes. One process."""

    def named(self, kind: Any) -> Any:
        """Return a subclass of ``kind``, a class of work, whose programs tell what belongs to which module.

        The programs are otherwise the same.
        """

    def programs(self, work: Any) -> list[Program]:
        """Return the programs or graphs that were compiled since ``work`` was made."""

    def traced(self, work: Any, first: int, count: int, folder: Path) -> Trace:
        """Trace ``count`` steps from ``first`` on into ``folder``; return what ran in them. Moves the state.

        Raises ValueError if the trace shows no kernels of the device.
        """

    def account(self, work: Any, index: int, found: Profile) -> None:
        """Note in ``found`` what memory is for, and PyTorch the model's layers. May take steps from ``index`` on."""
