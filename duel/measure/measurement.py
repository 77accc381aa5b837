"""A row on its way through its stages."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from duel import recipes
from duel.catalogue import BENCHMARKS, PRESETS, USE_CASES, Benchmark, Preset, UseCase
from duel.data.feed import Feed
from duel.measure import batches, evidence, parameters, twin
from duel.measure.device import Device, Setting, World
from duel.measure.watch import Watch
from duel.record import Row
from duel.results import Run

Emit = Callable[..., None]
TRAINER = ("trainer", "Trainer")  # the module and class of a training to accuracy
Columns = dict[str, Any]


class Skip(Exception):
    """The row cannot be measured here; the message says why."""


@dataclass
class Measurement:
    """A row on its way, and what its stages leave to later ones."""

    run: Run
    row: Row
    data: Path
    device_kind: str | None
    emit: Emit
    world: World
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of parameters and running statistics
    proofs: dict[str, tuple[str, str]] = field(default_factory=dict)  # by switch: the value found, and the evidence
    proved: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)  # each with the reason
    proof_seconds: float = 0.0
    microbatches: tuple[int | None, ...] = (None,)  # as asked for, and None if it is the device's own
    page_faults: float | None = None  # per step, once blocks are timed
    next_step: int = 0
    steps_per_block: int = 1
    entry: Benchmark | None = None  # as a data set made it
    # The fields below exist from the stage named next to them.
    device: Device = field(init=False)  # find_device
    watch: Watch = field(init=False)
    feed: Feed = field(init=False)  # open_data, in a training to accuracy
    setting: Setting = field(init=False)  # load
    initial: parameters.Arrays = field(init=False)
    pool: batches.Pool = field(init=False)
    work: twin.Work = field(init=False)
    recorder: evidence.Recorder = field(init=False)  # prove_before

    @property
    def benchmark(self) -> Benchmark:
        return self.entry or BENCHMARKS[str(self.row.benchmark)]

    @property
    def preset(self) -> Preset:
        return PRESETS[str(self.row.preset)]

    @property
    def use_case(self) -> UseCase:
        return USE_CASES[self.row.use_case or 0]

    @property
    def maker(self) -> Any:
        """The class of ``work``."""
        module, work = TRAINER if self.row.recipe else (self.use_case.module, self.use_case.work)
        return getattr(importlib.import_module(module), work)

    @property
    def recipe(self) -> recipes.Recipe:
        """The recipe of a training to accuracy."""
        row = self.row
        return recipes.recipe(str(row.benchmark), str(row.dataset), row.epochs, row.batch_size)

    @property
    def number(self) -> int:
        return self.row.row or 0

    @property
    def training(self) -> twin.Training:
        """``work``, as the stages of training see it."""
        return cast(twin.Training, self.work)

    @property
    def producing(self) -> twin.PerSampleGradients | twin.Inference:
        """``work``, as stages whose steps give results see it."""
        return cast(twin.PerSampleGradients | twin.Inference, self.work)

    def say(self, phase: str) -> None:
        """Report what comes next, and save what is known so far: it must survive a kill."""
        if phase and not self.world.rank:
            print(phase, flush=True)
            self.emit("phase", row=self.number, phase=phase)
            self.run.write_row(self.row)
