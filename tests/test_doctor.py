"""main.py doctor: each finding with its remedy, with real interpreters and broken ones."""

import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Main, interpreter

from duel.launch import doctor
from duel.launch.doctor import FAIL, OK, WARN, Finding
from duel.launch.schema import Cluster
from duel.results import Results


def make_cluster(scheduler: str = "local", **changes: Any) -> Cluster:
    python = {"jax": interpreter("jax"), "pytorch": interpreter("pytorch")}
    target = {"scheduler": scheduler, "python": python} | changes
    return Cluster.model_validate({"default": "here", "targets": {"here": target}})


def interpreters(python: dict[str, str], scheduler: str = "local", **changes: Any) -> list[Finding]:
    """What is found of both interpreters; each framework's is a real one where ``python`` names no other."""
    real = {"jax": interpreter("jax"), "pytorch": interpreter("pytorch")}
    target = make_cluster(scheduler, python=real | python, **changes).targets["here"]
    return [finding for framework in python for finding in doctor._interpreter(framework, "here", target)]


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither this user's W&B key nor the answers of another test."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    doctor._devices.cache_clear()


def test_a_complete_checkout_has_nothing_to_mend(main: Main) -> None:
    asked = main("doctor")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "FAIL" not in asked.stdout
    assert asked.stdout.splitlines()[-1].endswith(", 0 to fix")
    assert "jax on local, cpu: 1 x " in asked.stdout
    assert "pytorch on local, cpu: 1 x " in asked.stdout


def test_main_reports_a_broken_interpreter_and_fails(main: Main, checkout: Path) -> None:
    text = (checkout / "cluster.yaml").read_text().replace(".venv/jax/bin/python", "nowhere/python")
    (checkout / "cluster.yaml").write_text(text)
    asked = main("doctor")
    assert asked.returncode == 1
    assert (
        "FAIL  jax on local: cluster.yaml: targets.local.python.jax: no interpreter 'nowhere/python'\n" in asked.stdout
    )
    assert "      'make jax-env' makes one, or set cluster.yaml: targets.local.python.jax\n" in asked.stdout
    assert "Traceback" not in asked.stdout + asked.stderr


def test_the_driver_imports_no_framework() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from duel.launch import cluster, doctor; from duel.results import Results\n"
        "doctor.run(cluster.load(Path('cluster.yaml')), Results(Path('results')))\n"
        "print(sorted({'jax', 'flax', 'torch', 'torchvision', 'wandb'} & set(sys.modules)))"
    )
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines()[-1] == "[]"


def test_every_finding_that_is_not_ok_has_a_remedy_and_no_other(tmp_path: Path) -> None:
    targets = {
        "here": {"scheduler": "local", "python": {"jax": sys.executable, "pytorch": "nowhere/python"}},
        "there": {"scheduler": "slurm", "python": {"jax": "/no/python", "pytorch": "no-such-python"}},
    }
    cluster = Cluster.model_validate({"default": "here", "targets": targets})
    for finding in doctor.findings(cluster, Results(tmp_path / "results")):
        assert finding.level in (OK, WARN, FAIL)
        assert bool(finding.remedy) == (finding.level != OK), finding
        # A command to give, or a key to change.
        assert not finding.remedy or re.search(r"'.+'|^make |cluster\.yaml: ", finding.remedy), finding
        assert finding.found
        assert "\n" not in finding.found + finding.remedy


def test_real_interpreters_tell_versions_and_devices() -> None:
    found = interpreters({"jax": interpreter("jax"), "pytorch": interpreter("pytorch")})
    text = "\n".join(map(str, found))
    assert "jax on here: " in text
    assert "jaxlib " in text
    assert "torchvision " in text
    assert text.count(", cpu: 1 x ") == 2
    assert FAIL not in text


def test_an_interpreter_without_the_framework_is_named() -> None:
    (found,) = interpreters({"pytorch": sys.executable})
    assert found.level == FAIL
    assert f"{sys.executable!r} has no torch" in found.found
    assert "make pytorch-env" in found.remedy


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    (found,) = interpreters({"jax": str(program(tmp_path, "python", "echo broken >&2; exit 3"))})
    assert found.level == FAIL
    assert "broken" in found.found


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'ImportError: libcudnn' >&2; exit 1", "ImportError: libcudnn"),
        ("echo no json", "listing its devices failed: Expecting value"),
    ],
)
def test_devices_that_cannot_be_listed_are_a_failure(tmp_path: Path, answer: str, words: str) -> None:
    python = program(tmp_path, "python", f'case "$1" in -c) echo 1.0;; *) {answer};; esac')
    (found,) = interpreters({"jax": str(python)})
    assert found.level == FAIL
    assert words in found.found
    assert "jax/devices.py" in found.remedy


@pytest.mark.parametrize(
    ("driver", "capability", "cuda"),
    [
        ("580.65.06", "9.0", "cuda13"),
        ("550.54.15", "9.0", "cuda12"),
        ("580.65.06", "7.0", "cuda12"),
        ("580.65.06", "9.0\n7.0", "cuda12"),
        ("580.65.06", "[N/A]", "cuda13"),
    ],
)
def test_a_gpu_that_the_framework_does_not_see_is_told_with_the_right_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, capability: str, cuda: str
) -> None:
    program(tmp_path, "nvidia-smi", f"case $1 in *driver*) echo {driver};; *) echo '{capability}';; esac")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    devices = '{"versions": {}, "devices": [{"kind": "cpu", "name": "x", "count": 1, "driver": null, '
    devices += '"compute_capability": null, "memory_bytes": 1}]}'
    python = str(program(tmp_path, "python", f"case \"$1\" in -c) echo 1.0;; *) echo '{devices}';; esac"))
    found = {finding.what: finding for finding in interpreters({"jax": python, "pytorch": python})}
    assert found["jax on here, gpu"].level == WARN
    assert found["jax on here, gpu"].remedy == f"make jax-env JAX={cuda}"
    assert found["pytorch on here, gpu"].remedy == f"make pytorch-env PYTORCH={cuda}"


