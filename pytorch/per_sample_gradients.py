"""Per-sample gradients by ``torch.func``, eager or compiled, or by Opacus."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.backends import cuda as sdp
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from duel.catalogue import CLIP_NORM
from duel.errors import UserError
from duel.measure.batches import Pool
from duel.measure.device import Setting
from models import _layers
from network import COMPUTE, Network
from training import LOSSES

Gradients = dict[str, torch.Tensor]


def _all_reduced(sums: Gradients) -> Gradients:
    """Return the sums over all processes, by one all-reduce."""
    vector = torch.cat([array.flatten() for array in sums.values()])
    torch.distributed.all_reduce(vector)
    parts = vector.split([array.numel() for array in sums.values()])
    return {name: part.view_as(array) for (name, array), part in zip(sums.items(), parts, strict=True)}


def _gathered(array: torch.Tensor, ranks: int) -> torch.Tensor:
    """Concatenate every process's ``array`` (n, ...) into (ranks * n, ...)."""
    parts = [torch.empty_like(array) for _ in range(ranks)]
    torch.distributed.all_gather(parts, array.contiguous())
    return torch.cat(parts)


def _hooked(model: nn.Module) -> Any:
    """Return ``model`` with Opacus' hooks."""
    try:
        opacus = importlib.import_module("opacus")
    except ImportError as error:
        raise UserError("--mode opacus: the library is not installed here; 'make opacus' does it") from error
    return opacus.GradSampleModule(model, loss_reduction="sum")


def _cloned(result: Any) -> Any:
    """Copy a product to new memory: norms, or an array per parameter."""
    return result.clone() if isinstance(result, torch.Tensor) else {name: a.clone() for name, a in result.items()}


