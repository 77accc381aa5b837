"""Inference on one device: the forward pass in evaluation run eagerly, operation by operation."""

from typing import Any

import torch

from network import Network


class Inference(Network):
    """The forward pass with the running statistics, on the batches of the pool, taken in turn."""

    @torch.inference_mode()
    def step(self, index: int) -> Any:
        """Dispatch the pass over batch ``index`` modulo the pool; its logits, which may not be ready yet."""
        logits = self._forward(self._batches[index % len(self._batches)][0], train=False)
        if self._xla:
            self._xla.sync()
        return logits
