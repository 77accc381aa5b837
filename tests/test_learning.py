"""A training by a stand-in for both sides: where it is saved, what it reports, and what counts as its time."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duel.catalogue import SGD
from duel.data.feed import Fed
from duel.errors import Diverged, UserError
from duel.measure import learning
from duel.measure.checkpoint import Checkpoints
from duel.measure.device import ALONE
from duel.measure.learning import _Training
from duel.measure.watch import Conditions
from duel.recipes import Recipe
from duel.record import Row
from duel.results import Run

STEPS, HELD_OUT = 3, 4  # batches of an epoch, and of an evaluation
SECOND, SAVING = 1.0, 100.0  # what a step, and a checkpoint, take by the clock of these tests


class Clock:
    """A clock that only steps and checkpoints move, which draw a watt."""

    now = 0.0
    looking = 0.0  # what reading the conditions takes
    load: tuple[float | None, ...] = ()  # that others have between readings of an epoch

    def perf_counter(self) -> float:
        return self.now

    def counters(self) -> list[float]:
        return [self.now]

    def used(self, before: list[float], after: list[float]) -> float:
        return after[0] - before[0]

    def begin(self) -> None:
        self.others = iter(self.load)

    def block(self) -> Conditions:
        self.now += self.looking
        return Conditions(foreign_load=next(self.others, 0.0))

    no_counter = untold = ""


class Work:
    """A twin's trainer, whose state is the number of its steps; ``told`` is called at each batch of an evaluation."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.state, self.evaluated, self.agreed = clock, 0, 0, True
        self.rates: list[float] = []
        self.told: Any = lambda: None

    def put(self, batch: Any, present: int) -> Any:
        return batch

    def advance(self, placed: Any, rate: float) -> float:
        self.state += 1
        self.rates.append(rate)
        self.clock.now += SECOND
        return 1.0 / self.state

    def loss(self, handle: float) -> float:
        return handle

    def agree(self, value: float) -> float:
        return value if self.agreed else 0.0

    def evaluate(self, batch: Any) -> tuple[float, int, int]:
        self.evaluated += 1
        self.clock.now += SECOND
        self.told()
        return 1.0 / (1 + self.state), min(self.state, 10), 10

    def snapshot(self) -> dict[str, Any]:
        self.clock.now += SAVING
        return {"state": np.array(self.state)}

    def restore(self, arrays: dict[str, Any]) -> None:
        self.state = int(arrays["state"])


class Feed:
    steps, waits = STEPS, 0.0  # what making a batch takes
    dataset = SimpleNamespace(classes=10, source="none", held_out=SimpleNamespace(labels=np.zeros(10 * HELD_OUT)))

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def batches(self, first: int, end: int, threads: int) -> Iterator[Fed]:
        for step in range(first, end):
            self.clock.now += self.waits
            yield Fed((np.full(2, step, np.float32),), np.zeros(2, np.int32), 2)

    def held_out(self, threads: int) -> Iterator[Fed]:
        for _ in range(HELD_OUT):
            yield Fed((np.zeros(10, np.float32),), np.zeros(10, np.int32), 10)


