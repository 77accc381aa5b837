"""Fixtures: a private copy of the checkout to run the real commands in."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from slurm_cluster import SlurmCluster, missing_programs

from duel.record import COLUMNS

# Tests and their jobs run beside each other, and OpenMP's threads would wait for each other by spinning: three proofs
# of PyTorch at once took 23 s so, and 8 s where they sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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


NO_SLURM = "NOT TESTED: Slurm is not installed"


@contextmanager
def start_slurm(*, accounting: bool) -> Iterator[SlurmCluster]:
    """Where Slurm is not installed its tests are skipped, and say so; where CI is set that is a failure."""
    if missing := missing_programs():
        reason = f"{NO_SLURM} ({', '.join(missing)}): run 'make slurm' first"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with SlurmCluster(accounting=accounting) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_of_session() -> Iterator[SlurmCluster]:
    with start_slurm(accounting=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_without_accounting_of_session() -> Iterator[SlurmCluster]:
    with start_slurm(accounting=False) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_of_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """A real Slurm with every node free. It is this worker's; what a test breaks or leaves running ends with the test.

    ``main(..., **slurm.environment)`` runs Duel against it.
    """
    slurm_of_session.wait_idle()
    yield slurm_of_session
    slurm_of_session.wait_idle()


@pytest.fixture
def slurm_without_accounting(slurm_without_accounting_of_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same at a site that keeps no accounts, so that sacct knows nothing."""
    slurm_without_accounting_of_session.wait_idle()
    yield slurm_without_accounting_of_session
    slurm_without_accounting_of_session.wait_idle()


@pytest.fixture
def slurm_environment(slurm: SlurmCluster) -> dict[str, str]:
    """The whole environment of a process that shall find the cluster, for tests that start one themselves."""
    return clean_environment() | slurm.environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slurm's tests first: they wait more than they compute, and behind the others a worker would wait with them."""
    items.sort(key=lambda item: item.path.name != "test_slurm.py")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """The last thing to be read: how many tests did not run for want of Slurm."""
    yield
    skipped = [report for report in terminalreporter.getreports("skipped") if NO_SLURM in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{NO_SLURM}, so {len(skipped)} tests did not run: 'make slurm' installs it",
            yellow=True,
            bold=True,
        )
