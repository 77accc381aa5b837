"""Fixtures: a private copy of the checkout to run the real commands in."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from duel.record import COLUMNS

settings.register_profile("duel", deadline=None)  # a busy machine is no defect
settings.load_profile("duel")

ROOT = Path(__file__).resolve().parent.parent
Main = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would change a run: keys and modes of W&B, variables of Slurm and Duel."""
    unwanted = ("WANDB_", "SLURM_", "SBATCH_", "DUEL_", "JAX_", "XLA_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the working tree, in a folder whose path has a space, with the repository's environments."""
    copy = tmp_path / "my duel"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("results/published/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


@pytest.fixture
def main(checkout: Path) -> Main:
    """Runs ``python main.py ...`` in the copy."""

    def run(*arguments: str, timeout: float = 300, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "main.py", *arguments],
            cwd=checkout,
            env=clean_environment() | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def interpreter(framework: str) -> str:
    """The framework's interpreter; its absence is a failure, never a skip."""
    python = ROOT / ".venv" / framework / "bin" / "python"
    assert python.exists(), f"no {python.relative_to(ROOT)}: run 'make {framework}-env' first"
    return str(python)


def rows_of(checkout: Path) -> list[dict[str, str]]:
    with open(checkout / "results" / "results.csv", newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == COLUMNS
        return list(reader)
