"""What each use case leaves in results.csv, end to end, and the parts of a training step."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Main, clean_environment, interpreter, rows_of

from duel.catalogue import FRAMEWORKS


def test_inference_has_a_row_for_each_batch_size(main: Main, checkout: Path) -> None:
    asked = ("--benchmark", "mnist", "--use_case", "inference", "--preset", "smoke", "--batch_sizes", "4,1,4")
    said = main(*asked, "--wait")
    assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    assert [(row["framework"], row["batch_size"]) for row in rows] == [(f, b) for f in FRAMEWORKS for b in ("4", "1")]
    for row in rows:
        assert row["status"] == "finished", row["cause"]
        assert 5 <= int(row["latency_calls"]) <= 20  # a busy machine has time for fewer
        p50, p95 = float(row["latency_seconds_p50"]), float(row["latency_seconds_p95"])
        assert 0 < p50 <= p95
        assert row["latency_seconds_p99"] == row["loss_first"] == ""
        assert f"{row['latency_calls']} calls; 1000 are needed" in row["missing"]
        assert "no part of this use case" in row["missing"]
        assert float(row["throughput"]) == pytest.approx(int(row["batch_size"]) / float(row["step_seconds_p50"]))
        per_gb = float(row["throughput"]) / (int(row["peak_memory_bytes"]) / 1e9)
        assert float(row["throughput_per_gb"]) == pytest.approx(per_gb)
    pairs = {
        row["batch_size"]: {other["pair"] for other in rows if other["batch_size"] == row["batch_size"]} for row in rows
    }
    assert [len(pair) for pair in pairs.values()] == [1, 1]
    assert pairs["1"] != pairs["4"]
    assert "Same initial weights, same samples in the same order (hashes agree)." in said.stdout
    first = [line.split()[:1] for line in said.stdout.splitlines()]
    assert ["1"] in first
    assert ["4"] in first


def test_a_batch_size_that_fails_is_a_row_and_the_others_go_on(main: Main, checkout: Path) -> None:
    """MNIST here is 1,437 training samples."""
    asked = ("--benchmark", "mnist", "--use_case", "5", "--preset", "smoke", "--batch_sizes", "2000,1")
    said = main(*asked, "--framework", "jax", "--wait")
    assert said.returncode == 1
    rows = rows_of(checkout)
    assert [row["status"] for row in rows] == ["failed", "finished"]
    assert {row["cause"] for row in rows} == {
        "",
        "input: batch size 2000 is larger than the 1437 training samples of sklearn-digits",
    }


PASSES = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
sys.path.append(".")
import devices, network, training, weights
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters
from duel.measure.device import Setting

device, benchmark = devices.select("cpu"), BENCHMARKS["cifar10_resnet18"]
arrays = parameters.initialise(weights.shapes(network.build(benchmark, "tiny")), 0)
pool = batches.pool(benchmark, "tiny", 4, 0, pathlib.Path())
work = training.Training(Setting(benchmark, "tiny", "fp32", device), pool, arrays)
work.compile()
before = parameters.sha256({name: array for name, array in work.export().items() if "running" not in name})
losses = [work.gradients(1)[0]]
for name, dispatch in work.passes().items():
    handle = dispatch(1 + len(pool.batches))
    work.synchronize(handle)
    while isinstance(handle, tuple):  # JAX gives all of a program's results
        handle = handle[0]
    losses.append(work.loss(handle))
after = parameters.sha256({name: array for name, array in work.export().items() if "running" not in name})
losses.append(work.loss(work.step(1)))
print(json.dumps({"losses": losses, "the weights are": "the same" if before == after else "others"}))
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_forward_and_backward_pass_on_their_own_are_those_of_the_step(framework: str) -> None:
    command = [interpreter(framework), "-c", PASSES, framework]
    said = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True)
    found = json.loads(said.stdout)
    assert len(found["losses"]) == 4
    assert found["losses"] == pytest.approx([found["losses"][0]] * 4, rel=1e-5)
    assert found["the weights are"] == "the same"
