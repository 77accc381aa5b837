"""The lines that only a GPU reaches, reached by stand-ins for it, and how many of them that are.

No GPU is here. What is called of PyTorch's and JAX's is replaced by stand-ins with the names and signatures of the real
functions, so a call of something that does not exist fails; what XLA is asked for is given to the real compiler.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage
from conftest import ROOT, Main, interpreter

from duel.results import Results

FOLDERS = ("jax", "pytorch", "duel/measure")
WHOLE = ("duel/measure/nvml.py", "duel/measure/amd.py", "duel/measure/gpus.py", "jax/devices.py:_local_device")
# A test that only a GPU, or what there is only with one, passes; and one that it fails.
GPU = re.compile(r"\bcuda\b|'gpu'|cuda_graphs|_gpu\b|_copies\b|(platform|type) != 'cpu'|peak_bytes_in_use")
NOT = re.compile(r"is None$")


def gpu_only(file: Path) -> dict[int, int]:
    """The statements of ``file`` that only a GPU reaches: the last line of each by its first."""
    name = str(file.relative_to(ROOT))
    found: dict[int, int] = {}

    def note(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            for each in ast.walk(node):
                if isinstance(each, ast.stmt) and not _declares(each):
                    inner = getattr(each, "body", None)
                    found[each.lineno] = (inner[0].lineno - 1 if inner else each.end_lineno) or each.lineno

    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and (name in WHOLE or f"{name}:{node.name}" in WHOLE):
            note(node.body)
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):
                continue
            for place, each in enumerate(block):
                if not isinstance(each, ast.If) or not GPU.search(test := ast.unparse(each.test)):
                    continue
                if "'gpu'" in test or not NOT.search(test):
                    note(each.body)
                else:
                    note(each.orelse)
                    if isinstance(each.body[-1], ast.Return):
                        note(block[place + 1 :])
    return found


def _declares(node: ast.stmt) -> bool:
    """Whether it is a docstring or the like, which no line tracer sees."""
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


START = """
import os, sys
sys.path[:0] = [sys.argv[1] + "/" + sys.argv[2], sys.argv[1]]
sys.path.append(sys.argv[3])  # where coverage is, and nothing else
import coverage
tracer = coverage.Coverage(data_file=sys.argv[4], config_file=False, include=[sys.argv[1] + "/*"])
tracer.start()
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters
from duel.measure.device import Setting, World
NAME = "NVIDIA H100 80GB HBM3"
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
"""

PYTORCH = """
import contextlib, dataclasses
import torch
import _accounting, devices, network, profiling, weights
from duel.catalogue import SGD
from duel.recipes import Recipe
from per_sample_gradients import PerSampleGradients
from trainer import Trainer
from training import Training


def of_cuda(**values):
    stack = contextlib.ExitStack()
    for name, value in values.items():
        stack.enter_context(mock.patch(f"torch.cuda.{name}", autospec=True, return_value=value))
    return stack


there = dict(is_available=True, is_initialized=True, get_device_capability=(9, 0), get_device_name=NAME,
             device_count=4, current_device=2, max_memory_allocated=7 << 30, max_memory_reserved=9 << 30,
             memory_allocated=1 << 30, reset_peak_memory_stats=None, set_device=None, synchronize=None)
with of_cuda(**there), mock.patch("torch.distributed.init_process_group", autospec=True) as joined:
    with mock.patch("torch.backends.mps.is_available", autospec=True, return_value=True):
        kinds = {one.kind: one for one in devices.available()}
    assert list(kinds) == ["gpu", "mps", "cpu"] and kinds["gpu"].compute_capability == "9.0", kinds
    for variables in ({}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}):
        with mock.patch.dict(os.environ, variables):
            try:
                chosen = devices.select("gpu", World(6, 8, 6, "node:1"))
            except ValueError as error:
                assert not variables and str(error) == "process 6 of this node has no GPU: there are 4", error
    assert torch.cuda.set_device.call_args.args == (2,) and joined.call_args.args == ("nccl",)
    assert torch.cuda.synchronize.called
    assert devices.native(chosen) == torch.device("cuda", 2)
    assert devices.peak_memory_bytes() == (7 << 30, "allocator_peak") and devices.reserved_bytes() == 9 << 30
    work = SimpleNamespace(_device=torch.device("cuda"), step=lambda index: index, synchronize=lambda handle: None)
    assert _accounting._peak(work, 0) == 6 << 30
    assert torch.cuda.reset_peak_memory_stats.called

modes = []
with mock.patch("torch.compile", autospec=True, side_effect=lambda function, mode=None: modes.append(mode)):
    for on in (["compile"], ["compile", "cuda_graphs"], ["compile", "max_autotune"],
               ["compile", "cuda_graphs", "max_autotune"]):
        for captures in (True, profiling.named(Training)._captures):
            setting = SimpleNamespace(on=on.__contains__)
            network.Network._compiled(SimpleNamespace(_setting=setting, _captures=captures), print)
