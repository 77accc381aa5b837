"""Per-sample gradients are what their names say, by what is computed without them."""

import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import BENCHMARKS, CLIP_NORM, FRAMEWORKS, PRODUCTS
from duel.report.parity import GRADIENTS, ZERO_GRADIENT

Arrays = dict[str, np.ndarray]
BATCH_SIZE = 4
# The others are left to 'make test-full': a certificate compares both frameworks' of every benchmark.
QUICK = ("mnist",)
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in BENCHMARKS]
# Without batch norms, for which group norms would stand: training's gradients are then those of the same network.
WITHOUT = ("mnist", "cifar10", "vit_b16", "gpt2", "bert", "graphnet", "gcn")
PLAIN = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in WITHOUT]
# One side's products for a batch, and the gradients that training has: of the batch, and of each sample alone.
SCRIPT = """
import dataclasses, pathlib, sys
framework, benchmark, precision, mode, output = sys.argv[1:]
sys.path.insert(0, framework)
sys.path.append(".")
import numpy as np
import devices, network, per_sample_gradients, training, weights
from duel.catalogue import BENCHMARKS, PRODUCTS
from duel.measure import batches, parameters
from duel.measure.device import Setting

device = devices.select("cpu")
entry = dataclasses.replace(BENCHMARKS[benchmark], dataset="synthetic")
pool = batches.pool(entry, "tiny", BATCH_SIZE, 0, pathlib.Path())
arrays = parameters.initialise(weights.shapes(network.build(entry, "tiny", True)), 0, randomise=True)
found = {}
for product in PRODUCTS:
    for microbatch in (BATCH_SIZE, 1):
        switches = {} if mode == "default" else {mode: "on"}
        setting = Setting(
            entry, "tiny", precision, device, switches=switches, product=product, microbatch=microbatch
        )
        work = per_sample_gradients.PerSampleGradients(setting, pool, arrays)
        work.compile()
        for name, array in work.named(work.step(0)).items():
            found[f"{product}/{microbatch}/{name}"] = array
if weights.shapes(network.build(entry, "tiny")).keys() == arrays.keys():
    plain = Setting(entry, "tiny", precision, device)
    work = training.Training(plain, pool, arrays)
    found |= {f"batch/{name}": array for name, array in work.gradients(0)[2].items()}
    samples = [pool.batches[0].part(index, BATCH_SIZE) for index in range(BATCH_SIZE)]
    one = training.Training(plain, dataclasses.replace(pool, batches=tuple(samples)), arrays)
    for index in range(BATCH_SIZE):
        found |= {f"sample/{index}/{name}": array for name, array in one.gradients(index)[2].items()}
    found["present"] = np.array([sample.present for sample in samples])
np.savez(output, **found)
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Arrays]:
    known: dict[tuple[str, ...], Arrays] = {}

    def get(framework: str, benchmark: str, precision: str = "float64", mode: str = "default") -> Arrays:
        asked = (framework, benchmark, precision, mode)
        if asked not in known:
            output = tmp_path_factory.mktemp("products") / "found.npz"
            script = SCRIPT.replace("BATCH_SIZE", str(BATCH_SIZE))
            done = subprocess.run(
                [interpreter(framework), "-c", script, *asked, str(output)],
                cwd=ROOT,
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            with np.load(output) as file:
                known[asked] = dict(file)
        return known[asked]

    return get


def part(arrays: Arrays, begin: str) -> Arrays:
    return {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}


def assert_near(found: Arrays, exact: Arrays, precision: str = "float64") -> None:
    """As a certificate compares gradients: per tensor, in which less than a rounding of all of them is nothing."""
    assert found.keys() == exact.keys()
    assert exact
    least = ZERO_GRADIENT[precision] * float(np.linalg.norm([np.linalg.norm(array) for array in exact.values()]))
    for name in exact:
        off = float(np.linalg.norm(found[name] - exact[name]))
        assert off <= GRADIENTS[precision] * max(float(np.linalg.norm(exact[name])), least), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("benchmark", PLAIN)
def test_they_are_those_of_each_sample_alone(products: Callable[..., Arrays], framework: str, benchmark: str) -> None:
    found = products(framework, benchmark)
    alone = [part(found, f"sample/{index}/") for index in range(BATCH_SIZE)]
    stacked = {name: np.stack([one[name] for one in alone]) for name in alone[0]}
    assert_near(part(found, f"materialised/{BATCH_SIZE}/"), stacked)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("benchmark", PLAIN)
def test_their_mean_is_the_gradient_of_the_batch(
    products: Callable[..., Arrays], framework: str, benchmark: str
) -> None:
    """Weighted by each sample's labels: the batch's loss is the mean over all of these."""
    found = products(framework, benchmark)
    share = found["present"] / found["present"].sum()
    made = part(found, f"materialised/{BATCH_SIZE}/")
    assert_near({name: np.tensordot(share, each, 1) for name, each in made.items()}, part(found, "batch/"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("benchmark", EACH)
def test_norms_and_clipped_sums_are_made_of_them(
    products: Callable[..., Arrays], framework: str, benchmark: str
) -> None:
    found = products(framework, benchmark)
    made = part(found, f"materialised/{BATCH_SIZE}/")
    assert all(len(each) == BATCH_SIZE for each in made.values())
    norms = np.sqrt(sum(np.square(each.reshape(BATCH_SIZE, -1)).sum(1) for each in made.values()))
    factors = np.minimum(1, CLIP_NORM / norms)
    assert factors.min() < 1 or benchmark == "gcn"  # whose gradients are all small
    for microbatch in (BATCH_SIZE, 1):
        assert_near(part(found, f"norms/{microbatch}/"), {"norms": norms})
        summed = {name: np.tensordot(factors, each, 1) for name, each in made.items()}
        assert_near(part(found, f"clipped_sum/{microbatch}/"), summed)
    assert_near(part(found, "materialised/1/"), made)


@pytest.mark.parametrize("benchmark", PLAIN)
def test_both_frameworks_have_the_same_in_float32(products: Callable[..., Arrays], benchmark: str) -> None:
    for product in PRODUCTS:
        sides = [part(products(name, benchmark, "fp32"), f"{product}/{BATCH_SIZE}/") for name in FRAMEWORKS]
        assert_near(*sides, "fp32")


@pytest.mark.full
def test_compiled_they_are_the_same(products: Callable[..., Arrays]) -> None:
    found, compiled = (products("pytorch", "mnist", mode=mode) for mode in ("default", "compile"))
    assert_near(part(compiled, "clipped_sum/"), part(found, "clipped_sum/"))


OPACUS = ["mnist", *(pytest.param(name, marks=pytest.mark.full) for name in ("cifar10", "vit_b16"))]


@pytest.mark.parametrize("benchmark", OPACUS)
def test_opacus_has_the_same(products: Callable[..., Arrays], benchmark: str) -> None:
    found, library = (products("pytorch", benchmark, mode=mode) for mode in ("default", "opacus"))
    for product in PRODUCTS:
        assert_near(part(library, f"{product}/"), part(found, f"{product}/"))


def test_in_16_bits_opacus_keeps_its_gradients_in_float32(products: Callable[..., Arrays]) -> None:
    """Its own, of a layer whose results are in 16 bits, would be in these."""
    found, library = (products("pytorch", "mnist", "bf16", mode) for mode in ("default", "opacus"))
    for product in PRODUCTS:
        for name, array in part(library, f"{product}/").items():
            assert array.dtype == np.float32
            right = part(found, f"{product}/")[name]
            assert np.linalg.norm(array - right) < 0.03 * np.linalg.norm(right), name
