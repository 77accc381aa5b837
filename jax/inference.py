"""Inference on one device: the forward pass in evaluation as one compiled program."""

from typing import Any

import numpy as np
import numpy.typing as npt

from network import Network


class Inference(Network):
    """The forward pass with running statistics, on the batches of the pool, taken in turn."""

    def step(self, index: int) -> Any:
        """Dispatch the pass over batch ``index`` modulo the pool; return its logits, which may not be ready yet."""
        return self._program(*self._state, self._batches[index % len(self._batches)][0])

    def named(self, handle: Any, every: int = 1, first: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return the logits of ``handle``, (N, classes) or more axes, of each ``every``-th sample from ``first``."""
        return {"logits": np.array(handle[first::every] if every > 1 else handle)}

    def _trace(self) -> Any:
        return self._evaluate.trace(*self._state, self._batches[0][0])
