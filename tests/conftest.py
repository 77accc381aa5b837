"""Fixtures: a private copy of the checkout to run the real commands in."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from playwright.sync_api import Browser, sync_playwright
from slurm_cluster import SlurmCluster, missing_programs

from duel import variables
from duel.launch import intent, queue
from duel.measure.ranks import shares
from duel.record import COLUMNS
from duel.results import Results, Run

# Each worker's tests and jobs have cores of their own, as a framework's threads wait for each other by spinning: where
# two runs of both sides shared two cores, they took 51 and 133 s, and 28 and 31 s with a core each.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and sys.platform == "linux":
    os.sched_setaffinity(0, shares(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))[int(worker.removeprefix("gw"))])
settings.register_profile("duel", deadline=None)  # a busy machine is no defect
settings.load_profile("duel")

ROOT = Path(__file__).resolve().parent.parent
Main = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would change a run.

    That is keys and modes of W&B, variables of Slurm and Duel, and those that frameworks obey, but for threads.
    """
    unwanted = ("WANDB_", "SLURM_", "SBATCH_", "DUEL_")
    obeyed = {name for name in variables.obeyed(os.environ) if not variables.matches(name, variables.THREADS)}
    return {name: os.environ[name] for name in os.environ if not name.startswith(unwanted) and name not in obeyed}


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """What is started inside ends on Ctrl-C even where these tests were started by a script's '&', which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the working tree without its records, in a folder whose path has a space, with its environments."""
    copy = tmp_path / "my duel"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("results/published/", "results/tuned/")):
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


FRAMEWORKS_PYTHON = [str(ROOT / ".venv" / framework / "bin" / "python") for framework in ("jax", "pytorch")]
COPIED = ("export DUEL_CHECKOUT=", "export DUEL_COMMIT=")


def without_copy(script: str) -> str:
    """A run's script as the one to start by hand has it: with the code of the checkout instead of its copy."""
    lines = [line for line in script.splitlines() if not line.startswith(("# sha256", *COPIED))]
    return re.sub(r"results/trees/[0-9a-f]{12}/", "", "\n".join(lines))


def packages(folder: Path, *names: str) -> Path:
    """A folder in which ``names`` are installed as far as their metadata goes."""
    for name in names:
        info = folder / f"{name}-9.9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    return folder


def python_with(folder: Path, *names: str) -> str:
    """An interpreter that has ``names`` as far as their metadata goes."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{packages(folder / "site", *names)}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def rows_of(checkout: Path) -> list[dict[str, str]]:
    with open(checkout / "results" / "results.csv", newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == COLUMNS
        return list(reader)


NOT_TESTED = "NOT TESTED"


def needs(missing: list[str], target: str) -> None:
    """What ``missing`` programs test is skipped, and says so; where CI is set that is a failure."""
    if missing:
        reason = f"{NOT_TESTED}: {', '.join(missing)} not installed: run 'make {target}' first"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    needs([] if Path(CHROMIUM).exists() else ["chromium"], "page-tools")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def start_slurm(*, accounting: bool, **more: int) -> Iterator[SlurmCluster]:
    needs(missing_programs(), "slurm")
    with SlurmCluster(accounting=accounting, **more) as cluster:
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


REAL = "{jax: .venv/jax/bin/python, pytorch: .venv/pytorch/bin/python}"


# For 'python -c': submits that many jobs, as main.py does, without its checks beforehand.
SUBMIT = """
import sys
from pathlib import Path
from duel.job import Job
from duel.launch import cluster, slurm, submit
from duel.results import Results

number = int(sys.argv[1])
name, target = cluster.load(Path("cluster.yaml")).target(None)
kinds = [(f, b, p, r) for b in ("mnist", "resnet50", "cifar10", "vit_b16") for p in ("smoke", "standard")
         for r in ("fp32", "bf16", "tf32") for f in ("jax", "pytorch")]
launches = submit.plan([Job(f, b, 1, p, r, None, name) for f, b, p, r in kinds[:number]], target)
for run in slurm.Slurm().start(launches, Results(Path("results")), lambda words: print(words, flush=True)):
    print("started", run.id, run.launch().slurm_job_id, flush=True)
