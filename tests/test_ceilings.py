"""What a step is held against: its FLOP, the bytes that it must move, and the nearer ceiling."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duel.catalogue import BENCHMARKS
from duel.errors import Disproved
from duel.measure import ceilings, timed
from duel.measure.device import ALONE, Device, Setting
from duel.record import Row

CPU = Device("cpu", "some processor", 1)
PARAMETERS = 1000


def setting(benchmark: str = "mnist", **more: str) -> Setting:
    return Setting(BENCHMARKS[benchmark], "full", "fp32", CPU, **more)


def test_a_backward_pass_counts_as_two_forward_ones() -> None:
    forward = BENCHMARKS["mnist"].sizes["full"].flops
    assert ceilings.step_flops(setting(), "inference", 64) == 64 * forward
    for module in ("training", "per_sample_gradients"):
        assert ceilings.step_flops(setting(), module, 64) == 3 * 64 * forward


@pytest.mark.parametrize(
    ("benchmark", "module", "product", "arrays", "sample"),
    [
        ("mnist", "inference", "", 1, 784),
        ("mnist", "training", "", 6, 784),  # weights, gradients and one moment, each read and written
        ("gpt2", "training", "", 8, 1024),  # AdamW has two
        ("mnist", "per_sample_gradients", "materialised", 1 + 64, 784),
        ("mnist", "per_sample_gradients", "norms", 1, 784),
        ("mnist", "per_sample_gradients", "clipped_sum", 2, 784),
        ("gcn", "inference", "", 1, 2708 * 1433 + 2 * 10556),
        ("graphnet", "inference", "", 1, 26 * 9 + 2 * 56),
    ],
)
def test_the_fewest_bytes_of_a_step(benchmark: str, module: str, product: str, arrays: int, sample: int) -> None:
    found = ceilings.least_bytes(setting(benchmark, product=product), module, 64, PARAMETERS)
    assert found == 4 * (arrays * PARAMETERS + 64 * sample)


def test_the_bound_is_the_ceiling_that_takes_longer() -> None:
    found = {"matmul_flops_per_second": 100.0, "copy_bytes_per_second": 10.0}
    assert ceilings.utilisation(found, 1000, 50, 20.0) == {"mfu": 0.5, "bound": "compute"}
    assert ceilings.utilisation(found, 1000, 500, 100.0) == {"mfu": 0.1, "bound": "memory"}


@pytest.mark.parametrize(
    ("caches", "memory", "megabytes"),
    [
        (["32768K"], 2**40, 128),
        (["393216K", "393216K"], 2**40, 3072),  # two EPYC 9654
        (["393216K", "393216K"], 2**33, 1024),
        (["4096K"], 2**40, 64),
        ([], 2**40, 64),  # a virtual machine that tells none
    ],
)
def test_what_is_copied_on_cpus_is_larger_than_their_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: list[str], memory: int, megabytes: int
) -> None:
    for number, size in enumerate(caches):
        for cpu in (2 * number, 2 * number + 1):
            for index, (each, shared) in enumerate([("32K", cpu), ("1024K", cpu), (size, f"{2 * number}-")]):
                folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
                folder.mkdir(parents=True)
                (folder / "size").write_text(f"{each}\n")
                (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(ceilings, "CPUS", tmp_path)
    monkeypatch.setattr(ceilings, "usable_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(ceilings.device, "cpu", lambda: dataclasses.replace(CPU, memory_bytes=memory))
    ceilings.copied.cache_clear()
    assert ceilings.copied("cpu") * 4 == megabytes * 2**20
    assert ceilings.copied("gpu") == ceilings.COPIED["gpu"]
    ceilings.copied.cache_clear()


def test_the_ceiling_is_the_best_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slow = [0.0], iter([1.0] * 8 + [0.7] + [1.0] * 1000)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now[0])

    def loop(rounds: int) -> None:
        now[0] += rounds * 0.04 * next(slow)  # two of them make a block

    assert ceilings._best(loop) == pytest.approx(1 / (0.04 * 0.7))


def test_a_rate_above_the_ceiling_is_measured_once_more_and_then_disproved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"matmul_flops_per_second": 1e9, "copy_bytes_per_second": 1e9}
    calls: list[object] = []
    monkeypatch.setitem(sys.modules, "ceilings", SimpleNamespace(loops=lambda setting: ["products"]))
    monkeypatch.setattr(timed.ceilings, "measure", lambda *asked: calls.append(asked) or found)
    monkeypatch.setattr(timed.ceilings, "step_flops", lambda *_: 10**9)
    monkeypatch.setattr(timed.ceilings, "least_bytes", lambda *_: 1)
    m: Any = SimpleNamespace(world=ALONE, setting=None, use_case=SimpleNamespace(module="training"), proved=[])
    m.preset, m.watch = SimpleNamespace(thorough=True), SimpleNamespace(sliced=False)
    for seconds, times in ((0.3, 1), (0.2, 2)):
        calls.clear()
        m.row = Row(batch_size=8, parameters=1, step_seconds_p50=seconds)
        if times == 1:
            assert timed.utilise(m)["matmul_flops_per_second"] == 1e9
        else:
            with pytest.raises(Disproved, match="5 times the measured ceiling"):
                timed.utilise(m)
        assert len(calls) == times


def test_what_needs_more_memory_than_the_step_leaves_the_row_standing() -> None:
    m: Any = SimpleNamespace(unproved=[])

    def full(m: Any) -> dict[str, Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    found = timed._beside("mfu", "bound")(full)(m)
    assert found == {"missing": dict.fromkeys(("mfu", "bound"), "out of memory, beside what the step needs")}
    assert m.unproved == ["a rate within the measured ceiling (out of memory)"]

    def wrong(m: Any) -> dict[str, Any]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        timed._beside("mfu")(wrong)(m)
