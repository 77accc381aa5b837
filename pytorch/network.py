"""A benchmark's network on one device, with its weights and batches: what is trained, proved and evaluated.

On a TPU, torch_xla only records the operations; its ``sync`` sends them to the device as one program, which is compiled
if it is new.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.backends import cuda as sdp
from torch.utils._python_dispatch import TorchDispatchMode

import devices
import weights
from duel.catalogue import Benchmark, groups
from duel.measure.batches import Batch, Pool
from duel.measure.device import Setting
from duel.measure.probes import usable_cpus
from duel.switches import ALL, THREADS
from models import _layers

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FRAMEWORKS_CHOICE = "framework"
ATTENTION = {
    "math": sdp.enable_math_sdp,
    "flash": sdp.enable_flash_sdp,
    "efficient": sdp.enable_mem_efficient_sdp,
    "cudnn": sdp.enable_cudnn_sdp,
}


def build(benchmark: Benchmark, size: str, per_sample: bool = False) -> nn.Module:
    """Return the model, without meaningful weights; ``per_sample`` has group norms in place of batch norms."""
    model = importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)
    for module in list(model.modules()) if per_sample else ():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(groups(channels), channels, child.eps))
    return model


def count_flops(benchmark: Benchmark, size: str, inputs: tuple[npt.NDArray[Any], ...]) -> int:
    """Return the FLOPs of the forward pass in evaluation: two per multiply-add of matrix products and convolutions.

    Nothing is computed: the "meta" device has only shapes, so only those of ``inputs`` matter.
    """
    # Imported only here: at the top, its memory would count as the network's.
    flop_counter = importlib.import_module("torch.utils.flop_counter")
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # the counter lacks some other kernels
    with torch.device("meta"), plain, flop_counter.FlopCounterMode(display=False) as counter:
        arrays = [torch.empty(a.shape, dtype=torch.float32 if a.dtype.kind == "f" else torch.int64) for a in inputs]
        build(benchmark, size).eval()(*arrays)
    return int(counter.get_total_flops())


def _share_batch_norms(model: nn.Module, device: torch.device) -> None:
    """Make batch norms take their training statistics over all processes' batches, as in the twin."""
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for module in model.modules():  # torch's own rejects CPUs
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = _layers.SharedBatchNorm


