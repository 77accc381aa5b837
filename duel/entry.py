"""The parts of an entry in ``duel.benchmarks``: a sample's inputs, sizes, an optimizer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Images:
    """Images (channels, height, width), one label each."""

    channels: int
    height: int
    width: int
    classes: int


@dataclass(frozen=True)
class Tokens:
    """Sequences of ``length`` tokens. With ``classes`` one label each; without, every token's label is the next one."""

    length: int
    vocabulary: int
    classes: int | None = None


@dataclass(frozen=True)
class Molecules:
    """Small graphs, each padded to ``nodes`` nodes and ``edges`` directed edges; ``tasks`` yes-or-no labels each.

    Every node has ``node_features`` numbers, every edge ``edge_features``. Some labels are missing.
    """

    nodes: int
    edges: int
    node_features: int
    edge_features: int
    tasks: int


@dataclass(frozen=True)
class Citations:
    """One large graph of ``nodes`` nodes and ``edges`` directed edges; ``labelled`` of the nodes have a label."""

    nodes: int
    edges: int
    features: int
    classes: int
    labelled: int


@dataclass(frozen=True)
class Size:
    """One size of a benchmark.

    ``model`` holds the keyword arguments of ``build`` in both ``models/<name>.py``; ``inputs`` describes one sample.
    ``batch_size`` maps a device kind to the samples per device and step.
    ``flops`` are those of one sample's forward pass, in evaluation: two for each multiply-add of convolutions, matrix
    products and attention (both halves of a causal one). ``main.py validate`` counts them in both programs and fails if
    this number differs.
    """

    model: Mapping[str, Any]
    inputs: Images | Tokens | Molecules | Citations
    batch_size: Mapping[str, int]
    flops: int


@dataclass(frozen=True)
class SGD:
    """As ``torch.optim.SGD`` defines it: L2 decay is added to the gradient before the momentum.

    ``learning_rate`` is for ``batch_size`` samples per step over all devices, or for any number if that is None.
    ``source`` is the published recipe that these values follow.
    """

    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch_size: int | None = None
    source: str = ""

    def at(self, batch_size: int) -> "SGD":
        """Return the recipe at ``batch_size``, by linear scaling (Goyal et al. 2017, arXiv:1706.02677)."""
        if self.batch_size is None:
            return self
        rate = self.learning_rate * batch_size / self.batch_size
        return replace(self, learning_rate=rate, batch_size=batch_size)


@dataclass(frozen=True)
class AdamW:
    """As ``torch.optim.AdamW`` defines it (Loshchilov and Hutter 2017, arXiv:1711.05101).

    ``learning_rate``, ``batch_size`` and ``source`` are as in ``SGD``.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    batch_size: int | None = None
    source: str = ""

    def at(self, batch_size: int) -> "AdamW":
        """Return the recipe at ``batch_size``, by square root scaling (Malladi et al. 2022, arXiv:2205.10782).

        Only the rate is scaled. Their rule also moves betas and epsilon: from 4096 samples to 2 it would take the first
        beta from 0.9 to 0.99995, an average over far more steps than a run has.
        """
        if self.batch_size is None:
            return self
        rate = self.learning_rate * math.sqrt(batch_size / self.batch_size)
        return replace(self, learning_rate=rate, batch_size=batch_size)


@dataclass(frozen=True)
class Benchmark:
    """One network, its data and its training recipe.

    ``dataset`` names a loader of ``duel.datasets`` or is ``"synthetic"``: made from the seed, by ``measure.batches``.
    ``loss`` is the mean over all labels that are not missing: "softmax" (one of several classes) or "sigmoid" (yes or
    no). ``attention`` is True if the model calls ``_layers.attention``, whose kernel a switch chooses, and
    ``odd_tokens`` if that is over an odd number of them, ``depthwise`` if it has convolutions of single channels.
    ``torchvision`` is torchvision's name for the network, if it publishes weights for it.
    ``curve_steps`` training steps open every run, are the same on both sides, and give the loss curve (and the
    held-out accuracy if the data is real) before anything is timed. Synthetic data are a pool of 8 batches, taken in
    turn: the ninth step sees the first batch again. Their labels are random, so losses differ more between
    batches than a few steps change them.
    """

    name: str
    title: str
    source: str
    sizes: Mapping[str, Size]
    optimizer: SGD | AdamW
    dataset: str = "synthetic"
    loss: str = "softmax"
    attention: bool = False
    odd_tokens: bool = False
    depthwise: bool = False
    torchvision: str | None = None
    curve_steps: int = 9
    unit: str = "images/s"
