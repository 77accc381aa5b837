"""The timing loop's floors, on a clock of our own: no test here depends on how fast the machine is."""

import dataclasses
import statistics

import pytest

from duel.catalogue import PRESETS, Preset
from duel.measure import timing


class Steps:
    """Work whose steps take ``seconds`` each, waited for at the synchronisation, as on an accelerator."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.pending = 0.0, seconds, 0
        self.taken: list[int] = []
        self.synchronised: list[int] = []

    def step(self, index: int) -> int:
        self.taken.append(index)
        self.pending += 1
        return index

    def synchronize(self, handle: int) -> None:
        self.now += self.pending * self.seconds
        self.pending = 0
        self.synchronised.append(handle)

    def loss(self, handle: int) -> float:
        return float(handle)

    def agree(self, value: float) -> float:
        return value


def measured(monkeypatch: pytest.MonkeyPatch, seconds: float, preset: Preset) -> tuple[Steps, int, list[timing.Block]]:
    work = Steps(seconds)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    first, steps = timing.warm_up(work, preset, 10, 0.0)
    blocks = []
    for block, handle in timing.time_blocks(work, preset, first, steps):
        assert handle == block.first_step + block.steps - 1
        blocks.append(block)
    return work, first, blocks


@pytest.mark.parametrize("seconds", [1e-5, 0.003, 0.15, 0.9, 5.0])
@pytest.mark.parametrize("name", ["standard", "publication"])
def test_the_floors_hold_at_every_speed(monkeypatch: pytest.MonkeyPatch, seconds: float, name: str) -> None:
    preset = PRESETS[name]
    work, first, blocks = measured(monkeypatch, seconds, preset)
    assert first >= preset.warmup_steps
    assert (first - 10) * seconds >= preset.warmup_seconds
    assert sum(block.steps for block in blocks) >= preset.iterations == 50
    spent = sum(block.seconds for block in blocks)
    assert len(blocks) >= preset.blocks or spent >= preset.max_seconds
    assert all(block.seconds >= preset.block_seconds for block in blocks)
    assert len({block.steps for block in blocks}) == 1
    # One synchronisation a block, at its last step; every step taken once, in order.
    assert work.taken == list(range(10, 10 + len(work.taken)))
    assert work.synchronised[-len(blocks) :] == [block.first_step + block.steps - 1 for block in blocks]


def test_a_slow_step_ends_after_its_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocks = measured(monkeypatch, 5.0, PRESETS["standard"])
    assert (len(blocks), blocks[0].steps) == (50, 1)


def test_the_time_is_up_before_the_blocks_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = dataclasses.replace(PRESETS["standard"], iterations=4)
    _, _, blocks = measured(monkeypatch, 7.0, preset)
    assert len(blocks) == 9  # 63 s: the first block that ends after 60 s is the last


def test_the_summary_is_over_blocks() -> None:
    blocks = [timing.Block(4 * number, 4, 4 * seconds) for number, seconds in enumerate((1.0, 2.0, 3.0, 10.0))]
    found = timing.summary(blocks, batch_size=8)
    assert (found["iterations"], found["blocks"], found["steps_per_block"]) == (16, 4, 4)
    assert found["step_seconds_mean"] == 4.0
    assert found["step_seconds_p50"] == 2.5
    assert found["step_seconds_std"] == statistics.stdev((1, 2, 3, 10))
    assert found["step_seconds_p95"] == pytest.approx(8.95)
    assert found["throughput"] == 8 / 2.5


def test_the_opening_steps_are_dispatched_before_any_loss_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Steps(2.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    said: list[tuple[int, float]] = []
    first_step_seconds, since, losses = timing.opening_steps(work, 5, lambda step, loss: said.append((step, loss)))
    assert (first_step_seconds, since) == (2.0, 2.0)
    assert losses == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert said == list(enumerate(losses))
    assert work.synchronised == [0]


@pytest.mark.parametrize(
    ("seconds", "name", "calls"),
    [(1e-3, "standard", 1000), (0.5, "standard", 120), (5.0, "standard", 50), (1e-3, "smoke", 20)],
)
def test_latency_is_of_calls_that_are_synchronised_one_by_one(
    monkeypatch: pytest.MonkeyPatch, seconds: float, name: str, calls: int
) -> None:
    work = Steps(seconds)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    taken = timing.time_calls(work, PRESETS[name], 7)
    assert len(taken) == calls
    assert taken == pytest.approx([seconds] * calls)
    assert work.taken == work.synchronised == list(range(7, 7 + calls))


def test_the_latency_s_99th_percentile_needs_a_thousand_calls() -> None:
    few, enough = (timing.latency([1e-3 * (index + 1) for index in range(count)]) for count in (999, 1000))
    assert (few["latency_calls"], few["latency_seconds_p99"]) == (999, None)
    assert few["missing"] == {"latency_seconds_p99": "999 calls; 1000 are needed"}
    assert enough["missing"] == {}
    expected = {"mean": 0.5005, "p50": 0.5005, "p95": 0.95005, "p99": 0.99001, "std": 0.28882}
    for figure, value in expected.items():
        assert enough[f"latency_seconds_{figure}"] == pytest.approx(value, rel=1e-4)
