"""Per-sample gradients on one device by ``torch.func``, run eagerly, operation by operation."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from duel.catalogue import CLIP_NORM, PRECISIONS, Benchmark
from duel.measure.batches import Pool
from duel.measure.device import Device
from network import Network
from training import LOSSES

Gradients = dict[str, torch.Tensor]


class PerSampleGradients(Network):
    """One ``product`` of the catalogue for the batches of the pool, taken in turn, ``microbatch`` samples at a time.

    Each sample's gradient is that of its own loss. Group norms stand for batch norms, which mix the samples.
    """

    _per_sample = True

    def __init__(
        self,
        benchmark: Benchmark,
        size: str,
        pool: Pool,
        arrays: Mapping[str, npt.NDArray[Any]],
        precision: str,
        device: Device,
        *,
        product: str,
        microbatch: int,
    ) -> None:
        self._product, self._microbatch = product, microbatch
        self._loss_scale = PRECISIONS[precision].loss_scale if precision in PRECISIONS else 1.0
        self._loss = LOSSES[benchmark.loss]
        super().__init__(benchmark, size, pool, arrays, precision, device)
        self._model.train()
        # What is loaded later is written into the same memory.
        self._parameters = {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def step(self, index: int) -> Any:
        """Dispatch the product of batch ``index`` modulo the pool, which may not be ready yet.

        "materialised": for each parameter (N, ...). "norms": (N,). "clipped_sum": for each parameter the sum over the
        samples, each of at most ``CLIP_NORM``.
        """
        inputs, labels = self._batches[index % len(self._batches)]
        parts: list[Any] = [
            self._some(tuple(array[start : start + self._microbatch] for array in inputs), part)
            for start, part in zip(range(0, len(labels), self._microbatch), labels.split(self._microbatch), strict=True)
        ]
        result = parts[0]
        if len(parts) > 1:
            if self._product == "norms":
                result = torch.cat(parts)
            elif self._product == "materialised":
                result = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            else:
                result = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        if self._xla:
            self._xla.sync()
        return result

    def named(self, handle: Any) -> dict[str, npt.NDArray[Any]]:
        """The arrays behind ``handle``, as ``weights`` names and lays out parameters; norms are called "norms"."""
        arrays = {"norms": handle} if self._product == "norms" else handle
        return {name: array.cpu().numpy() for name, array in arrays.items()}

    @torch.no_grad()
    def _some(self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> Any:
        """What the product keeps of the gradients of a microbatch."""
        # The others know no axis of samples, and would be called for one sample after the other.
        with sdpa_kernel(SDPBackend.MATH):
            gradients: Gradients = vmap(grad(self._sample_loss), (None, 0, 0))(self._parameters, inputs, labels)
        if self._loss_scale != 1:
            torch._foreach_div_(list(gradients.values()), self._loss_scale)
        if self._product == "materialised":
            return gradients
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        if self._product == "norms":
            return norms
        factors = (CLIP_NORM / norms).clamp(max=1)  # of a gradient of zero: 1
        return {name: torch.tensordot(factors, gradient, 1) for name, gradient in gradients.items()}

    def _sample_loss(self, parameters: Gradients, inputs: tuple[torch.Tensor, ...], label: torch.Tensor) -> Any:
        with self._compute:
            logits = functional_call(self._model, parameters, tuple(array[None] for array in inputs))
        return self._loss(logits.to(self._dtype), label[None]) * self._loss_scale
