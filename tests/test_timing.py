"""The timing loop's floors, on a clock of our own: no test here depends on how fast the machine is."""

import dataclasses
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duel.catalogue import BENCHMARKS, PRESETS, Preset
from duel.evidence import Evidence
from duel.measure import timed, timing
from duel.measure.device import ALONE, host_peak_memory
from duel.measure.measurement import Measurement
from duel.measure.watch import ENERGY_SECONDS, Conditions
from duel.record import Row


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
    first, steps = timing.warm_up(work, preset, 10)
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
    assert first >= preset.warmup_steps or first * seconds >= preset.max_seconds
    assert (first - 10) * seconds >= preset.warmup_seconds
    spent = sum(block.seconds for block in blocks)
    steps = sum(block.steps for block in blocks)
    assert (steps >= preset.iterations and len(blocks) >= preset.blocks) or spent >= preset.max_seconds
    assert len(blocks) >= timing.FEWEST
    assert all(block.seconds >= preset.block_seconds for block in blocks)
    assert len({block.steps for block in blocks}) == 1
    # One synchronisation a block, at its last step; every step taken once, in order.
    assert work.taken == list(range(10, 10 + len(work.taken)))
    assert work.synchronised[-len(blocks) :] == [block.first_step + block.steps - 1 for block in blocks]


def test_a_slow_step_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocks = measured(monkeypatch, 7.0, PRESETS["standard"])
    assert (len(blocks), blocks[0].steps) == (5, 1)  # after 20 s, and five
    _, _, blocks = measured(monkeypatch, 7.0, PRESETS["publication"])
    assert (len(blocks), blocks[0].steps) == (9, 1)  # 63 s: the first block that ends after 60 s is the last