class Told(Exception):
    """In place of the process's end."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, before = Clock(), signal.getsignal(signal.SIGTERM)

    def end(code: int) -> None:
        assert code == learning.TOLD_TO_END
        raise Told

    monkeypatch.setattr(learning, "time", clock)
    monkeypatch.setattr(learning.os, "_exit", end)
    yield clock
    signal.signal(signal.SIGTERM, before)


def training(folder: Path, clock: Clock, epochs: int = 2, target: float | None = None) -> tuple[_Training, Any]:
    run = Run(folder / "jax_mnist_1-x")
    run.folder.mkdir(exist_ok=True)
    row = Row(run_id=run.id, row=0, framework="jax", repeat=0, target_accuracy=target, throughput_unit="images/s")
    events: list[dict[str, Any]] = []
    m: Any = SimpleNamespace(run=run, row=row, number=0, work=Work(clock), feed=Feed(clock), world=ALONE, watch=clock)
    m.device, m.recipe, m.say = SimpleNamespace(kind="cpu"), Recipe(SGD(0.1), 2, epochs), lambda phase: None
    m.events, m.emit = events, lambda event, **fields: events.append({"event": event, **fields})
    return _Training(m, Checkpoints(run.folder / "checkpoints", {})), m


def epochs_of(m: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(m.run.curve_file(m.row).read_text())
    return found


def test_checkpoints_within_an_epoch_are_no_time_or_energy_of_it(
    tmp_path: Path, stand_ins: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "CHECKPOINT_SECONDS", 0.0)
    one, m = training(tmp_path, stand_ins)
    columns = one.run()
    assert [epoch["seconds"] for epoch in epochs_of(m)] == [0.0, STEPS * SECOND, STEPS * SECOND]
    assert columns["training_seconds"] == columns["training_joules"] == 2 * STEPS * SECOND


def test_the_rates_are_the_recipe_s_also_after_an_interruption(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins)
    rates = [m.recipe.rate(step, 2 * STEPS, STEPS) for step in range(2 * STEPS)]
    m.work.told = lambda: setattr(one, "_told", m.work.state == STEPS)
    with pytest.raises(Told):
        one.run()
    again, there = training(tmp_path, stand_ins)
    again.resume()
    again.run()
    assert m.work.rates + there.work.rates == rates
    assert len(set(rates)) == len(rates)


def test_the_time_spent_waiting_for_data_and_both_accuracies_are_recorded(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins)
    m.feed.waits = 0.25
    columns = one.run()
    assert columns["waiting_share"] == pytest.approx(0.25 / (0.25 + SECOND))
    assert (columns["top1"], columns["top5"]) == (pytest.approx(2 * STEPS / 10), 1.0)


def test_energy_is_read_often_enough_for_counters_that_wrap(
    tmp_path: Path, stand_ins: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "REPORT_SECONDS", 0.5)
    wraps = 2.0  # J; a used() beyond one range cannot be told from less
    monkeypatch.setattr(stand_ins, "used", lambda before, after: (after[0] - before[0]) % wraps, raising=False)
    one, _ = training(tmp_path, stand_ins)
    assert one.run()["training_joules"] == 2 * STEPS * SECOND


def test_energy_used_while_conditions_are_read_is_counted(
    tmp_path: Path, stand_ins: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "REPORT_SECONDS", 0.5)
    stand_ins.looking = 0.25
    one, _ = training(tmp_path, stand_ins)
    columns = one.run()
    assert columns["training_joules"] == columns["training_seconds"] > 2 * STEPS * SECOND


def test_several_ranks_agree_at_least_every_few_seconds_whether_they_were_told_to_end(
    tmp_path: Path, stand_ins: Clock
) -> None:
    one, m = training(tmp_path, stand_ins)
    m.world = SimpleNamespace(size=2, rank=0)
    course = one._course
    for since, steps, until in ((0.01, 3, learning.MOST_UNASKED), (40.0, 12, 1), (9.0, 11, 5)):
        course.step = one._asked
        assert not one._is_due(since, steps)
        assert one._asked == course.step + until
        one._told = True
        assert not one._is_due(since, steps), "not asked"
        one._told = False
    course.step, one._told = one._asked, True
    assert one._is_due(9.0, 11)
    assert one._asked == course.step + 1


def test_what_others_took_meanwhile_is_recorded(
    tmp_path: Path, stand_ins: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "REPORT_SECONDS", 0.5)
    stand_ins.load = (0.5, 0.04)  # of the three steps of an epoch
    one, _ = training(tmp_path, stand_ins)
    columns = one.run()
    assert columns["foreign_load"] == pytest.approx((0.5 + 0.04) / STEPS)
    assert columns["disturbed_share"] == pytest.approx(1 / STEPS)
    stand_ins.load = (0.5, None)
    (tmp_path / "silent").mkdir()
    one, _ = training(tmp_path / "silent", stand_ins)
    columns = one.run()
    assert columns["foreign_load"] is None
    assert "foreign_load" in columns["missing"]
    stand_ins.load, stand_ins.untold = (), "throttling (NVML: denied)"
    (tmp_path / "denied").mkdir()
    one, _ = training(tmp_path / "denied", stand_ins)
    columns = one.run()
    assert columns["disturbed_share"] is None, "a zero would claim that nothing throttled"
    assert columns["missing"]["disturbed_share"] == "not reported: throttling (NVML: denied)"


def test_times_of_several_machines_are_not_those_of_one(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins, epochs=1)
    m.row = m.row.replace(host="n1", device_id="0")
    one.resume()
    one.run()
    again, m = training(tmp_path, stand_ins)
    m.row = m.row.replace(host="n2", device_id="0")
    again.resume()
    columns = again.run()
    assert columns["trained_epochs"] == 2
    assert {columns[name] for name in learning.OF_MACHINE if name in columns} == {None}
    assert columns["missing"]["training_seconds"] == "trained on several machines or devices"


def test_ranks_that_would_go_on_from_other_checkpoints_end(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins, epochs=1)
    one.run()
    other, m = training(tmp_path, stand_ins)
    m.work.agreed = False  # rank 0 is at step 0
    with pytest.raises(UserError, match=f"rank 0 would go on after step {STEPS}, rank 0 after another"):
        other.resume()


def test_an_evaluation_reports_how_far_it_is(tmp_path: Path, stand_ins: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "REPORT_SECONDS", 0.5)
    one, m = training(tmp_path, stand_ins, epochs=1)
    one.run()
    labels = [event["label"] for event in m.events if event["event"] == "learning"]
    told = [f"{10 * (1 + number)} of {10 * HELD_OUT} held-out samples evaluated" for number in range(HELD_OUT)]
    assert labels[:HELD_OUT] == labels[-HELD_OUT:] == told


@pytest.mark.parametrize("batch", [1, HELD_OUT + 2, 2 * HELD_OUT + 1])
def test_told_to_end_in_an_evaluation_it_ends_at_once_and_goes_on_alike(
    tmp_path: Path, stand_ins: Clock, batch: int
) -> None:
    (tmp_path / "whole").mkdir()
    whole, there = training(tmp_path / "whole", stand_ins)
    whole.run()
    one, m = training(tmp_path, stand_ins)
    m.work.told = lambda: m.work.evaluated == batch and one._tell(signal.SIGTERM, None)
    with pytest.raises(Told):
        one.run()
    assert m.work.evaluated == batch
    trained = m.work.state
    again, m = training(tmp_path, stand_ins)
    again.resume()
    again.run()
    assert m.work.state == there.work.state == 2 * STEPS
    assert again._course.seen == whole._course.seen
    assert epochs_of(m) == epochs_of(there)
    assert trained == (batch - 1) // HELD_OUT * STEPS, "nothing was trained twice"


def test_the_end_at_a_target_is_decided_for_all_ranks_together(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins, target=0.1)
    assert one.run()["trained_epochs"] == 1
    other, m = training(tmp_path, stand_ins, target=0.1)
    m.work.agreed = False  # rank 0 has not reached it
    assert other.run()["trained_epochs"] == 2


def test_a_checkpoint_belongs_to_one_kind_of_device() -> None:
    row = Row(benchmark="mnist", size="tiny", device_kind="gpu", device_name="NVIDIA A100")
    m: Any = SimpleNamespace(row=row, world=ALONE, feed=Feed(Clock()))
    other: Any = SimpleNamespace(row=row.replace(device_name="NVIDIA H100"), world=ALONE, feed=Feed(Clock()))
    assert learning._identity(m) != learning._identity(other)


def test_a_checkpoint_belongs_to_the_code_that_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    m: Any = SimpleNamespace(
        row=Row(benchmark="mnist", size="tiny", device_kind="cpu"), world=ALONE, feed=Feed(Clock())
    )
    before = learning._identity(m)
    monkeypatch.setattr(learning.tree, "digest", lambda: "other")
    assert {name for name, value in learning._identity(m).items() if value != before[name]} == {"code"}


def test_a_target_that_was_not_reached_has_no_time(tmp_path: Path, stand_ins: Clock) -> None:
    one, _ = training(tmp_path, stand_ins, target=0.99)
    columns = one.run()
    assert columns.get("seconds_to_target") is columns.get("joules_to_target") is None
    assert columns["missing"]["seconds_to_target"].startswith("top-1 ended at 0.")


def test_the_loss_and_rate_are_of_what_was_trained(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins)
    one.run()
    losses = [[1.0, 1 / 2, 1 / 3], [1 / 4, 1 / 5, 1 / 6]]
    assert [epoch["loss"] for epoch in epochs_of(m)[1:]] == pytest.approx([sum(each) / 3 for each in losses])
    (tmp_path / "other").mkdir()
    other, _ = training(tmp_path / "other", stand_ins, target=0.1)
    assert other.run()["trained_per_second"] == pytest.approx(2 * STEPS / (STEPS * SECOND)), "of one epoch of two"


def test_a_held_out_loss_that_is_no_number_ends_the_training(tmp_path: Path, stand_ins: Clock) -> None:
    one, m = training(tmp_path, stand_ins)
    m.work.evaluate = lambda batch: (float("nan"), 0, 0)
    with pytest.raises(Diverged, match="held-out loss became nan after epoch 0"):
        one.run()


@pytest.mark.parametrize(
    "name",
    ["framework", "framework_version", "benchmark", "size", "precision", "switches", "recipe", "weights_sha256"],
)
def test_a_checkpoint_belongs_to_one_version_and_setting(name: str) -> None:
    def of(row: Row) -> dict[str, str]:
        m: Any = SimpleNamespace(row=row, world=ALONE, feed=Feed(Clock()))
        return learning._identity(m)

    assert of(Row(**{name: "a"})) != of(Row(**{name: "b"}))
