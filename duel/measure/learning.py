"""The stages of a training to accuracy: its data, its epochs with their evaluations, what they came to."""

import dataclasses
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

from duel import recipes, tree
from duel.catalogue import Images, Tokens
from duel.data import known, samples
from duel.data.feed import Fed, Feed
from duel.errors import Diverged, UserError
from duel.files import write_atomically
from duel.measure import batches, preparing, probes, twin
from duel.measure.checkpoint import Checkpoints, Course, Epoch
from duel.measure.measurement import Columns, Measurement

CHECKPOINT_SECONDS = probes.seconds("DUEL_CHECKPOINT_SECONDS", 300.0)  # between two within an epoch
REPORT_SECONDS = 1.0
IN_FLIGHT = 2  # steps that may be dispatched ahead of the device
MOST_THREADS = 16  # that make batches
# Between two questions to all devices: they end within a minute of being told to.
MOST_UNASKED, UNASKED_SECONDS = 200, 5.0  # steps, seconds
TOLD_TO_END = 128 + signal.SIGTERM
OF_MACHINE = (
    *("training_seconds", "training_joules", "waiting_share", "trained_per_second"),
    *("seconds_to_target", "joules_to_target", "foreign_load", "disturbed_share"),
)


def open_data(m: Measurement) -> Columns:
    """Open the data set, and make the benchmark's inputs and classes its own."""
    recipe = m.recipe
    size, entry = str(m.row.size), m.benchmark
    inputs = entry.sizes[size].inputs
    try:
        dataset = known.load(str(m.row.dataset), known.Place(m.data), getattr(inputs, "length", 0))
        if isinstance(inputs, Images):
            dataset = samples.enlarged(dataset, inputs.channels, inputs.height, inputs.width)
        m.entry = recipes.fitted(entry, size, dataset)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if isinstance(inputs, Tokens) and dataset.classes > inputs.vocabulary and size == "full":
        raise UserError(f"{dataset.source}: more kinds of tokens than {entry.name} has ({inputs.vocabulary})")
    shape = (inputs.height, inputs.width) if isinstance(inputs, Images) else (0, 0)
    m.feed = Feed(
        *(dataset, recipe.augmentation, recipe.batch_size, m.row.seed or 0, *shape), m.world.rank, m.world.size
    )
    if recipe.batch_size % m.world.size or not m.feed.steps:
        raise UserError(
            f"batch size {recipe.batch_size}: it must divide among {m.world.size} devices, and be at most the "
            f"{len(dataset.train.labels)} training samples of {dataset.name}"
        )
    print(f"data: {dataset.source}", flush=True)
    return {"batch_size": recipe.batch_size}


def load(m: Measurement) -> Columns:
    """Put weights and the training's first batches, which the proofs are made with, on the device."""
    whole = dataclasses.replace(m.feed, rank=0, ranks=1)  # of which the twins take their parts
    made = tuple(_batch(whole.batch(step)) for step in range(batches.POOL_BATCHES))
    return preparing.load(m, batches.Pool(made, None, str(m.row.dataset), False, batches.sha256(made)))


def _batch(fed: Fed) -> batches.Batch:
    return batches.Batch(fed.inputs, fed.labels)


def learn(m: Measurement) -> Columns:
    """Train all epochs from the initial weights, or from the last checkpoint on; return what they came to."""
    folder = m.run.folder / "checkpoints" / m.run.curve_file(m.row).stem
    training = _Training(m, Checkpoints(folder, _identity(m)))
    m.work.load(m.initial)
    training.resume()
    return training.run()


def _identity(m: Measurement) -> dict[str, str]:
    """Return what a checkpoint must have in common with the training that goes on from it."""
    row = m.row
    names = ("framework", "framework_version", "benchmark", "size", "precision", "switches", "recipe", "seed")
    found = {name: str(getattr(row, name)) for name in (*names, "weights_sha256", "device_kind", "device_name")}
    found |= {"devices": str(m.world.size), "code": tree.digest()}
    return found | {"data": m.feed.dataset.source}


