"""The batches that both frameworks train on, made in numpy from one seed."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duel import datasets
from duel.catalogue import Benchmark, Citations, Images, Molecules, Tokens

# A pool is larger than one batch so that neither caches nor constant folding can memorise it.
POOL_BATCHES = 8
MISSING_LABELS = 0.6  # share of labels, as in ogbg-molpcba (Hu et al. 2020, arXiv:2005.00687)
EVALUATION_CHUNK = 500  # samples per forward pass in evaluation, whatever the batch size


@dataclass(frozen=True)
class Batch:
    """The model's inputs, arrays whose first axis is the N samples, and their labels.

    ================  ==========================================================================  ==================
    catalogue         inputs                                                                      labels
    ================  ==========================================================================  ==================
    Images            images (N, channels, height, width) float32                                 (N,)
    Tokens            ids (N, length) int32                                                       (N,) or (N, length)
    Molecules         nodes (N, nodes, node features) and edges (N, edges, edge features)         (N, tasks)
                      float32, senders and receivers (N, edges) int32, masks of the nodes and
                      edges that are not padding, (N, nodes) and (N, edges) float32
    Citations         nodes (N, nodes, features) float32, senders and receivers (N, edges +       (N, nodes)
                      nodes) int32 and weights of these edges, float32
    ================  ==========================================================================  ==================

    Labels are int32; -1 is missing. Senders and receivers are positions among the nodes of their own graph, so that a
    sample means the same in every batch; edges are sorted by receiver. Padding edges go from a padding node to itself.
    """

    inputs: tuple[npt.NDArray[np.float32 | np.int32], ...]
    labels: npt.NDArray[np.int32]

    @property
    def present(self) -> int:
        """The number of labels that are not missing: the divisor of a mean loss, whichever device has them."""
        return int((self.labels >= 0).sum())

    def part(self, rank: int, ranks: int) -> "Batch":
        """Return the ``rank``th of ``ranks`` equal parts. Raises ValueError if the batch cannot be split equally."""
        samples, rest = divmod(len(self.labels), ranks)
        if rest:
            raise ValueError(f"batch size {len(self.labels)} does not divide among {ranks} devices")
        part = slice(rank * samples, (rank + 1) * samples)
        return Batch(tuple(array[part] for array in self.inputs), self.labels[part])

    def chunks(self) -> Iterator["Batch"]:
        """Yield the batch, whose samples are independent, in parts of at most ``EVALUATION_CHUNK``."""
        for start in range(0, len(self.labels), EVALUATION_CHUNK):
            part = slice(start, start + EVALUATION_CHUNK)
            yield Batch(tuple(array[part] for array in self.inputs), self.labels[part])


@dataclass(frozen=True)
class Pool:
    """At least ``POOL_BATCHES`` batches of one shape, taken in turn; ``held_out`` is None for synthetic data.

    ``dataset`` names the source of the samples; ``sha256`` covers all arrays in order.
    """

    batches: tuple[Batch, ...]
    held_out: Batch | None
    dataset: str
    synthetic: bool
    sha256: str


def pool(benchmark: Benchmark, size: str, batch_size: int, seed: int, data_folder: Path) -> Pool:
    """Return the pool of ``benchmark`` at ``size``, the same for the same arguments and data.

    Synthetic numbers are N(0, 1), never constant: zeros draw less power and run faster on a GPU. Real data are shuffled
    and cut into full batches, dropping the rest; a data set of too few batches is reshuffled until there are enough.
    Raises ValueError if ``batch_size`` is not positive or larger than the data set.
    """
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}; at least 1 is needed")
    generator = np.random.default_rng(seed)
    if benchmark.dataset == datasets.SYNTHETIC:
        made = tuple(_make(benchmark.sizes[size].inputs, batch_size, generator) for _ in range(POOL_BATCHES))
        return Pool(made, None, datasets.SYNTHETIC, True, sha256(made))
    data = datasets.load(benchmark.dataset, data_folder)
    check_size(batch_size, data)
    samples = len(data.train_labels)
    batches: list[Batch] = []
    while len(batches) < POOL_BATCHES:
        order = generator.permutation(samples)
        for start in range(0, samples - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            batches.append(Batch((data.train_images[chosen],), data.train_labels[chosen]))
    held_out = Batch((data.held_out_images,), data.held_out_labels)
    return Pool(tuple(batches), held_out, data.name, False, sha256((*batches, held_out)))


def check_size(batch_size: int, data: datasets.Dataset) -> None:
    """Raise ValueError if ``data`` has not enough samples for one batch."""
    samples = len(data.train_labels)
    if batch_size > samples:
        raise ValueError(f"batch size {batch_size} is larger than the {samples} training samples of {data.name}")


def _make(inputs: Images | Tokens | Molecules | Citations, samples: int, generator: np.random.Generator) -> Batch:
    match inputs:
        case Images():
            shape = (samples, inputs.channels, inputs.height, inputs.width)
            return Batch((_normal(shape, generator),), _integers(inputs.classes, (samples,), generator))
        case Tokens(classes=None):  # one token more than is read: the label of the last
            tokens = _integers(inputs.vocabulary, (samples, inputs.length + 1), generator)
            return Batch((tokens[:, :-1].copy(),), tokens[:, 1:].copy())
        case Tokens():
            tokens = _integers(inputs.vocabulary, (samples, inputs.length), generator)
            return Batch((tokens,), _integers(inputs.classes or 0, (samples,), generator))
        case Molecules():
            return _molecules(inputs, samples, generator)
        case Citations():
            return _citations(inputs, samples, generator)


def _molecules(inputs: Molecules, samples: int, generator: np.random.Generator) -> Batch:
    """Make trees with some rings closed, of half to all but one of the nodes: the last is always left for padding."""
    ends = np.full((samples, 2, inputs.edges), inputs.nodes - 1, np.int32)  # senders, receivers
    node_mask = np.zeros((samples, inputs.nodes), np.float32)
    edge_mask = np.zeros((samples, inputs.edges), np.float32)
    for sample in range(samples):
        nodes = int(generator.integers(inputs.nodes // 2, inputs.nodes))
        child = np.arange(1, nodes)
        tree = np.stack([(generator.random(nodes - 1) * child).astype(np.int32), child])
        free = inputs.edges // 2 - (nodes - 1)
        rings = generator.integers(nodes, size=(2, int(generator.integers(free + 1))), dtype=np.int32)
        bonds = np.concatenate([tree, rings], axis=1)
        both_ways = np.concatenate([bonds, bonds[::-1]], axis=1)
        count = both_ways.shape[1]
        ends[sample, :, :count] = both_ways[:, np.argsort(both_ways[1], kind="stable")]
        node_mask[sample, :nodes], edge_mask[sample, :count] = 1, 1
    senders, receivers = ends[:, 0].copy(), ends[:, 1].copy()
    labels = _integers(2, (samples, inputs.tasks), generator)
    missing = generator.random(labels.shape) < MISSING_LABELS
    missing[missing.all(1), 0] = False  # a sample without a label would have no loss and no gradient
    labels[missing] = -1
    nodes_in = _normal((samples, inputs.nodes, inputs.node_features), generator)
    edges_in = _normal((samples, inputs.edges, inputs.edge_features), generator)
    return Batch((nodes_in, edges_in, senders, receivers, node_mask, edge_mask), labels)


def _citations(inputs: Citations, samples: int, generator: np.random.Generator) -> Batch:
    """Make random graphs with a self-loop at each node, and the weights of Kipf and Welling 2016, equation 2."""
    ends = np.empty((samples, 2, inputs.edges + inputs.nodes), np.int32)
    weights = np.empty((samples, inputs.edges + inputs.nodes), np.float32)
    labels = np.full((samples, inputs.nodes), -1, np.int32)
    itself = np.arange(inputs.nodes, dtype=np.int32)
    for sample in range(samples):
        first = generator.integers(inputs.nodes, size=inputs.edges // 2, dtype=np.int32)
        # never the node itself: below, every node gets a self-loop
        second = (first + generator.integers(1, inputs.nodes, size=len(first), dtype=np.int32)) % inputs.nodes
        both_ways = np.array([[*first, *second, *itself], [*second, *first, *itself]], np.int32)
        ends[sample] = both_ways[:, np.argsort(both_ways[1], kind="stable")]
        degree = np.bincount(ends[sample, 1], minlength=inputs.nodes)
        weights[sample] = 1 / np.sqrt(degree[ends[sample, 0]] * degree[ends[sample, 1]])
        chosen = generator.choice(inputs.nodes, inputs.labelled, replace=False)
        labels[sample, chosen] = generator.integers(inputs.classes, size=inputs.labelled)
    nodes_in = _normal((samples, inputs.nodes, inputs.features), generator)
    return Batch((nodes_in, ends[:, 0].copy(), ends[:, 1].copy(), weights), labels)


def _normal(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.float32]:
    return generator.standard_normal(shape, dtype=np.float32)


def _integers(below: int, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.int32]:
    return generator.integers(below, size=shape, dtype=np.int32)


def sha256(batches: Iterable[Batch]) -> str:
    """Return the hash of all arrays, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        for array in (*batch.inputs, batch.labels):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