modes, traced = modes[::2], modes[1::2]
assert traced == [None, None, "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"], traced
assert modes == [None, "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"], modes
assert set(modes[1:]) <= set(torch._inductor.list_mode_options()), "what torch.compile does not know"

entry = dataclasses.replace(BENCHMARKS["mnist"], dataset="synthetic", optimizer=SGD(0.05))
device = devices.select("cpu")
pool = batches.pool(entry, "tiny", 8, 0, Path("none"))
initial = parameters.initialise(weights.shapes(network.build(entry, "tiny")), 0)


def made(kind, **options):
    one = kind(Setting(entry, "tiny", "fp32", device, **options), pool, initial)
    one.compile()
    return one


def on_cuda(one):  # what asks for its device is told a GPU
    return mock.patch.object(one, "_device", torch.device("cuda", 0))


# Recorded graphs: the loss of a step is a copy, a microbatch's sums are too, and the manager says whether they are.
plain, replayed = made(Training), made(Training, switches={"cuda_graphs": "on"})
outputs, run = [], replayed._differentiable
replayed._differentiable = lambda *given: outputs.append(run(*given)) or outputs[-1]
loss = replayed.step(0)
assert plain.loss(plain.step(0)) == replayed.loss(loss) and loss.data_ptr() != outputs[0][0].data_ptr()
for manager, said in ((object(), "on"), (None, "off")):
    where = "torch._inductor.cudagraph_trees.get_manager"
    with on_cuda(replayed), mock.patch(where, autospec=True, return_value=manager) as asked:
        assert replayed.observed()["cuda_graphs"][0] == said and asked.call_args.args == (0,)
with on_cuda(plain), mock.patch("torch.accelerator.synchronize", autospec=True) as waited:
    plain.synchronize(None)
    assert waited.call_args.args == (torch.device("cuda", 0),)
parts = [made(PerSampleGradients, product="clipped_sum", microbatch=4, switches={"cuda_graphs": value})
         for value in ("off", "on")]
assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
one, other = (work.step(0) for work in parts)
assert all(torch.equal(one[name], other[name]) for name in one)

# On several GPUs batch norms share their statistics.
norms = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
network._share_batch_norms(norms, torch.device("cuda"))
assert type(norms[0]) is torch.nn.SyncBatchNorm

# A trace that has only what the host did.
plain.graphs = None
with on_cuda(plain), mock.patch.object(plain, "synchronize"):
    try:
        profiling.traced(plain, 0, 2, Path(sys.argv[4]).parent / "trace")
    except ValueError as error:
        assert "ERR_NVGPUCTRPERM" in str(error), error
    else:
        raise AssertionError("a trace without kernels was taken")

# A trainer copies batches on a stream of its own, and a step waits for it.
alone, copying = (made(Trainer, recipe=Recipe(entry.optimizer, 8, 1)) for _ in range(2))
copying._copies, now = (mock.create_autospec(torch.cuda.Stream, instance=True) for _ in range(2))
pinned, kept = [], []
expected = alone.loss(alone.advance(alone.put(pool.batches[0], 8), 0.05))
done = mock.create_autospec(torch.cuda.Event, instance=True)
with (of_cuda(stream=contextlib.nullcontext(), current_stream=now, Event=done),
      mock.patch("torch.Tensor.pin_memory", lambda tensor: pinned.append(1) or tensor),
      mock.patch("torch.Tensor.record_stream", lambda tensor, stream: kept.append(stream))):
    assert copying.loss(copying.advance(copying.put(pool.batches[0], 8), 0.05)) == expected
    copying.read(copying.step(0))  # as the clock's proof waits for a step
assert len(pinned) == 3 and done.record.called and done.synchronize.called
assert kept[:2] == [now] * 2 and now.wait_stream.call_args.args == (copying._copies,)
"""

JAX = """
import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import devices, network, per_sample_gradients


def local(backend=None, **_):
    if backend not in (None, there[0].platform):
        raise RuntimeError("Unknown backend")
    return there


def statistics():
    return {"bytes_limit": 80 << 30, "peak_bytes_in_use": 7 << 30, "peak_pool_bytes": 9 << 30}


for kind in ("gpu", "tpu"):
    there = [SimpleNamespace(device_kind=NAME, platform=kind, compute_capability="9.0", memory_stats=statistics)] * 4
    with mock.patch("jax.local_devices", autospec=True, side_effect=local):
        found = devices.available()
        assert [(one.kind, one.count) for one in found] == [(kind, 4), ("cpu", 1)], found
        assert devices.peak_memory_bytes() == (7 << 30, "allocator_peak") and devices.reserved_bytes() == 9 << 30
        assert devices.native(found[0]) is there[0]
    with mock.patch("jax.local_devices", side_effect=RuntimeError("Unable to initialize backend 'cuda': too old")):
        try:
            devices.select("gpu")
            raise AssertionError("it measures another device")
        except ValueError as error:
            assert str(error) == "JAX cannot use its accelerator: Unable to initialize backend 'cuda': too old", error
