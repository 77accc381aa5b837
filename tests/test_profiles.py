"""Profiles: from a trace to the parts of a step. Traces of GPUs are stand-ins of the form that is documented."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT, interpreter

from duel import kinds, profile
from duel.profile import Profile

HLO = (ROOT / "tests/recorded/program.hlo.txt").read_text()  # of XLA's form, by hand


def hlo() -> ModuleType:
    """jax/_hlo.py, which needs nothing of JAX."""
    spec = importlib.util.spec_from_file_location("_hlo", ROOT / "jax" / "_hlo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_hlo"] = module
    spec.loader.exec_module(module)
    return module


def test_a_compiled_program_says_what_each_instruction_computes_and_where() -> None:
    program = hlo().Program(HLO, training=True)
    (conv,) = program.operations("conv")
    assert (conv.module, conv.layer, conv.stage) == ("conv1", "depthwise", "forward")
    assert kinds.kind(conv, "jax") == kinds.DEPTHWISE
    assert program.flops("conv") == 2 * (2 * 8 * 8 * 4) * 9
    assert program.bytes("conv") == 4 * (2 * 2 * 8 * 8 * 4 + 3 * 3 * 4)
    kind, told = kinds.telling(program.operations("norms"), "jax") or ("", conv)
    assert (kind, told.module) == (kinds.NORMS, "bn1")


CALLS = """HloModule calls

