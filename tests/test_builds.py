"""A target whose interpreter has no build for its device is refused before anything is sent; no framework is asked.

What is installed is a real interpreter's metadata: of the tests' own environments, or of packages made up for a build
that cannot be here.
"""

from pathlib import Path

import pytest
from conftest import Main, interpreter, python_with

from duel.errors import UserError
from duel.launch import builds

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
WHERE = "cluster.yaml: targets.here.python.jax"


@pytest.fixture
def checkout(checkout: Path) -> Path:
    return checkout.rename(checkout.with_name("duel"))  # a space cannot stand in a directive


def refusal(python: str, framework: str, kind: str | None) -> str:
    """What is said of it; empty where nothing is."""
    try:
        builds.check_device(python, framework, kind, WHERE)
    except UserError as error:
        return str(error)
    return ""


def torch(folder: Path, *lines: str, version: str = "9.9") -> str:
    """An interpreter with PyTorch, whose torch/version.py has these lines, where there are any."""
    python = python_with(folder, "torch")
    site = folder / "site"
    (site / "torch-9.9.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if lines:
        (site / "torch").mkdir()
        (site / "torch" / "version.py").write_text("\n".join(["raise SystemExit('imported')", *lines, ""]))
    return python


def test_the_environments_of_the_tests_are_seen_as_what_they_are() -> None:
    assert refusal(interpreter("jax"), "jax", "cpu") == ""
    assert refusal(interpreter("jax"), "jax", None) == ""
    assert "has no jax-cuda13-plugin or jax-cuda12-plugin" in refusal(interpreter("jax"), "jax", "gpu")
    assert "has no libtpu" in refusal(interpreter("jax"), "jax", "tpu")
    assert refusal(interpreter("pytorch"), "pytorch", "gpu") == ""  # 'make pytorch-env' takes CUDA's for processors too


@pytest.mark.parametrize(
    ("names", "kind", "taken"),
    [
        (("jax", "jax_cuda13_plugin"), "gpu", True),
        (("jax", "jax-cuda12-plugin"), "gpu", True),
        (("jax", "jax-rocm7-plugin"), "gpu", True),
        (("jax", "libtpu"), "gpu", False),
        (("jax", "libtpu"), "tpu", True),
        (("jax", "jax_cuda13_plugin"), "tpu", False),
        (("jax",), "cpu", True),
        (("flax",), "gpu", True),  # no JAX at all: another check's
    ],
)
def test_jax_needs_the_package_of_its_device(tmp_path: Path, names: tuple[str, ...], kind: str, taken: bool) -> None:
    assert (refusal(python_with(tmp_path, *names), "jax", kind) == "") == taken


def test_a_plug_in_of_another_name_that_announces_itself_will_do(tmp_path: Path) -> None:
    python = python_with(tmp_path, "jax", "a_vendor_s_own")
    announced = tmp_path / "site" / "a_vendor_s_own-9.9.dist-info" / "entry_points.txt"
    announced.write_text("[jax_plugins]\nxla_cuda14 = a_vendor_s_own\n")
    assert refusal(python, "jax", "gpu") == ""
    assert refusal(python, "jax", "tpu"), "it is for GPUs"


@pytest.mark.parametrize(
    ("lines", "version", "taken"),
    [
        (("cuda: Optional[str] = '13.0'", "hip: Optional[str] = None"), "9.9", True),
        (("cuda: Optional[str] = None", "hip: Optional[str] = '7.1'"), "9.9+rocm7", True),
        (("cuda: Optional[str] = None", "hip: Optional[str] = None"), "9.9", False),
        ((), "9.9+cpu", False),
        ((), "9.9", True),  # cannot be told
    ],
)
def test_pytorch_says_in_its_files_what_it_was_built_for(
    tmp_path: Path, lines: tuple[str, ...], version: str, taken: bool
) -> None:
    said = refusal(torch(tmp_path, *lines, version=version), "pytorch", "gpu")
    assert (said == "") == taken
    if not taken:
        assert f"is a CPU build of PyTorch (torch {version}); 'make pytorch-env PYTORCH=cuda13' makes one" in said


def test_mps_is_a_mac_s(tmp_path: Path) -> None:
    said = refusal(torch(tmp_path), "pytorch", "mps")
    assert "pytorch supports mps on macOS only; choose another --device, or change 'device' of the target" in said


def test_a_program_that_does_not_answer_the_question_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 1.0\n")
    path.chmod(0o755)
    assert refusal(str(path), "jax", "gpu") == ""


def test_the_targets_of_the_file_as_it_comes_are_refused_with_the_command_to_give(main: Main, checkout: Path) -> None:
    for target, command in (("h100", "JAX=cuda13"), ("tpu", "JAX=tpu")):
        done = main(*MNIST, "--target", target)
        assert done.returncode == 2
        assert f"cluster.yaml: targets.{target}.python.jax: '.venv/jax/bin/python' has no " in done.stderr
        assert f"'make jax-env {command}' makes one" in done.stderr
        dry = main(*MNIST, "--target", target, "--dry_run")
        assert dry.returncode == 0, dry.stderr
    assert not (checkout / "results" / "runs").exists()
