"""The profile of a row: a trace of a few steps of the same program, in a process of its own after the row's."""

import dataclasses
import importlib
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duel import evidence, profile
from duel.catalogue import PRESETS, TRIAL
from duel.measure import preparing, proving, timing
from duel.measure.device import ALONE
from duel.measure.measurement import Columns, Measurement
from duel.measure.row import die_with_parent
from duel.results import Run

SECONDS, FEWEST, MOST = 1.0, 2, 20  # of traced steps


class Profiling(Measurement):
    """A row that was measured before: nothing of it is recorded again."""

    def say(self, phase: str) -> None:
        if phase:
            print(f"profile: {phase}", flush=True)

    @property
    def maker(self) -> Any:
        return importlib.import_module("profiling").named(super().maker)


def measure(run: Run, number: int, data: Path, device_kind: str | None, traced: bool) -> int:
    """Write the profile of row ``number``, or why there is none; return the exit code.

    If it is not to be ``traced``, only run its program: a tool watches this process.
    """
    die_with_parent()
    row = run.read_row(number)
    found = profile.Profile(run.id, number, str(row.framework))
    try:
        m = Profiling(run, row, data, device_kind, lambda event, **fields: None, ALONE)
        _run(m, found)
        if traced:
            _trace(m, found)
    except Exception as error:  # whatever program or tracer raises: the row was measured, and stays as it is
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        found = profile.Profile(run.id, number, str(row.framework), why=f"{type(error).__name__}: {first}")
    if traced:  # otherwise the row has its profile, whatever happened under the tool
        profile.write(run.folder, found)
    return 1 if found.why else 0


def _run(m: Profiling, found: profile.Profile) -> None:
    """Run the row's program, which is proved to be that, and measure its step as a search does."""
    _through(m, preparing.find_device, preparing.build, preparing.load, preparing.compile_step, preparing.first_step)
    programs = importlib.import_module("profiling").programs(m.work)
    found.programs = sorted(programs, key=lambda one: -sum(one.seconds.values()))[: profile.COSTLIEST]
    _through(m, proving.prove_before)
    found.proof = _proof(m)
    preset = PRESETS[TRIAL]
    m.next_step, steps = timing.warm_up(m.work, preset, m.next_step)
    blocks = [block for block, _ in timing.time_blocks(m.work, preset, m.next_step, steps)]
    found.step_seconds = statistics.median(block.seconds / block.steps for block in blocks)
    m.next_step = blocks[-1].first_step + blocks[-1].steps


def _through(m: Profiling, *stages: Callable[[Measurement], Columns]) -> None:
    for stage in stages:
        m.say(stage.__name__.replace("_", " "))
        m.row = m.row.replace(**stage(m))


def _trace(m: Profiling, found: profile.Profile) -> None:
    """Trace some steps and divide them; then account for memory."""
    count = min(max(round(SECONDS / found.step_seconds), FEWEST), MOST)
    m.say(f"tracing {count} steps")
    profiling = importlib.import_module("profiling")
    folder = profile.path(m.run.folder, m.number).with_suffix("")
    profile.divide(profiling.traced(m.work, m.next_step, count, folder), found)
    profiling.account(m.work, m.next_step, found)


def _proof(m: Measurement) -> str:
    """Return how this process's evidence from known weights compares with the row's.

    Raises ValueError if it does not agree, or the switches are others: other kernels may compute the same.
    """
    recorded = m.run.read_row(m.number).switches
    if m.row.switches != recorded:  # a search may have ended in the meantime, and tuned stand for what that found
        raise ValueError(f"not the row's program: it had the switches {recorded}, this one {m.row.switches}")
    measured = evidence.Evidence.from_bytes(m.run.evidence_file(m.number, 0).read_bytes())
    found = evidence.disagreements_of(_before(measured), _before(m.recorder.evidence), ("before",))
    if found:
        raise ValueError(f"not the row's program: {'; '.join(found)}")
    same = all((measured.passes["before"][n] == m.recorder.evidence.passes["before"][n]).all() for n in measured.shapes)
    return "the same bits from known weights" if same else "the same from known weights, to rounding"


def _before(one: evidence.Evidence) -> evidence.Evidence:
    passes = {name: found for name, found in one.passes.items() if name.startswith("before")}
    return dataclasses.replace(one, passes=passes)