%fused (x: f32[8,4], y: f32[4,2]) -> f32[8,2] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[4,2]{1,0} parameter(1)
  ROOT %inner = f32[8,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,2]{1,0} parameter(1)
  %triton = f32[8,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  %gemm = (f32[8,2]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
  %conv = (f32[8,2]{1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$convForward"
  %attention = (f32[8,2]{1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax"
  %keys = u32[4]{0} custom-call(%a), custom_call_target="cu_threefry2x32"
  ROOT %product = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_the_flop_of_a_librarys_products_are_not_known() -> None:
    program = hlo().Program(CALLS, training=False)
    known = {name: program.counted(name) for name in ("triton", "product", "keys", "gemm", "conv", "attention")}
    assert [name for name in known if not known[name]] == ["gemm", "conv", "attention"]
    assert program.flops("triton") == program.flops("product") == 2 * 8 * 2 * 4
    assert program.flops("gemm") == 0


def test_what_a_stage_leaves_in_memory_for_another_is_counted_once() -> None:
    """Through views, not inside fusions, and without arguments and copies of them. A program by hand."""
    program = hlo().Program((ROOT / "tests/recorded/handed.hlo.txt").read_text(), training=True)
    assert program.handed("forward", "backward") == 4 * 8 * 4
    assert program.handed("backward", "optimizer") == 4 * (4 * 2 + 8 * 2)
    assert program.handed("backward", "optimizer", alone=True) == 4 * 4 * 2
    assert program.handed("forward", "optimizer") == 0


def test_what_the_compiler_made_belongs_to_the_weights_that_it_updates() -> None:
    (gradient,) = hlo().Program(HLO, training=True).operations("gradient")
    assert (gradient.module, gradient.layer, gradient.stage) == ("conv1", "depthwise", "backward")
    (update,) = hlo().Program(HLO, training=True).operations("update")
    assert kinds.kind(update, "jax") == kinds.OPTIMIZER


# A Chrome trace of torch.profiler: one step, in microseconds.
def event(name: str, start: float, length: float, category: str = "cpu_op", **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 1, "args": arguments}


STEP = event("duel step", 0, 1000, "user_annotation")
ON_CPU = [
    STEP,
    event("module:conv1:depthwise", 100, 300, "user_annotation"),
    event("aten::conv2d", 110, 280, **{"Sequence number": 7}),
    event("aten::mkldnn_convolution", 120, 250, **{"Sequence number": 7}),
    event("aten::empty", 125, 5),
    event("autograd::engine::evaluate_function: ConvolutionBackward0", 500, 200, **{"Sequence number": 7}),
    event("aten::convolution_backward", 510, 180),
    event("Optimizer.step#SGD.step", 750, 200, "user_annotation"),
    event("aten::add_", 760, 100),
]
# Kernels as CUPTI names them, on two streams, with NCCL's and a copy; "External id" is that of what launched them.
ON_GPU = [
    STEP,
    event("module:conv1:convolution", 10, 30, "user_annotation"),
    event("aten::cudnn_convolution", 15, 20, **{"External id": 3}),
    event("aten::add_", 45, 5, **{"External id": 4}),
    event("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc", 100, 400, "kernel", **{"External id": 3}),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300, 400, "kernel"),
    event("void at::native::vectorized_elementwise_kernel<4, ...>", 700, 100, "kernel", **{"External id": 4}),
    event("Memcpy HtoD (Pinned -> Device)", 850, 50, "gpu_memcpy"),
]

READ = """
import json, sys
from pathlib import Path
import msgspec
import _inductor, profiling
from duel import profile
trace = profiling._read(Path(sys.argv[1]), _inductor.Compiled({}, {}), {}, True)
found = profile.Profile("run", 0, "pytorch")
profile.divide(trace, found)
sys.stdout.buffer.write(msgspec.json.encode(found))
"""


def ran(framework: str, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``code`` where the framework's run.py would."""
    start = f"import sys; sys.path[:0] = [{str(ROOT / framework)!r}, {str(ROOT)!r}]\n"
    command = [interpreter(framework), "-c", start + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def of_chrome(folder: Path, events: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """The microseconds of each part that the events of a trace by torch.profiler are divided into."""
    file = folder / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    done = ran("pytorch", READ, str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {(p["kind"], p["module"], p["stage"]): round(1e6 * p["seconds"], 3) for p in found["parts"]}


def test_a_trace_of_pytorch_on_a_cpu_is_divided_by_kind_module_and_stage(tmp_path: Path) -> None:
    assert of_chrome(tmp_path, ON_CPU) == {
        (kinds.DEPTHWISE, "conv1", "forward"): 280,
        (kinds.DEPTHWISE, "conv1", "backward"): 180,
        (kinds.OPTIMIZER, "", "optimizer"): 100,
        (kinds.IDLE, "", ""): 440,
    }


COUNTED = """
import json, sys
from pathlib import Path
import _inductor, profiling
from _counting import Amount
counted = {"aten::conv2d": [Amount(10, 1), Amount(20, 2)], "aten::convolution_backward": [Amount(40, 4), Amount(10, 3)]}
trace = profiling._read(Path(sys.argv[1]), _inductor.Compiled({}, {}), counted, True)
print(json.dumps([[k.operations[0].module, k.operations[0].stage, k.flops, k.bytes] for k in trace.kernels]))
"""


def test_what_a_backward_operation_computes_is_its_own_and_not_that_of_its_forward_operation(tmp_path: Path) -> None:
    """The backward pass is in a thread of its own, as on a GPU, and goes through the layers from the last on."""
    events = [STEP]
    for number, start in ((1, 100), (2, 200)):
        events.append(event(f"module:conv{number}:convolution", start, 50, "user_annotation"))
        events.append(event("aten::conv2d", start + 10, 30, **{"Sequence number": number}))
    for number, start in ((2, 500), (1, 600)):
        name = "autograd::engine::evaluate_function: ConvolutionBackward0"
        events.append(event(name, start, 50, **{"Sequence number": number}) | {"tid": 2})
        events.append(event("aten::convolution_backward", start + 10, 30) | {"tid": 2})
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    done = ran("pytorch", COUNTED, str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["conv1", "forward", 10, 1],
        ["conv2", "forward", 20, 2],
        ["conv2", "backward", 40, 4],
        ["conv1", "backward", 10, 3],
    ]


COMPILED = """
import json, sys
from pathlib import Path
import _inductor, profiling
from _counting import Amount
from duel.trace import Operation
region = "Torch-Compiled Region: 0/0"
loops = {
    (region, backward): {"cpp_fused_relu_0": _inductor.Loop((Operation("relu", stage=stage),), Amount())}
    for backward, stage in enumerate(("forward", "backward"))
}
trace = profiling._read(Path(sys.argv[1]), _inductor.Compiled(loops, {}), {}, True)
print(json.dumps([k.operations[0].stage for k in trace.kernels]))
"""


def test_loops_of_one_name_in_the_forward_and_the_backward_graph_are_told_apart(tmp_path: Path) -> None:
    """Inductor gives both graphs of a compiled function the same number, or each its own."""
    events = [STEP, event("Torch-Compiled Region: 0/0", 100, 100)]
    events.append(event("graph_0_cpp_fused_relu_0", 110, 50, **{"Sequence number": 1}))
    name = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    events.append(event(name, 300, 100, **{"Sequence number": 1}))
    events.append(event("graph_0_cpp_fused_relu_0", 310, 50))
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    done = ran("pytorch", COMPILED, str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["forward", "backward"]


def test_a_loop_that_inductor_has_not_told_of_is_of_no_known_kind_and_not_idle(tmp_path: Path) -> None:
    """As after an upgrade of PyTorch that names loops in another way."""
    region = event("Torch-Compiled Region: 0/0", 100, 500)
    assert of_chrome(tmp_path, [STEP, region, event("graph_9_cpp_fused_add_0", 200, 300)]) == {
        (kinds.OTHER, "", "forward"): 300,
        (kinds.IDLE, "", ""): 700,
    }


def test_a_copy_between_two_types_is_a_cast(tmp_path: Path) -> None:
    events = [
        STEP,
        event("aten::_to_copy", 100, 120),
        event("aten::copy_", 110, 100, **{"Input type": ["c10::BFloat16", "float", "Scalar"]}),
        event("aten::copy_", 400, 200, **{"Input type": ["float", "float", "Scalar"]}),
    ]
    assert of_chrome(tmp_path, events) == {
        (kinds.ELEMENTWISE, "", "forward"): 100,
        (kinds.COPIES, "", "forward"): 220,
        (kinds.IDLE, "", ""): 680,
    }


def test_a_trace_of_pytorch_on_a_gpu_is_divided_by_what_launched_each_kernel(tmp_path: Path) -> None:
    """By a stand-in: kernels that run at the same time share it."""
    assert of_chrome(tmp_path, ON_GPU) == {
        (kinds.CONVOLUTION, "conv1", "forward"): 300,
        (kinds.COLLECTIVE, "", "backward"): 300,
        (kinds.ELEMENTWISE, "", "forward"): 100,
        (kinds.COPIES, "", ""): 50,
        (kinds.IDLE, "", ""): 250,
    }


# As jax.profiler writes it: the steps are on the host, a line for each stream on a device; times are in picoseconds.
XPLANE = """
planes {
  name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 duration_ps: 1000000000 } }
  event_metadata { key: 1 value { id: 1 name: "duel step" } }
}
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 100000000 duration_ps: 400000000 stats { metadata_id: 1 str_value: "conv" } }
    events { metadata_id: 2 offset_ps: 600000000 duration_ps: 200000000 stats { metadata_id: 1 str_value: "norms" } }
  }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 100000000 duration_ps: 400000000 stats { metadata_id: 1 str_value: "conv" } }
  }
  event_metadata { key: 1 value { id: 1 name: "sm90_xmma_fprop_implicit_gemm" } }
  event_metadata { key: 2 value { id: 2 name: "loop_reduce_fusion" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""

# On a TPU, as programs that read such traces expect it (none was at hand): a line of instructions named by their text.
ON_TPU = XPLANE.replace("GPU", "TPU").replace("hlo_op", "tf_op").replace("XLA Ops", "XLA Modules")
ON_TPU = ON_TPU.replace("Stream #13(Compute)", "XLA Ops")
ON_TPU = ON_TPU.replace("loop_reduce_fusion", "%norms = f32[4]{0} fusion(%conv)")
ON_TPU = ON_TPU.replace("sm90_xmma_fprop_implicit_gemm", "%conv = f32[2,8,8,4]{3,2,1,0:T(8,128)} convolution(%x, %y)")

READ_XPLANE = """
import sys
from pathlib import Path
import jax, msgspec
import profiling
from duel import profile
from _hlo import Program
text, program, file = (Path(name) for name in sys.argv[1:4])
whole = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text.read_text())
file.write_bytes(whole[: len(whole) - int(sys.argv[4])])
found = profile.Profile("run", 0, "jax")
profile.divide(profiling._read(file, Program(program.read_text(), True), profile.DENIED), found)
sys.stdout.buffer.write(msgspec.json.encode(found))
"""


def of_xplane(folder: Path, text: str, cut: int = 0) -> "subprocess.CompletedProcess[str]":
    """The profile of a trace, of which the last ``cut`` bytes are missing."""
    (folder / "trace.txt").write_text(text)
    (folder / "program.txt").write_text(HLO)
    files = (str(folder / name) for name in ("trace.txt", "program.txt", "trace.pb"))
    return ran("jax", READ_XPLANE, *files, str(cut))


@pytest.mark.parametrize("text", [XPLANE, ON_TPU])
def test_a_trace_of_jax_on_a_device_is_divided_by_the_instructions_of_its_program(tmp_path: Path, text: str) -> None:
    """By stand-ins; lines that repeat others do not count twice."""
    done = of_xplane(tmp_path, text)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {(p["kind"], p["module"], p["stage"]): round(1e6 * p["seconds"], 3) for p in found["parts"]} == {
        (kinds.DEPTHWISE, "conv1", "forward"): 400,
        (kinds.NORMS, "bn1", "forward"): 200,
        (kinds.IDLE, "", ""): 400,
    }


def test_a_device_that_shows_no_kernels_is_an_error_that_says_what_the_administrator_can_do(tmp_path: Path) -> None:
    done = of_xplane(tmp_path, XPLANE.partition('planes {\n  name: "/device')[0])
    assert done.returncode != 0
    assert "ERR_NVGPUCTRPERM" in done.stderr
    cut = of_xplane(tmp_path, XPLANE, cut=100)
    assert cut.returncode != 0


@pytest.mark.parametrize(("text", "cause"), [(b"{}", "KeyError"), (b'{"traceEvents": [{"ph"', "JSON")])
def test_a_trace_that_was_cut_is_an_error(tmp_path: Path, text: bytes, cause: str) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(text))
    done = ran("pytorch", READ, str(file))
    assert done.returncode != 0
    assert cause in done.stderr


def test_a_trace_without_a_whole_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        profile.divide(profile.Trace([], []), Profile("run", 0, "jax"))
