"""results/tuned/<device>.json: the switches that 'main.py tune' found to be the fastest; ``--mode tuned`` sets them.

A choice is for one framework, benchmark, size, precision, module, product, number of samples and microbatch on a
device: use cases with many devices take what was found on one.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from duel import modes
from duel.catalogue import USE_CASES
from duel.comparability import disturbances, too_few_blocks
from duel.files import FORMAT, Damaged, locked, read_record, write_atomically
from duel.record import Row
from duel.states import FINISHED

POINT = ("framework", "benchmark", "size", "precision", "module", "product", "samples", "microbatch")


@dataclass(frozen=True)
class Trial:
    """A row of a search: a mode, and its throughput, None if it did not run or does not count."""

    mode: str
    throughput: float | None


def trial(row: Row, precision: str) -> Trial:
    """Return what ``row`` says of its mode in ``precision``."""
    return Trial(str(row.mode), row.throughput if row.status == FINISHED and not discounted(row, precision) else None)


def discounted(row: Row, precision: str) -> str:
    """Return why a row that finished does not count as a trial in ``precision``; empty if it does."""
    if found := disturbances(row):
        return "disturbed: " + ", ".join(f"{field} {much}" for field, much in found)
    if few := too_few_blocks(row):
        return few
    if row.rung == modes.HANDICAPPED:
        return "ran without XLA's autotuner only, which crashed"
    return f"ran in {row.precision} only, after a crash of XLA's autotuner" if row.precision != precision else ""


@dataclass(frozen=True)
class Choice:
    """What a search chose for one point of one side, and the evidence for it: all its trials, in order."""

    framework: str
    benchmark: str
    size: str
    precision: str
    module: str
    product: str | None
    samples: int  # per step, on each device
    mode: str
    trials: list[Trial]
    seconds: float  # that the trials took
    framework_version: str
    code_sha256: str
    cpus: int | None
    run_id: str
    microbatch: int | None = None  # as asked for; None: the device's own

    @property
    def point(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in POINT)

    @property
    def count(self) -> int:
        """The number of modes that were tried."""
        return len({trial.mode for trial in self.trials})


@dataclass(frozen=True)
class Tuned:
    """The file with all choices for a device."""

    device_name: str
    choices: list[Choice] = field(default_factory=list)


def path(results: Path, device_name: str) -> Path:
    return results / "tuned" / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read(file: Path) -> Tuned | None:
    """Return the choices in ``file``, None if it does not exist. Raises Damaged if it is not one of ours."""
    try:
        found = read_record(file, Tuned)
    except FileNotFoundError:
        return None
    for choice in found.choices:
        try:
            modes.check(choice.mode)
        except ValueError as error:
            raise Damaged(f"{file.name} is damaged: {error}") from error
    return found


def keep(results: Path, device_name: str, choice: Choice) -> None:
    """Store ``choice`` in the device's file, replacing the one for the same point. Raises Damaged like ``read``."""
    file = path(results, device_name)
    file.parent.mkdir(exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock"), wait=True):
        before = read(file) or Tuned(device_name)
        others = [other for other in before.choices if other.point != choice.point]
        choices = sorted([*others, choice], key=lambda one: [str(part) for part in one.point])
        stored = {"format": FORMAT, "device_name": device_name, "choices": list(map(asdict, choices))}
        write_atomically(file, json.dumps(stored, indent=1) + "\n")


def finalists(trials: Sequence[Trial], most: int) -> list[str]:
    """Return the modes to be measured again, ``default`` alone if nothing may be faster.

    These are the fastest by their first trials, up to ``most`` that are within a fifth of the fastest, as processes of
    one mode can differ by that, and ``default``.
    """
    first: dict[str, float] = {}
    for trial in trials:
        first.setdefault(trial.mode, trial.throughput or 0.0)
    top = max(first.values(), default=0.0)
    near = [mode for mode in first if mode != modes.DEFAULT and first[mode] >= 0.8 * top > 0]
    return [*sorted(near, key=first.__getitem__, reverse=True)[:most], modes.DEFAULT]


def chosen(trials: Sequence[Trial]) -> str:
    """Return the finalist that was the fastest when it was measured again; ``default`` if that or nothing else ran.

    By the mean of logarithms, from which a steady drift cancels in the order A B C C B A, among those that were
    measured to the end.
    """
    later = again(trials)
    if not all(later.get(modes.DEFAULT, [0.0])):
        return modes.DEFAULT
    most = max(map(len, later.values()))
    ran = {mode: sum(map(math.log, found)) for mode, found in later.items() if len(found) == most and all(found)}
    return max(ran, key=lambda mode: (ran[mode], mode == modes.DEFAULT), default=modes.DEFAULT)


def contenders(trials: Sequence[Trial]) -> list[str]:
    """Return the finalists that may still be the fastest: the chosen one, and those whose results overlap with its."""
    later, best = again(trials), chosen(trials)
    reached = later.get(best, [0.0])
    near = [mode for mode, found in later.items() if len(found) == len(reached) and max(found) >= min(reached)]
    return [mode for mode in near if all(later[mode])] if all(reached) else [best]


def again(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """Return the throughputs of the finalists but for their first trials, which made them finalists.

    0 is one that did not run.
    """
    later: dict[str, list[float]] = {}
    for place, trial in enumerate(trials):
        if trial.mode in [other.mode for other in trials[:place]]:
            later.setdefault(trial.mode, []).append(trial.throughput or 0.0)
    return later


def found_for(row: Row, results: Path, microbatches: Sequence[int | None] = (None,)) -> tuple[str | None, str]:
    """Return the mode that ``tuned`` stands for in ``row``, None without a search, and a text on how it was found.

    ``microbatches`` are those under which the search may be stored, the first found counts: what was asked for, which
    the row no longer tells, and None if that is the device's own. A CPU with its generation in its name has a file of
    its own, then that of the plain name, from before names had it. Raises Damaged if a file is not one of ours.
    """
    device = str(row.device_name)
    samples = (row.batch_size or 0) // (row.device_count or 1)
    module = USE_CASES[row.use_case or 0].module
    point = (row.framework, row.benchmark, row.size, row.precision, module, row.product, samples)
    why = "no search on this device"
    for name in dict.fromkeys((device, device.partition(" (family ")[0])):
        file = path(results, name)
        stored, where = read(file), f"results/tuned/{file.name}"
        if stored is None:
            continue
        if stored.device_name != name:
            why = f"{where} is of {stored.device_name}"
            continue
        choices = {one.point: one for one in stored.choices}
        choice = next((choices[*point, one] for one in microbatches if (*point, one) in choices), None)
        if choice is not None:
            return choice.mode, _evidence(choice, row, name)
        why = f"not searched in {where}"
    return None, f"{why}, the set for a {row.device_kind}"


def _evidence(choice: Choice, row: Row, device: str) -> str:
    """Return where ``choice`` is from, and in what it differs from ``row``."""
    notes = [f"the best of {choice.count} by {choice.run_id}"]
    if device != row.device_name:
        notes.append(f"of {device}, this is {row.device_name}")
    if choice.framework_version != row.framework_version:
        notes.append(f"of {choice.framework} {choice.framework_version}, this is {row.framework_version}")
    if choice.code_sha256 != row.code_sha256:
        notes.append("of other code")
    if choice.cpus != row.cpus:
        notes.append(f"of {choice.cpus} CPUs, this has {row.cpus}")
    return "; ".join(notes)
