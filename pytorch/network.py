"""The network of a benchmark on one device, with its weights and batches: what is trained, proved and evaluated.

On a TPU, torch_xla only records the operations; its ``sync`` gives them to the device as one program, which is compiled
when it is new.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

import devices
import weights
from duel.catalogue import GROUPS, Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import ALONE, Device, World
from models import _layers

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(benchmark: Benchmark, size: str, per_sample: bool = False) -> nn.Module:
    """The model of ``benchmark`` at ``size``, without weights; ``per_sample``: group norms stand for batch norms."""
    model = importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)
    for module in list(model.modules()) if per_sample else ():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(math.gcd(GROUPS, channels), channels, child.eps))
    return model


def _share_batch_norms(model: nn.Module, device: torch.device) -> None:
    """Let batch norms in training take the statistics of all processes' batches together, as in the twin."""
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for module in model.modules():  # torch's own refuses processors
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = _layers.SharedBatchNorm


class Network:
    """A model whose weights, and the batches of ``pool``, lie on the device from the start.

    ``arrays`` are the weights. ``precision`` is a policy of the catalogue or "float64". In a ``world`` of several
    processes each has all weights, and its part of every batch.
    """

    execution = "eager"
    _per_sample = False

    def __init__(
        self,
        benchmark: Benchmark,
        size: str,
        pool: Pool,
        arrays: Mapping[str, npt.NDArray[Any]],
        precision: str,
        device: Device,
        world: World = ALONE,
    ) -> None:
        devices.set_precision(precision)
        self._device = devices.native(device)
        self._world = world
        self._xla: Any = importlib.import_module("torch_xla") if device.kind == "tpu" else None
        if self._xla:
            self.execution = "lazy"
        self._dtype = torch.float64 if precision == "float64" else torch.float32
        half = COMPUTE.get(precision)
        self._compute: Any = torch.autocast(self._device.type, half) if half else contextlib.nullcontext()
        self._model = build(benchmark, size, self._per_sample)
        if world.size > 1:
            _share_batch_norms(self._model, self._device)
        self._model = self._model.to(self._device, self._dtype)
        self._trained: Any = self._model  # what is called in training
        self.load(arrays)
        self._batches = [self._put_batch(batch.part(world.rank, world.size)) for batch in pool.batches]

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin anew from other weights; what is compiled stays."""
        weights.load(self._model, arrays)

    def compile(self) -> float | None:
        """None: nothing is compiled ahead of time; where ``step`` is lazy, its first calls compile it."""
        return None

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""
        if self._xla:
            self._xla.core.xla_model.wait_device_ops()  # sync(wait=True) would wait for the dispatch only
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def accuracy(self, batch: Batch) -> float:
        """Share of ``batch`` that the model, with its running statistics, classifies rightly."""
        correct = 0
        for chunk in batch.chunks():
            inputs, labels = self._put_batch(chunk)
            correct += int((self._evaluate(inputs).argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """The current weights, as ``weights.export`` names them."""
        return weights.export(self._model)

    def layers(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """What each module gives for batch ``index`` in evaluation, by its name and in the order of the calls.

        The whole model's name is empty: the logits. Images are (N, channels, height, width).
        """
        recorded: dict[str, npt.NDArray[Any]] = {}

        def record(name: str, result: Any) -> None:
            result = result[0] if isinstance(result, tuple) else result
            # a copy: an activation in place would change what its layer gave
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
        """Logits with the running statistics."""
        return self._forward(inputs, train=False)

    def _forward(self, inputs: tuple[torch.Tensor, ...], train: bool) -> torch.Tensor:
        """Logits in full precision."""
        if self._model.training != train:  # it walks all modules, which a small network notices
            self._model.train(train)
        with self._compute:
            logits = (self._trained if train else self._model)(*inputs)
        return logits.to(self._dtype)

    def agree(self, value: float) -> float:
        """What rank 0 has for ``value``: for decisions that all processes must take alike."""
        if self._world.size == 1:
            return value
        shared = torch.tensor(value, device=self._device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)

    def all_reduce(self) -> Any:
        """Dispatch one all-reduce of as much as the gradients are, and nothing else."""
        torch.distributed.all_reduce(self._like_gradients)

    @functools.cached_property
    def _like_gradients(self) -> torch.Tensor:
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return torch.zeros(parameters, dtype=self._dtype, device=self._device)

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else torch.int64)

    def _put_batch(self, batch: Batch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return tuple(self._put(array) for array in batch.inputs), self._put(batch.labels)
