"""The measuring process: one fresh process, one framework, one row.

A row is a list of named stages, each of which returns columns; the module of its use case decides which.
"""

import ctypes
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from duel import variables
from duel.catalogue import FIT
from duel.errors import Disproved, Diverged, UserError, kind_of
from duel.files import utc
from duel.measure import growing, learning, preparing, proving, timed
from duel.measure.device import ALONE, World
from duel.measure.measurement import Columns, Emit, Measurement, Skip
from duel.measure.sinks import MetricsWriter
from duel.record import Row
from duel.results import Run
from duel.states import FAILED, FINISHED, SKIPPED

Stage = tuple[str, Callable[[Measurement], Columns]]
_DEVICE: tuple[Stage, ...] = (("finding the device", preparing.find_device), ("", preparing.build))
_START: tuple[Stage, ...] = (
    ("making weights and data", preparing.load),
    ("", preparing.check_precision),
    ("compiling", preparing.compile_step),
    ("first step", preparing.first_step),
    ("proving the program from known weights", proving.prove_before),
)
_END: tuple[Stage, ...] = (
    ("", timed.memory),
    ("proving clock and program", proving.prove_after),
    ("", timed.all_reduce),
    ("", proving.check_switches),
)
_REST: tuple[Stage, ...] = (("measuring ceilings", timed.utilise), ("", timed.start_again), ("", proving.certify))
_WARM: Stage = ("warming up", timed.warm_up)
# By the module of a use case, which a validation does not have; "learning" is a training to accuracy, "fitting" a try
# at a batch size.
STAGES: dict[str, tuple[Stage, ...]] = {
    "": (*_DEVICE, ("", proving.prove)),
    "fitting": (
        *_DEVICE,
        ("making weights and batches", growing.load),
        *_START[2:4],
        ("", timed.memory),
    ),
    "learning": (
        _DEVICE[0],
        ("opening the data set", learning.open_data),
        _DEVICE[1],
        ("making weights and data", learning.load),
        *_START[1:],
        ("", proving.prove_opening),
        ("training the opening steps", timed.train),
        ("", proving.prove_after),
        ("", proving.check_switches),
        ("", learning.learn),
        ("", timed.memory),
        ("", proving.certify),
    ),
    "training": (
        *_DEVICE,
        *_START,
        ("", proving.prove_opening),
        ("training the opening steps", timed.train),
        ("", proving.repeat),
        _WARM,
        ("measuring", timed.time_training),
        *_END,
        ("", timed.time_passes),
        *_REST,
    ),
    "per_sample_gradients": (
        *_DEVICE,
        *_START,
        ("", proving.repeat),
        _WARM,
        ("measuring", timed.time_blocks),
        *_END,
        *_REST,
    ),
    "inference": (
        *_DEVICE,
        *_START,
        ("", proving.repeat),
        _WARM,
        ("measuring latency", timed.time_calls),
        ("measuring", timed.time_blocks),
        *_END,
        *_REST,
    ),
}


class FolderGoneError(Exception):
    """The folder of a run in progress was moved or removed: nothing more of it can be recorded.

    The ``error`` that it ended with may come of that, or be one that is now in no log.
    """

    def __init__(self, run: Run, error: Exception) -> None:
        what = f"{run.folder} is gone: it was moved or removed during the run"
        super().__init__(f"{what}, which ended by {describe(error)}")


def die_with_parent() -> None:
    """Die with the supervisor: if killed, it must not leave a process behind that uses the device (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def measure(run: Run, number: int, data: Path, device_kind: str | None, version: str, world: World = ALONE) -> int:
    """Measure row ``number`` as one of ``world``; return the exit code. Rank 0 writes its file at its true end."""
    die_with_parent()
    row = run.read_row(number).replace(framework_version=version, python_version=sys.version.split()[0])
    row = row.replace(variables=variables.record(os.environ))  # before the framework is loaded, which adds to them
    emit: Emit = MetricsWriter(run.metrics) if world.rank == 0 else lambda event, **fields: None
    measured = Measurement(run, row, data, device_kind, emit, world)
    try:
        row = _through_stages(measured)
        if world.size > 1:
            importlib.import_module("devices").leave()
    except Skip as skip:
        row = measured.row.with_cell().replace(status=SKIPPED, cause=str(skip))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        row = run.read_row(number).replace(status=FAILED, cause=f"input: {_headline(error)}", why="input")
    except Disproved as error:
        print(f"error: {error}", file=sys.stderr)
        row = measured.row.replace(status=FAILED, cause=f"disproved: {_headline(error)}", why="disproved")
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        row = measured.row.replace(status=FAILED, cause=str(error), why="diverged")
    except Exception as error:  # whatever the framework raises becomes a row; its traceback is in the log
        if not run.folder.is_dir():  # nor is there a log: the error's text goes with this one's
            raise FolderGoneError(run, error) from error
        traceback.print_exc()
        row = run.read_row(number).replace(status=FAILED, cause=describe(error), why=kind_of(repr(error)))
        row = row.replace(batch_size=measured.row.batch_size)  # which did not fit, if that is the cause
    if world.rank == 0:
        run.write_row(row.replace(ended=utc()))
    elif row.cause:
        print(row.cause, flush=True)  # the last line, which rank 0 quotes
    return 0 if row.status in (FINISHED, SKIPPED) else 1


def _through_stages(measured: Measurement) -> Row:
    """Run all stages; return the finished row."""
    for name, stage in STAGES[_kind(measured)]:
        measured.say(name)
        columns = stage(measured)
        measured.row = measured.row.replace(**columns)
    return measured.row.replace(status=FINISHED)


def _kind(measured: Measurement) -> str:
    """Return which of ``STAGES`` a row goes through."""
    if measured.row.preset == FIT:
        return "fitting"
    return "learning" if measured.row.recipe else measured.use_case.module


def _headline(error: Exception) -> str:
    """Return its text in one line; a long list is in the log."""
    first, *others = [line.strip() for line in str(error).splitlines()]
    more = f"; and {len(others) - 1} more, all in log.txt" if len(others) > 1 else ""
    return " ".join([first, *others[:1]]) + more


def describe(error: Exception) -> str:
    """Return one line of it, headed 'out of memory' if that is its kind."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    text = re.sub(r"([^:]{3,80}: )\1+", r"\1", text)[:300]  # XLA adds the prefix again for each thunk that passes it on
    return f"out of memory: {text}" if kind_of(repr(error)) == "out of memory" else text
