"""Each mistake that is planted on one side is found by the comparison, and named."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.report.parity import deviations

Arrays = dict[str, np.ndarray]


def prove(framework: str, benchmark: str, root: Path, size: str = "tiny") -> Arrays:
    """What one side writes for a validation, by the script's own command in the checkout at ``root``."""
    preset = {"tiny": "smoke", "full": "standard"}[size]
    command = [interpreter(framework), f"{framework}/run.py", "--benchmark", benchmark, "--use_case", "0"]
    command += ["--preset", preset, "--device", "cpu"]
    environment = clean_environment() | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = done.stdout.partition("run ")[2].partition(",")[0]
    path = root / "results" / "runs" / run_id / "parity.npz"
    with np.load(path) as file:
        arrays = dict(file)
    path.unlink()
    return arrays


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Arrays]:
    """What PyTorch writes for a tiny benchmark; each is computed once."""
    root = copy_of_code(tmp_path_factory.mktemp("right"))
    known: dict[str, Arrays] = {}

    def get(benchmark: str) -> Arrays:
        if benchmark not in known:
            known[benchmark] = prove("pytorch", benchmark, root)
        return known[benchmark]

    return get


def copy_of_code(root: Path) -> Path:
    for folder in ("duel", *FRAMEWORKS):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "results").mkdir()
    return root


# A mistake on the JAX side: the benchmark that shows it, the file, what is replaced by what, and how the first check
# that fails begins.
MISTAKES = {
    "SAME padding at stride 2": (
        "mobilenet_v3_small",
        "models/_layers.py",
        [("[(self.padding, self.padding)] * 2", '"SAME"')],
        "float64 layers features.0.0:",
    ),
    "tanh GELU": ("vit_b16", "models/vit_b16.py", [("approximate=False", "approximate=True")], "float64 layers"),
    "epsilon of a layer norm": ("bert", "models/bert.py", [("1e-12", "1e-5")], "float64 layers"),
    "epsilon of a batch norm": (
        "cifar10_resnet18",
        "models/_layers.py",
        [("epsilon: float = 1e-5", "epsilon: float = 1.01e-5")],
        "float64 layers bn1:",
    ),
    "momentum of a batch norm": (
        "cifar10_resnet18",
        "models/_layers.py",
        [("momentum: float = 0.1", "momentum: float = 0.9")],
        "float64 sgd after bn1.running_mean:",
    ),
    "biased running variance": (
        "cifar10_resnet18",
        "models/_layers.py",
        [("var * (count / (count - 1))", "var")],
        "float64 sgd after bn1.running_var:",
    ),
    "decay behind the momentum": (
        "mnist",
        "training.py",
        [
            ("optax.add_decayed_weights(recipe.weight_decay),\n", ""),
            ("momentum),\n", "momentum),\noptax.add_decayed_weights(-recipe.weight_decay * recipe.learning_rate),\n"),
        ],
        "float64 sgd",
    ),
    "decay before AdamW": (
        "gcn",
        "training.py",
        [
            ("return optax.adamw(", "return optax.chain(optax.add_decayed_weights(recipe.weight_decay), optax.adamw("),
            ("weight_decay=recipe.weight_decay\n", "weight_decay=0.0)\n"),
        ],
        "float64 adamw",
    ),
    "transposed kernel": (
        "mnist",
        "weights.py",
        [("4: (2, 3, 1, 0)}", "4: (3, 2, 1, 0)}")],
        "float64 layers",
    ),
    "order of flattening": (
        "mnist",
        "models/mnist.py",
        [("x.transpose(0, 3, 1, 2)", "x")],
        "float64 layers fc1:",
    ),
    "one-pass variance": (
        "cifar10_resnet18",
        "models/_layers.py",
        [("jnp.square(wide - mean).mean((0, 1, 2))", "jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)")],
        "fp32 shifted logits:",
    ),
    "missing residual": (
        "cifar10_resnet18",
        "models/cifar10_resnet18.py",
        [("out + x", "out")],
        "float64 layers layer1.0:",
    ),
    "missing mask of labels": (
        "graphnet",
        "training.py",
        [("each.mean(where=there)", "each.mean()")],
        "float64 loss:",
    ),
    "attention that is not causal": ("gpt2", "models/gpt2.py", [("causal=True", "causal=False")], "float64 layers"),
    "half precision that is none": (
        "mnist",
        "network.py",
        [('"bf16": jnp.bfloat16', '"bf16": jnp.float32')],
        "bf16 error",
    ),
    "matrix products of half precision in float32": (
        "mnist",
        "models/_layers.py",
        [("rows @ cast(kernel)", "(rows.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(x.dtype)")],
        "float64 layers fc1:",
    ),
}


# 'make test' has one, through the whole command: tests/test_parity.py.
@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_side_fails_and_is_named(tmp_path: Path, right: Callable[[str], Arrays], mistake: str) -> None:
    benchmark, file, edits, name = MISTAKES[mistake]
    root = copy_of_code(tmp_path)
    path = root / "jax" / file
    for old, new in edits:
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} is no longer in {file}, or more than once"
        path.write_text(text.replace(old, new))
    wrong = prove("jax", benchmark, root)
    found = [
        str(d)
        for d in deviations(wrong, right(benchmark), BENCHMARKS[benchmark].optimizer.learning_rate)
        if not d.accepted
    ]
    assert found
    assert found[0].startswith(name), found[:5]
