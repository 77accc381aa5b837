"""Inference on one device: the forward pass in evaluation, eager or compiled."""

import functools
from typing import Any

import numpy.typing as npt
import torch

from network import Network


class Inference(Network):
    """The forward pass with running statistics, on the batches of the pool, taken in turn."""

    @torch.inference_mode()
    def step(self, index: int) -> Any:
        """Dispatch the pass over batch ``index`` modulo the pool; return its logits, which may not be ready yet."""
        self._switch(train=False)
        logits = self._run(self._model, self._batches[index % len(self._batches)][0])
        if self._xla:
            self._xla.sync()
        return logits

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return the logits of ``handle``, (N, classes) or more axes, of each ``every``-th sample from ``first``."""
        return {"logits": handle[first::every].cpu().numpy()}

    @functools.cached_property
    def _run(self) -> Any:
        return self._compiled(self.applied)
