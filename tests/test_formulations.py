"""The ways to a convolution and to attention: one function each, and seen in the program of a row."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Main, clean_environment, interpreter, rows_of

from duel.catalogue import BENCHMARKS

WAYS = """
import itertools, json, sys
sys.path[:0] = ["jax", "."]
import jax
import jax.numpy as jnp
import numpy as np
import network
from duel.catalogue import BENCHMARKS, Images
from models import _layers

jax.config.update("jax_enable_x64", True)
apart = {"shifted": 0.0, "products": 0.0, "gradients": 0.0}
for kernel, stride, padding, size, groups in itertools.product((1, 3), (1, 2), (0, 1), (5, 8), (6, 1)):
    generator = np.random.default_rng(0)
    conv = _layers.Conv(6, 6 if groups > 1 else 24, kernel, stride, padding, groups=groups)
    conv.kernel[...] = jnp.asarray(generator.standard_normal(conv.kernel.shape))
    graph, weights = network.nnx.split(conv)
    x = jnp.asarray(generator.standard_normal((2, size, size + 1, 6)))

    def computed(ways):
        with _layers.convolved_by(*ways):
            value, gradient = jax.vjp(lambda w, x: network.nnx.merge(graph, w)(x), weights, x)
            return value, *jax.tree.leaves(gradient(jnp.cos(value)))

    expected = computed(("grouped", "framework"))
    for way in ("shifted",) if groups > 1 else ("products", "gradients"):
        found = computed((way, way))
        assert len(found) == len(expected) == 3
        for one, other in zip(expected, found, strict=True):
            apart[way] = max(apart[way], float(jnp.abs(one - other).max()))
grouped = {}
for name, benchmark in BENCHMARKS.items():
    modules = [module for _, module in network.nnx.iter_modules(network.build(benchmark, "tiny"))]
    grouped[name] = any(isinstance(module, _layers.Conv) and module.groups > 1 for module in modules)


def attended(kernel, causal):
    generator = np.random.default_rng(0)
    inputs = [jnp.asarray(generator.standard_normal((2, 7, 6)), jnp.float32) for _ in range(3)]
    with _layers.attention_by(kernel):
        value, gradient = jax.vjp(lambda q, k, v: _layers.attention(q, k, v, 3, causal), *inputs)
    return value, *gradient(jnp.cos(value))

pairs = [zip(attended(None, causal), attended("heads_first", causal), strict=True) for causal in (False, True)]
attention = max(float(jnp.abs(one - other).max()) for pair in pairs for one, other in pair)
print(json.dumps({"apart": apart, "attention": attention, "grouped": grouped}))
"""


def test_every_way_is_one_function_and_the_catalogue_says_who_has_depthwise_convolutions() -> None:
    command = [interpreter("jax"), "-c", WAYS]
    said = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True)
    found = json.loads(said.stdout)
    assert all(0 < apart < 1e-12 for apart in found["apart"].values()), found["apart"]
    assert 0 < found["attention"] < 1e-6  # in float32, in which JAX's own has its softmax at all events
    assert found["grouped"] == {name: benchmark.depthwise for name, benchmark in BENCHMARKS.items()}


@pytest.mark.parametrize(
    ("mode", "values"),
    [
        ("default+depthwise=shifted+convolution=products", {"depthwise": "shifted", "convolution": "products"}),
        ("default+convolution=gradients", {"depthwise": "grouped", "convolution": "gradients"}),
    ],
)
def test_a_row_shows_by_its_program_how_it_convolves(
    main: Main, checkout: Path, mode: str, values: dict[str, str]
) -> None:
    asked = ("--benchmark", "mobilenet_v3_small", "--use_case", "1,3,5", "--preset", "smoke", "--framework", "jax")
    more = ("--products", "clipped_sum", "--batch_sizes", "8", "--mode", mode, "--device", "cpu", "--wait")
    said = main(*asked, *more, timeout=900)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    inference = "gradients" not in mode  # there it is the same program as 'products'
    assert {row["use_case"] for row in rows} == ({"1", "3", "5"} if inference else {"1", "3"})
    assert inference or "gradients is not a value of convolution for inference" in said.stderr
    called = {"shifted": "shifted_products", "products": "patch_products", "gradients": "kernel_products"}
    for row in rows:
        assert all(f"{switch}={value}" in row["switches"] for switch, value in values.items())
        counts = {name: int(count) for count, name in re.findall(r"(\d+) operations called (\w+)", row["proofs"])}
        assert {name for name, count in counts.items() if count} == {called[v] for v in values.values() if v in called}


def test_a_row_shows_by_its_program_how_it_attends(main: Main, checkout: Path) -> None:
    """In float16 all are written out on a CPU, with heads first, and only the value that asks for that is that."""
    asked = ("--benchmark", "gpt2", "--use_case", "5", "--preset", "smoke", "--framework", "jax", "--device", "cpu")
    kinds = [("default", "fp32"), ("default+attention=heads_first", "fp32"), ("default+attention=math", "fp16")]
    for mode, precision in kinds:
        said = main(*asked, "--batch_sizes", "2", "--mode", mode, "--precision", precision, "--wait", timeout=900)
        assert said.returncode == 0, said.stdout + said.stderr
    rows = rows_of(checkout)
    assert len(rows) == 3
    for row in rows:
        proof = json.loads(row["proofs"])["attention"]
        count = int(re.search(r"(\d+) operations called attention_heads_first", proof)[1])
        assert (count > 0) == ("heads_first" in row["mode"]), (row["mode"], proof)
        assert proof.startswith("math (") == (row["mode"] == "default"), (row["mode"], proof)
