"""The division of a step among kinds of work, and of a ratio among kinds and modules."""

import dataclasses
import math
from pathlib import Path

import pytest
from test_comparability import judged
from test_sessions import session

from duel import kinds, profile
from duel.profile import Part, Profile
from duel.record import Row
from duel.report import explain, points, profile_data, shares
from duel.report.pairs import Outcome, outcomes
from duel.report.records import Records
from duel.report.sessions import over_sessions
from duel.report.shares import Explained, Side
from duel.terminal import Table
from duel.trace import Kernel, Operation, Trace, shared


def kernel(start: float, end: float, name: str = "add", **more: object) -> Kernel:
    return Kernel(name, start, end, (Operation(name),), **more)  # type: ignore[arg-type]  # mypy takes one type for all


def test_kernels_that_run_together_share_the_time_and_nothing_is_idle() -> None:
    kernels = [kernel(0.0, 4.0), kernel(2.0, 6.0)]
    assert shared(kernels, 0.0, 10.0) == ({0: 3.0, 1: 3.0}, 4.0)


def test_of_kernels_in_one_lane_the_innermost_runs() -> None:
    kernels = [kernel(0.0, 10.0, lane=1), kernel(2.0, 5.0, lane=1), kernel(3.0, 4.0, lane=1)]
    assert shared(kernels, 0.0, 10.0) == ({0: 7.0, 1: 2.0, 2: 1.0}, 0.0)


def test_a_loop_has_only_the_time_that_nothing_inside_it_takes() -> None:
    kernels = [kernel(0.0, 10.0, "while", container=True), kernel(1.0, 9.0)]
    assert shared(kernels, 0.0, 12.0) == ({0: 2.0, 1: 8.0}, 2.0)


@pytest.mark.parametrize(
    ("framework", "name", "kind"),
    [
        ("jax", "convolution", kinds.CONVOLUTION),
        ("jax", "custom-call:__cudnn$convForward", kinds.CONVOLUTION),
        ("jax", "custom-call:__cublas$gemm", kinds.PRODUCT),
        ("jax", "dot", kinds.PRODUCT),
        ("jax", "reduce-window", kinds.NORMS),
        ("jax", "exponential", kinds.ELEMENTWISE),
        ("jax", "transpose", kinds.COPIES),
        ("jax", "all-reduce-start", kinds.COLLECTIVE),
        ("jax", "frobnicate", kinds.OTHER),
        ("pytorch", "aten::mkldnn_convolution", kinds.CONVOLUTION),
        ("pytorch", "aten::convolution_backward", kinds.CONVOLUTION),
        ("pytorch", "aten::_slow_conv2d_forward", kinds.CONVOLUTION),  # of one image on a CPU
        ("pytorch", "aten::_safe_softmax", kinds.NORMS),
        ("pytorch", "aten::isneginf", kinds.ELEMENTWISE),
        ("pytorch", "aten::addmm", kinds.PRODUCT),
        ("pytorch", "aten::_log_softmax_backward_data", kinds.NORMS),
        ("pytorch", "aten::native_batch_norm_backward", kinds.NORMS),
        ("pytorch", "aten::add_", kinds.ELEMENTWISE),
        ("pytorch", "aten::threshold_backward", kinds.ELEMENTWISE),
        ("pytorch", "aten::index_add_", kinds.MOVES),
        ("pytorch", "aten::copy_", kinds.COPIES),
        ("pytorch", "prims::convert_element_type", kinds.ELEMENTWISE),
        ("jax", "convert", kinds.ELEMENTWISE),
        ("pytorch", "aten::_scaled_dot_product_flash_attention_for_cpu", kinds.ATTENTION),
        ("pytorch", "aten::frobnicate", kinds.OTHER),
    ],
)
def test_an_operation_has_a_kind_by_its_name(framework: str, name: str, kind: str) -> None:
    assert kinds.kind(Operation(name), framework) == kind


