"""How ``tune`` searches: which modes it tries, which trials count, and when it chooses one."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_tuned import CHOICE, MNIST, SET

from duel import modes, tuned
from duel.catalogue import FRAMEWORKS, TRIAL
from duel.evidence import Evidence, sha256
from duel.measure import search
from duel.record import Row
from duel.report import trials
from duel.results import Results, Run
from duel.states import FAILED, FINISHED
from duel.tuned import Trial

RESNET50 = Row(framework="pytorch", benchmark="resnet50", use_case=1, precision="fp32", device_kind="cpu")
THREE = ("compile", "channels_last", "fused_optimizer")


def searched(row: Row, rates: dict[str, float], most: int = 99) -> list[str]:
    """The modes that are tried, in order, where each that ``rates`` has not is as fast as 1."""
    trials: list[Trial] = [Trial("default", rates.get("default", 1.0))]
    while len(trials) < most and (mode := search.following(trials, row)):
        trials.append(Trial(mode, rates.get(mode, 1.0)))
    return [trial.mode for trial in trials]


def test_each_trial_turns_a_switch_of_the_fastest_so_far() -> None:
    one_by_one = [f"default+{switch}" for switch in THREE]
    assert searched(RESNET50, {"default": 2.0}, 6) == ["default", SET, *one_by_one, "default+keep_memory"]
    without = [SET.replace(f"+{switch}", "") for switch in THREE]
    assert searched(RESNET50, {SET: 2.0}, 6) == ["default", SET, *without, f"{SET}+keep_memory"]
    faster = {"default+channels_last": 2.0, "default+compile+channels_last": 3.0}
    assert searched(RESNET50, faster, 6) == [
        *("default", SET, "default+compile", "default+channels_last", "default+compile+channels_last"),
        "default+compile+channels_last+keep_memory",
    ]


def test_then_switches_of_the_next_fastest_are_turned() -> None:
    """As with cifar10's inference on two AMD cores, where memory is worth keeping in ``default`` alone."""
    in_jax = RESNET50.replace(framework="jax", use_case=5)
    kept, products = "default+keep_memory", "default+convolution=products"
    rates = {"default": 440.0, products: 656.0, f"{products}+keep_memory": 549.0, kept: 615.0}
    assert searched(in_jax, rates) == ["default", products, f"{products}+keep_memory", kept]


def test_a_switch_is_turned_with_what_it_needs_and_without_what_it_excludes() -> None:
    per_sample = dataclasses.replace(RESNET50, benchmark="mnist", use_case=3)
    assert searched(per_sample, {"default+compile": 2.0}, 4) == [
        *("default", "default+compile", "default+opacus", "default+compile+keep_memory"),
    ]
    on_gpu = searched(dataclasses.replace(RESNET50, device_kind="gpu"), {"default": 2.0})
    assert "default+compile+cuda_graphs" in on_gpu
    assert "default+cuda_graphs" not in on_gpu
    there = {"default": 1.0, "default+compile+channels_last+fused_optimizer+cudnn_benchmark+cuda_graphs": 2.0}
    tried = searched(dataclasses.replace(RESNET50, device_kind="gpu"), there)
    assert "default+channels_last+fused_optimizer+cudnn_benchmark" in tried
    for mode in {*on_gpu, *tried}:
        modes.settings(modes.check(mode), "pytorch", "resnet50", 1, "fp32", "gpu")


def test_what_a_device_has_not_or_has_twice_is_not_tried() -> None:
    gpt2 = RESNET50.replace(benchmark="gpt2")
    tried = searched(gpt2, {})
    assert "default+attention=flash" in tried
    assert not [mode for mode in tried if "cudnn" in mode or "efficient" in mode]
    in_jax = gpt2.replace(framework="jax")
    assert "default+attention=heads_first" in searched(in_jax, {})
    half_on_gpu = in_jax.replace(device_kind="gpu", precision="bf16")
    assert "default+attention=cudnn" in searched(half_on_gpu, {})
    for row in (in_jax, half_on_gpu):  # 'math' is what JAX takes by itself
        assert not [mode for mode in searched(row, {}) if "attention=math" in mode]


def test_what_does_not_run_is_not_the_fastest_and_not_tried_again() -> None:
    trials = [Trial("default", None), Trial(SET, None)]
    assert tuned.finalists(trials, 3) == ["default"]
    assert search.following(trials, RESNET50) == "default+compile"


