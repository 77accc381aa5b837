"""JAX's programs lowered for CUDA on a machine without it: the marks of precisions and switches, in all benchmarks.

Nothing is compiled or run: that needs a driver. PyTorch's forward passes run on 'cuda' with fake tensors.
"""

import functools
import json
import subprocess
from typing import Any

import pytest
from conftest import FRAMEWORKS_PYTHON, ROOT

from duel.catalogue import BENCHMARKS

LOWER = """
import dataclasses, importlib, json, os, re, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / "jax"))
sys.path.append(sys.argv[1])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import Mesh
import devices, network, weights
from _ahead import shapes_of
from duel.catalogue import BENCHMARKS, USE_CASES
from duel.measure import batches, parameters
from duel.measure.device import Setting, World
jax.config.update("jax_platforms", "cpu")
device = devices.select("cpu")
network.Network._put = shapes_of
found = {}
for name in sys.argv[2].split(","):
    entry = dataclasses.replace(BENCHMARKS[name], dataset="synthetic")
    pool = batches.pool(entry, "tiny", 4, 0, Path("none"))
    per_sample = [(3, product) for product in ("clipped_sum", "norms", "materialised")]
    for case, product in ((1, ""), (2, ""), *per_sample, (4, "clipped_sum"), (5, "")):
        use_case = USE_CASES[case]
        world = World(0, 2 if case in (2, 4) else 1)
        kind = getattr(importlib.import_module(use_case.module), use_case.work)
        shapes = weights.shapes(network.build(entry, "tiny", bool(product)))
        for precision in ("fp32", "tf32", "bf16", "fp16"):
            setting = Setting(entry, "tiny", precision, device, world, product=product, microbatch=2 if product else 0)
            work = kind(setting, pool, parameters.initialise(shapes, 0))
            text = work._trace().lower(lowering_platforms=("cuda",)).as_text()
            kinds = {}
            for line in text.splitlines():
                if "stablehlo.dot_general" in line or "stablehlo.convolution" in line:
                    types = re.search(r": \\(tensor<([^>]*)>, tensor<([^>]*)>\\)", line)
                    marks = re.findall(r"precision(?: =)? ?\\[?(HIGHEST|HIGH|DEFAULT)", line)
                    one = [shape.split("x")[-1] for shape in types.groups()]
                    said = sorted(set(marks)) or ["-"]
                    key = "/".join(sorted(set(one))) + " " + "/".join(said)
                    kinds[key] = kinds.get(key, 0) + 1
            reductions = text.count("stablehlo.all_reduce")
            found[f"{name} {case}{product} {precision}"] = {"products": kinds, "reductions": reductions}
print(json.dumps(found))
"""