"""


class Site:
    """A checkout on a login node of the test cluster."""

    def __init__(self, folder: Path, slurm: SlurmCluster) -> None:
        self.folder, self.slurm = folder, slurm
        self.environment = clean_environment() | slurm.environment
        self.results = Results(folder / "results")
        self._before: set[str] = set()
        self.forget_jobs()

    def target(
        self, *directives: str, python: str = REAL, launcher: str = "srun --cpu-bind=none", more: str = ""
    ) -> None:
        """Write a cluster.yaml whose one Slurm target, 'site', has these lines."""
        text = "default: site\ntargets:\n  site:\n    scheduler: slurm\n    pause: 0\n"
        text += f"    launcher: {launcher}\n    python: {python}\n    directives:\n"
        text += "".join(f"      - {json.dumps(line)}\n" for line in directives)
        (self.folder / "cluster.yaml").write_text(text + more)

    def start_controller(self) -> None:
        """Returns when it has heard of its nodes, too: before, it refuses what they could take."""
        self.slurm.start_controller()
        self.wait(lambda: "unk" not in self.slurm.run("sinfo", "--noheader", "-o", "%t").stdout)

    def stand_in(self, name: str, *lines: str) -> str:
        """An interpreter for both sides that is a few lines of bash; for ``target``."""
        path = self.folder / f"stand-in-{name}"
        path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        path.chmod(0o755)
        return f"{{jax: {json.dumps(str(path))}, pytorch: {json.dumps(str(path))}}}"

    def popen(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        with heeding_ctrl_c():
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=self.environment | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def main(self, *arguments: str, expect: int = 0, **environment: str) -> str:
        """What ``python main.py`` prints; its exit code must be ``expect``."""
        process = self.popen("main.py", *arguments, **environment)
        said = process.communicate(timeout=900)[0]
        assert process.returncode == expect, said
        assert "Traceback" not in said
        return said

    def statuses(self) -> dict[str, dict[str, Any]]:
        process = subprocess.run(
            [sys.executable, "main.py", "status", "--json"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return {status["run_id"]: status for status in json.loads(process.stdout)}

    def only(self) -> Run:
        (run,) = self.results.runs()
        return run

    def jobs(self) -> Counter[str]:
        """How many jobs of each name Slurm has had since this site began (the cluster serves several tests)."""
        return Counter(name for job_id, name in self._jobs().items() if job_id not in self._before)

    def _jobs(self) -> dict[str, str]:
        # sacct is late by some seconds, and leaves out what was never eligible to start; squeue forgets after seconds.
        said = self.slurm.run("squeue", "--all", "--array", "--states=all", "--noheader", "-o", "%i|%j").stdout
        if self.slurm.accounting:
            said += self.slurm.run("sacct", "-X", "-P", "-n", "-S", "now-1hours", "-o", "JobID,JobName").stdout
        # "7_[5-9]" is what sacct calls elements of an array that had not started yet; squeue names each.
        return dict(line.split("|", 1) for line in said.splitlines() if "[" not in line)

    def forget_jobs(self) -> None:
        """Count from here on."""
        self._before |= set(self._jobs())

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.main("status")
            time.sleep(0.2)
        return found

    def wait_for_state(self, run: Run, *states: str) -> None:
        self.wait(lambda: run.stored_status().state in states)


@pytest.fixture
def site(checkout: Path, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(queue, "_known_name", ["duel"])  # in this process, too, which has no SLURM_CONF
    site = Site(checkout.rename(checkout.with_name("duel")), slurm)  # a space cannot stand in a directive
    yield site
    if (found := re.match(r"process (\d+) on ", intent.sender(site.results))) is not None:
        os.kill(int(found[1]), signal.SIGTERM)  # it is meant to outlive what started it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slurm's tests first: they wait more than they compute, and behind the others a worker would wait with them."""
    items.sort(key=lambda item: not item.path.name.startswith("test_slurm"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """The last thing to be read: how many tests did not run for want of a program."""
    yield
    skipped = [report for report in terminalreporter.getreports("skipped") if NOT_TESTED in str(report.longrepr)]
    if skipped:
        reasons = " ".join(str(report.longrepr) for report in skipped)  # some need root instead
        targets = sorted(set(re.findall(r"run 'make (\S+)' first", reasons)))
        said = f"; 'make {' '.join(targets)}' installs what is missing" if targets else ""
        terminalreporter.write_line(f"{NOT_TESTED}: {len(skipped)} tests{said}", yellow=True, bold=True)
