"""Modes: what is understood, what is refused and with which words, and what each turns where."""

import ast
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, clean_environment, interpreter

from duel import modes
from duel.catalogue import BENCHMARKS, FRAMEWORKS, USE_CASES
from duel.errors import UserError
from duel.job import Job
from duel.measure import attempt, preparing
from duel.measure.device import ALONE, Device, Setting, World, keeping
from duel.record import Row
from duel.switches import AS_PASSED, SWITCHES, applicable


@pytest.mark.parametrize("mode", [*modes.MODES, "default+compile", "tuned-compile", "default+threads=2-donation"])
def test_a_name_with_switches_is_a_mode(mode: str) -> None:
    assert modes.check(mode) == mode


def test_every_value_of_every_switch_can_be_spelled() -> None:
    for switch in SWITCHES:
        for value in switch.values if not switch.counts else ("2",):
            assert modes.check(modes.spelled("default", {switch.name: value}))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("fast", "unknown mode 'fast'; valid: default, tuned, compile, opacus"),
        ("", "unknown mode ''"),
        ("default+nhwc", "unknown switch 'nhwc'; valid: threads, "),
        (
            "default+compile=2",
            "+compile=2: expected +compile=VALUE with one of off, on; +compile and -compile stand for",
        ),
        ("default+threads", "+threads: expected +threads=VALUE with one of all, a number"),
        ("default+threads=0", "+threads=0: expected"),
        ("default+compile-compile", "mode 'default+compile-compile' contradicts itself: compile is on and off"),
        ("compile-compile", "mode 'compile-compile' contradicts itself: compile is on and off"),
        ("default+attention=math+attention=flash", "contradicts itself: attention is math and flash"),
        ("default+", "expected a name, then +switch, -switch or +switch=value"),
        ("default+compile!", "expected a name"),
    ],
)
def test_what_is_no_mode_is_answered_with_what_is(mode: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        modes.check(mode)


def settings(mode: str, framework: str = "pytorch", benchmark: str = "resnet50", use_case: int = 1, **more: Any) -> Any:
    return modes.settings(mode, framework, benchmark, use_case, more.get("precision", "fp32"), more.get("kind", "cpu"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("use_case", [number for number in USE_CASES if number])
@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu", "mps"])
def test_what_a_newcomer_gets_is_the_first_value_of_every_switch(
    framework: str, benchmark: str, use_case: int, kind: str
) -> None:
    found = settings("default", framework, benchmark, use_case, kind=kind)
    first = {switch.name: switch.values[0] for switch in SWITCHES if switch.framework == framework}
    assert found
    assert found.items() <= first.items()


def test_tuned_turns_what_applies_and_nothing_else() -> None:
    on = {"compile": "on", "channels_last": "on", "fused_optimizer": "on"}
    assert settings("tuned") == settings("default") | on
    assert settings("tuned", benchmark="gpt2") == settings("default", benchmark="gpt2") | {
        "compile": "on",
        "fused_optimizer": "on",
    }
    assert settings("tuned", use_case=3) == settings("default", use_case=3) | {"compile": "on"}
    assert settings("tuned", "jax") == settings("default", "jax")
    graphs = {"cudnn_benchmark": "on", "cuda_graphs": "on"}
    assert settings("tuned", kind="gpu") == settings("default", kind="gpu") | on | graphs


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_a_gpu_both_sides_take_one_kernel_of_attention(framework: str) -> None:
    """The plain one in full precision, cuDNN's where it takes the type."""
    for precision, kernel in {"fp32": "math", "tf32": "math", "bf16": "cudnn", "fp16": "cudnn"}.items():
        assert settings("tuned", framework, "gpt2", kind="gpu", precision=precision)["attention"] == kernel


def test_a_switch_that_a_side_lacks_leaves_it_as_it_is() -> None:
    assert settings("default+channels_last", "jax") == settings("default", "jax")
    assert settings("default+channels_last")["channels_last"] == "on"
    assert settings("tuned-compile")["compile"] == "off"
    assert settings("default+threads=1")["threads"] == "1"


@pytest.mark.parametrize(
    ("mode", "more", "words"),
    [
        ("default+channels_last", {"benchmark": "gpt2"}, "does not apply to train_single of gpt2 on a cpu; valid: "),
        ("default+cuda_graphs", {}, "switch cuda_graphs does not apply to train_single of resnet50 on a cpu"),
        ("default+cuda_graphs", {"kind": "gpu"}, "cuda_graphs needs compile; valid: default+cuda_graphs+compile"),
        (
            "tuned-compile+cuda_graphs",
            {"kind": "gpu"},
            "switch cuda_graphs needs compile; valid: both of them, or neither",
        ),
        (
            "opacus+compile",
            {"benchmark": "mnist", "use_case": 3},
            "switches opacus and compile cannot be combined; valid: one of them",
        ),
        ("tuned+opacus", {"benchmark": "mnist", "use_case": 3}, "cannot be combined; valid: tuned+opacus-compile"),
        (
            "default+attention=flash",
            {"framework": "jax", "benchmark": "gpt2"},
            "flash is not a value of attention in jax",
        ),
        ("default+attention=cudnn", {"benchmark": "gpt2"}, "on a cpu; valid: framework, math, flash"),
        (
            "default+attention=cudnn",
            {"benchmark": "gpt2", "kind": "gpu"},
            "attention=cudnn needs a 16-bit precision; valid: --precision bf16 or fp16",
        ),
    ],
)
def test_what_does_not_apply_or_go_together_is_refused(mode: str, more: dict[str, Any], words: str) -> None:
    assert modes.check(mode)
    with pytest.raises(UserError, match=re.escape(words)):
        settings(mode, **more)


def test_a_switch_that_is_turned_off_takes_along_what_needs_it() -> None:
    assert settings("tuned-compile", kind="gpu") == settings("tuned-compile-cuda_graphs", kind="gpu")
    chosen = "default+compile+max_autotune"
    for mode in ("tuned-compile", "tuned-compile-cuda_graphs", "tuned-compile-max_autotune"):
        found = settings(modes.in_place(mode, chosen, "pytorch"), kind="gpu")
        assert found == settings("default", kind="gpu"), mode
    assert settings(modes.in_place("tuned-cuda_graphs", chosen, "pytorch"), kind="gpu")["max_autotune"] == "on"
    with pytest.raises(UserError, match="max_autotune needs compile"):  # as asked for
        settings(modes.in_place("tuned-compile+max_autotune", chosen, "pytorch"), kind="gpu")


def test_an_odd_number_of_tokens_has_no_gradient_by_cudnn_in_jax() -> None:
    """An image's patches and the class token. Inference, and PyTorch, have the kernel."""
    for use_case, kernel in ((1, "math"), (5, "cudnn")):
        assert modes.settings("tuned", "jax", "vit_b16", use_case, "bf16", "gpu")["attention"] == kernel
        assert modes.settings("tuned", "pytorch", "vit_b16", use_case, "bf16", "gpu")["attention"] == "cudnn"
    with pytest.raises(UserError, match="cudnn is not a value of attention in jax on a gpu; valid: framework, math"):
        modes.settings("default+attention=cudnn", "jax", "vit_b16", 1, "bf16", "gpu")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_switches_that_a_row_recorded_can_be_asked_for_again(framework: str, kind: str) -> None:
    """As an interrupted training in mode tuned does."""
    for benchmark in ("resnet50", "gpt2", "gcn", "mobilenet_v3_small"):
        for precision in ("fp32", "bf16"):
            here = (framework, benchmark, 1, precision, kind)
            begun = modes.settings("tuned", *here)
            texts = dict(text.split("=", 1) for text in modes.said(begun).split())
            assert modes.settings(modes.spelled("default", texts), *here) == begun


def test_what_is_deterministic_has_no_cudnn_attention_in_pytorch() -> None:
    """It refuses it: torch's sdp_utils.cpp, check_cudnn_deterministic."""
    assert modes.settings("tuned+deterministic", "pytorch", "gpt2", 1, "bf16", "gpu")["attention"] == "flash"
    assert modes.settings("tuned+deterministic", "jax", "gpt2", 1, "bf16", "gpu")["attention"] == "cudnn"
    with pytest.raises(UserError, match="attention=cudnn is not deterministic; valid: attention=flash or math"):
        modes.settings("default+attention=cudnn+deterministic", "pytorch", "gpt2", 1, "bf16", "gpu")
    for framework, kernel in (("pytorch", "flash"), ("jax", "cudnn")):
        mode = modes.in_place("tuned+deterministic", "default+attention=cudnn", framework)
        assert modes.settings(mode, framework, "gpt2", 1, "bf16", "gpu")["attention"] == kernel


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_gpu_without_cudnn_takes_the_plain_kernel_of_attention(framework: str) -> None:
    here = (framework, "gpt2", 1, "bf16", "gpu")
    assert modes.settings("tuned", *here, cudnn=False)["attention"] == "math"
    with pytest.raises(UserError, match="attention=cudnn needs an NVIDIA GPU; valid: attention=math"):
        modes.settings("default+attention=cudnn", *here, cudnn=False)


def test_a_number_of_threads_is_of_one_process_with_so_many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    modes.refuse("default+threads=2", "mnist", 5)
    for use_case in (2, 4):
        with pytest.raises(
            UserError, match=r"threads limits one process, and .* has several; valid: use cases 1, 3, 5"
        ):
            modes.refuse("default+threads=2", "mnist", use_case)
    monkeypatch.setattr(preparing.probes, "usable_cpus", lambda: [0, 1])
    preparing._check_threads("default", {"threads": "all"}, World(0, 2))
    preparing._check_threads("default+threads=2", {"threads": "2"}, ALONE)
    with pytest.raises(UserError, match="threads=64: there are 2 CPUs here; valid: threads=1 to threads=2"):
        preparing._check_threads("default+threads=64", {"threads": "64"}, ALONE)
    with pytest.raises(UserError, match="threads limits one process, this row has 2; valid: threads=all"):
        preparing._check_threads("default+threads=2", {"threads": "2"}, World(0, 2))
    monkeypatch.delattr(os, "sched_setaffinity")  # as on macOS
    assert attempt._chosen_cpus(Row(mode="default+threads=2")) == []
    with pytest.raises(UserError, match="only Linux can limit a process to some CPUs"):
        preparing._check_threads("default+threads=2", {"threads": "2"}, ALONE)


def test_kept_memory_is_that_of_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from duel.measure.device import *; print(keeps_memory()); keep_memory(); print(keeps_memory())"
    alone = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert alone.stdout.split() == ["False", "True"]
    large = "from duel.measure.device import *; keep_memory(); block = bytearray(2**28); print(in_huge_pages())"
    command = [sys.executable, "-c", large]
    kept = subprocess.run(command, cwd=ROOT, env=keeping(os.environ), capture_output=True, text=True, check=True)
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # the mode in force is in brackets
    given = file.read_text() if file.exists() else "[never]"
    asks = [int(part) for part in platform.libc_ver()[1].split(".") if part] >= [2, 35]
    assert (float(kept.stdout) > 0.9) is ("[always]" in given or ("[madvise]" in given and asks))
    monkeypatch.setattr(preparing, "keep_memory", lambda: None)  # as on musl, which has no mallopt
    with pytest.raises(UserError, match="only glibc's malloc can be told to keep memory; valid here: keep_memory=off"):
        preparing._keep_memory("default+keep_memory")


def test_memory_is_kept_where_one_process_computes() -> None:
    modes.refuse("default+keep_memory", "mnist", 1)
    with pytest.raises(UserError, match="switch keep_memory does not apply to train_multi of mnist; valid: threads, "):
        modes.refuse("default+keep_memory", "mnist", 2)
    for use_case, there in ((1, True), (2, False), (3, True), (4, False), (5, True)):
        for framework in FRAMEWORKS:
            assert ("keep_memory" in applicable(framework, "mnist", use_case, "cpu")) is there


def test_what_applies_to_neither_side_is_refused_before_anything_starts() -> None:
    modes.refuse("default+channels_last", "resnet50", 1)
    modes.refuse("opacus", "mnist", 3)
    for mode, benchmark, use_case in (("opacus", "mnist", 1), ("default+attention=math", "resnet50", 1)):
        with pytest.raises(UserError, match="does not apply to train_single of "):
            modes.refuse(mode, benchmark, use_case)
    with pytest.raises(UserError, match="switch opacus does not apply to per_sample_gradients_single of graphnet"):
        modes.refuse("opacus", "graphnet", 3)


def test_a_switch_that_did_not_take_is_an_error_with_what_was_found() -> None:
    values = {"channels_last": "on", "autotune": "4", "attention": "framework"}
    seen = {
        "channels_last": ("off", "strides, 3 of 161"),
        "attention": ("flash", "aten._flash"),
        "compile": ("on", "-"),
    }
    with pytest.raises(UserError, match=r"switch channels_last did not take: on was set, off was found \(strides, 3"):
        modes.in_force(values, seen)
    seen["channels_last"] = ("on", "strides, 161 of 161")
    assert modes.in_force(values, seen) == {
        "attention": "flash (aten._flash)",
        "autotune": AS_PASSED,
        "channels_last": "strides, 161 of 161",
    }


def test_the_ladder_goes_down_rung_by_rung_and_ends() -> None:
    """TF32's products may be what crashes; fp32 and bf16 have none."""

    def down(precision: str) -> list[int]:
        rungs, rung = [], modes.next_rung(0, precision)
        while rung is not None:
            rungs.append(rung)
            rung = modes.next_rung(rung, precision)
        return rungs

    assert down("tf32") == down("fp16") == [1, 2, 3, 4]
    assert down("fp32") == down("bf16") == [1, 3, 4]
    assert [modes.rung_precision(rung, "tf32") for rung in range(5)] == ["tf32", "tf32", "fp32", "fp32", "fp32"]
    assert {modes.rung_precision(rung, "bf16") for rung in range(5)} == {"bf16"}
    found = [modes.settings("default", "jax", "vit_b16", 1, "fp32", "gpu", rung) for rung in range(5)]
    assert [(each["triton_gemm"], each["autotune"]) for each in found] == [
        *(("on", "4"), ("off", "4"), ("off", "4"), ("off", "2"), ("off", "0")),
    ]


def test_a_mode_s_script_has_a_name_that_files_may_have() -> None:
    job = Job("jax", "mnist", 1, "standard", "fp32", None, "local", mode="tuned-compile+threads=1")
    assert job.stem == "jax_mnist_1_tuned_without_compile_with_threads_1"
    assert job.options[job.options.index("--mode") + 1] == job.mode


def test_a_setting_knows_no_other_switches_than_there_are() -> None:
    common = (BENCHMARKS["mnist"], "tiny", "fp32", Device("cpu", "here", 1))
    setting = Setting(*common, switches={"compile": "on"})
    assert [setting.on(name) for name in ("compile", "donation", "channels_last")] == [True, True, False]
    assert setting.value("threads") == "all"
    message = "unknown switch 'chanels_last'; valid: threads, "
    with pytest.raises(ValueError, match=message):
        setting.on("chanels_last")
    with pytest.raises(ValueError, match=message):
        Setting(*common, switches={"chanels_last": "on"})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_side_asks_for_switches_of_its_own_and_for_all_that_it_has(framework: str) -> None:
    """Among them those of devices that no test here has."""
    asked = set()
    for path in (ROOT / framework).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="on" | "value"), args=[ast.Constant(value=str(switch))]):
                    asked.add(switch)
    of_everyone = {"threads", "keep_memory"}  # the measuring process looks at it, too
    assert asked | of_everyone == {switch.name for switch in SWITCHES if switch.framework == framework}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_catalogue_says_which_models_call_attention(name: str) -> None:
    tree = ast.parse(Path(ROOT, "jax", "models", f"{name}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert ("attention" in names) == BENCHMARKS[name].attention


SCRIPT = """
import json, pathlib, sys
sys.path.insert(0, "pytorch")
sys.path.append(".")
import devices, network, weights
import inference, per_sample_gradients, training
from duel.catalogue import BENCHMARKS
from duel.measure import batches, parameters
from duel.measure.device import Setting

device, mnist, found = devices.select("cpu"), BENCHMARKS["mnist"], {}
arrays = parameters.initialise(weights.shapes(network.build(mnist, "tiny")), 0)
pool = batches.pool(mnist, "tiny", 2, 0, pathlib.Path())
for work in (training.Training, inference.Inference, per_sample_gradients.PerSampleGradients):
    for value in ("off", "on"):
        setting = Setting(mnist, "tiny", "fp32", device, switches={"compile": value}, product="norms", microbatch=2)
        found[f"{work.__name__} {value}"] = work(setting, pool, arrays).execution
print(json.dumps(found))
"""


def test_pytorch_says_before_its_first_step_how_it_will_run() -> None:
    """Rows take it from there."""
    command = [interpreter("pytorch"), "-c", SCRIPT]
    said = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True)
    found = json.loads(said.stdout)
    assert len(found) == 6
    assert all(execution == ("compiled" if name.endswith("on") else "eager") for name, execution in found.items())