class _Training:
    """One row's training: where it stands, and what it is made of."""

    def __init__(self, m: Measurement, checkpoints: Checkpoints) -> None:
        self._m, self._checkpoints, self._course = m, checkpoints, Course()
        self._work, self._recipe, self._feed = cast(twin.Trainer, m.work), m.recipe, m.feed
        self._steps = self._recipe.epochs * m.feed.steps
        self._curve = m.run.curve_file(m.row)
        cpus = len(probes.usable_cpus())
        self._threads = max(1, cpus // 2) if m.device.kind == "cpu" else min(cpus, MOST_THREADS)
        self._since = 0  # the step at which this process began to train
        self._looked = 0.0  # when conditions and energy were last read
        self._told = False
        self._asked = 0  # the step at which the ranks agree again whether a checkpoint is due
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, number: int, frame: Any) -> None:
        self._told = True

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = self._checkpoints.newest()
        if found is not None:
            self._course, arrays = found
            self._work.restore(arrays)
            print(f"going on after step {self._course.step} of {self._steps}", flush=True)
        mine = float(self._course.step % 2**20)  # all ranks must: each reads the file by itself
        if self._work.agree(mine) != mine:
            rank = self._m.world.rank
            raise UserError(f"rank {rank} would go on after step {self._course.step}, rank 0 after another: try again")
        place = f"{self._m.row.host}, {self._m.row.device_id}"
        self._course.places += [] if place in self._course.places else [place]

    def run(self) -> Columns:
        course = self._course
        if not course.epochs:
            self._m.say("evaluating the initial weights")
            self._evaluate(0, None)
        self._m.say("training")  # once: what is left is judged by its pace
        self._since = course.step
        while len(course.epochs) <= self._recipe.epochs and not self._reached():
            number = len(course.epochs)  # the first is of the initial weights
            if course.step < number * self._feed.steps:
                self._train(number * self._feed.steps)
                self._save()  # before the evaluation, which changes nothing: if that is cut short, it is made again
            self._evaluate(number, course.losses / course.counted)
            course.losses, course.counted, course.seconds, course.waiting = 0.0, 0, 0.0, 0.0
            course.joules = 0.0 if course.joules is not None else None
        return self._columns()

    def _reached(self) -> bool:
        """Return whether the target was reached; rounding must not end the training on some ranks alone."""
        target = self._m.row.target_accuracy
        if target is None:
            return False
        return self._work.agree(float(any(epoch.top1 >= target for epoch in self._course.epochs[1:]))) > 0

    def _train(self, end: int) -> None:
        """Take the steps up to ``end``, the epoch's."""
        course = self._course
        begun = self._begin()
        saved = reported = time.perf_counter()
        first = course.step
        self._asked = first + IN_FLIGHT + 1
        arriving = self._feed.batches(course.step, end, self._threads)
        handles: list[Any] = []
        ready = self._next(arriving)
        while course.step < end:
            handles.append(self._advance(*ready))
            if course.step < end:
                ready = self._next(arriving)
            if len(handles) > IN_FLIGHT:
                self._count(handles.pop(0))
            now = time.perf_counter()
            if now - reported > REPORT_SECONDS:
                reported = now
                self._report(now - begun[0])
                begun = begun[0], self._metered(begun[1])
            if course.step < end and self._is_due(now - saved, course.step - first):
                self._close(begun, handles)
                self._save()
                begun, saved, first = self._begin(), time.perf_counter(), course.step
        self._close(begun, handles)

    def _begin(self) -> tuple[float, list[float]]:
        """Return when the epoch would have begun if it had been trained without a break, and the energy counters."""
        self._m.watch.begin()
        self._looked = time.perf_counter()
        return self._looked - self._course.seconds, self._m.watch.counters()

    def _close(self, begun: tuple[float, list[float]], handles: list[Any]) -> None:
        """Wait for the steps under way, and add the time and energy since ``_begin`` to the epoch's."""
        while handles:
            self._count(handles.pop(0))
        start, before = begun
        self._course.seconds = time.perf_counter() - start
        self._metered(before)

    def _metered(self, before: list[float]) -> list[float]:
        """Add what was used and disturbed since the last call; return the energy counters now.

        ``before`` has what they were then: those of CPUs wrap within minutes.
        """
        counters = self._m.watch.counters()
        course, used, conditions = self._course, self._m.watch.used(before, counters), self._m.watch.block()
        course.joules = None if used is None or course.joules is None else course.joules + used
        now, load = time.perf_counter(), conditions.foreign_load
        span, self._looked = now - self._looked, now
        course.foreign = None if load is None or course.foreign is None else course.foreign + load * span
        course.disturbed += span if conditions.faults else 0.0
        return counters

    def _is_due(self, since: float, steps: int) -> bool:
        """Return whether a checkpoint is due ``since`` seconds and ``steps`` after the last, the same on all ranks."""
        if self._m.world.size > 1 and self._course.step < self._asked:  # asking waits for all devices
            return False
        due = since > CHECKPOINT_SECONDS or self._told
        pace = max(since, 1e-6) / max(1, steps - IN_FLIGHT)
        answer = self._work.agree(-1.0 if due else float(min(MOST_UNASKED, int(UNASKED_SECONDS / pace))))
        self._asked = self._course.step + max(1, int(answer))
        return answer < 0

    def _next(self, arriving: Iterator[Fed]) -> tuple[Any, bytes]:
        """Wait for the next batch and begin to copy it, beside the step that is under way; return it and its hash."""
        start = time.perf_counter()
        fed = next(arriving)
        self._course.waiting += time.perf_counter() - start
        return self._work.put(_batch(fed), fed.present), fed.digest()

    def _advance(self, placed: Any, digest: bytes) -> Any:
        rate = self._recipe.rate(self._course.step, self._steps, self._feed.steps)
        self._course.step += 1
        self._course.seen = hashlib.sha256(self._course.seen.encode() + digest).hexdigest()
        return self._work.advance(placed, rate)

    def _count(self, handle: Any) -> None:
        """Add a step's loss, which waits for it. Raises Diverged, with a checkpoint before, if it is not finite."""
        loss = self._work.loss(handle)
        if not math.isfinite(loss):
            raise Diverged(
                f"the training loss became {loss} by step {self._course.step}; the last checkpoint before it is kept"
            )
        self._course.losses += loss
        self._course.counted += 1

    def _report(self, seconds: float) -> None:
        course, rate = self._course, self._recipe.batch_size * self._course.counted
        values = {"loss": course.losses / max(1, course.counted), "throughput": rate / seconds}
        last, unit = course.epochs[-1], self._m.row.throughput_unit
        label = f"epoch {len(course.epochs)} of {self._recipe.epochs}, top-1 {100 * last.top1:.2f} % before it"
        self._progress(label, **values, unit=unit)

    def _progress(self, label: str, **values: Any) -> None:
        step = self._course.step
        done = {"done": step - self._since, "needed": self._steps - self._since}
        self._m.emit("learning", row=self._m.number, step=step, **values, **done, label=label)

    def _evaluate(self, number: int, loss: float | None) -> None:
        """Evaluate all held-out samples, and record the epoch."""
        start = reported = time.perf_counter()
        total, right, near, labels, samples = 0.0, 0, 0, 0, 0
        for fed in self._feed.held_out(self._threads):
            one, first, five = self._work.evaluate(_batch(fed))
            total, right, near, labels = total + one, right + first, near + five, labels + fed.present
            samples += len(fed.labels)
            if time.perf_counter() - reported > REPORT_SECONDS:  # silence would be taken for a process that hangs
                reported = time.perf_counter()
                self._progress(f"{samples} of {len(self._feed.dataset.held_out.labels)} held-out samples evaluated")
            self._end_if_told()
        course, classes = self._course, self._feed.dataset.classes
        if not math.isfinite(total):
            raise Diverged(f"the held-out loss became {total} after epoch {number}; the last checkpoint is kept")
        epoch = Epoch(
            *(number, course.step, loss, total / labels, right / labels, near / labels if classes > 5 else None),
            *(course.seconds, course.waiting, time.perf_counter() - start, course.joules if number else None),
            course.seen,
        )
        course.epochs.append(epoch)
        if self._m.world.rank == 0:
            self._curve.parent.mkdir(exist_ok=True)
            epochs = [dataclasses.asdict(each) for each in course.epochs]
            write_atomically(self._curve, json.dumps(epochs, indent=1) + "\n")
        self._m.emit("epoch", row=self._m.number, **dataclasses.asdict(epoch))

    def _save(self) -> None:
        """Write a checkpoint; if the process was told to end, that is its end."""
        arrays = self._work.snapshot()  # on all ranks: it waits for the device
        if self._m.world.rank == 0:
            self._checkpoints.save(self._course, arrays)
        self._end_if_told()

    def _end_if_told(self) -> None:
        """End the process if it was told to. Called where nothing has been trained since the last checkpoint."""
        if self._told:
            begun = f"checkpoint after step {self._course.step} of {self._steps}"
            print(f"told to end: {begun if self._course.step else 'nothing has been trained yet'}", flush=True)
            os._exit(TOLD_TO_END)  # the row has no end: its run has, and may go on

    def _columns(self) -> Columns:
        first, *epochs = self._course.epochs
        last, target = epochs[-1], self._m.row.target_accuracy
        seconds = sum(epoch.seconds for epoch in epochs)
        waiting = sum(epoch.waiting for epoch in epochs)
        joules = [epoch.joules for epoch in epochs]
        known_joules = None if None in joules else sum(cast(list[float], joules))
        samples, disturbed = self._recipe.batch_size * self._course.step, self._course.disturbed / seconds
        columns: Columns = {
            "trained_epochs": last.number,
            "top1_before": first.top1,
            "held_out_loss_before": first.held_out_loss,
            "top1": last.top1,
            "top5": last.top5,
            "held_out_loss": last.held_out_loss,
            "training_loss": last.loss,
            "training_seconds": seconds,
            "training_joules": known_joules,
            "waiting_share": waiting / seconds,
            "foreign_load": None if self._course.foreign is None else self._course.foreign / seconds,
            "disturbed_share": disturbed if disturbed or not self._m.watch.untold else None,
            "trained_per_second": samples / seconds,
            # Sides that end at a target may end after other numbers of epochs.
            "seen_sha256": self._course.seen if target is None else " ".join(epoch.seen[:12] for epoch in epochs),
        }
        missing = {"top5": "five classes or fewer", "training_joules": self._m.watch.no_counter}
        missing["foreign_load"] = "not reported by the kernel (/proc/stat)"
        missing["disturbed_share"] = f"not reported: {self._m.watch.untold}"
        if target is None:
            missing |= dict.fromkeys(("seconds_to_target", "joules_to_target"), "no target was given")
        elif last.top1 < target:
            missing |= dict.fromkeys(("seconds_to_target", "joules_to_target"), f"top-1 ended at {last.top1:.4f}")
        else:
            columns |= {"seconds_to_target": seconds, "joules_to_target": known_joules}
            missing["joules_to_target"] = self._m.watch.no_counter
        if len(self._course.places) > 1:
            moved = [name for name in columns if name in OF_MACHINE]
            columns |= dict.fromkeys(moved)
            missing |= dict.fromkeys(moved, "trained on several machines or devices")
        return columns | {"missing": missing}