def test_slow_steps_warm_up_for_as_long_as_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Steps(7.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    first, steps = timing.warm_up(work, PRESETS["standard"], 1)
    assert (first, steps) == (4, 1)  # 21 s
    first, steady, blocks = timing.settle(work, PRESETS["standard"], first, steps)
    assert (first, steady, blocks) == (9, True, [7.0] * 5)  # 30 s are over, and there are five
    assert timing.settle(work, PRESETS["trial"], first, steps) == (9, False, [])


def test_there_are_five_blocks_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocks = measured(monkeypatch, 30.0, PRESETS["standard"])
    assert len(blocks) == timing.FEWEST == 5


def test_what_was_spent_before_the_warm_up_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs and opening steps take longer than a warm-up."""
    work, row = Steps(0.01), Row(row=0, preset="trial")
    work.now = 100.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    m = Measurement(
        SimpleNamespace(write_row=print), row, Path(), None, lambda event, **found: None, ALONE, next_step=30
    )
    m.work = work
    timed.warm_up(m)
    assert len(work.taken) * work.seconds >= PRESETS["trial"].warmup_seconds == 2.0


SETTLING = dataclasses.replace(PRESETS["standard"], settling_seconds=20.0)


def settled(monkeypatch: pytest.MonkeyPatch, step_seconds: Callable[[int], float]) -> tuple[int, bool, list[float]]:
    """What ``settle`` says of blocks of one step, whose seconds ``step_seconds`` gives by their number."""
    work = Steps(0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    monkeypatch.setattr(work, "synchronize", lambda index: setattr(work, "now", work.now + step_seconds(index)))
    return timing.settle(work, SETTLING, 0, 1)


def test_it_is_measured_once_a_falling_time_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    first, steady, blocks = settled(monkeypatch, lambda index: 0.2 + 0.3 * 0.7**index + 0.001 * (index % 3))
    assert steady
    assert first == len(blocks)
    assert 15 <= first <= 40  # before, the last ten still fell by more than a hundredth


def test_what_never_comes_to_rest_is_said_to_be_unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    _, steady, blocks = settled(monkeypatch, lambda index: 0.2 * 1.02**index)
    assert not steady
    assert sum(blocks) >= SETTLING.settling_seconds


def test_a_drift_of_less_than_a_hundredth_is_none() -> None:
    assert timing.steady([1 + 0.0005 * index for index in range(10)])
    assert not timing.steady([1 + 0.005 * index for index in range(10)])


def test_noise_is_called_a_trend_as_often_as_the_test_allows() -> None:
    generator = random.Random(0)
    called = sum(not timing.steady([generator.gauss(1, 0.2) for _ in range(10)]) for _ in range(2000))
    assert 40 <= called <= 120  # 5 % of 2,000, less those of small drift


def test_outliers_are_counted_by_tukey_s_fences() -> None:
    assert timing.outliers([1.0, 1.1, 1.2, 1.3, 1.4]) == 0
    assert timing.outliers([1.0, 1.1, 1.2, 1.3, 9.0, 0.1]) == 2


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
    dispatched: list[int] = []  # before each loss is read
    monkeypatch.setattr(work, "loss", lambda handle: dispatched.append(len(work.taken)) or float(handle))
    said: list[tuple[int, float]] = []
    losses = timing.opening_steps(work, 5, lambda step, loss: said.append((step, loss)))
    assert losses == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert dispatched == [5] * 5
    assert said == list(enumerate(losses))
    assert work.synchronised == []


@pytest.mark.parametrize(
    ("seconds", "name", "calls"),
    [
        (1e-3, "standard", 1000),
        (0.5, "publication", 120),
        (0.5, "standard", 40),
        (30.0, "standard", 5),
        (1e-3, "smoke", 20),
    ],
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


def test_held_out_samples_take_no_memory_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    work, before = Steps(0.0), host_peak_memory()[0]

    def accuracy(batch: Any) -> float:
        assert len(bytearray(b"1" * 2**28)) == 2**28
        return 0.5

    setting = SimpleNamespace(benchmark=BENCHMARKS["mnist"])
    row = Row(row=0, benchmark="mnist", preset="smoke")
    m = Measurement(SimpleNamespace(write_row=print), row, Path(), None, lambda event, **found: None, ALONE)
    m.work, m.setting = work, setting
    m.pool, m.recorder = SimpleNamespace(held_out=()), SimpleNamespace(evidence=Evidence("fp32"))
    work.accuracy = accuracy
    assert timed.train(m)["accuracy"] == 0.5
    assert m.recorder.evidence.curve == list(map(float, range(400)))
    assert host_peak_memory()[0] < before + 2**27


class Disturbed(Steps):
    """Work with one part, "forward", whose first blocks behind the warm-up are disturbed: they take ten times as long.

    It is its own watch.
    """

    def __init__(self, seconds: float, disturbed: int) -> None:
        super().__init__(seconds)
        self.disturbed = range(1, 1 + disturbed)

    def passes(self) -> dict[str, Callable[[int], int]]:
        return {"forward": self.step}

    def synchronize(self, handle: int) -> None:
        self.pending *= 10 if len(self.synchronised) in self.disturbed else 1
        super().synchronize(handle)

    def block(self) -> Conditions:
        return Conditions(foreign_load=0.5 if len(self.synchronised) - 1 in self.disturbed else 0.0)


@pytest.mark.parametrize(
    ("seconds", "blocks", "disturbed"), [(0.001, 10, 0), (0.4, 7, 0), (9.0, 5, 0), (0.001, 10, 3), (9.0, 5, 2)]
)
def test_a_part_of_the_step_is_the_median_of_its_undisturbed_blocks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, blocks: int, disturbed: int
) -> None:
    work, said = Disturbed(seconds, disturbed), dict[str, Any]()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    row = Row(run_id="r", row=3, preset="standard", missing={"forward_seconds": "not yet"})

    def emit(event: str, **found: Any) -> None:
        if event == "passes":
            said[event] = found

    m = Measurement(SimpleNamespace(write_row=print), row, Path(), None, emit, ALONE, steps_per_block=2)
    m.work = m.watch = work
    row = row.replace(**timed.time_passes(m))
    times = [10 * seconds] * disturbed + [seconds] * (blocks - disturbed)
    forward = {"step_seconds": pytest.approx(times), "left_out": list(range(disturbed))}
    assert said == {"passes": {"row": 3, "steps": 2, "forward": forward}}
    if disturbed == 2:  # of five, more than 30 %
        why = "2 of 5 blocks are left out: 2 other processes on the CPUs"
        assert (row.forward_seconds, row.missing) == (None, {"forward_seconds": why})
    else:
        assert (row.forward_seconds, row.missing) == (pytest.approx(seconds), {})


class Throttled(Steps):
    """Work whose blocks of numbers ``bad`` are throttled, and take ten times as long. It is its own watch."""

    untold = "other processes (NVML: Unknown Error)"
    least_seconds = 0.0

    def __init__(self, seconds: float, bad: set[int]) -> None:
        super().__init__(seconds)
        self.bad, self.blocks, self.begun, self.items = bad, 0, False, 0

    def begin(self) -> None:
        self.begun = True

    def synchronize(self, handle: int) -> None:
        self.pending *= 10 if self.begun and self.blocks in self.bad else 1
        super().synchronize(handle)

    def block(self) -> Conditions:
        self.blocks += 1
        return Conditions(throttles=("power brake",) if self.blocks - 1 in self.bad else ())

    def columns(self, conditions: list[Conditions], items: int) -> dict[str, Any]:
        self.items = items
        return {"host_peak_bytes": len(conditions)}


@pytest.mark.parametrize("bad", [set(), {1, 4, 49}, set(range(20))])
def test_a_throttled_block_is_in_the_record_and_not_in_the_row_s_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: set[int]
) -> None:
    work, said = Throttled(0.003, bad), list[dict[str, Any]]()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    row = Row(row=3, preset="publication", batch_size=8, throughput_unit="images/s", missing={"left_out": "not yet"})

    def emit(event: str, **found: Any) -> None:
        said.append({event: found})

    m = Measurement(SimpleNamespace(write_row=print), row, Path(), None, emit, ALONE, next_step=10)
    m.work = m.watch = work
    for stage in (timed.warm_up, timed.time_blocks):
        columns = stage(m)
        m.row = m.row.replace(**columns)
    row = m.row
    records = [event["block"] for event in said if "block" in event]
    assert len(records) == row.host_peak_bytes == 50
    assert {number for number, record in enumerate(records) if record.get("throttles")} == bad
    assert {number for number, record in enumerate(records) if record["step_seconds"] > 0.02} == bad
    assert (row.blocks, row.left_out_blocks, row.outliers) == (50 - len(bad), len(bad), 0)
    assert (row.step_seconds_mean, row.throughput) == (pytest.approx(0.003), pytest.approx(8 / 0.003))
    assert work.items == 8 * (row.iterations or 0) == 8 * sum(record["steps"] for record in records)
    words = f"{len(bad)} throttled (power brake)" if bad else "none is"
    told = row.left_out if bad else row.missing["left_out"]
    assert told == f"{words}; not reported: other processes (NVML: Unknown Error)"
    warned = f"warning: {len(bad)} of 50 blocks are left out: {words}" in capsys.readouterr().out
    assert warned == bool(bad)


@pytest.mark.parametrize("seconds", [0.003, 0.9])
def test_blocks_go_on_for_long_enough_to_measure_their_energy(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A slow step has been timed for longer already, a fast one has all blocks of the preset before."""
    work = Throttled(seconds, set())
    work.least_seconds = ENERGY_SECONDS
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    row = Row(row=0, preset="standard", batch_size=8, throughput_unit="images/s")
    m = Measurement(SimpleNamespace(write_row=print), row, Path(), None, lambda event, **found: None, ALONE)
    m.work = m.watch = work
    m.row = m.row.replace(**timed.warm_up(m))
    before = work.now
    row = m.row.replace(**timed.time_blocks(m))
    assert work.now - before >= ENERGY_SECONDS
    assert (row.blocks or 0) > PRESETS["standard"].blocks or seconds * (row.iterations or 0) > ENERGY_SECONDS
