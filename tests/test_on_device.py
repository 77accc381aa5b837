"""What each twin puts on its device, reads back from it, and sets for its process."""

import json
import subprocess
from typing import Any

import pytest
from conftest import ROOT, clean_environment, interpreter

from duel.catalogue import FRAMEWORKS

# In each framework: a batch of images, whose memory numpy overwrites once it is placed; and the sizes of what ``read``
# copies to the host. In PyTorch also what it sets and reports by itself.
SCRIPT = """
import dataclasses, json, pathlib, sys
framework = sys.argv[1]
sys.path.insert(0, framework)
sys.path.append(".")
import numpy as np
import devices, inference, network, weights
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters
from duel.measure.device import Setting


def aligned(array):  # as XLA must find it to use it as it is
    memory = np.empty(array.nbytes + 64, np.uint8)
    found = memory[-memory.ctypes.data % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


device = devices.select("cpu")
entry = dataclasses.replace(BENCHMARKS["mnist"], dataset="synthetic")
pool = batches.pool(entry, "tiny", 4, 0, pathlib.Path())
pool = dataclasses.replace(pool, batches=tuple(
    dataclasses.replace(batch, inputs=tuple(map(aligned, batch.inputs))) for batch in pool.batches
))
arrays = parameters.initialise(weights.shapes(network.build(entry, "tiny")), 0)
work = inference.Inference(Setting(entry, "tiny", "fp32", device), pool, arrays)
work.compile()
handle = work.step(0)
work.synchronize(handle)
before = [array.copy() for array in pool.batches[0].inputs]
for array in pool.batches[0].inputs:
    array[...] = 7
kept = [np.array_equal(one, other) for one, other in zip(next(work.held()).inputs, before)]
copied = []
if framework == "jax":
    class Noting:
        def __getattr__(self, name):
            return getattr(np, name)

        def asarray(self, array):
            copied.append(array.size)

    network.np = Noting()
else:
    import torch
    torch.Tensor.cpu = lambda array: copied.append(array.numel())
work.read(handle)
found = {"kept": kept, "copied": copied, "logits": int(np.prod(handle.shape))}
if framework == "pytorch":
    network._set_globally(Setting(entry, "tiny", "fp32", device, switches={"threads": "3"}))
    found["threads"] = torch.get_num_threads()
    torch.version.hip = "7.1"
    found["hip"] = devices.versions().get("hip")
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(framework: str) -> dict[str, Any]:
    command = [interpreter(framework), "-c", SCRIPT, framework]
    said = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stdout + said.stderr
    return dict(json.loads(said.stdout.splitlines()[-1]))


def test_a_batch_on_the_device_is_not_numpy_s_own_memory(found: dict[str, Any]) -> None:
    """A CPU's peak memory would be smaller by the pool."""
    assert found["kept"] == [True]


def test_of_a_result_one_number_is_read(found: dict[str, Any]) -> None:
    """However large: the time of its copy would count as that of the step, on one side."""
    assert found["logits"] == 40
    assert found["copied"] == [1]


@pytest.mark.parametrize("framework", ["pytorch"], scope="module")
def test_the_switch_threads_sets_pytorch_s_own_number(found: dict[str, Any]) -> None:
    """By itself it takes a core's two hardware threads for one, and JAX both."""
    assert found["threads"] == 3


@pytest.mark.parametrize("framework", ["pytorch"], scope="module")
def test_a_build_for_rocm_is_known_as_one(found: dict[str, Any]) -> None:
    assert found["hip"] == "7.1"