def test_all_that_may_be_the_fastest_are_measured_again_and_the_best_of_these_is_chosen() -> None:
    first = [Trial("default", 1.0), Trial("a", 2.0), Trial("b", 1.9), Trial("c", 1.5), Trial("d", 1.7)]
    assert tuned.finalists(first, 1) == ["a", "default"]
    finalists = tuned.finalists(first, 3)
    assert finalists == ["a", "b", "d", "default"]
    assert tuned.finalists([Trial("default", 1.95), *first[1:]], 2) == ["a", "b", "default"]
    order = [*finalists, *reversed(finalists)]
    speeds = {"a": 1.6, "b": 1.8, "d": 1.7, "default": 1.0}
    again = [*first, *(Trial(mode, speeds[mode]) for mode in order)]
    assert tuned.chosen(again) == "b"
    assert tuned.contenders(again) == ["b"]
    overlapping = [*again[:-1], Trial("a", 1.9)]
    assert tuned.contenders(overlapping) == ["a", "b"]
    last = [*overlapping, *(Trial(mode, speed) for mode, speed in [("a", 1.65), ("b", 1.5), ("b", 1.6), ("a", 1.65)])]
    assert tuned.chosen(last) == "a"  # d, whose mean is higher, was out after the first round
    assert tuned.contenders(last) == ["a", "b"]


@pytest.mark.parametrize(
    ("again", "mode"),
    [
        ([2.0, 1.0, 1.0, 2.0], SET),
        ([1.1, 1.0, 1.0, 0.9], "default"),  # the first time it was lucky
        ([0.9, 1.0, 1.0, 1.3], SET),  # and here the process was unlucky
        ([2.0, 1.0], SET),
        ([], "default"),  # ended before it was measured again
        ([None, 1.0, 1.0, 2.0], "default"),
    ],
)
def test_the_fastest_must_be_faster_when_measured_again(again: list[float | None], mode: str) -> None:
    assert tuned.chosen(measured_again(again)) == mode


@pytest.mark.parametrize(
    ("again", "decided"),
    [
        ([2.0, 1.0, 1.9, 2.1], True),
        ([0.9, 1.0, 1.1, 0.8], True),  # default is the faster one
        ([2.0, 1.0, 2.1, 2.2], False),
        ([2.0, 1.0, 1.9, 2.1, 1.8, 1.0, 1.0, 2.0], False),
        ([None, 1.0, 2.1, 2.2], True),  # what does not run is not chosen however often it is tried
    ],
)
def test_modes_that_overlap_are_measured_once_more(again: list[float | None], decided: bool) -> None:
    assert (len(tuned.contenders(measured_again(again))) == 1) == decided


@pytest.mark.parametrize(
    ("fast", "rounds"),
    [
        ([2.0], 1),
        ([2.0, 0.9], 3),  # the ranges overlap for good
        ([0.9], 1),  # default is the fastest, which may be luck
        ([0.5], 0),
    ],
)
def test_a_search_repeats_the_last_comparison_at_most_three_times(
    tmp_path: Path, fast: list[float], rounds: int
) -> None:
    results = Results(tmp_path)
    run = results.run("paired_mnist_1_trial-260101-000000-00abcd")
    planned = [MNIST.replace(framework="jax", mode="default", row=0, point=0)]
    run.create(planned)
    modes_tried: list[str] = []
    for row in search.rows(run, planned, 2, tmp_path):
        modes_tried.append(str(row.mode))
        here = [mode for mode in modes_tried if mode == row.mode]
        rate = 1.0 if row.mode == "default" else fast[(len(here) - 1) % len(fast)]
        run.write_row(row.replace(run_id=run.id, status=FINISHED, throughput=rate))
    best = modes_tried[1]
    assert modes_tried == ["default", best] + rounds * [best, "default", "default", best]


@pytest.mark.parametrize(("seconds", "others", "rounds"), [(30.0, 2, 3), (70.0, 2, 2), (120.0, 2, 1), (400.0, 2, 1)])
def test_where_trials_take_long_fewer_modes_are_measured_again_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, others: int, rounds: int
) -> None:
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    run = Results(tmp_path).run("paired_mnist_1_trial-260101-000000-00abcd")
    planned = [MNIST.replace(framework="jax", mode="default", row=0, point=0)]
    run.create(planned)
    tried = []
    for row in search.rows(run, planned, 3, tmp_path):
        tried.append(row.mode)
        run.write_row(row.replace(run_id=run.id, status=FINISHED, throughput=1.1 if len(tried) in (2, 3) else 1.0))
    assert len(set(tried)) == 3
    again = tried[3:]
    assert len(set(again)) == others + 1
    assert len(again) == rounds * 2 * (others + 1)