def _norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of each sample's gradient (N, ...) as (N,).

    In two stages: on a CPU, PyTorch adds the squares of one stage one after the other in float32, so that the norm of
    25 million numbers would be off by 1e-3.
    """
    rows = torch.linalg.vector_norm(gradient.flatten(2), dim=2) if gradient.ndim > 2 else gradient
    return torch.linalg.vector_norm(rows, dim=1)


def _cut(inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, size: int) -> list[Any]:
    """Split a batch into (inputs, labels) of ``size`` samples each. Done once, since every view costs microseconds."""
    each = zip(*(array.split(size) for array in inputs), strict=True)
    return list(zip(each, labels.split(size), strict=True))


class PerSampleGradients(Network):
    """The setting's product on the batches of the pool, taken in turn, ``microbatch`` samples at a time.

    Each sample's gradient is that of its own loss. Group norms replace batch norms, which mix samples.
    """

    _per_sample = True

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._product = setting.product
        self._loss_scale = setting.loss_scale
        self._loss = LOSSES[setting.benchmark.loss]
        super().__init__(setting, pool, arrays)
        self._model.train()
        # Weights loaded later are written into the same memory.
        self._parameters = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        # A weight that modules share must be set under all its names, and finding them means a walk at every call.
        self._tied = len(self._parameters) < len(list(self._model.named_parameters(remove_duplicate=False)))
        self._each: Any = vmap(grad(self._sample_loss), (None, 0, 0))
        self._parts = [_cut(inputs, labels, setting.microbatch) for inputs, labels in self._batches]
        # The other attention kernels do not support an axis of samples and would be called for each one separately.
        # Set for the whole process: "with sdpa_kernel(...)" takes 0.2 ms of every step.
        for enable in (sdp.enable_flash_sdp, sdp.enable_mem_efficient_sdp, sdp.enable_cudnn_sdp):
            enable(False)
        sdp.allow_fp16_bf16_reduction_math_sdp(True)  # else what is left multiplies 16 bits as float32, without TF32
        if setting.precision in COMPUTE:  # torchvision's own attention looks it up there, too
            functional.scaled_dot_product_attention = _layers.half_attention
        self._run: Any = self._compiled(self._some)
        self._replayed = setting.on("cuda_graphs")
        if self._replayed:  # else each replay copies all weights into the graph's own memory
            for parameter in self._parameters.values():
                torch._dynamo.mark_static_address(parameter)
        self._hooked: Any = None
        if setting.on("opacus"):
            self._hooked = _hooked(self._model)
            self._run = self._by_hooks
        elif not setting.on("compile"):
            for module in self._model.modules():
                if type(module) is nn.Conv2d and module.groups == 1 and module.dilation == (1, 1):
                    module.__class__ = _layers.SampleConv2d

    def step(self, index: int) -> Any:
        """Dispatch the product of batch ``index`` modulo the pool and return it; it may not be ready yet.

        "materialised": (N, ...) by parameter. "norms": (N,). "clipped_sum": by parameter, the sum over samples, each
        clipped to a norm of at most ``CLIP_NORM``.
        """
        cut = self._parts[index % len(self._parts)]
        parts: list[Any] = []
        for part in cut:
            result = self._run(*part)
            # The graph's next replay overwrites these results.
            parts.append(_cloned(result) if self._replayed and len(cut) > 1 else result)
        result = parts[0]
        if len(parts) > 1:
            if self._product == "norms":
                result = torch.cat(parts)
            elif self._product == "materialised":
                # Taken out: each parameter's parts are freed before the next one's are joined.
                result = {name: torch.cat([part.pop(name) for part in parts]) for name in list(parts[0])}
            else:
                result = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        if self._world.size > 1 and self._product == "clipped_sum":  # per-sample gradients stay where they were made
            result = _all_reduced(result)
        if self._xla:
            self._xla.sync()
        return result

    def _taken(self) -> int:
        return min(sum(len(labels) for _, labels in parts) for parts in self._parts)

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of ``handle``, as ``weights`` names and lays out parameters; norms are called "norms".

        If the product has samples, those of all devices or, where ``every`` leaves some out because all would be too
        large, this device's every ``every``-th one from ``first`` on.
        """
        arrays = {"norms": handle} if self._product == "norms" else handle
        if self._product != "clipped_sum":
            arrays = {name: array[first::every] for name, array in arrays.items()}
        if self._world.size > 1 and self._product != "clipped_sum" and every == 1:
            arrays = {name: _gathered(array, self._world.size) for name, array in arrays.items()}
        return {name: array.cpu().numpy() for name, array in arrays.items()}

    def _observed_here(self) -> dict[str, tuple[str, str]]:
        """Return whose hooks are in place."""
        if self._hooked is None:
            return {"opacus": ("off", "no hooks")}
        return {"opacus": ("on", type(self._hooked).__name__)}

    @torch.no_grad()
    def _some(self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> Any:
        """Return what the product keeps of a microbatch's gradients."""
        return self._reduced(self._each(self._parameters, inputs, labels))

    def _by_hooks(self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> Any:
        """Return the same, each layer's part made by Opacus in the backward pass of the whole microbatch."""
        self._hooked.zero_grad(set_to_none=True)  # and the per-sample gradients
        with self._compute:
            logits = self._hooked(*inputs)
        losses = vmap(lambda logits, label: self._loss(logits[None], label[None]))(logits.to(self._dtype), labels)
        (losses.sum() * self._loss_scale).backward()
        named: dict[str, Any] = dict(self._model.named_parameters())
        # Opacus takes the type of the layers' results, which in 16 bits is theirs.
        gradients: Gradients = {name: parameter.grad_sample.to(self._dtype) for name, parameter in named.items()}
        with torch.no_grad():
            return self._reduced(gradients)

    def _reduced(self, gradients: Gradients) -> Any:
        """Return what the product keeps of a microbatch's gradients (N, ...)."""
        if self._loss_scale != 1:
            torch._foreach_div_(list(gradients.values()), self._loss_scale)
        if self._product == "materialised":
            return gradients
        norms = torch.linalg.vector_norm(torch.stack([_norms(gradient) for gradient in gradients.values()]), dim=0)
        if self._product == "norms":
            return norms
        factors = (CLIP_NORM / norms).clamp(max=1)  # 1 for a zero gradient
        return {name: torch.tensordot(factors, gradient, 1) for name, gradient in gradients.items()}

    def _sample_loss(self, parameters: Gradients, inputs: tuple[torch.Tensor, ...], label: torch.Tensor) -> Any:
        one = tuple(array[None] for array in inputs)
        with self._compute:
            logits = functional_call(self._model, parameters, one, tie_weights=self._tied)
        # Under vmap and grad, even a product with 1 or a cast to the same type takes as long as a small layer.
        loss = self._loss(logits if logits.dtype == self._dtype else logits.to(self._dtype), label[None])
        return loss if self._loss_scale == 1 else loss * self._loss_scale
