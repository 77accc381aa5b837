"""What a row records of its own program, and the checks of its clock, on work that is a few lines of Python."""

import contextlib
import io
import math
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duel.errors import Disproved
from duel.evidence import GRAIN, ROUNDING, Evidence, curves_apart, disagreements, finer, sha256
from duel.measure import clock, proving
from duel.measure import evidence as recording
from duel.measure.evidence import Recorder, evaluated, produced, project, trained
from duel.record import Row

SHAPES = {"fc.weight": (4, 8), "fc.bias": (4,)}


def test_projections_tell_how_far_two_tensors_are_apart() -> None:
    generator = np.random.default_rng(0)
    one, noise = generator.standard_normal((2, 300, 40))
    for size in (1e-6, 1e-2, 1.0):
        apart = project("fc.weight", one + size * noise) - project("fc.weight", one)
        assert np.linalg.norm(apart[1:]) == pytest.approx(size * np.linalg.norm(noise), rel=0.8)
    assert project("fc.weight", one)[0] == pytest.approx(np.linalg.norm(one))
    assert not np.array_equal(project("fc.weight", one), project("other", one))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(Disproved, match="NaN or infinite numbers: change/fc\\.bias"):
        project("change/fc.bias", np.array([1.0, bad]))


class Linear:
    """A linear layer on two batches. ``rounds`` is what its arithmetic does to each result."""

    def __init__(self, rounds: Any = lambda array: array) -> None:
        self.rounds, self.weights = rounds, {}
        self.batches = np.random.default_rng(1).standard_normal((8, 5, 8))

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.weights = dict(arrays)

    def step(self, index: int) -> np.ndarray:
        weight, bias = (self.rounds(self.weights[name].astype(np.float64)) for name in SHAPES)
        return self.rounds(self.batches[index % 8] @ weight.T + bias)

    def named(self, handle: np.ndarray, every: int = 1, first: int = 0) -> dict[str, np.ndarray]:
        return {"logits": handle[first::every]}


def recorded(work: Linear, policy: str = "fp32", elements: int = 1, samples: int = 5) -> Evidence:
    recorder = Recorder(work, produced, SHAPES, 8, elements, samples, policy, 0, smooth=False)
    recorder.before()
    recorder.after(13)
    return recorder.evidence


def half(array: np.ndarray) -> np.ndarray:
    """Rounded to the seven bits of a bfloat16's mantissa."""
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent)


def test_the_same_program_agrees_and_one_of_fewer_digits_does_not() -> None:
    exact, single, rounded = recorded(Linear()), recorded(Linear(np.float32)), recorded(Linear(half))
    assert disagreements([exact], [single]) == []
    assert any("result 0/logits before the clock" in text for text in disagreements([exact], [rounded]))


def test_in_half_precision_more_digits_are_noticed() -> None:
    assert ROUNDING["bf16"] > 100 * GRAIN
    rounded, single = recorded(Linear(half), "bf16"), recorded(Linear(np.float32), "bf16")
    assert finer(single, rounded).startswith("computed in more than bf16: result ")
    assert finer(rounded, single) == finer(rounded, rounded) == finer(single, single) == ""
    assert finer(recorded(Linear(np.float32)), recorded(Linear(half))) == ""


def curves(policy: str, moved: float, *apart: float) -> list[str]:
    """What is found of two curves of a hundred losses that are ``apart``, where rounding moves both by ``moved``."""
    one = [1.0] * 100
    other = [1.0 + (apart[step] if step < len(apart) else apart[-1]) for step in range(100)]
    return curves_apart(
        *(Evidence(policy, curve=curve, moved_curve=[a + moved for a in curve]) for curve in (one, other))
    )


def test_opening_losses_may_differ_by_what_rounding_does_to_them() -> None:
    assert curves("fp32", 1e-6, 9e-4) == curves("fp32", 1e-2, 1.9e-2) == curves("bf16", 0.1, 0.3) == []
    assert curves("fp32", 1e-6, 1e-2) == [
        "opening losses (apart by 1.0e-02 to step 1, rounding moves them by 1e-06; 1 | 1.01)"
    ]
    assert curves("fp32", 1e-6, 1e-5, 0.1)[0].startswith("opening losses (apart by 9.0e-02 to step 10,")
    assert curves("bf16", 1e-2, *[1e-4] * 10, 0.1)[0].startswith("opening losses (apart by 9.0e-02 to step 100,")
    assert curves("fp32", 1e-3, math.nan)[0].endswith("; 1 | nan)")
    assert curves_apart(Evidence("fp32", curve=[1.0]), Evidence("fp32")) == ["opening losses (1 | 0 of them)"]
    one, other = (Evidence("fp32", curve=[1.0, last]) for last in (0.5, 0.9))
    assert curves_apart(one, other) == []  # nobody knows how far rounding moves the second


