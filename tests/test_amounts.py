"""How much the kinds of work compute and move, where it is counted, and what is not shown of it."""

import gzip
import json
from pathlib import Path

from test_profiles import CALLS, COUNTED, STEP, event, hlo, ran

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
