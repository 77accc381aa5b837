"""N processes with one part of a batch each compute what one process computes with all of it."""

import functools
import itertools
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import BENCHMARKS, FRAMEWORKS, PRODUCTS

Arrays = dict[str, np.ndarray]
STEPS, BATCH_SIZE = 5, 8
BOUND = 1e-9  # relative, per tensor, in float64
# One with batch norms, one whose labels are masked unevenly, one with attention, and one whose sample is a whole graph.
TRAINED = ("cifar10_resnet18", "graphnet", "gpt2", "gcn")
QUICK = ((TRAINED[0], 2), "clipped_sum")  # in 'make test'
PER_SAMPLE = "cifar10_resnet18"
# One rank of a world: what it computes of the benchmark, in float64, to a file if it is the first.
RANK = """
import dataclasses, os, pathlib, sys
framework, benchmark, size, rank, address, what, every, first, output = sys.argv[1:]
sys.path.insert(0, framework)
sys.path.append(".")
import numpy as np
import devices, network, per_sample_gradients, training, weights
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters
from duel.measure.device import Setting, World

world = World(int(rank), int(size), int(rank), address)
device = devices.select("cpu", world)
entry, trains = BENCHMARKS[benchmark], what == "train"
entry = dataclasses.replace(entry, optimizer=entry.optimizer.at(BATCH_SIZE))
arrays = parameters.initialise(weights.shapes(network.build(entry, "tiny", not trains)), 0, randomise=True)
pool = batches.pool(entry, "tiny", BATCH_SIZE, 0, pathlib.Path())
product = {} if trains else {"product": what, "microbatch": 2}
common = (Setting(entry, "tiny", "float64", device, world, **product), pool, arrays)
if trains:
    work = training.Training(*common)
    work.compile()
    losses = [work.loss(work.step(index)) for index in range(STEPS)]
    found = work.export() | {"losses": np.array(losses)}
else:
    work = per_sample_gradients.PerSampleGradients(*common)
    work.compile()
    found = work.named(work.step(1), int(every), int(first))
assert work.agree(3.0 + world.rank) == 3.0
if world.size > 1:
    assert devices.slowest(3.0 + world.rank, device) == 2.0 + world.size
    reduced = work.all_reduce()
    work.synchronize(reduced)
    if framework == "jax":  # one ready vector, as in PyTorch: making it would count as communication
        import jax
        sizes = [array.size for array in jax.tree.leaves(work._state[0])]
        assert [array.shape for array in jax.tree.leaves(reduced)] == [(sum(sizes),)]
    devices.leave()
if world.rank == 0:
    np.savez(output, **found)
os._exit(0)  # as Duel's own processes end: collectives' threads may crash an interpreter that is taken down
"""


def together(
    framework: str, benchmark: str, ranks: int, what: str, output: Path, every: int = 1, first: int = 0
) -> Arrays:
    """What ``ranks`` processes compute, as the first of them has it; of every so many-th sample from ``first`` on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = RANK.replace("BATCH_SIZE", str(BATCH_SIZE)).replace("STEPS", str(STEPS))
    environment = {name: value for name, value in clean_environment().items() if not name.lower().endswith("_proxy")}

    def one(rank: int) -> "subprocess.CompletedProcess[str]":
        command = [interpreter(framework), "-c", script, framework, benchmark, str(ranks), str(rank), address, what]
        return subprocess.run(
            [*command, str(every), str(first), str(output)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    with ThreadPoolExecutor(ranks) as pool:
        for done in pool.map(one, range(ranks)):
            assert done.returncode == 0, done.stdout + done.stderr
    with np.load(output) as file:
        return dict(file)


def apart(found: Arrays, exact: Arrays) -> float:
    """The largest ‖difference‖ / ‖exact‖ of a tensor; one of less than a millionth of them all counts as that much."""
    assert set(found) == set(exact)
    norms = {name: float(np.linalg.norm(array)) for name, array in exact.items()}
    least = 1e-6 * float(np.linalg.norm(list(norms.values())))
    return max(float(np.linalg.norm(found[name] - exact[name])) / max(norms[name], least) for name in exact)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Arrays]:
    """What one process computes in JAX; each is computed once."""
    return functools.cache(
        lambda *what: together("jax", what[0], 1, what[1], tmp_path_factory.mktemp("alone") / "1.npz")
    )


@pytest.mark.parametrize(
    ("benchmark", "ranks"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.full) for c in itertools.product(TRAINED, (1, 2, 4))],
)
def test_training_is_the_same_on_one_two_and_four_devices(
    tmp_path: Path, alone: Callable[[str, str], Arrays], benchmark: str, ranks: int
) -> None:
    assert BENCHMARKS[benchmark].dataset == "synthetic"
    exact = alone(benchmark, "train")
    assert not np.isclose(exact["losses"][0], exact["losses"][-1], rtol=1e-6)
    for framework in FRAMEWORKS:
        if (framework, ranks) != ("jax", 1):
            found = together(framework, benchmark, ranks, "train", tmp_path / f"{framework}.npz")
            assert apart(found, exact) < BOUND, framework


@pytest.mark.parametrize("product", [pytest.param(p, marks=() if p in QUICK else pytest.mark.full) for p in PRODUCTS])
def test_per_sample_gradients_are_the_same_on_one_and_two_devices(
    tmp_path: Path, alone: Callable[[str, str], Arrays], product: str
) -> None:
    for framework in FRAMEWORKS:
        found = together(framework, PER_SAMPLE, 2, product, tmp_path / f"{framework}.npz")
        assert apart(found, alone(PER_SAMPLE, product)) < BOUND, framework


@pytest.mark.parametrize(("first", "samples"), [(0, [0, 3]), (1, [1])])
def test_of_a_large_product_both_sides_take_the_same_samples_of_a_device(
    tmp_path: Path, alone: Callable[[str, str], Arrays], first: int, samples: list[int]
) -> None:
    """Of its own four, whose number is no multiple of three; those of the other are not gathered."""
    exact = {name: array[samples] for name, array in alone(PER_SAMPLE, "materialised").items()}
    for framework in FRAMEWORKS:
        found = together(framework, PER_SAMPLE, 2, "materialised", tmp_path / f"{framework}.npz", 3, first)
        assert apart(found, exact) < BOUND, framework


def test_a_difference_is_seen() -> None:
    exact = {"a": np.ones(4), "b": np.full(2, 1e-3)}
    assert apart(exact, exact) == 0
    assert apart({"a": np.ones(4), "b": np.full(2, 1.1e-3)}, exact) == pytest.approx(0.1)
