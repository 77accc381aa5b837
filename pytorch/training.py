"""Training on one device: the optimizer step run eagerly, operation by operation.

On a TPU, torch_xla only records the operations; the end of the step hands them over as one program, which is compiled
when it is new.
"""

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

import devices
import weights
from duel.catalogue import Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import Device


def build(benchmark: Benchmark, size: str) -> nn.Module:
    """The model of ``benchmark`` at ``size``, without weights."""
    return importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)


class Training:
    """SGD on the batches of ``pool``, which lie on the device from the start, taken in turn.

    ``arrays`` are the initial weights. ``precision`` is a policy of the catalogue or "float64".
    """

    execution = "eager"

    def __init__(
        self,
        benchmark: Benchmark,
        size: str,
        pool: Pool,
        arrays: Mapping[str, npt.NDArray[Any]],
        precision: str,
        device: Device,
    ) -> None:
        devices.set_precision(precision)
        self._device = devices.native(device)
        self._xla: Any = importlib.import_module("torch_xla") if device.kind == "tpu" else None
        if self._xla:
            self.execution = "lazy"
        self._dtype = torch.float64 if precision == "float64" else torch.float32
        half = torch.autocast(self._device.type, torch.bfloat16)
        self._compute: Any = half if precision == "bf16" else contextlib.nullcontext()
        self._model = build(benchmark, size).to(self._device, self._dtype)
        weights.load(self._model, arrays)
        recipe = benchmark.optimizer
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), recipe.learning_rate, recipe.momentum, weight_decay=recipe.weight_decay
        )
        self._batches = [self._put_batch(batch) for batch in pool.batches]

    def compile(self) -> float | None:
        """None: nothing is compiled ahead of time; where ``step`` is lazy, its first calls compile it."""
        return None

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; its loss, which may not be ready yet."""
        loss, _ = self._backward(*self._batches[index % len(self._batches)])
        self._optimizer.step()
        if self._xla:
            self._xla.sync()
        return loss

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""
        if self._xla:
            self._xla.core.xla_model.wait_device_ops()  # sync(wait=True) would wait for the dispatch only
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def loss(self, handle: Any) -> float:
        """The loss behind ``handle``."""
        return float(handle)

    def accuracy(self, batch: Batch) -> float:
        """Share of ``batch`` that the model, with its running statistics, classifies rightly."""
        correct = 0
        for chunk in batch.chunks():
            images, labels = self._put_batch(chunk)
            correct += int((self._evaluate(images).argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """The current weights, as ``weights.export`` names them."""
        return weights.export(self._model)

    def logits(self, index: int) -> npt.NDArray[Any]:
        """Logits (N, classes) of batch ``index`` with the running statistics, as in evaluation."""
        images, _ = self._batches[index % len(self._batches)]
        return self._evaluate(images).cpu().numpy()

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """What a step on batch ``index`` would see, without taking it.

        The loss, the logits (N, classes) with the batch's own statistics, and the gradient by each trainable parameter.
        """
        before = self.export()
        loss, logits = self._backward(*self._batches[index % len(self._batches)])
        weights.load(self._model, before)  # the pass has moved the running statistics
        gradients = {name: p.grad.cpu().numpy().copy() for name, p in self._model.named_parameters()}
        return float(loss), logits.cpu().numpy(), gradients

    def _backward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, logits); the gradients are left in the parameters' ``grad``."""
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._forward(images)
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        return loss.detach(), logits.detach()

    @torch.no_grad()
    def _evaluate(self, images: torch.Tensor) -> torch.Tensor:
        """Logits with the running statistics."""
        self._model.eval()
        logits = self._forward(images)
        self._model.train()
        return logits

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits in full precision."""
        with self._compute:
            logits = self._model(images)
        return logits.to(self._dtype)

    def _put_batch(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.from_numpy(batch.images).to(self._device, self._dtype)
        return images, torch.from_numpy(batch.labels).to(self._device, torch.int64)
