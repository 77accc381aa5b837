"""The trainers of both sides: the same mathematics in float64, and the same bits after a checkpoint."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FRAMEWORKS_PYTHON, ROOT

from duel.catalogue import FRAMEWORKS

TRAIN = """
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / sys.argv[2]))
sys.path.append(sys.argv[1])
import numpy as np
import devices, network, weights
from duel.catalogue import BENCHMARKS, SGD, AdamW
from duel.measure import batches, parameters
from duel.measure.device import Setting
from duel.recipes import Recipe
from trainer import Trainer

name, kind, smoothing, average, precision = sys.argv[3:8]
switches = dict.fromkeys(sys.argv[9:], "on")
optimizer = {"sgd": SGD(0.05), "adamw": AdamW(0.01, weight_decay=0.1)}[kind]
benchmark = dataclasses.replace(BENCHMARKS[name], optimizer=optimizer)
recipe = Recipe(optimizer, 8, 1, smoothing=float(smoothing), average=float(average))
device = devices.select("cpu")
pool = batches.pool(dataclasses.replace(benchmark, dataset="synthetic"), "tiny", 8, 0, Path("none"))
initial = parameters.initialise(weights.shapes(network.build(benchmark, "tiny")), 0)
work = Trainer(Setting(benchmark, "tiny", precision, device, switches=switches, recipe=recipe), pool, initial)
work.compile()


def steps(first, end):
    rates = [0.02, 0.05, 0.04, 0.01, 0.003, 0.02]
    fed = [pool.batches[number] for number in range(first, end)]
    return [work.loss(work.advance(work.put(b, b.present), rates[n])) for n, b in enumerate(fed, first)]


losses = steps(0, 3)
np.savez(sys.argv[8], **work.snapshot())  # a file keeps no strides
kept = dict(np.load(sys.argv[8]))
losses += steps(3, 6)
after = work.export()
scores = work.evaluate(pool.batches[7])
work.load(initial)
work.restore(kept)
again = steps(3, 6)
same = {n: np.array_equal(a, after[n]) for n, a in work.export().items()}
assert again == losses[3:] and all(same.values()) and work.evaluate(pool.batches[7]) == scores, (again, losses, same)
np.savez(sys.argv[8], losses=losses, scores=scores, **{f"w/{n}": a for n, a in after.items()})
"""


def trained(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What both sides compute."""
    return [trained_by(framework, folder, *arguments) for framework in FRAMEWORKS]


def trained_by(framework: str, folder: Path, *arguments: str, switches: tuple[str, ...] = ()) -> dict[str, Any]:
    python = dict(zip(FRAMEWORKS, FRAMEWORKS_PYTHON, strict=True))[framework]
    out = folder / f"{framework}.npz"
    command = [python, "-c", TRAIN, str(ROOT), framework, *arguments, str(out), *switches]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return dict(np.load(out))


@pytest.mark.parametrize(
    ("name", "optimizer", "smoothing", "average"),
    [("cifar10_resnet18", "sgd", "0.1", "0.9"), ("cifar10", "adamw", "0", "0"), ("vit_b16", "adamw", "0.2", "0.99")],
)
def test_both_sides_train_alike(tmp_path: Path, name: str, optimizer: str, smoothing: str, average: str) -> None:
    jax, pytorch = trained(tmp_path, name, optimizer, smoothing, average, "float64")
    assert jax.keys() == pytorch.keys()
    for what, array in jax.items():
        assert np.allclose(array, pytorch[what], rtol=1e-7, atol=1e-9), what


@pytest.mark.parametrize("name", ["gcn", "graphnet", "gpt2"])
def test_labels_that_are_missing_or_many_count_alike(tmp_path: Path, name: str) -> None:
    jax, pytorch = trained(tmp_path, name, "sgd", "0", "0.5", "float64")
    assert np.allclose(jax["losses"], pytorch["losses"], rtol=1e-9)
    assert np.allclose(jax["scores"], pytorch["scores"], rtol=1e-9)


def test_smoothing_and_the_average_change_what_they_should(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, "cifar10", "sgd", "0", "0", "float64")
    smooth, _ = trained(tmp_path, "cifar10", "sgd", "0.5", "0", "float64")
    averaged, _ = trained(tmp_path, "cifar10", "sgd", "0", "0.9", "float64")
    assert not np.allclose(plain["losses"], smooth["losses"], rtol=1e-3)
    assert np.array_equal(plain["losses"], averaged["losses"]), "the average is evaluated, not trained"
    assert plain["scores"][0] != averaged["scores"][0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_moments_from_a_file_are_in_the_order_of_their_parameters(tmp_path: Path, optimizer: str) -> None:
    """With kernels as NHWC in memory, which the fused optimizer goes through without looking at strides."""
    switches = ("channels_last", "fused_optimizer")
    trained_by("pytorch", tmp_path, "cifar10_resnet18", optimizer, "0", "0.9", "fp32", switches=switches)
