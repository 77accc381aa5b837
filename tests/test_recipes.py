"""Learning rates follow the batch size, and what is trained trains: the opening steps lower the loss."""

import dataclasses
import json
import math
import subprocess

import pytest
from conftest import ROOT, clean_environment, interpreter

from duel import recipes
from duel.catalogue import BENCHMARKS, DEVICE_KINDS, FRAMEWORKS, SGD, AdamW
from duel.measure.batches import POOL_BATCHES

# The opening steps of every benchmark at size tiny, as a row takes them.
OPEN = """
import dataclasses, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
sys.path.append(".")
import devices, network, training, weights
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters, timing
from duel.measure.device import Setting

device, found = devices.select("cpu"), {}
for name, benchmark in BENCHMARKS.items():
    batch_size = benchmark.sizes["tiny"].batch_size["cpu"]
    benchmark = dataclasses.replace(benchmark, optimizer=benchmark.optimizer.at(batch_size))
    arrays = parameters.initialise(weights.shapes(network.build(benchmark, "tiny")), 0)
    pool = batches.pool(benchmark, "tiny", batch_size, 0, pathlib.Path("data"))
    work = training.Training(Setting(benchmark, "tiny", "fp32", device), pool, arrays)
    work.compile()
    found[name] = timing.opening_steps(work, benchmark.curve_steps, lambda step, loss: None)
print(json.dumps(found))
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_opening_steps_of_every_benchmark_lower_the_loss(framework: str) -> None:
    command = [interpreter(framework), "-c", OPEN, framework]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert set(found) == set(BENCHMARKS)
    assert [name for name, losses in found.items() if not losses[-1] < losses[0]] == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_first_and_the_last_opening_step_take_the_same_batch(name: str) -> None:
    """Of synthetic data. With real data many more steps are taken, and any batch will show that they lower the loss."""
    benchmark = BENCHMARKS[name]
    if benchmark.dataset == "synthetic":
        assert benchmark.curve_steps == POOL_BATCHES + 1
    else:
        assert benchmark.curve_steps > 10 * POOL_BATCHES


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_recipe_names_its_source_and_gives_a_rate_at_each_batch_size(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert benchmark.optimizer.source
    for size in benchmark.sizes.values():
        for kind in DEVICE_KINDS:
            samples = size.batch_size[kind]
            recipe = benchmark.optimizer.at(samples)
            assert 0 < recipe.learning_rate < 1
            assert recipe.at(samples) == recipe
            # Nothing but the rate follows the batch size.
            rate = {"learning_rate": recipe.learning_rate, "batch_size": recipe.batch_size}
            assert recipe == dataclasses.replace(benchmark.optimizer, **rate)


def test_sgd_scales_linearly_and_adamw_by_the_square_root() -> None:
    sgd, adamw = SGD(0.1, batch_size=256), AdamW(0.001, batch_size=256)
    for factor in (1 / 128, 0.5, 1, 4):
        samples = round(256 * factor)
        assert sgd.at(samples).learning_rate == pytest.approx(0.1 * factor)
        assert adamw.at(samples).learning_rate == pytest.approx(0.001 * math.sqrt(factor))
        # By way of another batch size it is the same rate.
        assert sgd.at(32).at(samples).learning_rate == pytest.approx(sgd.at(samples).learning_rate)
        assert adamw.at(32).at(samples).learning_rate == pytest.approx(adamw.at(samples).learning_rate)


@pytest.mark.parametrize("recipe", [SGD(0.1), AdamW(0.01)], ids=str)
def test_a_recipe_without_a_batch_size_is_the_same_at_any(recipe: SGD | AdamW) -> None:
    assert recipe.at(1) == recipe.at(4096) == recipe


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    recipe = recipes.Recipe(SGD(0.1, batch_size=64), 128, 10, warmup_epochs=2)
    rates = [recipe.rate(step, 100, 10) for step in range(100)]
    assert max(rates) == pytest.approx(0.2), "scaled to the batch size"
    assert rates.index(max(rates)) == 20
    assert rates[0] == pytest.approx(0.2 / 21)
    assert rates[-1] < 0.0001
    assert rates[60] == pytest.approx(0.1), "half way down"
    assert [recipe.rate(step, 1, 1) for step in range(1)] == [pytest.approx(0.2)]


def test_fewer_epochs_or_larger_batches_shorten_the_warm_up_and_the_average() -> None:
    whole = recipes.RECIPES["vit_b16", "imagenet1k"]
    short = recipes.recipe("vit_b16", "imagenet1k", 30, None)
    assert short.warmup_epochs / short.epochs == whole.warmup_epochs / whole.epochs
    fashion = recipes.RECIPES["mnist", "fashion_mnist"]
    assert recipes.recipe("mnist", "fashion_mnist", None, None) == fashion
    for epochs, batch_size in ((1, 128), (30, 2048)):
        found = recipes.recipe("mnist", "fashion_mnist", epochs, batch_size)
        steps = [fashion.epochs / fashion.batch_size, epochs / batch_size]
        left = [one.average ** (60_000 * each) for one, each in zip((fashion, found), steps, strict=True)]
        assert left[1] == pytest.approx(left[0]), "of the initial weights"


def test_every_recipe_is_for_something_that_fits() -> None:
    for (benchmark, dataset), recipe in recipes.RECIPES.items():
        assert benchmark in recipes.DATASETS[dataset]
        assert recipe.source
        assert recipe.augmentation in recipes.AUGMENTATIONS
    for dataset, names in recipes.DATASETS.items():
        for name in names:
            assert recipes.recipe(name, dataset, 3, 8).epochs == 3
            assert BENCHMARKS[name]


def test_every_network_for_pictures_has_augmentation_on_its_own_sets() -> None:
    own = {("imagenet1k", "imagenet100"): recipes._IMAGENET, ("cifar10", "cifar100"): recipes._CIFAR}
    found = {(n, d): recipes.recipe(n, d, None, None) for sets, names in own.items() for d in sets for n in names}
    assert len(found) == 12
    assert not [key for key, recipe in found.items() if recipe.augmentation == recipes.NONE or recipe.epochs < 50]
    assert {key for key, recipe in found.items() if recipe.aim} == {
        *(("resnet50", "imagenet1k"), ("cifar10_resnet18", "cifar10"))
    }, "an accuracy that was published for another recipe or set is no aim"
