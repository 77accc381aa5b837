"""The waterfall: which modes it is measured in, and what the ratios of those come to."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from conftest import Main
from test_comparability import judged
from test_explain import explained
from test_pairs import outcomes, sides
from test_sessions import session

from duel import kinds, modes
from duel.catalogue import BENCHMARKS, DEVICE_KINDS, PRECISIONS, USE_CASES
from duel.record import Row
from duel.report import compare, explain, points
from duel.report.sessions import over_sessions
from duel.report.waterfall import waterfalls
from duel.results import Results

CPU = [
    "default",
    *("default+compile", "tuned-compile"),
    *("default+channels_last", "tuned-channels_last"),
    *("default+fused_optimizer", "tuned-fused_optimizer"),
    "tuned",
]


def measured(ratios: dict[str, float], **point: Any) -> list[Row]:
    """Four pairs of ResNet-50 on a CPU in each mode, JAX so many times as fast as PyTorch, give or take a percent."""
    rows = []
    for mode, ratio in ratios.items():
        change = {"benchmark": "resnet50", "device_kind": "cpu", "mode": mode, "group": mode, "run_id": mode} | point
        near = sides([ratio, 1.01 * ratio, 0.99 * ratio, ratio])
        rows += [dataclasses.replace(row, switches=switches(mode, str(row.framework)), **change) for row in near]
    return rows


def switches(mode: str, framework: str) -> str:
    return f"compile={'off' if framework == 'jax' or mode == 'default' else 'on'} threads=2"


def told(ratios: dict[str, float], **point: Any) -> list[str]:
    return waterfalls(outcomes(measured(ratios, **point)))


def test_each_switch_is_turned_on_before_all_others_and_off_behind_them() -> None:
    assert modes.of_waterfall(modes.waterfall("resnet50", 1, "fp32", "cpu")) == CPU
    assert modes.of_waterfall(modes.waterfall("resnet50", 5, "fp32", "cpu")) == CPU[:5] + CPU[-1:]


def test_one_switch_alone_is_the_whole_way_and_measured_once() -> None:
    assert modes.of_waterfall(modes.waterfall("gpt2", 5, "fp32", "cpu")) == ["default", "tuned"]
    (whole,) = told({"default": 0.5, "tuned": 2.0}, use_case=3, product="sum")
    assert whole.startswith("waterfall of resnet50 (full, fp32), per_sample_gradients_single, sum, batch size 64: JAX")
    assert " / PyTorch from 0.500 to 2.000, x 4.000 [3.9" in whole
    assert whole.endswith("], one switch: compile")


@pytest.mark.parametrize(
    ("framework", "found"), [("jax", "convolution=gradients"), ("pytorch", "compile=off aggregation=sparse threads=2")]
)
def test_one_switch_gets_nothing_of_what_a_search_chose(framework: str, found: str) -> None:
    rows = measured({"default": 0.5, "tuned": 2.0}, use_case=3, product="sum")
    searched = [
        row.replace(switches=found) if (row.framework, row.mode) == (framework, "tuned") else row for row in rows
    ]
    assert waterfalls(outcomes(searched)) == []


@pytest.mark.parametrize(
    "other", [{"framework_version": "9.9"}, {"device_name": "another"}, {"driver": "another"}, {"cpus": 8}]
)
def test_a_waterfall_is_of_one_version_and_device(other: dict[str, Any]) -> None:
    rows = measured({"default": 0.5, "tuned": 2.0}, use_case=3, product="sum")
    assert waterfalls(outcomes(rows))
    elsewhere = [row.replace(**other) if row.mode == "tuned" else row for row in rows]
    assert waterfalls(outcomes(elsewhere)) == []


def test_a_switch_that_needs_another_is_turned_on_behind_it_and_leaves_with_it() -> None:
    found = {turn.switch: turn for turn in modes.waterfall("gpt2", 1, "bf16", "gpu")}
    assert set(found) == {"compile", "fused_optimizer", "cudnn_benchmark", "cuda_graphs", "attention", "latency_hiding"}
    assert found["cuda_graphs"].first == ("default+compile", "default+compile+cuda_graphs")
    assert found["cuda_graphs"].last == ("tuned-cuda_graphs", "tuned")
    assert found["compile"].last == ("tuned-compile-cuda_graphs", "tuned")
    for mode in ("tuned-cuda_graphs", "tuned-compile-cuda_graphs"):  # of PyTorch alone
        of = [modes.settings(each, "jax", "gpt2", 1, "bf16", "gpu") for each in (mode, "tuned")]
        assert of[0] == of[1]
    assert found["attention"].first == ("default", "default+attention=cudnn")
    assert found["attention"].last == ("tuned+attention=framework", "tuned")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_each_mode_of_a_waterfall_is_one_that_both_sides_take(benchmark: str, kind: str) -> None:
    for number in (number for number in USE_CASES if number):
        for precision in PRECISIONS:
            for mode in modes.of_waterfall(modes.waterfall(benchmark, number, precision, kind)):
                for framework in ("jax", "pytorch"):
                    assert modes.settings(modes.check(mode), framework, benchmark, number, precision, kind)


def test_the_shares_add_up_and_what_switches_do_together_is_left_over() -> None:
    """From 0.5 to 2, fourfold: compile alone doubles it, and with the others it is worth 2.83."""
    ratios = dict(zip(CPU, (0.5, 1.0, 2 / 8**0.5, 0.5, 2.0, 0.5, 2.0, 2.0), strict=True))
    whole, first, last = told(ratios)
    assert whole.startswith("waterfall of resnet50 (full, fp32), train_single, batch size 64: JAX / PyTorch from 0.500")
    assert " to 2.000, x 4.000 [3.9" in whole
    assert "each turned on first: compile x 2.000 [1.9" in first
    assert "] (50 %); channels_last x 1.000 [0.9" in first
    assert first.endswith("left over x 2.000 (50 %)")
    assert "each turned off last: compile x 2.828 [2.7" in last
    assert last.endswith("] (0 %); left over x 1.414 (25 %)")


def test_where_both_ends_are_alike_there_are_no_shares() -> None:
    lines = told(dict.fromkeys(CPU, 1.2))
    assert len(lines) == 3
    assert "%" not in "".join(lines)


def test_a_waterfall_with_a_mode_of_no_ratio_says_why() -> None:
    rows = [dataclasses.replace(row, steady=row.mode != "tuned") for row in measured(dict.fromkeys(CPU, 1.2))]
    (said,) = waterfalls(outcomes(rows))
    assert said.startswith("no waterfall of resnet50 (full, fp32), train_single, batch size 64: mode tuned: NOT ")
    assert "NOT COMPARABLE: steady (" in said
    assert waterfalls(outcomes(rows), missing=False) == []


def test_a_waterfall_is_of_all_sessions_of_its_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last session a mode has no ratio; those before have one."""
    every = []
    for number in range(2):
        for mode in CPU:
            point = {"benchmark": "resnet50", "device_kind": "cpu", "mode": mode, "pair": mode}
            rows = session([1.5, 1.51, 1.49, 1.5], 2.0 * number, **point)
            if number and mode == "tuned":
                rows = [dataclasses.replace(row, steady=False) for row in rows]
            every.append(compare.Group([], rows, [], outcomes(judged(rows))))
    monkeypatch.setattr(compare, "groups", lambda runs, results: every)
    said = "\n".join(map(str, compare.report([], Results(tmp_path))))
    assert "waterfall of resnet50" in said
    assert "no waterfall" not in said