def test_the_side_whose_losses_rounding_moves_less_sets_the_bound() -> None:
    for policy, bound in (("fp32", 1e-3), ("tf32", 1e-2), ("fp16", 2e-2), ("bf16", 5e-2)):
        quiet = Evidence(policy, curve=[1.0] * 100, moved_curve=[1.0 + 1e-6] * 100)
        noisy = Evidence(policy, curve=[1.0 + 1.1 * bound] * 100, moved_curve=[9.0] * 100)
        assert curves_apart(quiet, noisy)[0].startswith("opening losses ("), policy
        assert curves_apart(noisy, quiet)[0].startswith("opening losses ("), policy
        assert curves(policy, 1e-6, 0.95 * bound) == [], policy


def test_the_opening_steps_are_repeated_from_moved_weights_and_the_initial_ones_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[dict[str, np.ndarray]] = []
    work = SimpleNamespace(agree=lambda value: value, load=loaded.append)
    m: Any = SimpleNamespace(work=work, training=work, initial={"a": np.ones(5, np.float32)}, row=Row(seed=0))
    m.recorder = SimpleNamespace(step_seconds=1e-3, evidence=Evidence("fp32"))
    m.setting, m.benchmark = SimpleNamespace(precision="fp32"), SimpleNamespace(curve_steps=3)
    m.unproved, m.proof_seconds = [], 0.0
    monkeypatch.setattr(proving.timing, "opening_steps", lambda _, steps, __: [float(len(loaded))] * steps)
    proving.prove_opening(m)
    assert m.recorder.evidence.moved_curve == [1.0] * 3
    moved, restored = loaded
    assert restored is m.initial
    assert 0 < np.abs(moved["a"] - m.initial["a"]).max() < 1e-4
    assert m.unproved == []