def test_a_layers_own_work_is_of_its_kind_in_both_frameworks() -> None:
    assert kinds.kind(Operation("multiply", layer="norm"), "jax") == kinds.NORMS
    assert kinds.kind(Operation("add", layer="depthwise"), "jax") == kinds.DEPTHWISE
    assert kinds.kind(Operation("aten::mkldnn_convolution", layer="depthwise"), "pytorch") == kinds.DEPTHWISE
    assert kinds.kind(Operation("transpose", layer="depthwise"), "jax") == kinds.COPIES
    assert kinds.kind(Operation("add", stage="optimizer"), "jax") == kinds.OPTIMIZER


def test_a_fused_loop_is_of_its_most_telling_operation() -> None:
    loop = [Operation("add", "a"), Operation("dot", "b"), Operation("reduce", "c")]
    found = kinds.telling(loop, "jax")
    assert found is not None
    assert (found[0], found[1].module) == (kinds.PRODUCT, "b")
    assert kinds.telling([Operation("parameter"), Operation("tuple")], "jax") is None


@pytest.mark.parametrize("name", ["transpose", "slice", "reshape", "broadcast"])
def test_what_is_a_view_in_pytorch_copies_where_it_is_left_in_hlo(name: str) -> None:
    found = kinds.telling([Operation("parameter"), Operation(name)], "jax")
    assert found == (kinds.COPIES, Operation(name))


def test_a_choice_between_values_is_elementwise_in_hlo_and_a_view_is_no_work_in_pytorch() -> None:
    assert kinds.telling([Operation("select")], "jax") == (kinds.ELEMENTWISE, Operation("select"))
    for name in ("aten::select", "aten::transpose_", "aten::slice", "aten::_reshape_alias", "aten::t"):
        assert kinds.telling([Operation(name)], "pytorch") is None


def test_the_parts_of_a_step_add_up_to_its_wall_time() -> None:
    kernels = [kernel(0.0, 1.0, "dot"), kernel(0.5, 2.0), kernel(10.0, 12.0, "frobnicate")]
    found = Profile("run", 0, "jax")
    profile.divide(Trace([(0.0, 3.0), (10.0, 13.0)], kernels), found)
    assert found.traced_seconds == pytest.approx(3.0)
    assert sum(part.seconds for part in found.parts) == pytest.approx(3.0)
    assert found.seconds(kind=kinds.IDLE) == pytest.approx(1.0)
    assert found.unknown == {"frobnicate": pytest.approx(1.0)}
    assert found.explained == pytest.approx(2 / 3)


def test_a_kind_of_work_that_another_version_knows_is_other(tmp_path: Path) -> None:
    parts = [Part("telepathy", "", "", 1.0), Part(kinds.IDLE, "", "", 2.0)]
    found = Profile("run", 0, "jax", parts=parts, timeline=[profile.Bar(0.0, 1.0, "telepathy", "")])
    profile.write(tmp_path, found)
    read = profile.read(tmp_path, 0)
    assert read is not None
    assert [part.kind for part in read.parts] == [kinds.OTHER, kinds.IDLE]
    assert read.timeline[0].kind == kinds.OTHER


def test_a_timeline_has_no_kernel_inside_another_of_its_lane() -> None:
    lanes = [(0.0, 5.0, 1), (1.0, 2.0, 1), (6.0, 7.0, 1), (1.0, 3.0, 2), (2.0, 4.0, None), (2.5, 3.5, None)]
    kernels = [Kernel("k", begin, end, (Operation("dot"),), lane=lane) for begin, end, lane in lanes]
    found = profile._timeline(Trace([(0.0, 10.0)], kernels), "jax")
    assert [(bar.begin, bar.end) for bar in found] == [
        (1e6 * begin, 1e6 * end) for begin, end, _ in sorted(lanes) if (begin, end) != (1.0, 2.0)
    ]


def test_a_part_is_counted_if_the_flop_of_all_its_kernels_are() -> None:
    kernels = [kernel(0.0, 1.0, "dot"), kernel(1.0, 2.0, "dot", counted=False), kernel(2.0, 3.0)]
    found = Profile("run", 0, "jax")
    profile.divide(Trace([(0.0, 3.0)], kernels), found)
    assert {part.kind: part.counted for part in found.parts} == {
        kinds.PRODUCT: False,
        kinds.ELEMENTWISE: True,
        kinds.IDLE: True,
    }