@pytest.mark.parametrize("some", [["default", "tuned"], ["default", "default+compile"], CPU[:-1]])
def test_some_of_its_modes_are_none(some: list[str]) -> None:
    assert told(dict.fromkeys(some, 1.2)) == []


def test_one_command_plans_all_its_modes(main: Main) -> None:
    asked = ("--benchmark", "resnet50", "--use_case", "1", "--mode", "waterfall")
    said = main(*asked, "--paired", "--device", "cpu", "--dry_run")
    assert said.returncode == 0, said.stderr
    assert [line.split()[3] for line in said.stdout.splitlines() if line.startswith("resnet50 ")] == CPU
    assert "64 rows in 8 scripts" in said.stdout
    assert "paired_resnet50_1_default_with_compile_cpu.sh" in said.stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "cpu"], "--mode waterfall needs --paired"),
        (["--paired"], "set --device cpu|gpu|tpu|mps, or targets.local.device in"),
        (["--paired", "--device", "tpu"], "waterfall: tuned changes no switch of train_single of resnet50 on a tpu"),
    ],
)
def test_what_a_waterfall_needs_is_said(main: Main, more: list[str], words: str) -> None:
    said = main("--benchmark", "resnet50", "--use_case", "1", "--mode", "waterfall", *more, "--dry_run")
    assert (said.returncode, words in said.stderr, "Traceback" in said.stderr) == (2, True, False)


def test_what_modes_change_names_the_point_and_the_hours_between_them() -> None:
    one, other = (
        explained(mode, (f"threads={mode}", ""), {kinds.PRODUCT: seconds}, {kinds.PRODUCT: 1.0})
        for mode, seconds in (("default", 2.0), ("tuned", 1.0))
    )
    for each, hour in ((one, 9), (other, 13)):
        row, found = each.pairs[0][0]
        each.pairs[0] = ((row.replace(started=f"2026-11-28T{hour:02d}:00:00Z", batch_size=8), found), each.pairs[0][1])
    (text,) = explain.switched([one, other])
    assert text.startswith("mnist (tiny, fp32), train_single, batch size ")
    assert text.endswith("; 4.0 hours apart, which may be part of it")
    row, found = other.pairs[0][0]
    other.pairs[0] = ((row.replace(started="2026-11-28T09:20:00Z"), found), other.pairs[0][1])
    assert "apart" not in explain.switched([one, other])[0]
    for started in ("yesterday", "2026-11-28T13:00:00"):  # the second without a time zone
        other.pairs[0] = ((row.replace(started=started), found), other.pairs[0][1])
        assert "apart" not in explain.switched([one, other])[0]


def test_sessions_of_two_modes_are_compared_with_the_nearest_in_time() -> None:
    """On a machine that drifts, with a session of 'default' before the others: JAX is 1 % faster in 'tuned'."""

    def of(mode: str, hours: tuple[float, ...], times: float) -> list[list[Row]]:
        return [session([times * 1.2 ** (hour // 2)], hour, pair=mode, mode=mode) for hour in hours]

    rows = [*of("default", (0.0, 2.0, 4.0, 6.0), 1.0), *of("tuned", (2.2, 4.2, 6.2), 1.01)]
    _, tuned = points.lines(over_sessions(outcomes(judged([row for each in rows for row in each]))))
    assert tuned.jax_itself == pytest.approx(1.01)
    assert tuned.pytorch_itself == pytest.approx(1.0)