def test_after_the_clock_both_weights_and_batches_are_others() -> None:
    class Kept(Linear):
        def load(self, arrays: dict[str, np.ndarray]) -> None:
            if not self.weights:
                super().load(arrays)

    class Noted(Linear):
        def step(self, index: int) -> np.ndarray:
            taken.append(index % 8)
            return super().step(index)

    found = disagreements([recorded(Linear())], [recorded(Kept())])
    assert found
    assert all("after the clock" in text for text in found)
    taken: list[int] = []
    recorded(Noted())
    assert not set(taken[: len(taken) // 2]) & set(taken[len(taken) // 2 :]), taken


def test_a_stored_result_and_a_wrong_batch_are_noticed() -> None:
    class Stored(Linear):
        def step(self, index: int) -> np.ndarray:
            if not hasattr(self, "kept"):
                self.kept = super().step(index)
            return self.kept

    class First(Linear):
        def step(self, index: int) -> np.ndarray:
            return super().step(index if index < 10 else 0)

    right = [recorded(Linear())]
    assert any("result 1/logits before" in text for text in disagreements(right, [recorded(Stored())]))
    found = disagreements(right, [recorded(First())])
    assert found
    assert all("after the clock" in text for text in found)


def test_evaluation_must_give_the_same_again() -> None:
    generator = np.random.default_rng()
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    dropping = Linear(lambda array: array * generator.integers(0, 2, array.shape))
    with pytest.raises(Disproved, match="not deterministic in evaluation: result 0/logits"):
        evaluated(dropping, weights, (0, 7), 1)
    evaluated(Linear(), weights, (0, 7), 1)
    adding = Linear(lambda array: array * (1 + 1e-3 * generator.standard_normal(array.shape)))
    evaluated(adding, weights, (0, 7), 1, policy="bf16")
    with pytest.raises(Disproved, match="not deterministic"):
        evaluated(dropping, weights, (0, 7), 1, policy="bf16")
    with pytest.raises(Disproved, match="not deterministic"):
        evaluated(adding, weights, (0, 7), 1)
    for policy in ("fp32", "bf16"):
        recorder = Recorder(adding, evaluated, SHAPES, 8, 1, 5, policy, 0, smooth=False)
        with contextlib.nullcontext() if policy == "bf16" else pytest.raises(Disproved):
            recorder.before()


def of_false_shape() -> bytes:
    """Return a file whose only array is 8 TiB large by its header, and empty."""
    file, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", header.getvalue())
    return file.getvalue()


def test_a_file_gives_back_what_was_recorded_and_nothing_of_what_was_changed() -> None:
    evidence = recorded(Linear())
    evidence.curve = [2.5, 2.4]
    data = evidence.to_bytes()
    again = Evidence.from_bytes(data)
    assert disagreements([evidence], [again]) == []
    assert (again.policy, again.curve, again.shapes) == ("fp32", [2.5, 2.4], evidence.shapes)
    assert sha256([data]) != sha256([data[:-1] + b"x"])
    for damaged in (b"", b"PK", data[: len(data) // 2], of_false_shape()):
        with pytest.raises(ValueError, match="not an evidence file"):
            Evidence.from_bytes(damaged)


def test_of_large_results_other_samples_are_proved_after_the_clock_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Linear):
        def step(self, index: int) -> np.ndarray:
            found = super().step(index)
            found[self.sample] *= 2
            return found

    monkeypatch.setattr(recording, "MOST_ELEMENTS", 10)
    right = recorded(Linear(), elements=20)
    assert right.notes == ["every 2th sample"]
    for sample, when in ((2, "before"), (3, "after")):
        wrong = Wrong()
        wrong.sample = sample
        found = disagreements([right], [recorded(wrong, elements=20)])
        assert found
        assert all(f" {when} the clock" in text for text in found)
    assert recorded(Linear(), elements=20, samples=1).shapes == {f"result {n}/logits": (3, 4) for n in range(2)}


class Queue:
    """A device that takes ``seconds`` for a step, 20 times as long for ``slow``, in a time of its own.

    ``waits``: the share of what is left that ``synchronize`` waits for.
    """

    def __init__(self, seconds: float = 0.002, waits: float = 1.0, slow: int = -1) -> None:
        self.seconds, self.waits, self.slow, self.done, self.now = seconds, waits, slow, 0.0, 0.0

    def step(self, index: int) -> float:
        self.done = max(self.done, self.now) + self.seconds * (20 if index == self.slow else 1)
        return self.done

    def read(self, handle: float) -> None:
        self.now = max(self.now, handle)

    def synchronize(self, handle: float) -> None:
        self.read(self.now + self.waits * max(0.0, handle - self.now))

    def agree(self, value: float) -> float:
        return value

    def samples(self) -> int:
        return 8


def test_a_clock_that_stops_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(work: Queue) -> tuple[float, int]:
        monkeypatch.setattr(clock.time, "perf_counter", lambda: work.now)
        monkeypatch.setattr(clock.time, "sleep", lambda seconds: work.read(work.now + seconds))
        return clock.waited(work, 100)

    assert waited(Queue()) == (pytest.approx(0.002), 100 + clock.WAITED + 26)
    assert waited(Queue(0.9)) == (pytest.approx(0.9), 100 + clock.FEWEST_WAITED + 2)
    assert waited(Queue(slow=103)) == waited(Queue()), "others may have used the device"
    assert waited(Queue(waits=0.95)) == waited(Queue())
    for share in (0.0, 0.8):
        with pytest.raises(Disproved, match="s of work remained when"):
            waited(Queue(waits=share))


def test_samples_and_rates_that_cannot_be_are_refused() -> None:
    clock.samples(Queue(), 8)
    with pytest.raises(Disproved, match="a step takes 8 samples, the batch size is 16"):
        clock.samples(Queue(), 16)
    clock.possible(10**9, 0.01, 5e10)
    with pytest.raises(Disproved, match="20 times the measured ceiling of this device"):
        clock.possible(10**9, 0.001, 5e10)
    clock.possible(195, 1.0, 50.0)
    with pytest.raises(Disproved, match="4 times the measured ceiling"):
        clock.possible(205, 1.0, 50.0)


class Optimizer:
    """Parameters that move with each step; a count if it is AdamW's."""

    def __init__(self, counts: bool, still: str = "") -> None:
        self.counts, self.still, self.steps = counts, still, 0

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.steps = 0

    def step(self, index: int) -> float:
        self.steps += 1
        return 1.0

    def loss(self, handle: float) -> float:
        return handle

    def export(self) -> dict[str, np.ndarray]:
        return {name: np.full(shape, 0.0 if name == self.still else self.steps) for name, shape in SHAPES.items()}

    def moments(self) -> dict[str, np.ndarray]:
        return {name: np.ones(shape) for name, shape in SHAPES.items()}

    def count(self) -> int | None:
        return self.steps if self.counts else None


def test_steps_that_were_not_taken_are_noticed() -> None:
    for counts in (True, False):
        work = Optimizer(counts)
        before, then = work.count(), clock.positions(work)
        for index in range(5):
            work.step(index)
        clock.counted(work, 5, before, then)
    with pytest.raises(Disproved, match="did not move fc\\.bias"):
        clock.counted(Optimizer(False, still="fc.bias"), 5, None, then | {"fc.weight": then["fc.weight"] + 1})
    adamw = Optimizer(True)
    adamw.steps = 4
    with pytest.raises(Disproved, match="the optimizer counts 4 steps, 5 were timed"):
        clock.counted(adamw, 5, 0, then)


def test_of_training_losses_moments_and_changes_are_recorded() -> None:
    known = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    found, floors = trained(Optimizer(True), known, (0, 7), 1)
    assert list(found) == ["losses", "moments/fc.weight", "moments/fc.bias", "change/fc.weight", "change/fc.bias"]
    assert np.array_equal(found["change/fc.bias"], np.full(4, 2.0))
    assert set(floors) == {"change/fc.weight", "change/fc.bias"}


def test_what_was_not_proved_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proving.certificate, "verdict", lambda *_: "verified")
    run = SimpleNamespace(folder=tmp_path / "runs" / "r")
    m: Any = SimpleNamespace(unproved=["b"], proved=["a"], row=Row(), run=run)
    assert proving.certify(m)["proved"] == "a; not proved: b"