@functools.cache
def lowered(names: str) -> dict[str, dict[str, Any]]:
    command = [FRAMEWORKS_PYTHON[0], "-c", LOWER, str(ROOT), names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_product_has_the_types_and_marks_of_its_precision(name: str) -> None:
    found = lowered(name)
    assert len(found) == 28
    for cell, program in found.items():
        _, work, precision = cell.split()
        assert (program["reductions"] > 0) == (work[0] in "24"), "many devices have one sum, others none"
        kinds = program["products"]
        assert sum(kinds.values()) > 0, cell
        for kind in kinds:
            types, marks = kind.split()
            if precision == "fp32":
                assert (types, marks) == ("f32", "HIGHEST"), (cell, kinds)
            elif precision == "tf32":
                assert types == "f32", (cell, kinds)
                assert marks != "HIGHEST", (cell, kinds)
            elif types == "f32":  # what stays in full precision must not become TF32
                assert marks == "HIGHEST", (cell, kinds)
            else:
                assert set(types.split("/")) <= {"bf16" if precision == "bf16" else "f16", "f32"}, (cell, kinds)
        assert precision not in ("bf16", "fp16") or any("16" in kind for kind in kinds), (cell, kinds)


ATTEND = """
import dataclasses, importlib, json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / "jax"))
sys.path.append(sys.argv[1])
import jax
from jax._src.cudnn import fused_attention_stablehlo as fused
import devices, network, weights
from duel.catalogue import BENCHMARKS, USE_CASES
from duel.measure import batches, parameters
from duel.measure.device import Setting
jax.config.update("jax_platforms", "cpu")
fused.check_cudnn_version = lambda: 91000  # stands in for the look-up of an installed cuDNN
device, found = devices.select("cpu"), {}
for name in ("vit_b16", "gpt2", "bert"):
    entry = dataclasses.replace(BENCHMARKS[name], dataset="synthetic")
    pool = batches.pool(entry, "tiny", 4, 0, Path("none"))
    for case in (1, 5):
        kind = getattr(importlib.import_module(USE_CASES[case].module), USE_CASES[case].work)
        arrays = parameters.initialise(weights.shapes(network.build(entry, "tiny")), 0)
        for precision in ("bf16", "fp16"):
            for value in ("cudnn", "math"):
                setting = Setting(entry, "tiny", precision, device, switches={"attention": value})
                try:
                    text = kind(setting, pool, arrays)._trace().lower(lowering_platforms=("cuda",)).as_text()
                    found[f"{name} {case} {precision} {value}"] = text.count("__cudnn$fmha")
                except NotImplementedError as error:
                    found[f"{name} {case} {precision} {value}"] = str(error)
print(json.dumps(found))
"""


def test_attention_by_cudnn_is_a_custom_call_and_else_there_is_none() -> None:
    """By a stand-in for cuDNN's version. Where it is refused, no mode asks for it (``duel.switches``)."""
    ran = subprocess.run([FRAMEWORKS_PYTHON[0], "-c", ATTEND, str(ROOT)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 24
    for cell, calls in found.items():
        name, case, _, value = cell.split()
        if value == "math":
            assert calls == 0, cell
        elif (name, case) == ("vit_b16", "1"):
            assert calls == "Unsupported sequence length Q 17, KV 17.", "JAX can: let the mode have it"
        else:
            assert calls > 0, cell


FAKE = """
import dataclasses, json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / "pytorch"))
sys.path.append(sys.argv[1])
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import network
from duel.catalogue import BENCHMARKS
from duel.measure import batches
torch.nn.init.trunc_normal_ = lambda tensor, *_, **__: tensor  # it looks at numbers, which fakes do not have
found = {}
for name, entry in BENCHMARKS.items():
    entry = dataclasses.replace(entry, dataset="synthetic")
    batch = batches.pool(entry, "tiny", 2, 0, Path("none")).batches[0]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        model = network.build(entry, "tiny").eval()
        kinds = [torch.float32 if array.dtype.kind == "f" else torch.int64 for array in batch.inputs]
        inputs = [torch.empty(array.shape, dtype=kind) for array, kind in zip(batch.inputs, kinds)]
        with torch.no_grad():
            logits = model(*inputs)
    found[name] = [str(logits.device), list(logits.shape)]
print(json.dumps(found))
"""


def test_pytorchs_forward_passes_dispatch_on_cuda() -> None:
    ran = subprocess.run([FRAMEWORKS_PYTHON[1], "-c", FAKE, str(ROOT)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == set(BENCHMARKS)
    assert all(device == "cuda:0" for device, _ in found.values())


PRECISIONS = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
import devices
for policy in ("fp32", "tf32", "bf16", "fp16", "float64", "tf32", "fp32"):
    devices.set_precision(policy)
    tf32 = policy == "tf32"
    whole = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert whole == ("high" if tf32 else "highest", tf32, tf32), (policy, whole)
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == tf32, policy
    assert all((one.fp32_precision == "tf32") == tf32 for one in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn))
"""


def test_pytorchs_older_settings_of_precision_agree_with_the_newer_ones() -> None:
    """Where they do not, reading them raises, as Inductor does when it chooses between kernels."""
    command = [FRAMEWORKS_PYTHON[1], "-W", "error", "-c", PRECISIONS, str(ROOT / "pytorch"), str(ROOT)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
