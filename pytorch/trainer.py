"""Training to accuracy: the optimizer step by a recipe, on batches that arrive while it runs."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from duel.measure.batches import Batch, Pool
from duel.measure.device import Setting
from training import LOSSES, Training

TOP = 5
OPENING = 0.1  # of the highest rate, which without a warm-up would raise the losses of the first steps


class Trainer(Training):
    """A recipe's optimizer, with another rate at each step, smoothed labels and an average of the weights."""

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        assert setting.recipe is not None
        self._rate, self._decay = setting.benchmark.optimizer.learning_rate, setting.recipe.average
        self._average: dict[str, torch.Tensor] = {}
        super().__init__(setting, pool, arrays)
        if setting.recipe.smoothing:
            self._loss = functools.partial(_smoothed, setting.recipe.smoothing)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        super().load(arrays)
        followed = self._averaged() if self._decay else {}
        self._average = {name: tensor.clone() for name, tensor in followed.items()}
        self._followed = [*followed.values()]  # the model's own, which keeps them: to look them up takes longer

    def step(self, index: int) -> Any:
        """Dispatch one optimizer step on batch ``index`` modulo the pool; return its loss, which may not be ready."""
        return self._advance(self._batches[index % len(self._batches)], OPENING * self._rate)

    def put(self, batch: Batch, present: int) -> Any:
        """Begin to copy ``batch``, this rank's part, to the device; ``present`` counts the labels of all ranks."""
        many = self._world.size > 1
        if self._copies is None:
            placed = self._put_batch(batch)
            return (*placed, torch.tensor(present, device=self._device)) if many else placed
        with torch.cuda.stream(self._copies):
            inputs = self._with_matrices(tuple(self._sent(array) for array in batch.inputs))
            return inputs, self._sent(batch.labels), *([self._sent(np.array(present))] if many else [])

    def _sent(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)
        tensor = tensor if tensor.is_floating_point() else tensor.to(torch.int64)
        return tensor.contiguous(memory_format=self._format) if tensor.ndim == 4 else tensor

    def advance(self, placed: Any, rate: float) -> Any:
        """Dispatch one optimizer step on what ``put`` returned, at ``rate``; return its loss."""
        loss = self._advance(placed, rate)
        return loss if self._copies is None else self._on_its_way(loss)

    def _advance(self, placed: Any, rate: float) -> Any:
        if self._copies is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._copies)
            for tensor in (*placed[0], *placed[1:]):  # its memory is not to be used again before this step has ended
                tensor.record_stream(now)
        for group in self._optimizer.param_groups:
            # A number would be part of the program that torch_xla compiles: another one at each step.
            group["lr"] = torch.tensor(rate, device=self._device) if self._xla else rate
        loss, _ = self._backward(*placed)
        self._optimizer.step()
        if self._decay:
            with torch.no_grad():
                torch._foreach_lerp_([*self._average.values()], self._followed, 1 - self._decay)
        if self._xla:
            self._xla.sync()
        return loss

    def _on_its_way(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy ``loss``, over all devices, to the host; return where it will be, and what tells when.

        A loss that is read on the device waits for all steps that were dispatched since.
        """
        loss = loss.detach().clone()
        if self._world.size > 1:
            torch.distributed.all_reduce(loss)
        there = torch.empty((), dtype=loss.dtype).pin_memory()
        there.copy_(loss, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return there, done

    def _over_all(self, handle: Any) -> torch.Tensor:
        if not isinstance(handle, tuple):
            return super()._over_all(handle)
        there, done = handle
        done.synchronize()
        return there

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, int, int]:
        """Return (sum of the losses, labels that are right, labels among the first five) of ``batch``."""
        inputs, labels = self._put_batch(batch)
        self._switch(train=False)
        logits = self.applied(self._evaluated, inputs)
        loss = LOSSES[self._setting.benchmark.loss](logits, labels, torch.ones((), device=self._device))
        there = labels >= 0
        if self._setting.benchmark.loss == "sigmoid":
            right = int((((logits > 0) == (labels > 0)) & there).sum())
            return float(loss), right, right
        first = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
        hits = (first == labels[..., None]) & there[..., None]
        return float(loss), int(hits[..., 0].sum()), int(hits.sum())

    def _evaluated(self, *inputs: torch.Tensor) -> Any:
        """Return the model's logits with the weights that are evaluated."""
        if not self._decay:
            return self._model(*inputs)
        return torch.func.functional_call(self._model, self._average, inputs)

    def _averaged(self) -> dict[str, torch.Tensor]:
        """Return all weights and running statistics, by name."""
        return {name: tensor for name, tensor in self._model.state_dict().items() if tensor.is_floating_point()}

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of everything that the next step depends on."""
        kept = {f"model/{name}": tensor for name, tensor in self._model.state_dict().items()}
        kept |= {f"average/{name}": tensor for name, tensor in self._average.items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            kept |= {f"optimizer/{number}/{name}": tensor for name, tensor in state.items() if tensor is not None}
        return {name: np.array(tensor.cpu().numpy()) for name, tensor in kept.items()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what ``snapshot`` returned."""
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = torch.from_numpy(array)
        self._model.load_state_dict(parts["model"])
        for name, tensor in self._average.items():
            tensor.copy_(parts["average"][name])
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            number, _, key = name.partition("/")
            parameter = parameters[int(number)]
            # A file keeps no strides, and a fused optimizer takes those of moments to be their parameter's.
            kept = torch.empty_like(parameter).copy_(tensor) if tensor.shape == parameter.shape else tensor
            state.setdefault(int(number), {})[key] = kept
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": state})


def _smoothed(
    share: float, logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the cross-entropy with all ``labels`` (...) that are not -1; ``share`` of each goes to all classes.

    The mean, or with ``count`` the sum divided by that.
    """
    if logits.ndim > 2:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return functional.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=share)
    return functional.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=share, reduction="sum") / count
