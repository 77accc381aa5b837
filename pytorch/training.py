"""Training: the optimizer step, eager or with the forward and backward pass compiled."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

import weights
from duel.catalogue import SGD, AdamW
from duel.measure.batches import Pool
from duel.measure.device import Setting
from network import Network

# PyTorch 2.14 warns about the older name.
_NAMES = inspect.signature(nn.parallel.DistributedDataParallel).parameters
SEND_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


class Training(Network):
    """The benchmark's optimizer on the batches of the pool, taken in turn."""

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._loss_scale = setting.loss_scale
        self._loss = LOSSES[setting.benchmark.loss]
        self._recipe = setting.benchmark.optimizer
        super().__init__(setting, pool, arrays)
        if self._world.size > 1:
            self._batches = [
                (*batch, torch.tensor(host.present, device=self._device))
                for batch, host in zip(self._batches, pool.batches, strict=True)
            ]
            # Running statistics are the same on all ranks already.
            options: dict[str, Any] = {SEND_BUFFERS: False, "gradient_as_bucket_view": True}
            self._trained = nn.parallel.DistributedDataParallel(self._model, **options)
        self._differentiable: Any = self._compiled(self._loss_and_logits)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        super().load(arrays)
        self._optimizer = _optimizer(self._recipe, self._model, self._setting.on("fused_optimizer"))

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; return its loss, which may not be ready."""
        loss, _ = self._backward(*self._batches[index % len(self._batches)])
        self._optimizer.step()
        if self._xla:
            self._xla.sync()
        return loss

    def loss(self, handle: Any) -> float:
        """Return the loss of ``handle``, over all devices: if there are several, all must call this together."""
        return float(self._over_all(handle))

    def _over_all(self, handle: Any) -> torch.Tensor:
        """Return the loss of ``handle``, over all devices."""
        if self._world.size > 1:
            handle = handle.clone()
            torch.distributed.all_reduce(handle)
        return handle

    def moments(self) -> dict[str, npt.NDArray[Any]]:
        """Return, by trainable parameter, what the optimizer keeps of its gradients: momentum, AdamW's first moment."""
        kept = "momentum_buffer" if isinstance(self._recipe, SGD) else "exp_avg"
        state = self._optimizer.state
        found = {name: state[p].get(kept) for name, p in self._model.named_parameters()}
        shapes = weights.shapes(self._model)
        # None if a parameter has had no gradient.
        return {n: np.zeros(shapes[n], np.float32) if a is None else a.cpu().numpy() for n, a in found.items()}

    def count(self) -> int | None:
        """Return the steps since ``load`` by the optimizer's own count; None for SGD, which keeps none."""
        if isinstance(self._recipe, SGD):
            return None
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def passes(self) -> dict[str, Callable[[int], Any]]:
        """Return functions that each dispatch a part of ``step`` for batch ``index`` modulo the pool.

        "forward" is the loss, without keeping anything for a backward pass; "gradient" includes that pass. Both move
        the running statistics and leave the weights.
        """

        def alone(run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], Any]:
            def dispatch(index: int) -> Any:
                loss, _ = run(*self._batches[index % len(self._batches)], None)
                if self._xla:
                    self._xla.sync()
                return loss

            return dispatch

        return {"forward": alone(self._loss_alone), "gradient": alone(self._backward)}

    @torch.no_grad()
    def _loss_alone(
        self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, count: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._switch(train=True)
        return self._differentiable(inputs, labels, count)

    def gradients(self, index: int) -> tuple[float, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Return what a step on batch ``index`` would see, without taking it.

        That is the loss, the logits (N, classes), or with more axes, with the batch's own statistics, and the gradient
        with respect to each trainable parameter.
        """
        before = self.export()
        loss, logits = self._backward(*self._batches[index % len(self._batches)])
        weights.load(self._model, before)  # the pass has moved the running statistics
        named: dict[str, Any] = dict(self._model.named_parameters())
        gradients = {name: p.grad.cpu().numpy().copy() for name, p in named.items()}
        return float(loss), logits.cpu().numpy(), gradients

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave gradients in the parameters' ``grad``; return (loss, logits). With ``count``, this device's share."""
        self._optimizer.zero_grad(set_to_none=True)
        self._switch(train=True)
        loss, logits = self._differentiable(inputs, labels, count)
        # Gradients are averaged over devices, but their sum is needed.
        scale = self._loss_scale * self._world.size
        if scale == 1:
            loss.backward()
        else:
            (loss * scale).backward()
        if self._loss_scale != 1:
            gradients: list[Any] = [p.grad for p in self._model.parameters()]
            torch._foreach_div_(gradients, self._loss_scale)
        if self._setting.on("cuda_graphs"):  # the next replay overwrites this one's results
            loss = loss.clone()
        return loss.detach(), logits.detach()

    def _loss_and_logits(
        self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, count: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.applied(self._trained, inputs)
        return self._loss(logits, labels, count), logits

    def _observed_here(self) -> dict[str, tuple[str, str]]:
        """Return the optimizer's kernel; takes one more step to find it."""
        names = self._names(self._optimizer.step)
        fused = [name for name in names if "_fused_" in name]
        return {"fused_optimizer": ("on" if fused else "off", ", ".join(fused) or f"{len(names)} others")}


def _optimizer(recipe: SGD | AdamW, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"weight_decay": recipe.weight_decay, "fused": fused or None}
    match recipe:
        case SGD():
            return torch.optim.SGD(model.parameters(), recipe.learning_rate, recipe.momentum, **options)
        case AdamW():
            return torch.optim.AdamW(model.parameters(), recipe.learning_rate, recipe.betas, recipe.epsilon, **options)


def _softmax_loss(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of ``logits`` (..., classes) with all ``labels`` (...) that are not -1: sum / ``count``.

    Without ``count``, the mean.
    """
    if logits.ndim > 2:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return functional.cross_entropy(logits, labels, ignore_index=-1)
    return functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / count


def _sigmoid_loss(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Return the binary cross-entropy of ``logits`` (...) with all ``labels`` (...) that are not -1, likewise."""
    there = (labels >= 0).to(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
    return (each * there).sum() / (there.sum() if count is None else count)


LOSSES = {"softmax": _softmax_loss, "sigmoid": _sigmoid_loss}
