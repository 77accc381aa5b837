"""Inference on one device: the forward pass in evaluation, operation by operation or compiled."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from duel.measure.batches import Pool
from duel.measure.device import Setting
from network import Network


class Inference(Network):
    """The forward pass with the running statistics, on the batches of the pool, taken in turn."""

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(setting, pool, arrays)
        self._run: Any = self._compiled(self.applied)

    @torch.inference_mode()
    def step(self, index: int) -> Any:
        """Dispatch the pass over batch ``index`` modulo the pool; its logits, which may not be ready yet."""
        self._switch(train=False)
        logits = self._run(self._model, self._batches[index % len(self._batches)][0])
        if self._xla:
            self._xla.sync()
        return logits

    def named(self, handle: Any) -> dict[str, npt.NDArray[Any]]:
        """The logits behind ``handle``."""
        return {"logits": handle.cpu().numpy()}
