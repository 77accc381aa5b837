"""Synthetic batches: each kind of input has the form that its benchmark says."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from duel.catalogue import BENCHMARKS, Images
from duel.measure import batches


def synthetic(name: str, samples: int = 16, seed: int = 0, size: str = "tiny") -> batches.Pool:
    return batches.pool(dataclasses.replace(BENCHMARKS[name], dataset="synthetic"), size, samples, seed, Path())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_synthetic_pool_is_noise_and_follows_its_seed(name: str) -> None:
    first, again, other = (synthetic(name, seed=seed) for seed in (0, 0, 1))
    assert (first.synthetic, first.dataset, first.held_out) == (True, "synthetic", None)
    assert first.sha256 == again.sha256 != other.sha256
    assert len({batch.inputs[0].tobytes() for batch in first.batches}) == len(first.batches) >= 8
    for batch in first.batches:
        assert {len(array) for array in (*batch.inputs, batch.labels)} == {16}
        assert {array.dtype for array in (*batch.inputs, batch.labels)} <= {np.dtype(np.float32), np.dtype(np.int32)}
        assert batch.labels.dtype == np.int32
        if batch.inputs[0].dtype == np.float32:
            assert abs(batch.inputs[0].mean()) < 0.1
            assert batch.inputs[0].std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", [b.name for b in BENCHMARKS.values() if isinstance(b.sizes["tiny"].inputs, Images)])
def test_images_have_the_catalogue_s_shape_and_labels(name: str) -> None:
    inputs = BENCHMARKS[name].sizes["tiny"].inputs
    pool = synthetic(name)
    assert {batch.inputs[0].shape for batch in pool.batches} == {(16, inputs.channels, inputs.height, inputs.width)}
    labels = np.concatenate([batch.labels for batch in pool.batches])
    assert set(labels.tolist()) == set(range(inputs.classes))


def test_every_token_s_label_is_the_next_token() -> None:
    for batch in synthetic("gpt2").batches:
        assert np.array_equal(batch.inputs[0][:, 1:], batch.labels[:, :-1])
        assert 0 <= batch.labels.min() <= batch.labels.max() < BENCHMARKS["gpt2"].sizes["tiny"].inputs.vocabulary


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_molecules_are_graphs_whose_padding_touches_nothing(size: str) -> None:
    inputs = BENCHMARKS["graphnet"].sizes[size].inputs
    batch = synthetic("graphnet", size=size).batches[0]
    _, _, senders, receivers, node_mask, edge_mask = batch.inputs
    assert np.all(np.diff(receivers) >= 0)
    for graph in range(16):
        real = np.flatnonzero(node_mask[graph]).tolist()
        edges = [
            (int(a), int(b), bool(there))
            for a, b, there in zip(senders[graph], receivers[graph], edge_mask[graph], strict=True)
        ]
        assert inputs.nodes // 2 <= len(real) < inputs.nodes
        assert all((a in real) and (b in real) for a, b, there in edges if there)
        assert {(a, b) for a, b, there in edges if not there} <= {(inputs.nodes - 1, inputs.nodes - 1)}
        # Both directions of every bond, and every node reached from the first.
        there = sorted((a, b) for a, b, real_edge in edges if real_edge)
        assert there == sorted((b, a) for a, b in there)
        reached, before = {real[0]}, set()
        while reached != before:
            before = set(reached)
            reached |= {b for a, b in there if a in reached}
        assert reached == set(real)
    assert set(batch.labels.reshape(-1).tolist()) == {-1, 0, 1}
    if size == "full":
        assert np.mean(batch.labels == -1) == pytest.approx(batches.MISSING_LABELS, abs=0.05)


def test_citations_have_the_weights_of_the_paper() -> None:
    """D^(-1/2) (A + I) D^(-1/2), here from a dense matrix."""
    inputs = BENCHMARKS["gcn"].sizes["tiny"].inputs
    batch = synthetic("gcn", samples=3).batches[0]
    _, senders, receivers, weights = batch.inputs
    assert np.all(np.diff(receivers) >= 0)
    for graph in range(3):
        a, b = senders[graph], receivers[graph]
        assert len(a) == inputs.edges + inputs.nodes
        adjacency, weighted = np.zeros((inputs.nodes, inputs.nodes)), np.zeros((inputs.nodes, inputs.nodes))
        np.add.at(adjacency, (a, b), 1)
        np.add.at(weighted, (a, b), weights[graph])
        assert np.array_equal(adjacency, adjacency.T)
        assert np.all(np.diag(adjacency) == 1)
        scale = np.diag(adjacency.sum(1) ** -0.5)
        assert np.allclose(weighted, scale @ adjacency @ scale, atol=1e-6)
        assert np.sum(batch.labels[graph] >= 0) == inputs.labelled
        assert batch.labels.max() < inputs.classes


def test_chunks_cover_a_batch_in_order() -> None:
    labels = np.arange(batches.EVALUATION_CHUNK * 2 + 1, dtype=np.int32)
    parts = list(batches.Batch((labels.astype(np.float32),), labels).chunks())
    assert [len(part.labels) for part in parts] == [batches.EVALUATION_CHUNK] * 2 + [1]
    assert np.array_equal(np.concatenate([part.labels for part in parts]), labels)
