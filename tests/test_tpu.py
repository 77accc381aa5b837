"""TPUs: JAX's job asks for one; PyTorch reaches one through torch_xla, and is refused in one line without it.

No TPU is needed here, nor torch_xla: a stand-in of that name shows what is asked of it.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Main, clean_environment, interpreter, packages, python_with

from duel.errors import UserError
from duel.launch import builds

MNIST = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke")
WHERE = "cluster.yaml: targets.here.python.pytorch"
STAND_IN = """
import json, sys, types
calls = []
core = types.SimpleNamespace(xla_model=types.SimpleNamespace(
    xla_device_kind=lambda: "TPU v9",
    get_memory_info=lambda: {"bytes_limit": 16, "peak_bytes_used": 7},
    wait_device_ops=lambda: calls.append("wait"),
))
runtime = types.SimpleNamespace(device_type=lambda: TYPE)
backends = sys.modules["torch_xla.backends"] = types.ModuleType("torch_xla.backends")
backends.set_mat_mul_precision = calls.append
def device_count(): return 4
def device():
    import torch
    return torch.device("cpu")
def sync(): calls.append("sync")
"""
USE = """
import dataclasses, json, sys
sys.path[:0] = ["pytorch", "."]
import devices
found = {"kinds": [device.kind for device in devices.available()]}
if found["kinds"][0] == "tpu":
    import network, torch_xla, training, weights
    from duel import datasets
    from duel.catalogue import BENCHMARKS
    from duel.measure import batches, parameters
    from duel.measure.device import Setting
    device = devices.select("tpu")
    found |= {"device": dataclasses.asdict(device), "peak": devices.peak_memory_bytes(), "versions": devices.versions()}
    mnist = dataclasses.replace(BENCHMARKS["mnist"], dataset=datasets.SYNTHETIC)
    pool = batches.pool(mnist, "tiny", 4, 0, None)
    arrays = parameters.initialise(weights.shapes(network.build(mnist, "tiny")), 0)
    work = training.Training(Setting(mnist, "tiny", "fp32", device), pool, arrays)
    handle = work.step(0)
    dispatched = list(torch_xla.calls)
    work.synchronize(handle)
    found |= {"execution": work.execution, "dispatched": dispatched, "waited": torch_xla.calls}
    found["loss"] = work.loss(handle)
print(json.dumps(found))
"""


@pytest.fixture
def checkout(checkout: Path) -> Path:
    return checkout.rename(checkout.with_name("duel"))  # a space cannot stand in a directive


def refused(done: "subprocess.CompletedProcess[str]", *said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    *_, line = done.stderr.splitlines()
    assert line.startswith("main.py: error: ")
    for words in said:
        assert words in line
    assert "Traceback" not in done.stderr


def test_on_a_tpu_target_jax_is_rendered_alone_and_asks_for_a_tpu(main: Main, checkout: Path) -> None:
    done = main("--benchmark", "resnet50", "--use_case", "1", "--target", "tpu", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "pytorch: left out, target 'tpu' has no interpreter for it" in done.stderr
    (script,) = (checkout / "slurm_scripts").glob("*.sh")
    assert script.name == "jax_resnet50_1.sh"
    assert "--device tpu" in script.read_text()


def test_pytorch_without_an_interpreter_is_refused(main: Main, checkout: Path) -> None:
    done = main(*MNIST, "--target", "tpu", "--framework", "pytorch")
    refused(done, "cluster.yaml: targets.tpu.python.pytorch is null", "valid: --framework jax")
    assert not (checkout / "results" / "runs").exists()


def test_pytorch_without_torch_xla_is_refused_before_anything_is_sent(main: Main, checkout: Path) -> None:
    interpreter("pytorch")
    path = checkout / "cluster.yaml"
    path.write_text(path.read_text().replace("pytorch: null", "pytorch: .venv/pytorch/bin/python"))
    said = "'.venv/pytorch/bin/python' has no torch_xla, which pytorch needs to compute on a tpu; "
    remedy = "name an interpreter that has it, or null to leave pytorch out"
    refused(
        main(*MNIST, "--target", "tpu", "--framework", "pytorch"),
        f"cluster.yaml: targets.tpu.python.pytorch: {said}{remedy}",
    )
    here = main(*MNIST, "--framework", "pytorch", "--device", "tpu")
    refused(here, f"cluster.yaml: targets.local.python.pytorch: {said}{remedy}")
    assert not (checkout / "results" / "runs").exists()
    assert not list((checkout / "slurm_scripts").glob("*.sh"))


@pytest.mark.parametrize(("names", "taken"), [(("torch", "torch_xla"), True), (("torch",), False), ((), True)])
def test_an_interpreter_is_refused_only_where_it_is_pytorch_s_and_lacks_torch_xla(
    tmp_path: Path, names: tuple[str, ...], taken: bool
) -> None:
    python = python_with(tmp_path, *names)
    for framework, kind in (("pytorch", "gpu"), ("pytorch", None), ("jax", "tpu")):
        builds.check_device(python, framework, kind, WHERE)
    if taken:
        builds.check_device(python, "pytorch", "tpu", WHERE)
    else:
        with pytest.raises(UserError, match=f"^{WHERE}: .* has no torch_xla"):
            builds.check_device(python, "pytorch", "tpu", WHERE)


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "python3", "/etc/passwd"])
def test_what_an_interpreter_of_the_nodes_has_is_not_guessed(python: str) -> None:
    builds.check_device(python, "pytorch", "tpu", WHERE)


def test_a_job_without_torch_xla_fails_its_row_in_one_line(checkout: Path) -> None:
    job = [interpreter("pytorch"), "pytorch/run.py", *MNIST, "--device", "tpu"]
    done = subprocess.run(job, cwd=checkout, env=clean_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert "PyTorch reaches a TPU through torch_xla, which this interpreter lacks; valid: an interpreter with" in line
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["TPU", "CPU"])
def test_where_torch_xla_has_a_tpu_a_step_is_handed_over_and_waited_for(tmp_path: Path, kind: str) -> None:
    (packages(tmp_path, "torch_xla") / "torch_xla.py").write_text(STAND_IN.replace("TYPE", repr(kind)))
    done = subprocess.run(
        [interpreter("pytorch"), "-c", USE],
        cwd=ROOT,
        env=clean_environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if kind == "CPU":  # torch_xla itself falls back to the processor where there is no TPU
        assert "tpu" not in found["kinds"]
        return
    device = found["device"]
    assert (device["kind"], device["name"], device["count"], device["memory_bytes"]) == ("tpu", "TPU v9", 4, 16)
    assert found["peak"] == [7, "allocator_peak"]
    assert found["versions"]["torch_xla"] == "9.9"
    assert found["execution"] == "lazy"
    assert found["dispatched"] == ["highest", "sync"]
    assert found["waited"] == ["highest", "sync", "wait"]
    assert found["loss"] > 0