def side(framework: str, seconds: float, **parts: float) -> Side:
    found = Profile(
        "run", 0, framework, step_seconds=seconds, parts=[Part(name, "", "", each) for name, each in parts.items()]
    )
    return Row(framework=framework, step_seconds_p50=seconds), found


def test_the_shares_of_a_ratio_add_up_to_its_logarithm() -> None:
    pairs = [
        (side("jax", 8.0, convolution=1.0, other=1.0), side("pytorch", 2.0, convolution=1.0, idle=3.0)),
        (side("jax", 9.0, convolution=2.0, other=1.0), side("pytorch", 2.0, convolution=1.0, idle=1.0)),
    ]
    shares = Explained(Outcome([]), pairs, []).divided(lambda part: part.kind)
    assert {share.name for share in shares} == {"convolution", "other", "idle"}
    for place, (a, b) in enumerate([(8.0, 2.0), (9.0, 2.0)]):
        assert sum(share.logs[place] for share in shares) == pytest.approx(math.log(b / a))
    (convolution,) = (share for share in shares if share.name == "convolution")
    assert convolution.seconds == (pytest.approx(5.0), pytest.approx(0.75))
    assert convolution.slower == 0


def test_equal_steps_have_shares_that_cancel() -> None:
    pairs = [(side("jax", 2.0, convolution=2.0, idle=0.0), side("pytorch", 2.0, convolution=1.0, idle=1.0))]
    shares = Explained(Outcome([]), pairs, []).divided(lambda part: part.kind)
    assert {share.name: round(share.log, 6) for share in shares} == {"convolution": -0.5, "idle": 0.5}


def explained(mode: str, switches: tuple[str, str], jax: dict[str, float], pytorch: dict[str, float]) -> Explained:
    """A point of one pair, with the seconds of each kind of work on both sides."""
    sides = []
    for framework, parts, which in zip(("jax", "pytorch"), (jax, pytorch), switches, strict=True):
        row, found = side(framework, sum(parts.values()), **parts)
        row = row.replace(mode=mode, switches=which, benchmark="mnist", use_case=1, device_kind="cpu", size="tiny")
        row = row.replace(precision="fp32")
        row = row.replace(matmul_flops_per_second=100.0, copy_bytes_per_second=10.0)
        sides.append((row, found))
    pair = (sides[0], sides[1])
    return Explained(Outcome([[(sides[0][0], sides[1][0])]], indicative=0.5), [pair], [])


def test_a_sentence_names_the_largest_share_and_the_switch_that_may_change_it() -> None:
    one = explained("default", ("", "compile=off"), {kinds.CONVOLUTION: 1.0}, {kinds.CONVOLUTION: 1.0, kinds.IDLE: 3.0})
    first, *_ = explain.sentences(one)
    assert first.startswith("Idle: - in JAX, 3 s in PyTorch, 100% of the difference")
    assert first.endswith("In pytorch, --mode default+compile may change it.")
    tuned = explained("tuned", ("", "compile=on"), {kinds.CONVOLUTION: 1.0}, {kinds.CONVOLUTION: 1.0, kinds.IDLE: 3.0})
    assert explain.sentences(tuned)[0].endswith(
        "No switch is known to change it; 'explain --reproduce' may write it as two scripts to report."
    )


def test_a_sentence_names_the_layer_and_how_many_times_slower_it_is() -> None:
    one = explained("default", ("", ""), {kinds.CONVOLUTION: 9.0}, {kinds.CONVOLUTION: 1.0})
    for _, found in one.pairs[0]:
        found.parts[0].module, found.parts[0].stage = "layer3.1.conv2", "backward"
    first, *_ = explain.sentences(one)
    assert "most of it in layer3.1.conv2, backward (9 s in JAX, 1 s in PyTorch, 9 times slower in JAX)" in first
    for _, found in one.pairs[0]:
        third = found.parts[0].seconds / 3
        found.parts = [Part(kinds.CONVOLUTION, f"conv{number}", "", third) for number in range(3)]
    assert "; the largest part in conv" in explain.sentences(one)[0]


