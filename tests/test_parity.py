"""Both frameworks compute the same function: forward pass, gradients, ten optimizer steps, running statistics.

Each side runs in its own interpreter and writes what it computed; the bounds are in duel/report/parity.py.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.report.parity import BOUNDS, deviations, failures

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    benchmark: str
    size: str
    precision: str
    steps: int = 10
    batch_size: int | None = None

    def __str__(self) -> str:
        return f"{self.benchmark}-{self.size}-{self.precision}-{self.batch_size or 'usual'}-batch"


# In fp32 a gradient is not a continuous function of what was rounded: it jumps where a ReLU's input crosses zero. With
# the million activations of eight images that happens at about every second seed (float64 rounds 1e9 times finer and
# never showed it), and each framework is then as far from its own float64 gradient as from the other's. So in fp32 the
# gradients of ResNet-50 are held to their bound on two images, where six of six seeds stay below it, and ten steps on
# 64, where the jumps average out.
CASES = [
    Case("mnist", "tiny", "float64"),
    Case("mnist", "tiny", "fp32"),
    Case("mnist", "full", "float64"),
    Case("mnist", "full", "fp32"),
    Case("resnet50", "tiny", "float64"),
    Case("resnet50", "tiny", "fp32", steps=0, batch_size=2),
    Case("resnet50", "full", "float64", steps=0, batch_size=2),
]
TEN_STEPS_IN_FP32 = Case("resnet50", "tiny", "fp32", batch_size=64)
PARAMETERS = {"mnist": 26_010, "resnet50": 25_557_032}


def run(framework: str, case: Case, output: Path, root: Path = ROOT) -> Arrays:
    command = [interpreter(framework), "-W", "error", f"{framework}/parity.py", "--benchmark", case.benchmark]
    command += ["--size", case.size, "--precision", case.precision, "--steps", str(case.steps)]
    command += ["--output", str(output), *(["--batch_size", str(case.batch_size)] if case.batch_size else [])]
    done = subprocess.run(
        command, cwd=root, env=clean_environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(output) as file:
        return dict(file)


@pytest.fixture(scope="session")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Arrays]:
    """What a framework computes in a case; each is computed once."""
    folder = tmp_path_factory.mktemp("parity")
    known: dict[tuple[str, Case], Arrays] = {}

    def get(framework: str, case: Case) -> Arrays:
        if (framework, case) not in known:
            known[framework, case] = run(framework, case, folder / f"{framework}-{case}.npz")
        return known[framework, case]

    return get


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_sides_compute_the_same(computed: Callable[[str, Case], Arrays], case: Case) -> None:
    jax, pytorch = (computed(framework, case) for framework in FRAMEWORKS)
    assert failures(jax, pytorch, case.precision) == []
    # Nothing was left out, and nothing compared that is trivially equal.
    kinds = {name.partition("/")[0] for name in jax}
    expected = {"weights_sha256", "data_sha256", "logits", "loss", "gradient"} | (
        {"losses", "after"} if case.steps else set()
    )
    assert kinds == expected
    trained = {name.removeprefix("gradient/") for name in jax if name.startswith("gradient/")}
    assert trained == {name for name in trained if np.any(jax[f"gradient/{name}"])}
    if case.steps:
        assert len(jax["losses"]) == case.steps
        assert len(set(jax["losses"].tolist())) == case.steps
        after = {name.removeprefix("after/") for name in jax if name.startswith("after/")}
        norms = {name.rpartition(".")[0] for name in trained if ".bn" in f".{name}" or "downsample.1" in name}
        assert after == trained | {f"{norm}.running_{what}" for norm in norms for what in ("mean", "var")}
    for name, array in jax.items():
        if array.dtype.kind == "f" and name not in ("loss", "losses"):
            assert (
                array.dtype
                == pytorch[name].dtype
                == np.dtype(np.float64 if case.precision == "float64" else np.float32)
            )


def test_ten_steps_of_resnet50_in_fp32_lose_alike(computed: Callable[[str, Case], Arrays]) -> None:
    jax, pytorch = (computed(framework, TEN_STEPS_IN_FP32) for framework in FRAMEWORKS)
    found = {deviation.name: deviation for deviation in deviations(jax, pytorch, "fp32")}
    assert len(jax["losses"]) == 10
    for name in ("logits/eval", "logits/train", "loss", "losses"):
        assert found[name].accepted, found[name]


@pytest.mark.parametrize(
    "case", [case for case in CASES if (case.size, case.precision) == ("full", "float64")], ids=str
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_number_of_parameters_is_that_of_the_papers(
    computed: Callable[[str, Case], Arrays], framework: str, case: Case
) -> None:
    arrays = computed(framework, case)
    assert (
        sum(array.size for name, array in arrays.items() if name.startswith("gradient/")) == PARAMETERS[case.benchmark]
    )


# A mistake in the JAX side, as text to replace, and a kind of array that must give it away.
MISTAKES = [
    (
        Case("mnist", "tiny", "float64"),
        "training.py",
        [
            ("optax.add_decayed_weights(recipe.weight_decay),\n", ""),
            ("momentum),\n", "momentum),\noptax.add_decayed_weights(-recipe.weight_decay * recipe.learning_rate),\n"),
        ],
        "after/",
    ),
    (Case("mnist", "tiny", "float64", steps=0), "models/mnist.py", [("x.transpose(0, 3, 1, 2)", "x")], "logits/"),
    (
        Case("resnet50", "tiny", "float64", steps=1),
        "models/resnet50.py",
        [("var * (count / (count - 1))", "var")],
        "after/bn1.running_var",
    ),
    (Case("resnet50", "tiny", "float64", steps=0), "models/resnet50.py", [("0.1, 1e-5", "0.1, 1.01e-5")], "logits/"),
    (
        Case("resnet50", "tiny", "float64", steps=0),
        "models/resnet50.py",
        [("padding=((1, 1), (1, 1))", "padding=((0, 1), (0, 1))")],
        "logits/",
    ),
]


@pytest.mark.parametrize(
    ("case", "file", "edits", "name"), MISTAKES, ids=["decay after momentum", "flatten", "biased", "epsilon", "padding"]
)
def test_a_mistake_in_one_side_is_found(
    tmp_path: Path,
    computed: Callable[[str, Case], Arrays],
    case: Case,
    file: str,
    edits: list[tuple[str, str]],
    name: str,
) -> None:
    for folder in ("duel", "jax"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "jax" / file
    for old, new in edits:
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} is no longer in {file}"
        path.write_text(text.replace(old, new))
    wrong = run("jax", case, tmp_path / "wrong.npz", tmp_path)
    found = failures(wrong, computed("pytorch", case), case.precision)
    assert any(failure.startswith(name) for failure in found), found


def example() -> Arrays:
    generator = np.random.default_rng(0)
    return {
        "weights_sha256": np.array("abc"),
        "logits/eval": generator.standard_normal((4, 10)),
        "loss": np.array(2.3),
        "gradient/fc.weight": generator.standard_normal((10, 5)),
        "gradient/key.bias": 1e-12 * generator.standard_normal(5),  # truly zero: what is there is rounding
        "losses": generator.uniform(1, 2, 10),
        "after/bn1.running_var": generator.uniform(1, 2, 5),
    }


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", [name for name, array in example().items() if array.dtype.kind == "f"])
def test_a_deviation_beyond_its_bound_is_named_and_one_within_is_not(precision: str, name: str) -> None:
    right = example()
    bounds = {deviation.name: deviation.bound for deviation in deviations(right, right, precision)}
    if name not in bounds:
        assert precision == "fp32"
        assert name.startswith("after/")
        return
    scale = right[name]
    if name == "logits/eval":
        scale = np.full_like(scale, np.abs(scale).max())
    elif name == "gradient/key.bias":
        scale = np.full_like(scale, 1e-6 * np.linalg.norm(right["gradient/fc.weight"]) / np.sqrt(scale.size))
    for factor in (0.9, 1.2):
        wrong = right | {name: right[name] + factor * bounds[name] * scale}
        for pair in ((right, wrong), (wrong, right)):
            found = failures(*pair, precision)
            assert [failure.partition(":")[0] for failure in found] == ([name] if factor > 1 else [])


@pytest.mark.parametrize("name", example())
def test_what_cannot_be_compared_is_a_failure(name: str) -> None:
    right = example()
    without = {other: array for other, array in right.items() if other != name}
    assert f"{name}: only one side has it" in failures(right, without, "float64")
    assert f"{name}: only one side has it" in failures(without, right, "float64")
    if name.endswith("sha256"):
        bad = [np.array("abd")]
    else:
        bad = [right[name] * value for value in (np.nan, -1.0, 0.0)] + [right[name][..., np.newaxis]]
        with np.errstate(invalid="ignore"):
            bad.append(right[name] * np.inf)
    for array in bad:
        if name == "gradient/key.bias" and not np.any(array != array) and np.all(np.abs(array) < 1e-6):
            continue  # smaller than what its bound, a share of the whole gradient, can see
        for pair in ((right, right | {name: array}), (right | {name: array}, right)):
            assert [failure.partition(":")[0] for failure in failures(*pair, "float64")] == [name]


def test_every_benchmark_has_cases_in_both_sizes_and_precisions() -> None:
    assert {(case.benchmark, case.size) for case in CASES} == {
        (name, size) for name in BENCHMARKS for size in ("tiny", "full")
    }
    assert {(case.benchmark, case.precision) for case in CASES} == {(name, p) for name in BENCHMARKS for p in BOUNDS}
