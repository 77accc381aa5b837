"""How much the kinds of work compute and move, where it is counted, and what is not shown of it."""

import gzip
import json
from pathlib import Path

import pytest
from test_profiles import CALLS, COUNTED, STEP, event, hlo, of_chrome, ran

from duel import kinds, profile
from duel.profile import Part, Profile


def test_zeros_between_the_numbers_of_a_gradient_are_not_multiplied() -> None:
    """The gradient of the input of a convolution with stride 2, as XLA writes it."""
    text = CALLS.splitlines()
    shape, window = "f32[2,8,8,4]{3,2,1,0}", "window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f"
    entry = next(place for place, line in enumerate(text) if line.startswith("ENTRY"))
    lines = [f"  %{name} = f32[{sides}] parameter({n})" for n, (name, sides) in enumerate(SIDES.items(), 90)]
    lines.append(f"  %dilated = {shape} convolution(%outer, %taps), {window}")
    program = hlo().Program("\n".join([*text[: entry + 1], *lines, *text[entry + 1 :]]), training=False)
    assert program.flops("dilated") == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 5) // 4


SIDES = {"outer": "2,4,4,5", "taps": "3,3,5,4"}


def test_of_several_kernels_that_one_operation_launches_the_first_has_its_amount(tmp_path: Path) -> None:
    """The kernel's id is that of the innermost operation; gradients are two kernels, and one clears memory first."""
    events = [STEP, event("aten::conv2d", 10, 60), event("aten::cudnn_convolution", 15, 20, **{"External id": 3})]
    events.append(event("fprop", 400, 100, "kernel", **{"External id": 3}))
    events.append(event("aten::convolution_backward", 100, 50, **{"External id": 5}))
    events.append(event("Memset (Device)", 500, 10, "gpu_memset", **{"External id": 5}))
    for number, name in enumerate(("dgrad", "wgrad")):
        events.append(event(name, 520 + 100 * number, 100, "kernel", **{"External id": 5}))
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    code = COUNTED.replace("[k.operations[0].module, k.operations[0].stage, ", "[k.name, ")
    done = ran("pytorch", code, str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["fprop", 10, 1],
        ["Memset (Device)", 0, 0],
        ["dgrad", 40, 4],
        ["wgrad", 0, 0],
    ]


WHOLE = """
import json
import torch
from _counting import Counting
x, weight, kernel = torch.ones(3, 4, 8, 8), torch.ones(16, 8), torch.ones(5, 4, 3, 3)
with torch.inference_mode(), Counting() as counting:
    torch.nn.functional.linear(x, weight)
    torch.nn.functional.conv2d(x, kernel, padding=1)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(json.dumps({name: [one.flops for one in found] for name, found in counting.found.items()}))
"""


def test_products_convolutions_and_attention_of_an_inference_are_counted() -> None:
    done = ran("pytorch", WHOLE)
    assert done.returncode == 0, done.stderr
    found = {name: [one for one in each if one] for name, each in json.loads(done.stdout).items()}
    assert sorted(map(tuple, filter(None, found.values()))) == sorted(
        [(2 * 3 * 4 * 8 * 8 * 16,), (2 * 3 * 5 * 8 * 8 * 4 * 3 * 3,), (2 * 2 * 3 * 4 * 8 * 8 * 8,)]
    )


def test_amounts_that_were_counted_in_another_way_are_not_shown(tmp_path: Path) -> None:
    part = Part(kinds.PRODUCT, "", "", 1.0, flops=5.0, bytes=7.0)
    for counting, flops in ((profile.COUNTING, 5.0), (0, 0.0)):
        profile.write(tmp_path, Profile("run", 0, "jax", counting=counting, parts=[part]))
        read = profile.read(tmp_path, 0)
        assert read is not None
        assert [(one.flops, one.counted) for one in read.parts] == [(flops, bool(flops))]


@pytest.mark.parametrize(
    ("labels", "window", "kind"),
    [("bf_io->bf", "", kinds.PRODUCT), ("0bf_0io->0bf", "window={size=3}, ", kinds.CONVOLUTION)],
)
def test_a_product_that_xla_writes_for_a_tpu_as_a_convolution_is_a_product(labels: str, window: str, kind: str) -> None:
    line = f"  %dense = f32[8,2]{{1,0}} convolution(%a, %b), {window}dim_labels={labels}"
    text = CALLS.replace("  %triton =", f"{line}\n  %triton =")
    (operation,) = hlo().Program(text, training=False).operations("dense")
    assert kinds.kind(operation, "jax") == kind


def test_the_products_and_the_softmax_of_attention_are_attention_also_in_pytorch(tmp_path: Path) -> None:
    events = [
        STEP,
        event("module:attn", 90, 310, "user_annotation"),
        event("aten::scaled_dot_product_attention", 100, 280),
        event("aten::_scaled_dot_product_attention_math", 105, 270),
        event("aten::bmm", 110, 100, **{"Sequence number": 7}),
        event("aten::softmax", 220, 50),
        event("aten::bmm", 280, 90),
        event("autograd::engine::evaluate_function: BmmBackward0", 500, 200, **{"Sequence number": 7}),
        event("aten::bmm", 510, 180),
        event("aten::bmm", 800, 100),
    ]
    found = of_chrome(tmp_path, events)
    assert found[kinds.ATTENTION, "attn", "forward"] == 280
    assert found[kinds.ATTENTION, "attn", "backward"] == 180
    assert found[kinds.PRODUCT, "", "forward"] == 100, "a product beside it"
