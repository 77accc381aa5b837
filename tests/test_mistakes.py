"""Each mistake that is planted on one side is found, and named.

By the proof in float64 (``MISTAKES``), and by what each row proves of itself, run to the verdict (tests/mistakes.txt):
there they are where the float64 proof does not look, in what is compiled, in the clock, after the tenth step.
"""

import importlib.util
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, clean_environment, interpreter
from test_paired import faults

from duel.catalogue import FRAMEWORKS
from duel.certificate import RATE
from duel.evidence import Evidence
from duel.record import Row
from duel.report.parity import deviations
from duel.results import Results
from duel.table import merge

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
        [("[(padding, padding)] * 2", '"SAME"')],
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
    "decay applied after the momentum": (
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


def plant(path: Path, edits: list[tuple[str, str]]) -> None:
    text = f"\n{path.read_text()}"
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is no longer in {path.name}, or more than once"
        text = text.replace(old, new)
    path.write_text(text[1:])


# 'make test' has one, through the whole command: tests/test_parity.py.
@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_side_fails_and_is_named(tmp_path: Path, right: Callable[[str], Arrays], mistake: str) -> None:
    benchmark, file, edits, name = MISTAKES[mistake]
    root = copy_of_code(tmp_path)
    plant(root / "jax" / file, edits)
    wrong = prove("jax", benchmark, root)
    found = [str(d) for d in deviations(wrong, right(benchmark), RATE) if not d.accepted]
    assert found
    assert found[0].startswith(name), found[:5]


@dataclass(frozen=True)
class Planted:
    """A block of tests/mistakes.txt."""

    name: str
    file: str
    pair: str
    named: str
    lines: list[str]

    def plant(self, root: Path) -> None:
        plant(root / self.file, list(self._hunks()))

    def _hunks(self) -> Iterator[tuple[str, str]]:
        """Whole lines that are there, and those that replace them."""
        sides = {"-": "\n", "+": "\n"}
        for line, following in itertools.pairwise([*self.lines, "-"]):
            sides[line[0]] += f"{line[1:]}\n"
            if line[0] == "+" and following[0] == "-":
                yield sides["-"], sides["+"]
                sides = {"-": "\n", "+": "\n"}


def all_planted() -> list[Planted]:
    _, *blocks = (ROOT / "tests" / "mistakes.txt").read_text().strip().split("\n\n")
    return [Planted(*block.split("\n")[:4], block.split("\n")[4:]) for block in blocks]


PLANTED = all_planted()
QUICK = 8  # of them 'make test' runs
QUICK_CONTROLS = ("mnist 2 --devices 2 --spawn", "mnist 3 --products clipped_sum --microbatch 8")


def test_every_mistake_still_fits_the_code_that_it_is_planted_in(tmp_path: Path) -> None:
    """Most of them run in 'make test-full' alone."""
    for place, mistake in enumerate(PLANTED):
        mistake.plant(copy_of_code(tmp_path / f"planted_{place}"))
    for place, (_, file, edits, _) in enumerate(MISTAKES.values()):
        plant(copy_of_code(tmp_path / f"float64_{place}") / "jax" / file, edits)


def test_every_slow_operation_of_the_benchmark_still_fits_too() -> None:
    spec = importlib.util.spec_from_file_location("planted", ROOT / "benchmarks" / "planted.py")
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    for name, one in planted.PLANTS.items():
        assert (ROOT / one.file).read_text().count(one.old) == 1, name


def measured(root: Path, pair: str) -> list[Row]:
    """The rows of a paired run, of the code at ``root``."""
    benchmark, use_case, *options = pair.split()
    size = [] if "--size" in options else ["--size", "tiny"]
    command = [interpreter("jax"), "jax/run.py", "--benchmark", benchmark, "--use_case", use_case, "--preset", "smoke"]
    command += ["--device", "cpu", "--paired", f"pytorch={interpreter('pytorch')}", *size, *options]
    environment = clean_environment() | {"WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    run_id = done.stdout.partition("run ")[2].partition(",")[0]
    rows = [row for row in merge(Results(root / "results")) if row.run_id == run_id]
    assert rows, done.stdout + done.stderr
    return rows


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake.name, marks=[] if place < QUICK else [pytest.mark.full])
        for place, mistake in enumerate(PLANTED)
    ],
)
def test_a_mistake_in_what_is_timed_bars_the_pair_and_is_named(tmp_path: Path, mistake: Planted) -> None:
    root = copy_of_code(tmp_path)
    mistake.plant(root)
    found = faults(measured(root, mistake.pair)[-1])  # of several devices, where one is measured first
    assert any(mistake.named in one for one in found), found
    print(mistake.name, found, sep="\n    ")  # 'make test-full' shows it


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[] if pair in QUICK_CONTROLS else [pytest.mark.full])
        for pair in dict.fromkeys(mistake.pair for mistake in PLANTED)
    ],
)
def test_without_a_mistake_nothing_bars_the_pair(tmp_path: Path, pair: str) -> None:
    row = measured(copy_of_code(tmp_path), pair)[-1]
    assert faults(row) == []
    assert row.evidence_sha256
    curves = [Evidence.from_bytes(file.read_bytes()) for file in tmp_path.glob("results/runs/*/evidence/*.npz")]
    assert {len(each.curve) for each in curves} == {row.loss_steps or 0}
    assert {len(each.moved_curve) for each in curves} <= {0, row.loss_steps or 0}  # none where steps took too long
    assert "before and after the clock" in str(row.proved)
    assert row.proof_seconds


def test_there_are_forty_mistakes() -> None:
    assert len({mistake.name for mistake in PLANTED}) >= 40