def test_only_what_overlaps_with_the_best_is_measured_once_more_and_default(tmp_path: Path) -> None:
    run = Results(tmp_path).run("paired_resnet50_1_trial-260101-000000-00abcd")
    planned = [RESNET50.replace(mode="default", row=0, point=0, batch_size=8, device_name="a CPU")]
    run.create(planned)
    rates = [[1.65] * 7, [2.0, 1.9, 2.2, 2.1, 2.1, 2.2, 2.2], [1.8, 2.0, 2.1, 1.8, 1.8, 1.8, 1.8], [1.7, 1.75, 1.75]]
    tried: list[str] = []
    for row in search.rows(run, planned, 4, tmp_path):
        tried.append(str(row.mode))
        every = list(dict.fromkeys(tried))  # in the order of their first trials
        rate = rates[every.index(tried[-1])][tried.count(tried[-1]) - 1]
        run.write_row(row.replace(run_id=run.id, status=FINISHED, throughput=rate))
    default, best, near, far = tried[:4]
    first, second = [best, near, far, default], [best, near, default]
    assert tried[4:] == [*first, *first[::-1], *second, *second[::-1], *second, *second[::-1]]


GPU = {"framework": "jax", "device_kind": "gpu", "device_name": "NVIDIA H100 80GB HBM3"}


def test_what_ran_in_another_precision_or_without_the_autotuner_does_not_count(tmp_path: Path) -> None:
    """After crashes of XLA's autotuner a row may end so; the choice is for what was asked for."""
    run = Results(tmp_path).run("paired_gpt2_1_trial-260101-000000-00abcd")
    planned = MNIST.replace(**GPU, benchmark="gpt2", precision="tf32", mode="default", row=0, point=0, preset=TRIAL)
    run.create([planned])
    tried: list[str] = []
    for row in search.rows(run, [planned], 3, tmp_path):
        tried.append(str(row.mode))
        fast = tried[2:] and row.mode == tried[2]
        ended = row.replace(run_id=run.id, status=FINISHED, rung=0, throughput=2.0 if fast else 1.0)
        if len(tried) < 3:  # the first two: crashes, and then the fastest of all, by other means
            run.write_row(ended.replace(status=FAILED, throughput=None))
            last = {"rung": 3, "precision": "fp32"} if len(tried) == 1 else {"rung": modes.HANDICAPPED}
            ended = ended.replace(row=len(run.rows()), throughput=9.0, **last)
        run.write_row(ended)
    stored = tuned.read(tuned.path(tmp_path, GPU["device_name"]))
    assert stored is not None
    (choice,) = stored.choices
    assert (choice.precision, choice.mode) == ("tf32", tried[2])
    assert [trial.throughput for trial in choice.trials] == [None, None, 2.0, 2.0, 1.0, 1.0, 2.0]
    said = trials.table(run.rows())
    assert said.title == [f"gpt2 (tiny, tf32), train_single, batch size 16: jax {tried[2]}, of 3 tried"]
    assert list(said.notes) == [
        "jax default: ran in fp32 only, after a crash of XLA's autotuner",
        f"jax {tried[1]}: ran without XLA's autotuner only, which crashed",
    ]


def test_a_trial_that_others_disturbed_does_not_count_and_the_table_says_why() -> None:
    row = MNIST.replace(mode="default", status=FINISHED, throughput=9.0, blocks=10, left_out_blocks=0, precision="fp32")
    assert tuned.trial(row, "fp32") == Trial("default", 9.0)
    for change, why in {
        ("foreign_load", 0.12): "disturbed: foreign_load 12%",
        ("left_out_blocks", 9): "disturbed: left_out_blocks 9 of 19, 9 throttled",
        ("blocks", 1): "1 of 1 blocks are left",
    }.items():
        bad = row.replace(**dict([change]), left_out="9 throttled")
        assert tuned.trial(bad, "fp32") == Trial("default", None)
        said = trials.table([bad.replace(point=0, preset=TRIAL, throughput_unit="images/s")])
        assert said.title == ["mnist (tiny, fp32), train_single, batch size 16: pytorch no figure, of 1 tried"]
        assert list(said.notes) == [f"pytorch default: {why}"]


