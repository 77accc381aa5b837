"""The lock files: hashed, free of hosts, and with the versions that each Python and each device needs."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, needs
from packaging.requirements import Requirement
from packaging.version import Version

FOLDER = ROOT / "requirements"
LOCKS = sorted(FOLDER.glob("*.txt"))
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(lock: Path) -> list[tuple[Requirement, list[str]]]:
    """Each requirement with its hashes."""
    text = re.sub(r"^\s*#.*\n", "", lock.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        found.append((Requirement(requirement.strip()), [f"--hash={text.strip()}" for text in hashes]))
    return found


def versions(lock: str, python: str) -> dict[str, Version]:
    """What pip would install on 64-bit Linux."""
    environment = LINUX | {"python_version": python, "python_full_version": f"{python}.0"}
    chosen: dict[str, Version] = {}
    for requirement, _ in entries(FOLDER / f"{lock}.txt"):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in chosen, f"{lock}, Python {python}: {requirement.name} twice"
            chosen[requirement.name] = Version(str(requirement.specifier).removeprefix("=="))
    return chosen


def test_every_lock_has_its_source_and_the_makefile_writes_it() -> None:
    (listed,) = re.findall(r"^LOCKS = (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert sorted(listed.split()) == [lock.stem for lock in LOCKS]
    for lock in LOCKS:
        assert lock.with_suffix(".in").exists()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_pins_and_hashes_everything_and_names_no_host(lock: Path) -> None:
    assert entries(lock)
    for requirement, hashes in entries(lock):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(HASH.fullmatch(text) for text in hashes), requirement
        assert requirement.url is None
    for line in lock.read_text().splitlines():
        assert not re.search(r"://|^\s*--(?!hash)|find-links|index", line), line
        assert not re.search(r"\s/|\.\./", line), f"a path: {line}"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_holds_what_its_source_asks_for(lock: Path) -> None:
    wanted: list[Requirement] = []
    sources = [lock.with_suffix(".in")]
    for source in sources:  # grows with each '-r'
        for line in source.read_text().split("\n"):
            if line.startswith("-r "):
                sources.append(FOLDER / line.removeprefix("-r "))
            elif line:
                wanted.append(Requirement(line))
    for python in PYTHONS:
        locked = versions(lock.stem, python)
        for requirement in wanted:
            if requirement.marker is None or requirement.marker.evaluate(LINUX | {"python_version": python}):
                name = re.sub(r"[-_.]+", "-", requirement.name).lower()
                assert locked[name] in requirement.specifier, f"{lock.stem}, Python {python}: {requirement}"


@pytest.mark.parametrize("python", PYTHONS)
def test_gpus_get_a_jax_without_the_scatter_regression(python: str) -> None:
    for lock in ("jax-cuda12", "jax-cuda13"):
        jax = versions(lock, python)["jax"]
        # JAX 0.11 and later need Python 3.12; 0.10.2 to 0.11.0 have a regression of scatters on GPUs.
        assert jax == Version("0.10.1") if python == "3.11" else jax >= Version("0.11.1")


@pytest.mark.parametrize("python", PYTHONS)
def test_cuda_12_is_for_v100_too_on_both_sides(python: str) -> None:
    """The support matrix of cuDNN 9.10 has compute capability 7.0; that of 9.24 begins with 7.5."""
    for lock in ("jax-cuda12", "pytorch-cuda12"):
        assert versions(lock, python)["nvidia-cudnn-cu12"] == Version("9.10.2.21")


@pytest.mark.parametrize("python", PYTHONS)
def test_each_build_of_pytorch_has_its_cuda(python: str) -> None:
    # 2.10 is the last one of the default package index for CUDA 12
    assert versions("pytorch-cuda12", python)["torch"] == Version("2.10.0")
    assert any(name.endswith("-cu12") for name in versions("pytorch-cuda12", python))
    assert versions("pytorch-cuda13", python)["torch"] >= Version("2.11")
    assert any(name.endswith("-cu13") for name in versions("pytorch-cuda13", python))


@pytest.mark.parametrize("python", PYTHONS)
def test_the_tests_run_with_the_drivers_versions(python: str) -> None:
    driver, test = versions("driver", python), versions("test", python)
    assert driver == {name: test[name] for name in driver}


@pytest.mark.parametrize("python", PYTHONS)
def test_both_frameworks_make_their_data_with_the_same_numpy(python: str) -> None:
    found = {lock.stem: versions(lock.stem, python) for lock in LOCKS if lock.stem.startswith(("jax", "pytorch"))}
    for package in ("numpy", "scikit-learn", "wandb", "nvidia-ml-py"):
        assert len({locked[package] for locked in found.values()}) == 1, package


def dry_run(**variables: str) -> str:
    """What 'make envs' would do."""
    command = ["make", "-n", "envs", *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_build_can_be_chosen() -> None:
    assert "jax jax-tpu " in dry_run(JAX="tpu")
    assert "pytorch pytorch-cuda12 " in dry_run(PYTORCH="cuda12")


@pytest.mark.parametrize(
    ("driver", "capability", "jax", "pytorch"),
    [
        ("580.65.06", "9.0", "cuda13", "cuda13"),
        ("550.54.15", "9.0", "cuda12", "cuda12"),
        ("580.65.06", "7.0", "cuda12", "cuda12"),
        ("", "", "cpu", "cuda13"),
    ],
)
def test_the_build_suits_the_driver_and_the_gpu(
    tmp_path: Path, driver: str, capability: str, jax: str, pytorch: str
) -> None:
    smi = tmp_path / "nvidia-smi"  # a stand-in: there is no GPU here
    smi.write_text(f"#!/bin/sh\ncase $1 in *driver*) echo {driver};; *) echo {capability};; esac\n")
    smi.chmod(0o755)
    command = ["make", "--dry-run", "envs", "made_for="]  # whatever environments there are
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert f"jax jax-{jax} " in said
    assert f"pytorch pytorch-{pytorch} " in said


ARM = LINUX | {"platform_machine": "aarch64"}
TORCH = ("pytorch-cuda13", "pytorch-cuda12")


def installed_on_arm(lock: str) -> set[str]:
    environment = ARM | {"python_version": "3.11", "python_full_version": "3.11.0"}
    found = [requirement for requirement, _ in entries(FOLDER / f"{lock}.txt")]
    return {one.name for one in found if one.marker is None or one.marker.evaluate(environment)}


def test_only_cuda_13_has_pytorchs_cuda_packages_on_arm() -> None:
    """Why 'make envs PYTORCH=cuda12' is refused there."""
    cuda = {lock: {n for n in installed_on_arm(lock) if n.startswith("nvidia-cu")} for lock in TORCH}
    assert cuda["pytorch-cuda13"]
    assert not cuda["pytorch-cuda12"]


@pytest.mark.parametrize(("machine", "refused"), [("aarch64", True), ("x86_64", False)])
def test_cuda_12_is_refused_on_arm_with_what_to_do(tmp_path: Path, machine: str, refused: bool) -> None:
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (tmp_path / "uname").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    command = ["make", "--dry-run", "pytorch-env", "PYTORCH=cuda12"]
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode == 0
    command = ["make", "pytorch-env", "PYTORCH=cuda12", "install=@echo would install"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ("make envs PYTORCH=cuda13" in ran.stderr) is refused
    assert ("would install" in ran.stdout) is not refused


@pytest.mark.full
@pytest.mark.parametrize("lock", ["driver", "jax-cpu", "jax-cuda13", "pytorch-cuda13"])
def test_a_resolver_finds_every_wheel_for_arm(lock: str, tmp_path: Path) -> None:
    """GH200 and GB200. It asks the package index for each wheel, and installs none."""
    uv = ROOT / ".venv" / "uv" / "bin" / "uv"
    needs([] if uv.exists() else ["uv"], "lock")
    command = [str(uv), "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--python-platform", "aarch64-manylinux_2_28", "--python-version", "3.11", "--target", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--requirement", str(FOLDER / f"{lock}.txt")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Would install" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"]), "only uv's own lock"