def test_compilations_memory_and_what_is_unknown_are_told_of_both_sides() -> None:
    one = explained("default", ("", "compile=on"), {kinds.CONVOLUTION: 9.0}, {kinds.CONVOLUTION: 1.0})
    (_, jax), (_, pytorch) = one.pairs[0]
    jax.programs = [profile.Program("step", {"trace": 1.0, "compile": 2.0})]
    pytorch.programs = [profile.Program(f"graph {n}", {"trace": 0.5, "autotune": 1.0}) for n in range(2)]
    jax.memory, pytorch.unknown = {profile.PARAMETERS: 2**20}, {"aten::new_thing": 0.25}
    table = explain.compilation(one)
    assert table.lines == [["trace", "1 s", "1 s"], ["compile", "2 s", "-"], ["autotune", "-", "2 s"]]
    assert table.notes[1] == "PyTorch: graph 0 1.5 s, graph 1 1.5 s"
    (line,) = points.lines(over_sessions(outcomes(judged(session([1.5])))))
    more = [dataclasses.replace(line, mode=mode) for mode in ("tuned", "compile")]
    records = Records("", Path(), [], [(one.outcome, each) for each in (line, *more)])
    first, said, others = profile_data.sentences([(one, line)], records)
    assert first.startswith("1 of 3 points are explained: ")
    where = "training on one device, mnist, batch 64"
    assert others == f"Not profiled: {where}, tuned; {where}, compile."
    assert "PyTorch: of no known kind: aten::new_thing 250 ms." in said
    assert "Memory in MiB, JAX | PyTorch: parameters 1 | -." in said
    assert "Compiling, JAX | PyTorch: trace 1 s | 1 s, compile 2 s | -, autotune - | 2 s." in said


@pytest.mark.parametrize(
    ("kind", "change", "mode"),
    [
        (kinds.IDLE, {"mode": "tuned-compile", "switches": "compile=off"}, ""),
        (kinds.IDLE, {"mode": "opacus", "use_case": 3, "switches": "compile=off opacus=on"}, ""),
        (kinds.IDLE, {"mode": "tuned", "use_case": 3, "switches": "compile=off opacus=on"}, ""),
        (kinds.IDLE, {"mode": "default", "use_case": 3, "switches": "compile=off opacus=off"}, "default+compile"),
        (kinds.ATTENTION, {"benchmark": "gpt2", "switches": "attention=framework"}, ""),
        (kinds.MOVES, {"benchmark": "gcn", "switches": "aggregation=index_add"}, "default+aggregation=sparse"),
        (kinds.MOVES, {"benchmark": "gcn", "use_case": 3, "switches": "compile=off"}, "default+compile"),
    ],
)
def test_a_mode_that_would_be_refused_is_not_recommended(kind: str, change: dict[str, object], mode: str) -> None:
    row = Row(framework="pytorch", benchmark="mnist", use_case=1, precision="fp32", device_kind="cpu", mode="default")
    assert shares.remedy(kind, row.replace(**change)) == mode


def test_nothing_is_concluded_from_a_profile_that_its_row_contradicts() -> None:
    one = explained("default", ("", ""), {kinds.PRODUCT: 1.0}, {kinds.PRODUCT: 2.0})
    for times, why in ((1.2, ""), (1.3, "1.00 (JAX) and 1.30 (PyTorch) times"), (0.75, "0.75 (PyTorch)")):
        one.pairs[0][1][1].step_seconds = 2.0 * times
        assert (why in one.why) if why else one.why == ""
    table = explain.explanation(one)[-1]
    assert isinstance(table, Table)
    assert table.notes == [f"not explained: {one.why}"]