def recorded(run: Run, row: Row, projections: float) -> Row:
    """A row that finished, with evidence that is ``projections``."""
    found = {"losses": np.full(9, projections)}
    kinds = ("before", "before, moved 1", "after", "after, moved 1")
    evidence = Evidence("fp32", dict.fromkeys(kinds, found), {"losses": (2,)})
    file = run.evidence_file(row.row or 0, 0)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(evidence.to_bytes())
    return row.replace(run_id=run.id, status=FINISHED, evidence_sha256=sha256([evidence.to_bytes()]))


@pytest.mark.parametrize(
    ("damage", "said"), [("", "losses before the clock (apart by "), ("rubbish", "not an evidence file: ")]
)
def test_a_mode_that_computes_something_else_or_nothing_readable_is_not_chosen(
    tmp_path: Path, damage: str, said: str
) -> None:
    run = Results(tmp_path).run("paired_resnet50_1_trial-260101-000000-00abcd")
    planned = MNIST.replace(benchmark="resnet50", mode="default", row=0, point=0, preset=TRIAL)
    run.create([planned])
    for row in search.rows(run, [planned], 3, tmp_path):
        wrong = row.mode == SET
        rate = {"default": 1.0, SET: 9.0}.get(str(row.mode), 2.0)
        run.write_row(recorded(run, row, 1.1 if wrong else 1.0).replace(throughput=rate))
        if wrong and damage:
            run.evidence_file(row.row or 0, 0).write_text(damage)
    stored = tuned.read(tuned.path(tmp_path, str(MNIST.device_name)))
    assert stored is not None
    (choice,) = stored.choices
    assert choice.mode == "default+compile"
    assert next(trial for trial in choice.trials if trial.mode == SET).throughput is None
    failed = next(row for row in run.rows() if row.mode == SET)
    assert (failed.status, failed.why) == (FAILED, "disproved")
    assert str(failed.cause).startswith(f"disproved: other results than in default: {said}")
    assert any(str(failed.cause) in note for note in trials.table(run.rows()).notes)


def test_a_microbatch_that_was_asked_for_is_a_point_of_its_own(tmp_path: Path) -> None:
    run = Results(tmp_path).run("paired_mnist_3_trial-260101-000000-00abcd")
    here = MNIST.replace(use_case=3, product="norms", mode="default", row=0, point=0)
    usual = dataclasses.replace(CHOICE, module="per_sample_gradients", product="norms", run_id="usual")
    tuned.keep(tmp_path, str(MNIST.device_name), usual)
    planned = here.replace(microbatch=8)
    run.create([planned])
    for row in search.rows(run, [planned], 1, tmp_path):
        run.write_row(row.replace(run_id=run.id, status=FINISHED, throughput=1.0))
    assert tuned.found_for(here.replace(microbatch=16), tmp_path) == (SET, "the best of 2 by usual")
    assert tuned.found_for(planned, tmp_path, [8]) == ("default", f"the best of 1 by {run.id}")
    assert tuned.found_for(planned, tmp_path, [8, None]) == ("default", f"the best of 1 by {run.id}")
    assert tuned.found_for(planned, tmp_path, [4]) == (
        None,
        "not searched in results/tuned/amd-epyc-9b14.json, the set for a cpu",
    )
    assert tuned.found_for(planned, tmp_path, [4, None]) == (SET, "the best of 2 by usual")


def test_cudnn_is_not_tried_on_an_amd_gpu() -> None:
    gpt2 = RESNET50.replace(benchmark="gpt2", precision="bf16", device_kind="gpu", device_name="AMD Instinct MI300X")
    for framework in FRAMEWORKS:
        assert not [mode for mode in searched(gpt2.replace(framework=framework), {}) if "=cudnn" in mode]
        there = gpt2.replace(framework=framework, device_name="NVIDIA H100 80GB HBM3")
        assert [mode for mode in searched(there, {}) if "attention=cudnn" in mode]


def measured_again(again: list[float | None]) -> list[Trial]:
    """The trials of a search whose fastest mode was ``SET``, measured again in the order A B B A."""
    order = [SET, "default", "default", SET] * 2
    return [Trial("default", 1.0), Trial(SET, 1.5), *(Trial(*pair) for pair in zip(order, again, strict=False))]
