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
from duel.catalogue import PRECISIONS, SGD, AdamW, Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import Device

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(benchmark: Benchmark, size: str) -> nn.Module:
    """The model of ``benchmark`` at ``size``, without weights."""
    return importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)


class Training:
    """The benchmark's optimizer on the batches of ``pool``, which lie on the device from the start, taken in turn.

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
        half = COMPUTE.get(precision)
        self._compute: Any = torch.autocast(self._device.type, half) if half else contextlib.nullcontext()
        self._loss_scale = PRECISIONS[precision].loss_scale if precision in PRECISIONS else 1.0
        self._loss = LOSSES[benchmark.loss]
        self._model = build(benchmark, size).to(self._device, self._dtype)
        self._recipe = benchmark.optimizer
        self.load(arrays)
        self._batches = [self._put_batch(batch) for batch in pool.batches]

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin anew from other weights; what is compiled stays."""
        weights.load(self._model, arrays)
        self._optimizer = _optimizer(self._recipe, self._model)

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

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """What a step on batch ``index`` would see, without taking it.

        The loss, the logits (N, classes) with the batch's own statistics, and the gradient by each trainable parameter.
        """
        before = self.export()
        loss, logits = self._backward(*self._batches[index % len(self._batches)])
        weights.load(self._model, before)  # the pass has moved the running statistics
        gradients = {name: p.grad.cpu().numpy().copy() for name, p in self._model.named_parameters()}
        return float(loss), logits.cpu().numpy(), gradients

    def _backward(self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, logits); the gradients are left in the parameters' ``grad``."""
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._forward(inputs, train=True)
        loss = self._loss(logits, labels)
        if self._loss_scale == 1:
            loss.backward()
        else:
            (loss * self._loss_scale).backward()
            torch._foreach_div_([p.grad for p in self._model.parameters()], self._loss_scale)
        return loss.detach(), logits.detach()

    @torch.no_grad()
    def _evaluate(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Logits with the running statistics."""
        return self._forward(inputs, train=False)

    def _forward(self, inputs: tuple[torch.Tensor, ...], train: bool) -> torch.Tensor:
        """Logits in full precision."""
        if self._model.training != train:  # it walks all modules, which a small network notices
            self._model.train(train)
        with self._compute:
            logits = self._model(*inputs)
        return logits.to(self._dtype)

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else torch.int64)

    def _put_batch(self, batch: Batch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return tuple(self._put(array) for array in batch.inputs), self._put(batch.labels)


def _optimizer(recipe: SGD | AdamW, model: nn.Module) -> torch.optim.Optimizer:
    decay = recipe.weight_decay
    match recipe:
        case SGD():
            return torch.optim.SGD(model.parameters(), recipe.learning_rate, recipe.momentum, weight_decay=decay)
        case AdamW():
            return torch.optim.AdamW(
                model.parameters(), recipe.learning_rate, recipe.betas, recipe.epsilon, weight_decay=decay
            )


def _softmax_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of ``logits`` (..., classes) over all ``labels`` (...) that are not -1."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)


def _sigmoid_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy of ``logits`` (...) over all ``labels`` (...) that are not -1."""
    there = (labels >= 0).to(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
    return (each * there).sum() / there.sum()


LOSSES = {"softmax": _softmax_loss, "sigmoid": _sigmoid_loss}
