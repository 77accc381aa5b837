"""Check the set-up and suggest fixes. Stays off the network; only ``prove`` starts jobs."""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel import ROOT, datasets, terminal
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.job import Job
from duel.launch import builds, local, manage, preflight, submit, thorough
from duel.launch.environment import listed
from duel.launch.schema import Cluster, Target
from duel.results import Results
from duel.states import FINISHED
from duel.tries import counted

PROBE_SECONDS = 120
WANDB_LOGIN = ".venv/driver/bin/python -m wandb login"
FREE_BYTES_NEEDED = 10**9
PROOF_BENCHMARK, PROOF_TIME = "mnist", "--time=00:05:00"
CUDA_13 = (580, 7.5)  # the first NVIDIA driver, and the least compute capability, that it serves

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` says how to fix anything that is not ``OK``."""

    level: str
    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.what}: {self.found}"
        return f"{line}\n      {self.remedy}" if self.remedy else line


def run(cluster: Cluster, results: Results) -> int:
    """Print each finding as soon as it is known. Returns 1 if something needed is missing, else 0."""
    counts = {OK: 0, WARN: 0, FAIL: 0}
    for finding in findings(cluster, results):
        counts[finding.level] += 1
        terminal.say(str(finding))
    terminal.say(f"{counts[OK]} ok, {counts[WARN]} to look at, {counts[FAIL]} to fix")
    return 1 if counts[FAIL] else 0


def prove(cluster: Cluster, name: str, results: Results, say: Callable[[str], None]) -> int:
    """Run the smallest benchmark on target ``name`` and wait for it: whatever is wrong there shows in its rows.

    Returns 1 if a side did not finish, else 0.
    """
    name, target = cluster.target(name)
    if target.scheduler == "slurm":
        say(str(Finding(OK, f"variables on {name}", listed(target))))
    sides = [framework for framework in FRAMEWORKS if getattr(target.python, framework) is not None]
    planned = [
        Job(framework, PROOF_BENCHMARK, 1, "smoke", "fp32", None, name, changes=(PROOF_TIME,)) for framework in sides
    ]
    runs = submit.launch(planned, cluster, results, say)
    manage.wait(runs, results)
    failed = False
    for framework, run in zip(sides, runs, strict=True):
        row = counted(run.rows())[-1]  # JAX may have been started again after a crash of its autotuner
        what = f"{framework} on {name}"
        if row.status == FINISHED:
            found = f"{row.device_name} ({row.device_kind}), {framework} {row.framework_version}, on {row.host}"
            say(str(Finding(OK, what, found)))
            say(str(Finding(OK, what, run.status().wandb or "Weights & Biases: not reached")))
            if text := thorough.outdated(row, results):
                say(str(Finding(WARN, what, text, f"'python main.py doctor --target {name} --thorough'")))
        else:
            failed = True
            say(str(Finding(FAIL, what, row.cause or str(row.status), f"see 'python main.py logs {run.id}'")))
    return 1 if failed else 0


def findings(cluster: Cluster, results: Results) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order of the report."""
    yield _driver_python()
    yield _tool("bash", "the scripts need bash: 'sudo apt install bash', or your system's equivalent")
    yield _tool("git", "every result records its commit: 'sudo apt install git', or your system's equivalent")
    yield _tool("make", "it creates the environments: 'sudo apt install make', on macOS 'xcode-select --install'")
    yield _compiler()
    for name, target in cluster.targets.items():
        for framework in FRAMEWORKS:
            yield from _interpreter(framework, name, target)
    yield _slurm([name for name, target in cluster.targets.items() if target.scheduler == "slurm"])
    default = cluster.targets[cluster.default]
    yield _wandb(default.wandb.mode)
    for dataset in sorted({benchmark.dataset for benchmark in BENCHMARKS.values()} - {datasets.SYNTHETIC}):
        yield _data(dataset, default, f"cluster.yaml: targets.{cluster.default}.data")
    yield _disk(results.folder)


def _driver_python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    if path := os.environ.get("PYTHONPATH"):
        remedy = "its packages come before those of every environment, in jobs too: unset it"
        return Finding(WARN, "Python of main.py", f"{found}; PYTHONPATH is {path}", remedy)
    return Finding(OK, "Python of main.py", found)


def _tool(name: str, remedy: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(FAIL, name, "not on the PATH", remedy)
    return _working(name, path, remedy)


def _compiler() -> Finding:
    remedy = "torch.compile needs one: 'sudo apt install g++', on macOS 'xcode-select --install', or load its module"
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return _working("C++ compiler", path, remedy)
    return Finding(FAIL, "C++ compiler", "no c++, g++ or clang++ on the PATH", remedy)


def _working(what: str, path: str, remedy: str) -> Finding:
    """Check whether a program runs: macOS has some that only say what to install."""
    line = _first_line(path, "--version")
    failed = line.startswith("does not run") or "(exit code" in line
    return Finding(FAIL, what, f"{line}, {path}", remedy) if failed else Finding(OK, what, f"{line}, {path}")


def _interpreter(framework: str, name: str, target: Target) -> Iterator[Finding]:
    """Check a target's interpreter: whether it exists and has ``framework``, and which devices that sees."""
    python = getattr(target.python, framework)
    if python is None:
        yield Finding(OK, f"{framework} on {name}", "no interpreter, as set in cluster.yaml")
        return
    where = f"cluster.yaml: targets.{name}.python.{framework}"
    what = f"{framework} on {name}"
    if target.scheduler == "slurm" and shutil.which(ROOT / python if "/" in python else python) is None:
        remedy = f"fine if the compute nodes have it; otherwise 'make {framework}-env', or set {where}"
        yield Finding(WARN, what, f"no interpreter {python!r} here; whether the nodes have it is unknown", remedy)
        return
    try:
        version = local.check_interpreter(python, framework, where)
    except UserError as error:
        yield _problem(FAIL, what, error, where)
        return
    try:
        builds.check_device(python, framework, target.device, where)
    except UserError as error:  # the targets of the shipped cluster.yaml are examples: nobody needs a build for each
        yield _problem(WARN if target.scheduler == "slurm" else FAIL, f"{what}, {target.device}", error, where)
        return
    try:
        record = _devices(python, framework)
    except UserError as error:
        yield _problem(FAIL, what, error, where)
        return
    versions = record["versions"] | {FRAMEWORKS[framework]: version}
    packages = ", ".join(f"{package} {number}" for package, number in versions.items())
    yield Finding(OK, what, f"{python}: {packages}")
    driver = _nvidia("driver_version")
    remedy = f"make {framework}-env {framework.upper()}={_cuda(driver)}"
    if target.scheduler == "slurm":  # its devices are on the nodes, not on this machine
        computes = any(word in package for package in versions for word in ("cuda", "rocm", "hip"))
        if "gpu" in " ".join(target.directives) and not computes:
            yield Finding(
                WARN, f"{what}, gpu", "its directives request one, but this build has no CUDA or ROCm", remedy
            )
        return
    for device in record["devices"]:
        yield Finding(OK, f"{what}, {device['kind']}", _describe(device))
    for kind, reason in record.get("errors", {}).items():
        yield Finding(WARN, f"{what}, {kind}", str(reason), f"if this machine has a usable {kind}: {remedy}")
    if driver and all(device["kind"] != "gpu" for device in record["devices"]):
        yield Finding(WARN, f"{what}, gpu", f"nvidia-smi shows one (driver {driver}); {framework} sees none", remedy)


def _problem(level: str, what: str, error: UserError, where: str) -> Finding:
    """Make a finding from an error that ends with a remedy; ``where`` is added if the remedy quotes no command."""
    found, _, remedy = str(error).rpartition("; ")
    return Finding(level, what, found, remedy if "'" in remedy else f"{remedy} ({where})")


@functools.cache
def _devices(python: str, framework: str) -> dict[str, Any]:
    """Return what ``<framework>/devices.py`` prints in the interpreter ``python``. Raises UserError if that fails."""
    command = [python, f"{framework}/devices.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    remedy = f"see the output of '{' '.join(command)}'"
    try:
        asked = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        if asked.returncode:
            last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
            raise UserError(f"listing its devices failed: {last}; {remedy}")
        record: dict[str, Any] = json.loads(asked.stdout)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"listing its devices took more than {PROBE_SECONDS} s; {remedy}") from error
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"listing its devices failed: {error}; {remedy}") from error
    return record


def _describe(device: dict[str, Any]) -> str:
    parts = [f"{device['count']} x {device['name']}"]
    if device["memory_bytes"]:
        parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    if device["compute_capability"]:
        parts.append(f"compute capability {device['compute_capability']}")
    if device["driver"]:
        parts.append(f"driver {device['driver']}")
    return ", ".join(parts)


def _nvidia(what: str) -> str:
    """Return the lowest version that nvidia-smi knows of the GPUs; empty if there is none, or it does not know."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    versions = [line for line in asked.stdout.split("\n") if re.fullmatch(r"\d+(\.\d+)+", line)]
    return min(versions, key=lambda version: [int(part) for part in version.split(".")], default="")


def _cuda(driver: str) -> str:
    """Return the CUDA for ``driver``, where there is one, and for this machine's oldest GPU."""
    capability = _nvidia("compute_cap")
    old = driver and int(driver.partition(".")[0]) < CUDA_13[0]
    return "cuda12" if old or (capability and float(capability) < CUDA_13[1]) else "cuda13"


def _slurm(targets: list[str]) -> Finding:
    found = {name: _first_line(name, "--version") for name in ("sbatch", "squeue", "sacct") if shutil.which(name)}
    text = ", ".join(f"{name} ({version})" for name, version in found.items()) or "not on the PATH"
    if not targets:
        return Finding(OK, "Slurm", f"{text}; no target needs it")
    # If Slurm is installed but not configured, --version fails.
    missing = [name for name in ("sbatch", "squeue", "sacct") if not found.get(name, "").startswith("slurm")]
    if not missing:
        return Finding(OK, "Slurm", text)
    if found:
        text = f"{text}; not usable: {', '.join(missing)}"
    remedy = (
        f"needed for --target {', '.join(targets)}: run main.py on a login node of the cluster, or ignore these "
        f"targets (cluster.yaml: targets)"
    )
    return Finding(WARN, "Slurm", text, remedy)


def _wandb(mode: str) -> Finding:
    """Check whether Weights & Biases would be online; ``mode`` is the default target's. The key itself is not shown."""
    what = "Weights & Biases"
    mode = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    key = preflight.wandb_key()
    text = f"key in {key}" if key else "no key"
    if variables := [name for name in sorted(os.environ) if name.startswith("WANDB_")]:
        text += f"; set here: {', '.join(variables)}"
    if open_file := preflight.open_key_file():
        return Finding(WARN, what, text, open_file)
    if mode in ("offline", "disabled", "dryrun"):
        return Finding(OK, what, f"{mode}; {text}")
    if key:
        return Finding(OK, what, f"online; {text}")
    if mode == "online":
        return Finding(WARN, what, text, f"cluster.yaml or WANDB_MODE asks for online: '{WANDB_LOGIN}'")
    return Finding(OK, what, f"offline; {text} ('{WANDB_LOGIN}' stores one)")


def _data(dataset: str, target: Target, where: str) -> Finding:
    try:
        return Finding(OK, f"data, {dataset}", datasets.check(dataset, ROOT / target.data))
    except (ValueError, OSError) as error:
        remedy = f"fix these files, or move them all elsewhere to use a stand-in ({where})"
        return Finding(FAIL, f"data, {dataset}", str(error), remedy)


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{folder}: {free / 1e9:.1f} GB free"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(
            FAIL,
            "results",
            f"{folder}: not writable: {error.strerror}",
            f"make it writable: 'chmod u+w {existing}'",
        )
    if free < FREE_BYTES_NEEDED:
        remedy = f"at least {FREE_BYTES_NEEDED / 1e9:.0f} GB is needed: free some space ('df -h {existing}')"
        return Finding(FAIL, "results", text, remedy)
    return Finding(OK, "results", text)


def _first_line(*command: str) -> str:
    """Return the first line that ``command`` prints, or the reason if there is none."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    last = " ".join(asked.stderr.strip().splitlines()[-1:]) or "no output"
    return next(iter(asked.stdout.splitlines()), "").strip() or f"{last} (exit code {asked.returncode})"