three = [SimpleNamespace(id=number, process_index=rank, slice_index=rank // 2) for number, rank in enumerate((2, 0, 1))]
with mock.patch("jax.devices", return_value=three):
    assert [device.process_index for device in devices._of_ranks()] == [0, 1, 2], "in cyclic order of nodes, too"
    assert per_sample_gradients._by_rank(np.array([20, 21, 0, 1, 10, 11])).tolist() == [0, 1, 10, 11, 20, 21]
assert devices._local_device(3) == 3
with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="4,5,6"):
    assert devices._local_device(4) == 1
with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="5"):
    assert devices._local_device(3) == 0, "a launcher that shows each process its own"

# The options that the switches ask for: the real XLA refuses one that it does not know.
given = []
program = jax.jit(lambda x: x + 1).lower(1.0)
real = type(program).compile
def noted(self, compiler_options=None):
    given.append(compiler_options)
    return real(self, compiler_options)
with mock.patch.object(type(program), "compile", noted):
    for on in ("command_buffers", "triton_gemm"), ("latency_hiding", "deterministic"):
        setting = SimpleNamespace(on=on.__contains__, value=lambda name: "2")
        it = object.__new__(network.Network)
        it._device, it._setting = SimpleNamespace(platform="gpu"), setting
        assert it._compiled(program)(1.0) == 2.0
        with mock.patch.object(jax, "jit") as jit:
            it._evaluate  # in a training, too
        assert jit.call_args.kwargs == {"compiler_options": given[-1]}, jit.call_args
assert list(given[0]) == ["xla_gpu_autotune_level"] and len(given[1]) == 5, given

# On several GPUs gradients are summed array by array.
it = SimpleNamespace(_mesh=Mesh(jax.devices("cpu")[:1], network.AXIS), _device=SimpleNamespace(platform="gpu"))
summed = jax.shard_map(lambda tree: network.Network._sum(it, tree), mesh=it._mesh, in_specs=PartitionSpec(),
                       out_specs=PartitionSpec(), check_vma=False)
text = str(jax.make_jaxpr(summed)({"a": 1.0, "b": 2.0}))
assert "psum" in text and "concatenate" not in text, text
assert jax.jit(summed)({"a": 1.0, "b": 2.0}) == {"a": 1.0, "b": 2.0}
"""

END = """
tracer.stop()
tracer.save()
"""


def test_the_lines_that_only_a_gpu_reaches_run_with_stand_ins(tmp_path: Path) -> None:
    """At least 95 in 100 of them; those that are left are named."""
    package = tmp_path / "packages" / "coverage"
    package.parent.mkdir()
    package.symlink_to(Path(coverage.__file__).parent)
    runs = [
        [interpreter(side), "-c", START + code + END, str(ROOT), side, str(package.parent), str(tmp_path / side)]
        for side, code in (("jax", JAX), ("pytorch", PYTORCH))
    ]
    own = ["-m", "coverage", "run", f"--data-file={tmp_path / 'driver'}", f"--include={ROOT}/duel/measure/*"]
    of_libraries = [str(ROOT / "tests" / name) for name in ("test_watch.py", "test_amd.py")]
    runs.append([sys.executable, *own, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *of_libraries])
    reached: dict[str, set[int]] = {}
    for command in runs:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for side in ("jax", "pytorch", "driver"):
        data = coverage.CoverageData(str(tmp_path / side))
        data.read()
        for name in data.measured_files():
            reached.setdefault(name, set()).update(data.lines(name) or ())
    left, count = [], 0
    for file in sources():
        for first, last in gpu_only(file).items():
            count += 1
            if not reached.get(str(file), set()) & set(range(first, last + 1)):
                left.append(f"{file.relative_to(ROOT)}:{first}")
    assert count > 100, "the rule finds too few"
    print(json.dumps({"lines": count, "left": left}))
    assert len(left) <= 0.05 * count, f"{len(left)} of {count} are not reached: {' '.join(left)}"


def test_a_fault_on_such_a_line_is_survived_and_named(main: Main, checkout: Path) -> None:
    """A wrong call of the allocator leaves the row as it was measured; a switch that raises fails its side alone."""
    raises = 'raise RuntimeError("no such mode")'
    for file, line, fault in (
        ("jax/devices.py", '_in_use" in statistics', '_in_use" in jax.no_such_call()'),
        ("pytorch/network.py", 'graphs = self._setting.on("cuda_graphs") and self._captures', raises),
    ):
        text = (checkout / file).read_text()
        assert text.count(line) == 1
        (checkout / file).write_text(text.replace(line, fault))
    options = ("--benchmark", "mnist", "--use_case", "1", "--preset", "smoke", "--mode", "compile", "--wait")
    ran = main(*options)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    rows = {row.framework: row for run in Results(checkout / "results").runs() for row in run.rows()}
    assert (rows["pytorch"].status, rows["pytorch"].cause) == ("failed", "RuntimeError: no such mode")
    assert rows["jax"].status == "finished"
    assert rows["jax"].throughput
    assert rows["jax"].peak_memory_bytes is rows["jax"].throughput_per_gb is None
    assert "no_such_call" in (rows["jax"].missing or {})["peak_memory_bytes"]
