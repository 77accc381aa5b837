"""Both sides compute the same function, and the certificate that says so fails for each mistake that is planted."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Main, clean_environment, interpreter, rows_of

from duel import certificate
from duel.catalogue import BENCHMARKS, FRAMEWORK_DEFAULT, PRECISIONS
from duel.certificate import STEPS
from duel.record import Row
from duel.report.parity import ZERO_GRADIENT, Deviation, deviations
from duel.states import FINISHED

Arrays = dict[str, np.ndarray]
RATE = 0.1
PER_SAMPLE_START = """
import network, weights
from duel.catalogue import BENCHMARKS
from duel.measure import parameters
shapes = weights.shapes(network.build(BENCHMARKS[sys.argv[1]], "tiny", per_sample=True))
print(parameters.sha256(parameters.initialise(shapes, 0)))
"""
PRECISIONS_ON_A_CPU = ["float64", "fp32", "bf16", "fp16"]


# What 'make test' proves: it has images, batch norms, all that a proof can have. The others are for 'make test-full'.
OFTEN = "cifar10_resnet18"


@pytest.mark.parametrize(
    "benchmark", [name if name == OFTEN else pytest.param(name, marks=pytest.mark.full) for name in BENCHMARKS]
)
def test_both_sides_compute_the_same_and_are_certified(main: Main, checkout: Path, benchmark: str) -> None:
    said = main("validate", "--benchmark", benchmark, timeout=600)
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.splitlines()[-1].startswith(benchmark)
    assert said.stdout.endswith("passed\n")
    found = json.loads((checkout / "results" / "parity" / f"{benchmark}-tiny-cpu.json").read_text())
    assert found["passed"]
    assert found["failures"] == []
    assert found["precisions"] == PRECISIONS_ON_A_CPU
    assert found["code_sha256"] == certificate.code_sha256(benchmark, "tiny")
    # Nothing was left out, and nothing compared that is trivially equal.
    checks = {summary["check"]: summary for summary in found["checks"]}
    parameters, layers = found["shapes"]["parameters"], found["shapes"]["layers"]
    trained = [name for name in parameters if ".running_" not in name]
    for precision in ("float64", "fp32"):
        assert checks[f"{precision} gradients"]["compared"] == len(trained)
        assert checks[f"{precision} layers"]["compared"] > len({name.rpartition(".")[0] for name in trained}) / 2
        assert 0 < checks[f"{precision} layers"]["error"]
    for optimizer in ("sgd", "adamw"):
        assert checks[f"float64 {optimizer} after"]["compared"] == len(parameters)
        assert 0 < checks[f"float64 {optimizer} after"]["error"]
    assert checks["flops"]["compared"] == len(BENCHMARKS[benchmark].sizes)
    assert checks["bf16 error"]["compared"] == checks["fp16 error"]["compared"] == 2
    assert ("fp32 shifted logits" in checks) == hasattr(BENCHMARKS[benchmark].sizes["tiny"].inputs, "height")
    assert layers["logits"][0] == BENCHMARKS[benchmark].sizes["tiny"].batch_size["cpu"]
    # Rows of per-sample gradients start from other weights where there are batch norms: it covers them, too.
    code = f"import sys; sys.path[:1] = ['.', 'jax']\n{PER_SAMPLE_START}"
    command = [interpreter("jax"), "-c", code, benchmark]
    start = subprocess.run(command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, check=True)
    assert start.stdout.strip() in found["weights_sha256"]
    # What was compared is not kept, and is no measurement.
    assert list(checkout.rglob("parity.npz")) == []
    assert len((checkout / "results" / "results.csv").read_text().splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_both_sides_compute_the_same_at_full_size(main: Main, benchmark: str) -> None:
    said = main("validate", "--benchmark", benchmark, "--size", "full", timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    print(said.stdout)  # 'make test-full' shows it


def test_validate_fails_and_says_where_and_what(main: Main, checkout: Path) -> None:
    path = checkout / "jax" / "models" / "gcn.py"
    path.write_text(path.read_text().replace("x = nnx.relu(self.conv1(x, *edges))", "x = self.conv1(x, *edges)"))
    said = main("validate", "--benchmark", "gcn")
    assert said.returncode == 1
    assert "    float64 layers conv2: error" in said.stdout
    assert "FAILED" in said.stdout
    found = json.loads((checkout / "results" / "parity" / "gcn-tiny-cpu.json").read_text())
    assert not found["passed"]
    assert found["failures"][0].startswith("float64 layers conv2")


def test_flops_that_the_catalogue_has_wrong_are_named_with_what_both_sides_count(main: Main, checkout: Path) -> None:
    entries = checkout / "duel" / "benchmarks.py"
    entries.write_text(entries.read_text().replace("flops=124_784_640", "flops=1"))
    said = main("validate", "--benchmark", "gcn")
    assert said.returncode == 1
    failed = [line for line in said.stdout.splitlines() if line.startswith("    ")]
    assert failed == ["    flops full: the catalogue says 1; jax computes 124_784_640, pytorch computes 124_784_640"]


def test_where_a_side_dies_its_error_is_said_and_there_is_no_certificate(main: Main, checkout: Path) -> None:
    path = checkout / "jax" / "models" / "mnist.py"
    path.write_text(path.read_text().replace("def __call__(", "def calls("))
    said = main("validate", "--benchmark", "mnist")
    assert said.returncode == 1
    assert "no certificate: jax failed: TypeError: '_Network' object is not callable" in said.stdout
    assert "main.py logs jax_mnist_0_smoke-" in said.stdout
    assert not (checkout / "results" / "parity").exists()


def test_where_a_late_part_raises_what_both_sides_had_is_compared(main: Main, checkout: Path) -> None:
    """torch.func refuses dropout in per-sample gradients, which come last."""
    path = checkout / "pytorch" / "models" / "mnist.py"
    line = "x = functional.relu(self.fc1(x.flatten(1)))"
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, "x = functional.dropout(functional.relu(self.fc1(x.flatten(1))))"))
    said = main("validate", "--benchmark", "mnist")
    assert said.returncode == 1
    assert "no certificate: pytorch failed: RuntimeError: vmap: called random operation" in said.stdout
    assert "    float64 layers fc2: error" in said.stdout
    assert list(checkout.rglob("*.npz")) == []


def finished_row(results: Path) -> Row:
    """A row that the certificate in ``results`` is for, and the certificate."""
    versions = {"jax": {"jax": "1.0"}, "pytorch": {"torch": "2.0"}}
    made = {"format": 1, "passed": True, "failures": [], "precisions": ["float64", "fp32"], "versions": versions}
    made |= {"code_sha256": "c", "weights_sha256": ["v", "w"]}
    path = certificate.path(results, "mnist", "full", "cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    row = Row(benchmark="mnist", size="full", framework="jax", device_kind="cpu", precision="fp32", target="here")
    return row.replace(status=FINISHED, framework_version="1.0", code_sha256="c", weights_sha256="w")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "verified"),
        ({"code_sha256": "x"}, "the certificate is for other code;"),
        ({"weights_sha256": "x", "framework_version": "1.1"}, "for other weights and jax version;"),
        ({"framework": "pytorch", "framework_version": "2.1"}, "for other pytorch version;"),
        ({"precision": "bf16"}, "covers float64, fp32;"),
        ({"size": "tiny"}, "no certificate; run 'python main.py validate --benchmark mnist --size tiny --target here'"),
        ({"device_kind": "gpu"}, "no certificate;"),
        ({"weights_sha256": None}, "did not get far enough"),
    ],
    ids=str,
)
def test_a_row_is_verified_by_a_certificate_that_is_for_it(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    said = certificate.verdict(finished_row(tmp_path).replace(**changes), tmp_path)
    assert reason in said
    assert (said == certificate.VERIFIED) == (not changes)
    assert said.startswith("unverified: ") or not changes


HEADED = '''"""What it does."""

import os


def f(a):  # why
    """Return a."""
    text = "# no comment"
    return a
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("What it does.", "What it\ndoes, better said.", True),
        ("  # why", "", True),
        ('    """Return a."""\n', "", True),
        ("\n\n\ndef", "\n\ndef", True),
        ("return a", "return -a", False),
        ("# no comment", "# no such comment", False),
        ('    """Return a."""\n', '    b = """Return a."""\n', False),
    ],
)
def test_code_is_other_code_by_its_statements_alone(tmp_path: Path, old: str, new: str, same: bool) -> None:
    assert HEADED.count(old) == 1
    for name, text in (("one.py", HEADED), ("two.py", HEADED.replace(old, new))):
        (tmp_path / name).write_text(text)
    one, two = (certificate._statements(tmp_path / name) for name in ("one.py", "two.py"))
    assert (one == two) == same
    assert b"no comment" in one
    assert b"why" not in one


def test_a_failed_or_damaged_certificate_verifies_nothing(tmp_path: Path) -> None:
    row = finished_row(tmp_path)
    path = certificate.path(tmp_path, "mnist", "full", "cpu")
    good = path.read_text()
    failed = json.loads(good) | {"passed": False, "failures": ["float64 layers fc1: error 1e-2, bound 1e-10"]}
    for text, words in {
        json.dumps(failed): "do NOT compute the same: float64 layers fc1",
        good[:20]: "damaged",
        json.dumps(json.loads(good) | {"format": 2}): "has format 2; this version of Duel reads 1",
    }.items():
        path.write_text(text)
        certificate._read.cache_clear()  # which goes by the file's time: a fast machine's clock may not have moved
        assert words in certificate.verdict(row, tmp_path)


def test_rows_say_whether_they_are_verified_and_learn_it_later(main: Main, checkout: Path) -> None:
    """End to end: measure, see what is missing, validate, and the same rows are verified; other code is not."""
    command = ("--benchmark", "gcn", "--use_case", "1", "--preset", "smoke")
    said = main(*command, "--wait")
    remedy = "run 'python main.py validate --benchmark gcn --size tiny --target local'"
    assert [row["parity"] for row in rows_of(checkout)] == [f"unverified: no certificate; {remedy}"] * 2
    assert "parity" not in said.stdout  # which would bar the pair
    assert main("validate", "--benchmark", "gcn").returncode == 0
    assert [row["parity"] for row in rows_of(checkout)] == ["verified", "verified"]
    path = checkout / "jax" / "training.py"
    path.write_text(path.read_text() + "# changed\n")
    path.write_text(path.read_text() + "CHANGED = True\n")
    main(*command, "--framework", "jax", "--wait")
    assert [row["parity"].partition(";")[0] for row in rows_of(checkout)] == [
        *("verified", "verified"),
        "unverified: the certificate is for other code",
    ]


def example() -> Arrays:
    generator = np.random.default_rng(0)
    shapes = {
        "parameters": {"fc.weight": [10, 5], "key.bias": [5]},
        "layers": {"fc": [4, 10], "key": [4, 5], "logits": [4, 10]},
    }
    logits = generator.standard_normal((4, 10))
    return {
        "shapes": np.array(json.dumps(shapes)),
        "weights_sha256": np.array("abc"),
        "float64/layers/fc": logits,
        "float64/loss": np.array(2.3),
        "float64/gradients/fc.weight": generator.standard_normal((10, 5)),
        "float64/gradients/key.bias": 1e-12 * generator.standard_normal(5),  # truly zero: what is there is rounding
        "float64/sgd losses": generator.uniform(1, 2, STEPS),
        "float64/sgd after/fc.weight": generator.standard_normal((10, 5)),
        "float64/adamw losses": generator.uniform(1, 2, STEPS),
        "float64/adamw after/fc.weight": generator.standard_normal((10, 5)),
        "fp32/layers/fc": logits,
        "fp32/gradients/fc.weight": generator.standard_normal((10, 5)),
        "float64/sensitivity/fc.weight": np.array(1e-7),
        "float64/sensitivity/losses": np.array(1e-7),
        "fp32/sgd losses": generator.uniform(1, 2, STEPS),
        "fp32/shifted logits": logits,
        "bf16/error/logits": np.array(1e-3),
    }


def failures(first: Arrays, second: Arrays) -> list[Deviation]:
    return [deviation for deviation in deviations(first, second, RATE) if not deviation.accepted]


# What must be added to an array, as a share of its bound, to be just at the bound.
SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float64/layers/fc": lambda a: np.full_like(a, np.abs(a).max()),
    "float64/gradients/key.bias": lambda a: np.full_like(
        a, ZERO_GRADIENT["float64"] * np.linalg.norm(example()["float64/gradients/fc.weight"]) / np.sqrt(a.size)
    ),
    "float64/adamw after/fc.weight": lambda a: np.full_like(a, RATE * STEPS),
    "float64/sensitivity/fc.weight": lambda _: np.linalg.norm(example()["float64/gradients/fc.weight"]),
    "float64/sensitivity/losses": lambda _: np.array(1.0),
    "fp32/layers/fc": lambda a: np.full_like(a, np.abs(a).max()),
    "fp32/shifted logits": lambda a: np.full_like(a, np.abs(a).max()),
}


@pytest.mark.parametrize("name", [name for name, array in example().items() if array.dtype.kind == "f"])
def test_a_deviation_beyond_its_bound_is_named_and_one_within_is_not(name: str) -> None:
    right = example()
    known = {f"{d.check} {d.name}".strip(): d.bound for d in deviations(right, right, RATE)}
    label = name.replace("/", " ")
    bound = known[label] - (1 if name.startswith("bf16/error") else 0)  # a ratio of errors: equal ones are 1 apart
    scale = SCALES.get(name, lambda a: a)(right[name])
    for factor in (0.9, 1.2):
        wrong = right | {name: right[name] + factor * bound * scale}
        for pair in ((right, wrong), (wrong, right)):
            found = [f"{d.check} {d.name}".strip() for d in failures(*pair)]
            assert found == ([label] if factor > 1 else [])


@pytest.mark.parametrize("name", ["gradients/fc.weight", "sgd losses"])
def test_what_is_float32_may_move_as_rounding_moves_it_and_no_further(name: str) -> None:
    right = example()
    array = right[f"fp32/{name}"]
    moves = {"gradients/fc.weight": ("fc.weight", np.linalg.norm(array)), "sgd losses": ("losses", 1.0)}
    what, scale = moves[name]
    sensitivity = f"float64/sensitivity/{what}"
    moves_much = {sensitivity: np.array(1e-3 * scale)}
    for factor, count in ((1.8, 0), (2.2, 1)):
        wrong = right | {f"fp32/{name}": array * (1 + factor * 1e-3)}
        assert [str(d).partition(":")[0] for d in failures(wrong, right)] == [f"fp32 {name.replace('/', ' ')}"]
        assert len(failures(wrong | moves_much, right | moves_much)) == count
        # One side alone that says so widens nothing, be it noise or no number at all.
        for said in (moves_much, {sensitivity: np.array(np.nan)}, {sensitivity: np.array(np.inf)}):
            for pair in ((wrong | said, right), (wrong, right | said)):
                names = {f"{d.check} {d.name}".strip() for d in failures(*pair)}
                assert names == {sensitivity.replace("/", " "), f"fp32 {name.replace('/', ' ')}"}
    no_number = {sensitivity: np.array(np.nan)}
    assert failures(right | no_number, right | no_number)


@pytest.mark.parametrize("name", [name for name in example() if name != "shapes"])
def test_what_cannot_be_compared_is_a_failure(name: str) -> None:
    right = example()
    without = {other: array for other, array in right.items() if other != name}
    label = name.replace("/", " ")
    for pair in ((right, without), (without, right)):
        assert any(str(d) == f"{label}: only one side has it" for d in failures(*pair))
    if name.endswith("sha256"):
        bad = [np.array("abd")]
    else:
        values = (np.nan, 0.0) if "error" in name else (np.nan, -1.0, 0.0)  # a distance is never negative
        bad = [right[name] * value for value in values] + [right[name][..., np.newaxis]]
        with np.errstate(invalid="ignore"):
            bad.append(right[name] * np.inf)
    for array in bad:
        if name == "float64/gradients/key.bias" and np.all(np.abs(array) < 1e-6):
            continue  # smaller than what its bound, a share of the whole gradient, can see
        for pair in ((right, right | {name: array}), (right | {name: array}, right)):
            assert label in [f"{d.check} {d.name}".strip() for d in failures(*pair)], array


def test_other_shapes_and_layers_that_one_side_alone_knows_are_failures() -> None:
    right = example()
    shapes = json.loads(str(right["shapes"]))

    def with_shapes(**changes: dict[str, list[int]]) -> Arrays:
        return right | {"shapes": np.array(json.dumps(shapes | changes))}

    other = with_shapes(parameters=shapes["parameters"] | {"fc.weight": [5, 10]})
    assert [str(d) for d in failures(other, right)] == ["shapes of parameters fc.weight: [5, 10] and [10, 5]"]
    more = with_shapes(parameters=shapes["parameters"] | {"more": [1]})
    assert "shapes of parameters more: [1] and None" in [str(d) for d in failures(more, right)]
    unseen = with_shapes(layers={"logits": [4, 10]})
    assert "layers with parameters fc.weight: no layer with it is known to both sides" in [
        str(d) for d in failures(unseen, right)
    ]


def test_every_precision_of_a_processor_is_certified() -> None:
    """All but the one that is never compared."""
    declared = {p.name for p in PRECISIONS.values() if "cpu" in p.device_kinds} - {FRAMEWORK_DEFAULT}
    assert set(PRECISIONS_ON_A_CPU) == {"float64"} | declared
