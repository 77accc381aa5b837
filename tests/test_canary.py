"""The canary tells one policy from another by what is computed, and a run whose policy is not in force ends."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Main, clean_environment, interpreter, rows_of

from duel.catalogue import FRAMEWORKS, PRECISIONS
from duel.measure import canary, preparing
from duel.measure.device import Device

SCRIPT = """
import json, sys
framework, = sys.argv[1:]
sys.path.insert(0, framework)
sys.path.append(".")
import pathlib
import canary as side
import devices, inference, network, weights
from duel.catalogue import BENCHMARKS
from duel.measure import batches, canary, parameters
from duel.measure.device import Setting

device, found, gcn = devices.select("cpu"), {}, BENCHMARKS["gcn"]
arrays = parameters.initialise(weights.shapes(network.build(gcn, "tiny")), 0)
pool = batches.pool(gcn, "tiny", 1, 0, pathlib.Path())
for policy in ("fp32", "bf16", "fp16", "framework_default"):
    work = inference.Inference(Setting(gcn, "tiny", policy, device), pool, arrays)
    found[policy] = canary.errors(side.products(work))
print(json.dumps(found))
"""
SIZES = {"fp32": 1e-7, "framework_default": 1e-7, "tf32": 3e-4, "fp16": 3e-4, "bf16": 3e-3}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_policy_of_a_cpu_is_what_it_says(framework: str) -> None:
    command = [interpreter(framework), "-c", SCRIPT, framework]
    said = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True)
    for policy, errors in json.loads(said.stdout).items():
        assert canary.contradiction(errors, policy) == ""
        for name, error in errors.items():
            expected = SIZES["fp32" if name == canary.SCATTER_ADD else policy]
            assert expected / 3 < error < expected * 5, (policy, name)


def errors(size: float) -> dict[str, float]:
    return dict.fromkeys(("matmul", "convolution", "attention"), size) | {canary.SCATTER_ADD: 1e-7}


@pytest.mark.parametrize("policy", [name for name in PRECISIONS if name != "framework_default"])
@pytest.mark.parametrize("real", ["fp32", "tf32", "bf16"])
def test_one_policy_is_not_taken_for_another(policy: str, real: str) -> None:
    alike = {policy, real} <= {"tf32", "fp16"} or policy == real  # both have ten bits
    assert (canary.contradiction(errors(SIZES[real]), policy) == "") is alike


def test_the_contradiction_is_said_with_the_measured_error() -> None:
    said = canary.contradiction(errors(3e-4), "fp32")
    assert said.startswith("matmul is 3.0e-04 from float64, expected 0e+00 to 1e-05; convolution is")
    assert canary.contradiction(errors(float("nan")), "fp32")
    assert "scatter_add is 1.0e-03" in canary.contradiction(errors(3e-3) | {canary.SCATTER_ADD: 1e-3}, "bf16")


def test_attention_may_stay_exact_under_tf32_but_nothing_else() -> None:
    assert canary.contradiction(errors(SIZES["tf32"]) | {"attention": 1e-7}, "tf32") == ""
    assert "matmul" in canary.contradiction(errors(SIZES["tf32"]) | {"matmul": 1e-7}, "tf32")


def test_what_a_newcomer_gets_is_reported_and_never_wrong() -> None:
    assert canary.contradiction(errors(3e-4), "framework_default") == ""


def test_a_gpu_before_ampere_lacks_two_policies() -> None:
    turing, ampere = (Device("gpu", "NVIDIA T4", 1, compute_capability=capability) for capability in ("7.5", "8.0"))
    lacks = {policy: preparing._lacks(turing, policy) for policy in PRECISIONS}
    assert {policy for policy, why in lacks.items() if why} == {"tf32", "bf16"}
    assert lacks["bf16"] == "bf16 needs compute capability 8.0 or higher; this is a NVIDIA T4 (7.5)"
    assert not any(preparing._lacks(ampere, policy) for policy in PRECISIONS)
    instinct = Device("gpu", "AMD Instinct MI300X", 1, compute_capability="gfx942")
    assert not any(preparing._lacks(instinct, policy) for policy in PRECISIONS)


def test_the_exact_products_are_exact() -> None:
    """Of a convolution and an attention, by their definitions at one place."""
    given = canary.inputs()
    found = canary.exact(given)
    image, kernel = given["image"].astype(np.float64), given["kernel"].astype(np.float64)
    assert found["convolution"][1, 2, 5, 6] == pytest.approx((image[1, :, 4:7, 5:8] * kernel[2]).sum())
    width = 64 // canary.HEADS
    q, k, v = (given[name][1, :, width : 2 * width].astype(np.float64) for name in "qkv")
    weights = np.exp(q[3] @ k.T / width**0.5)
    assert found["attention"][1, 3, width : 2 * width] == pytest.approx(weights / weights.sum() @ v)


@pytest.mark.parametrize(
    ("framework", "file", "line", "broken"),
    [
        ("jax", "jax/network.py", 'COMPUTE = {"bf16": jnp.bfloat16,', 'COMPUTE = {"bf16": jnp.float32,'),
        ("pytorch", "pytorch/network.py", "        with self._compute:\n", "        if True:\n"),
    ],
)
def test_a_policy_that_is_silently_not_applied_ends_the_run(
    main: Main, checkout: Path, framework: str, file: str, line: str, broken: str
) -> None:
    path = checkout / file
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, broken))
    asked = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke", "--precision", "bf16", "--device", "cpu")
    main(*asked, "--framework", framework, "--wait")
    (row,) = rows_of(checkout)
    assert row["status"] == "failed"
    assert row["cause"].startswith("input: precision bf16 is not in force: matmul is ")
    assert "matmul=" in row["canary"]
    assert row["throughput"] == ""
