"""Environment variables that frameworks obey: which ones there are, who may set them, and what is recorded."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Main, clean_environment, rows_of

from duel import variables
from duel.job import Job
from duel.launch import script
from duel.launch.schema import Target
from duel.measure.device import keeping

# The stand-in for an interpreter: it prints the environment that it got.
PRINTS = "#!/bin/bash\nexec env -0\n"
FLAGS = "--xla_disable_hlo_passes=fusion"
# From the shell, and whether they are to arrive.
SHELL = {
    **dict.fromkeys(("XLA_FLAGS", "JAX_PLATFORMS", "TORCH_LOGS", "TORCHINDUCTOR_MAX_AUTOTUNE", "NPROC", "CXX"), False),
    **dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"), False),
    **dict.fromkeys(("MKL_CBWR", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "TPU_MEGACORE"), False),
    **dict.fromkeys(("PYTHONTRACEMALLOC", "ENABLE_PERSISTENT_TMA_MATMUL", "DISABLE_PTXAS_OPT"), False),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "ROCR_VISIBLE_DEVICES", "TPU_WORKER_ID"), True),
    **dict.fromkeys(("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LD_LIBRARY_PATH", "PYTHONPATH", "TF_VAR_region"), True),
    **dict.fromkeys(("PYTHONHASHSEED", "CCACHE_DIR", "MY_XLA_FLAGS"), True),
}


def arrived(folder: Path, target: Target, **environment: str) -> dict[str, str]:
    """What the interpreter gets from a script for ``target`` that is started with ``environment``."""
    interpreter, path = folder / "python", folder / "script.sh"
    interpreter.write_text(PRINTS)
    interpreter.chmod(0o755)
    path.write_text(script.render(Job("jax", "resnet50", 1, "standard", "fp32", None, "here"), target, folder))
    # GLIBC_TUNABLES and LD_LIBRARY_PATH would be obeyed by bash itself: their values are ones that change nothing.
    known = clean_environment() | {"SLURM_JOB_ID": "1"} | environment
    done = subprocess.run(["bash", str(path)], env=known, capture_output=True, text=True, timeout=60, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def target(folder: Path, scheduler: str, **setup: list[str]) -> Target:
    launcher = {"launcher": None} if scheduler == "slurm" else {}
    python = {"jax": str(folder / "python"), "pytorch": None}
    return Target.model_validate({"scheduler": scheduler, "python": python, "setup": setup} | launcher)


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_script_passes_on_what_its_target_sets_and_not_what_the_shell_had(tmp_path: Path, scheduler: str) -> None:
    lines = {"job": [f"export XLA_FLAGS={FLAGS}", "unset TF_VAR_region"], "task": ["export NCCL_DEBUG=$TORCH_LOGS"]}
    found = arrived(tmp_path, target(tmp_path, scheduler, **lines), **dict.fromkeys(SHELL, ""))
    assert found["XLA_FLAGS"] == FLAGS
    assert found["NCCL_DEBUG"] == ""
    stayed = {"XLA_FLAGS", *(name for name, stays in SHELL.items() if stays)} - {"TF_VAR_region"}
    assert set(SHELL) & set(found) == stayed
    given = variables.obeyed(found[variables.GIVEN].split())
    assert sorted(given) == ["NCCL_DEBUG", "XLA_FLAGS"]
    assert variables.take_out(found) == []


def test_bash_and_python_take_the_same_variables_for_ones_that_are_obeyed(tmp_path: Path) -> None:
    patterns = [pattern for group in variables.OBEYED.values() for pattern in group]
    names = {pattern.replace("*", "SOME_1") for pattern in (*patterns, *variables.LEFT)}
    names |= {f"A{name}" for name in names} | {f"{name}_0" for name in names} | {name.lower() for name in names}
    names -= {"LD_PRELOAD", "LD_AUDIT"}  # bash would obey them
    found = arrived(tmp_path, target(tmp_path, "local"), **dict.fromkeys(names, ""))
    assert names - set(found) == set(variables.obeyed(names))
    assert len(variables.obeyed(names)) > len(patterns)


# These change what is logged, and nothing else.
LOGGED = {"DUMP_AOTI_MINIFIER", "LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE", "PT2_COMPILE_ID_PREFIX"}
LOGGED |= {"MAST_HPC_JOB_NAME", "ROLE_RANK"}


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("pytorch/lib/python3*/site-packages/torch/_inductor/config.py", r"environ(?:\.get)?[\[(]\s*\"([A-Z]\w+)\""),
        ("pytorch/lib/python3*/site-packages/torch/_inductor/config.py", r"env_name_(?:force|default)=\"([A-Z]\w+)\""),
        ("pytorch/lib/python3*/site-packages/torch/_dynamo/config.py", r"environ(?:\.get)?[\[(]\s*\"([A-Z]\w+)\""),
        ("pytorch/lib/python3*/site-packages/triton/knobs.py", r"\benv_\w+\(\"([A-Z]\w+)\""),
        ("jax/lib/python3*/site-packages/jax/_src/xla_bridge.py", r"(?:environ(?:\.get)?[\[(]|getenv\()'([A-Z]\w+)'"),
    ],
)
def test_what_the_frameworks_settings_read_is_obeyed(file: str, read: str) -> None:
    """So that the table is looked at where a new version brings a new kind of variable."""
    (path,) = (ROOT / ".venv").glob(file)
    names = set(re.findall(read, path.read_text()))
    assert names
    assert names - set(variables.obeyed(names)) - LOGGED == set()


def test_run_py_called_by_hand_has_nothing_given() -> None:
    environment = {"XLA_FLAGS": "a", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert variables.take_out(environment) == ["OMP_NUM_THREADS", "XLA_FLAGS"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}


def test_the_record_says_who_set_what_and_has_no_secret() -> None:
    environment = {
        variables.GIVEN: "PATH\nXLA_FLAGS\nTORCH_TOKEN",
        variables.OWN: "JAX_COMPILATION_CACHE_DIR",
        "JAX_COMPILATION_CACHE_DIR": "/tmp/x",
        "XLA_FLAGS": "a",
        "TORCH_TOKEN": "very secret",
        "NCCL_ALGO": "Ring",
        "PATH": "/bin",
    }
    text = variables.record(environment)
    assert json.loads(text) == {
        "unnamed": {"NCCL_ALGO": "Ring"},
        "target": {"TORCH_TOKEN": variables.HIDDEN, "XLA_FLAGS": "a"},
    }
    assert variables.unnamed(text) == ["NCCL_ALGO"]
    assert set(variables.recorded(text)) == {"NCCL_ALGO", "TORCH_TOKEN", "XLA_FLAGS"}
    assert variables.record({"PATH": "/bin"}) == "{}"
    for nothing in (None, "{}"):
        assert (variables.recorded(nothing), variables.unnamed(nothing)) == ({}, [])


def test_a_variable_that_the_target_sets_for_one_side_bars_the_pair(main: Main, checkout: Path) -> None:
    """And of the shell's the user hears before the jobs start."""
    lines = "{job: [export TRITON_DEBUG=0]}"
    variant = f"      - {{when: {{framework: jax}}, setup: {{job: [export XLA_FLAGS={FLAGS}]}}}}\n"
    text = "default: here\ntargets:\n  here:\n    scheduler: local\n"
    text += "    python: {jax: .venv/jax/bin/python, pytorch: .venv/pytorch/bin/python}\n"
    text += f"    wandb: {{mode: disabled}}\n    setup: {lines}\n    variants:\n{variant}"
    (checkout / "cluster.yaml").write_text(text)
    asked = ("--benchmark", "gcn", "--use_case", "1", "--preset", "smoke", "--device", "cpu", "--wait")
    said = main(*asked, XLA_FLAGS="--xla_no_such_flag", NCCL_ALGO="Ring", TRITON_DEBUG="1", OMP_NUM_THREADS="1")
    (note,) = [line for line in said.stdout.splitlines() if line.startswith("not passed to the jobs: ")]
    assert "NCCL_ALGO" in note
    assert not any(name in note for name in ("XLA_FLAGS", "TRITON_DEBUG", "OMP_NUM_THREADS"))
    assert "cluster.yaml: targets.here.setup: {job: [export " in note
    assert f"Variables of jax: TRITON_DEBUG=0 XLA_FLAGS={FLAGS}." in said.stdout
    found = {row["framework"]: row for row in rows_of(checkout)}
    assert {row["status"] for row in found.values()} == {"finished"}
    assert json.loads(found["jax"]["variables"]) == {"target": {"TRITON_DEBUG": "0", "XLA_FLAGS": FLAGS}}
    assert json.loads(found["pytorch"]["variables"]) == {"target": {"TRITON_DEBUG": "0"}}
    for row in found.values():
        assert f"variables (XLA_FLAGS: {FLAGS} | not set)" in row["comparable"]
        assert "TRITON_DEBUG" not in row["comparable"]


def test_what_the_target_sets_for_malloc_counts_and_is_recorded() -> None:
    environment = keeping({})
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert variables.record(environment) == "{}"  # the switch is
    environment = keeping({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", variables.GIVEN: "GLIBC_TUNABLES"})
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0"
    assert list(variables.recorded(variables.record(environment))) == ["GLIBC_TUNABLES"]