def test_a_gpu_is_described_with_driver_capability_and_memory() -> None:
    device = {"kind": "gpu", "name": "NVIDIA H200", "count": 2, "driver": "580.65"}
    device |= {"compute_capability": "9.0", "memory_bytes": 139 * 2**30}
    assert doctor._describe(device) == "2 x NVIDIA H200, 139 GiB, compute capability 9.0, driver 580.65"


def test_an_nvidia_smi_without_a_driver_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor._nvidia("driver_version") == ""


def test_an_interpreter_of_a_slurm_target_that_is_not_here_is_left_open() -> None:
    for python in ("/no/such/python", "no/such/python", "no-such-python"):
        (found,) = interpreters({"jax": python}, scheduler="slurm")
        assert found.level == WARN
        assert "is unknown" in found.found


def test_a_slurm_target_that_asks_for_gpus_wants_a_cuda_build(tmp_path: Path) -> None:
    program(
        tmp_path, "with", """case "$1" in -c) echo 1.0;; *) echo '{"versions": {"cuda": "13"}, "devices": []}';; esac"""
    )
    program(tmp_path, "without", """case "$1" in -c) echo 1.0;; *) echo '{"versions": {}, "devices": []}';; esac""")
    program(
        tmp_path, "rocm", """case "$1" in -c) echo 1.0;; *) echo '{"versions": {"hip": "7"}, "devices": []}';; esac"""
    )
    for python, levels in (("with", [OK]), ("rocm", [OK]), ("without", [OK, WARN])):
        found = interpreters({"jax": str(tmp_path / python)}, scheduler="slurm", directives=["--gpus-per-node=1"])
        assert [finding.level for finding in found] == levels
        doctor._devices.cache_clear()
    assert found[1].remedy.startswith("make jax-env JAX=cuda")


def test_a_build_for_another_device_is_told_with_the_build_that_it_needs() -> None:
    for kind, package, command in (("tpu", "libtpu", "JAX=tpu"), ("gpu", "jax-cuda13-plugin", "JAX=cuda13")):
        python = interpreter("jax")  # the tests' own is JAX for processors
        (found,) = interpreters({"jax": python}, scheduler="slurm", device=kind)
        assert (found.level, found.what) == (WARN, f"jax on here, {kind}")
        assert f"has no {package}" in found.found
        assert f"'make jax-env {command}' makes one" in found.remedy
        (found,) = interpreters({"jax": python}, device=kind)
        assert found.level == FAIL


def test_slurm_is_missed_only_where_a_target_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._slurm([]).level == OK
    assert doctor._slurm(["h100"]).level == WARN
    assert "--target h100" in doctor._slurm(["h100"]).remedy
    for name in ("sbatch", "squeue"):
        program(tmp_path, name, "echo slurm 23.11.4")
    assert "not usable: sacct" in doctor._slurm(["h100"]).found
    program(tmp_path, "sacct", "exit 1")
    assert doctor._slurm(["h100"]).level == WARN
    program(tmp_path, "sacct", "echo slurm 23.11.4")
    assert doctor._slurm(["h100"]).level == OK
    assert "slurm 23.11.4" in doctor._slurm(["h100"]).found


def test_missing_tools_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._tool("git", "install git").level == FAIL
    assert doctor._compiler().level == FAIL
    program(tmp_path, "clang++", "echo clang version 17")
    assert doctor._compiler().level == OK
    assert "clang version 17" in doctor._compiler().found
    program(tmp_path, "c++", "echo no developer tools were found >&2; exit 1")
    assert doctor._compiler().level == FAIL
    program(tmp_path, "git", "exit 1")
    assert doctor._tool("git", "install git").remedy == "install git"


def test_packages_of_the_shell_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert doctor._driver_python().level == OK
    monkeypatch.setenv("PYTHONPATH", "/opt/site")
    assert (doctor._driver_python().level, "/opt/site" in doctor._driver_python().found) == (WARN, True)


def test_a_wandb_key_is_found_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 3
    assert "offline; no key" in doctor._wandb("auto").found
    assert doctor._wandb("online").level == WARN
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")
    netrc.chmod(0o644)
    assert doctor._wandb("auto").level == WARN
    assert "others can read" in doctor._wandb("auto").remedy
    netrc.chmod(0o600)
    assert doctor._wandb("auto").found == f"online; key in {tmp_path / 'netrc'}"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "no key" in doctor._wandb("auto").found
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert doctor._wandb("auto").found.startswith(
        "online; key in WANDB_API_KEY; set here: WANDB_API_KEY, WANDB_BASE_URL"
    )
    assert key not in str(doctor._wandb("auto"))
    assert doctor._wandb("disabled").found.startswith("disabled; ")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert doctor._wandb("auto").found.startswith("offline; ")


def test_half_of_a_data_set_is_a_failure(tmp_path: Path) -> None:
    target = make_cluster(data=str(tmp_path)).targets["here"]
    assert doctor._data("mnist", target, "cluster.yaml: targets.here.data").level == OK
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"")
    assert doctor._data("mnist", target, "cluster.yaml: targets.here.data").level == FAIL


def test_a_full_or_closed_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._disk(tmp_path / "not" / "yet").level == OK
    assert not (tmp_path / "not").exists()
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage(10**12, 10**12, 10**9 - 1))
        assert doctor._disk(tmp_path).level == FAIL
    (tmp_path / "file").write_text("")  # root may write into any folder, but nobody into a file
    assert doctor._disk(tmp_path / "file").level == FAIL