def test_pairs_that_contradict_their_rows_do_not_make_up_for_each_other() -> None:
    """0.70 and 1.40 times the row's step are 1.05 times on average."""
    both = [explained("default", ("", ""), {kinds.PRODUCT: 1.0}, {kinds.PRODUCT: 2.0}) for _ in range(3)]
    one = dataclasses.replace(both[0], pairs=[each.pairs[0] for each in both])
    assert one.why == ""
    for pair, times in zip(one.pairs, (0.7, 1.4, 1.0), strict=True):
        pair[0][1].step_seconds = times
    assert one.profiled[0] == pytest.approx(1.033, abs=0.001)
    assert one.why.startswith(
        "the profiled processes took 0.70 (JAX) and 1.00 (PyTorch) times the row's step in 2 of 3"
    )


def test_nothing_is_concluded_of_a_point_without_a_ratio() -> None:
    one = explained("default", ("", ""), {kinds.PRODUCT: 1.0}, {kinds.PRODUCT: 2.0})
    assert dataclasses.replace(one, outcome=Outcome([], why="1 of 5 blocks are left")).why == "1 of 5 blocks are left"


def test_what_a_mode_changes_is_told_of_the_side_whose_switches_it_turns() -> None:
    plain = explained("default", ("a=1", "compile=off"), {kinds.PRODUCT: 2.0}, {kinds.PRODUCT: 2.0, kinds.IDLE: 2.0})
    turned = explained("default+compile", ("a=1", "compile=on"), {kinds.PRODUCT: 9.0}, {kinds.PRODUCT: 2.5})
    (line,) = explain.switched([plain, turned])
    assert "PyTorch, default to default+compile: step 4 s to 2.5 s" in line
    assert line.endswith("idle -2 s, matrix product +500 ms")
    row = turned.outcome.row.replace(framework_version="9.9")
    newer = dataclasses.replace(turned, outcome=Outcome([[(row, row)]]))
    assert explain.switched([plain, newer]) == [], "what a version changed is no switch's"


def test_the_modules_of_a_table_add_up_however_many_there_are() -> None:
    one = explained("default", ("", ""), {kinds.PRODUCT: 0.0}, {kinds.PRODUCT: 0.0})
    for side_, (_, found) in enumerate(one.pairs[0]):
        found.parts = [Part(kinds.PRODUCT, f"layer{n}", "", (1 + side_) * (20.0 - n)) for n in range(15)]
        found.parts += [Part(kinds.PRODUCT, f"small{n}", "", 0.01) for n in range(2)]
        found.step_seconds = found.traced_seconds = sum(part.seconds for part in found.parts)
    pair = [(row.replace(step_seconds_p50=found.step_seconds), found) for row, found in one.pairs[0]]
    one = dataclasses.replace(one, pairs=[(pair[0], pair[1])])
    (table,) = (part for part in explain.explanation(one) if isinstance(part, Table) and part.head[:1] == ["module"])
    assert [line[0] for line in table.lines] == [*(f"layer{n}" for n in range(12)), "5 others"]
    factors = [float(line[3]) for line in table.lines]
    assert math.prod(factors) == pytest.approx(math.exp(one.log), rel=0.01)
    assert table.lines[-1][1] == "21 s"  # 8 + 7 + 6 s, and the small ones


def test_the_roof_is_the_ceiling_that_takes_longer() -> None:
    one = explained("default", ("", ""), {kinds.PRODUCT: 2.0}, {kinds.PRODUCT: 4.0, kinds.COPIES: 1.0})
    for (_, found), (flops, moved) in zip(one.pairs[0], ((100.0, 1.0), (100.0, 20.0)), strict=True):
        found.parts[0].flops, found.parts[0].bytes = flops, moved
    assert one.roofs(kinds.PRODUCT) == ["compute 50%", "memory 50%"]
    assert one.roofs(kinds.COPIES) == ["", ""]
    one.pairs[0][0][1].parts[0].counted = False
    assert one.roofs(kinds.PRODUCT) == ["", "memory 50%"]
    assert [flops for _, flops, _ in one.work(kinds.PRODUCT)] == [0.0, 100.0]