def _set_globally(setting: Setting) -> None:
    """Set the switches that PyTorch has for the whole process."""
    if setting.value(THREADS) != ALL:  # by itself it takes physical cores, JAX what the process may use
        torch.set_num_threads(int(setting.value(THREADS)))
    if setting.on("cudnn_benchmark"):
        torch.backends.cudnn.benchmark = True
    if setting.on("deterministic"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    kernel = setting.value("attention")
    if kernel != FRAMEWORKS_CHOICE:
        for name, enable in ATTENTION.items():
            enable(name == kernel)
    if kernel == "math":  # by itself it multiplies 16 bits as float32, without TF32
        sdp.allow_fp16_bf16_reduction_math_sdp(True)


def _dynamo() -> Any:
    """Return Dynamo's own figures. Not imported if nothing is compiled: its memory would count as the network's."""
    return importlib.import_module("torch._dynamo.utils")


def _has_order(tensor: torch.Tensor) -> bool:
    """Return whether NCHW and NHWC would differ in the order of the elements of ``tensor`` (N, C, H, W)."""
    channels, height, width = tensor.shape[1:]
    return channels > 1 and height * width > 1


class _Names(TorchDispatchMode):
    """A context that records the names of the operations run inside it, in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] = None
        return func(*args, **(kwargs or {}))


class Network:
    """A model with its weights and the batches of ``pool``, on the device from the start.

    ``arrays`` are the weights. In a world of several processes, each has all weights and its part of every batch.
    """

    execution = "eager"
    _per_sample = False
    _captures = True  # CUDA graphs, if the switch is on

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        devices.set_precision(setting.precision)
        _set_globally(setting)
        self._setting, self._world = setting, setting.world
        self._device = devices.native(setting.device)
        self._xla: Any = importlib.import_module("torch_xla") if setting.device.kind == "tpu" else None
        if self._xla:
            self.execution = "lazy"
        if setting.on("compile"):  # ``observed`` finds out whether it was
            self.execution = "compiled"
        self._dtype = torch.float64 if setting.precision == "float64" else torch.float32
        self._format = torch.channels_last if setting.on("channels_last") else torch.contiguous_format
        half = COMPUTE.get(setting.precision)
        self._compute: Any = torch.autocast(self._device.type, half) if half else contextlib.nullcontext()
        self._model = build(setting.benchmark, setting.size, self._per_sample)
        if self._world.size > 1:
            _share_batch_norms(self._model, self._device)
        # torch's types have no overload of device, dtype and memory format together.
        self._model = self._model.to(  # type: ignore[call-overload]  # see above
            self._device, self._dtype, memory_format=self._format
        )
        self._trained: Any = self._model  # what is called in training
        self.load(arrays)
        self._given = len(pool.batches[0].inputs)  # arrays of a batch
        parts = [batch.part(self._world.rank, self._world.size) for batch in pool.batches]
        self._batches: list[tuple[Any, ...]] = [self._put_batch(batch) for batch in parts]

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        weights.load(self._model, arrays)

    def compile(self) -> float | None:
        """Return None: nothing is compiled ahead; if ``step`` is lazy or compiled, its first calls compile it."""
        return None

    def compile_times(self) -> dict[str, float]:
        """Return the seconds spent in JAX's stages, those that are known; empty if nothing was compiled.

        Dynamo's trace, and its backend's compilation of that; nothing is lowered in between.
        """
        if self.execution != "compiled":
            return {}
        spent = _dynamo().calculate_time_spent()
        backend = spent.get("backend_compile", 0.0) + spent.get("entire_backward_compile", 0.0)
        return {"trace_seconds": spent["total_wall_time"] - backend, "backend_seconds": backend}

    def forget(self) -> None:
        """Drop what is compiled but not what is cached in files, as if the process were restarted."""
        torch._dynamo.reset()

    def planned_bytes(self) -> int | None:
        """Return None: there is no plan of the memory that a step uses at once."""
        return None

    def observed(self) -> dict[str, tuple[str, str]]:
        """Return, by switch, the value found in what has run, and the evidence. It may move running statistics."""
        # With one channel or one pixel, an array has both orders at once.
        images = [t for t in (*self._model.parameters(), *self._batches[0][0]) if t.ndim == 4]
        nhwc = [t.is_contiguous(memory_format=torch.channels_last) for t in images if _has_order(t)]
        found = {"channels_last": ("on" if nhwc and all(nhwc) else "off", f"strides, {sum(nhwc)} of {len(nhwc)}")}
        counters = (
            _dynamo().counters if self.execution == "compiled" else {"stats": {"unique_graphs": 0}, "graph_break": {}}
        )
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        found["compile"] = ("on" if graphs else "off", f"Dynamo: {graphs} graphs, {breaks} breaks")
        if "attention" in self._setting.switches:
            one = tuple(array[:1] for array in self._batches[0][0])  # a whole batch, eagerly, may not fit
            with torch.set_grad_enabled(self._model.training):
                names = self._names(lambda: self.applied(self._model, one))
            kernels = [name for name in names if "scaled_dot_product" in name]
            kinds = [kind for kind in ("flash", "efficient", "cudnn") if any(kind in kernel for kernel in kernels)]
            found["attention"] = (kinds[0] if kinds else "math", ", ".join(kernels) or "no kernel of its own")
        if "aggregation" in self._setting.switches:
            with torch.no_grad():
                names = self._names(lambda: self.applied(self._model, self._batches[0][0]))
            products = [name for name in names if "sparse_product" in name]
            found["aggregation"] = ("sparse" if products else "index_add", ", ".join(products) or "no sparse product")
        if self._setting.on("cuda_graphs"):
            trees = importlib.import_module("torch._inductor.cudagraph_trees")
            manager = trees.get_manager(self._device.index, create_if_none_exists=False)
            found["cuda_graphs"] = ("on" if manager is not None else "off", "Inductor's manager of recorded graphs")
        if self._device.type == "cpu":
            asked, cpus, threads = self._setting.value(THREADS), len(usable_cpus()), torch.get_num_threads()
            there = ALL if asked == ALL else str(cpus if cpus != int(asked) else threads)
            found[THREADS] = (there, f"affinity, {cpus} CPUs, {threads} threads")
        return found | self._observed_here()

    def _observed_here(self) -> dict[str, tuple[str, str]]:
        """Return what ``observed`` finds only for this kind of work."""
        return {}

    def _names(self, run: Callable[[], Any]) -> list[str]:
        """Return the names of the operations that ``run`` dispatches."""
        with _Names() as names:
            run()
        return list(names.seen)

    def _compiled(self, function: Any) -> Any:
        """Return ``function``, compiled if the switch is on."""
        if not self._setting.on("compile"):
            return function
        graphs = self._setting.on("cuda_graphs") and self._captures
        mode = "reduce-overhead" if graphs else None
        if self._setting.on("max_autotune"):
            mode = "max-autotune" if graphs else "max-autotune-no-cudagraphs"
        return torch.compile(function, mode=mode)

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""
        if self._xla:
            self._xla.core.xla_model.wait_device_ops()  # sync(wait=True) would wait for the dispatch only
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def read(self, handle: Any) -> None:
        """Copy a result of ``handle``'s step to the host, which it cannot reach before the step has ended."""
        first = handle if isinstance(handle, torch.Tensor) else next(iter(handle.values()))
        first.reshape(-1)[:1].cpu()

    def samples(self) -> int:
        """Return the samples a step takes, over all devices, by the shapes of its inputs."""
        return self._taken() * self._world.size

    def _taken(self) -> int:
        return min(len(inputs[0]) for inputs, *_ in self._batches)

    def accuracy(self, batch: Batch) -> float:
        """Return the share of ``batch``, labels (N,), that the model classifies correctly with running statistics."""
        correct = 0
        for chunk in batch.chunks():
            inputs, labels = self._put_batch(chunk)
            correct += int((self._evaluate(inputs).argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Return the current weights, as ``weights.export`` names them."""
        return weights.export(self._model)

    def held(self) -> Iterator[Batch]:
        """Yield the batches as they are on the device, in the order in which they are taken."""
        for inputs, labels, *_ in self._batches:
            arrays = [tensor.cpu().numpy() for tensor in (*inputs[: self._given], labels)]
            *first, last = [array.astype(np.int32) if array.dtype == np.int64 else array for array in arrays]
            yield Batch(tuple(first), last)

    def layers(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return each module's output for batch ``index`` in evaluation, by module name, in the order of the calls.

        The whole model's name is empty, its output the logits. Images are (N, channels, height, width).
        """
        recorded: dict[str, npt.NDArray[Any]] = {}

        def record(name: str, result: Any) -> None:
            result = result[0] if isinstance(result, tuple) else result
            # a copy: an in-place activation would change the output of the layer before it
            recorded[name] = result.detach().to("cpu", self._dtype, copy=True).numpy()

        hooks = [
            module.register_forward_hook(lambda _, __, result, name=name: record(name, result))
            for name, module in self._model.named_modules()
        ]
        self._evaluate(self._batches[index % len(self._batches)][0])
        for hook in hooks:
            hook.remove()
        return recorded

    @torch.no_grad()
    def _evaluate(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the logits with running statistics."""
        return self._forward(inputs, train=False)

    def _forward(self, inputs: tuple[torch.Tensor, ...], train: bool) -> torch.Tensor:
        """Return the logits in full precision."""
        self._switch(train)
        return self.applied(self._trained if train else self._model, inputs)

    def _switch(self, train: bool) -> None:
        if self._model.training != train:  # it walks all modules, which costs small networks time
            self._model.train(train)

    def applied(self, model: Any, inputs: tuple[Any, ...]) -> torch.Tensor:
        """Return ``model(*inputs)`` under the policy and the switches, in full precision.

        Everything measured goes through here, and so does the canary.
        """
        with self._compute:
            result = model(*inputs)
        return result.to(self._dtype)

    def agree(self, value: float) -> float:
        """Return rank 0's ``value``, for decisions that must be alike in all processes."""
        if self._world.size == 1:
            return value
        shared = torch.tensor(value, device=self._device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)

    def all_reduce(self) -> Any:
        """Dispatch one all-reduce of as many bytes as the gradients have, and nothing else."""
        torch.distributed.all_reduce(self._like_gradients)

    @functools.cached_property
    def _like_gradients(self) -> torch.Tensor:
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return torch.zeros(parameters, dtype=self._dtype, device=self._device)

    def placed(self, arrays: tuple[npt.NDArray[Any], ...]) -> tuple[Any, ...]:
        """Return ``arrays`` on the device, floats in the policy's storage type."""
        return tuple(self._put(array) for array in arrays)

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # A copy, as in the twin: on a CPU it would else be numpy's own memory.
        tensor = tensor.to(self._device, self._dtype if tensor.is_floating_point() else torch.int64, copy=True)
        return tensor.contiguous(memory_format=self._format) if tensor.ndim == 4 else tensor

    def _put_batch(self, batch: Batch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return self._with_matrices(tuple(self._put(array) for array in batch.inputs)), self._put(batch.labels)

    def _with_matrices(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return ``inputs``, and behind them what the switch "aggregation" wants stored of their graphs."""
        if self._setting.value("aggregation") != "sparse":
            return inputs
        model: Any = self._model
        return *inputs, *model.matrices(*inputs)
