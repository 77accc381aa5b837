"""The search for the fastest switches: which row comes next, and what is chosen at the end.

The sides take turns and have the same number of trials at most. The first is ``default``, the second the set that
``duel.modes`` has for the kind of device; each later one changes a switch of the fastest mode so far, along with what
that needs or excludes. Once all of these were tried, it is the next fastest whose switches change, as one may pay only
without another, and so on until every mode or all trials are used. The finalists, which are the fastest modes and
``default``, are then measured twice more, in the order A B C C B A: the fastest of several trials is also the luckiest.
The best of these, those whose results overlap with its, and ``default`` are measured so again, up to three times in
all, as long as there are several that overlap and the repeats of this side have taken less than ten minutes; where
trials take so long that a round of all would take more, there are fewer finalists, though two besides ``default`` at
least. A mode whose evidence is not that of ``default`` on the same side has failed.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from duel import modes, tuned
from duel.catalogue import USE_CASES
from duel.errors import UserError
from duel.evidence import Evidence, disagreements
from duel.measure import gpus
from duel.record import Row
from duel.results import Run
from duel.states import FAILED
from duel.switches import OFF, ON, applicable
from duel.tuned import Choice, Trial

ROUNDS = 3  # of A B C C B A at most: with one, single processes decide where modes are close
FINALISTS = 5  # besides default at most: one trial of each tells little, as processes of a mode may differ by a quarter
FEWEST = 2  # besides default, however long a trial takes: one lucky trial must not be all that decides between modes
REPEAT_SECONDS = 600  # for a side's rounds at a point, though there is always one


def rows(run: Run, planned: Sequence[Row], most: int, results: Path) -> Iterator[Row]:
    """Yield the rows of a search, each to be measured before the next is drawn; ``planned`` has those in ``default``.

    What is found at a point is saved in ``results`` as soon as that has all its rows.
    """
    points: dict[tuple[object, ...], list[_Side]] = {}
    for row in planned:
        points.setdefault((row.batch_size, row.product), []).append(_Side(run, row))
    for sides in points.values():
        for number in range(most):
            for side in sides if number % 2 == 0 else sides[::-1]:
                if mode := side.following():
                    yield from side.measured(mode)
        for side in sides:
            near, before = side.finalists(), side.seconds
            for _ in range(ROUNDS):
                if len(near) < 2 or side.seconds - before > REPEAT_SECONDS:
                    break
                finalists = dict.fromkeys((*near, modes.DEFAULT))  # what is chosen must not be slower than default
                for mode in (*finalists, *reversed(finalists)):
                    yield from side.measured(mode)
                near = tuned.contenders(side.trials)
            side.keep(results)


class _Side:
    """The search of one framework at one point."""

    def __init__(self, run: Run, planned: Row) -> None:
        self._run, self._planned = run, planned
        self._ended: list[Row] = []
        self.seconds = 0.0  # that the trials have taken

    @property
    def trials(self) -> list[Trial]:
        return [tuned.trial(row, self._precision) for row in self._ended]

    @property
    def _precision(self) -> str:
        """What was asked for: after crashes of XLA's autotuner, a row may have another."""
        return str(self._planned.precision)

    def following(self) -> str | None:
        """Return the mode of the next trial; None if nothing is left to try or the device is unknown."""
        if not self._ended:
            return modes.DEFAULT
        known = next((row for row in self._ended if row.device_kind), None)
        return following(self.trials, known.replace(precision=self._precision)) if known else None

    def finalists(self) -> list[str]:
        """Return the modes to be measured again, ``default`` among them, as many as a round has time for."""
        each = max(self.seconds / max(len(self._ended), 1), 1.0)
        besides_default = int(REPEAT_SECONDS / (2 * each)) - 1
        return tuned.finalists(self.trials, min(max(besides_default, FEWEST), FINALISTS))

    def measured(self, mode: str) -> Iterator[Row]:
        """Yield the row of a trial, which counts once it has been measured."""
        number = len(self._run.rows()) if self._ended else self._planned.row
        since = time.monotonic()
        yield self._planned.replace(row=number, point=number, mode=mode)
        self.seconds += time.monotonic() - since
        self._ended.append(self._compared([row for row in self._run.rows() if row.point == number][-1]))

    def _compared(self, row: Row) -> Row:
        """Return ``row``; recorded as failed if it did not compute what ``default`` did."""
        default = next((one for one in self._ended if one.mode == modes.DEFAULT and one.evidence_sha256), None)
        if default is None or row.mode == modes.DEFAULT or row.evidence_sha256 is None:
            return row
        if default.precision != row.precision:  # after crashes of XLA's autotuner: no trial anyway
            return row
        try:
            found = disagreements(self._evidence(default), self._evidence(row))
        except (OSError, ValueError) as error:  # damaged since it was written
            found = [str(error)]
        if found:
            cause = f"disproved: other results than in {modes.DEFAULT}: {'; '.join(found)}"
            row = row.replace(status=FAILED, cause=cause, why="disproved")
            self._run.write_row(row)
        return row

    def _evidence(self, row: Row) -> list[Evidence]:
        return [Evidence.from_bytes(file.read_bytes()) for file in self._run.evidence_files(row.row or 0)]

    def keep(self, results: Path) -> None:
        """Save what was found, if anything ran."""
        row = next((row for row, trial in zip(self._ended, self.trials, strict=True) if trial.throughput), None)
        if row is None:
            return
        choice = Choice(
            framework=str(row.framework),
            benchmark=str(row.benchmark),
            size=str(row.size),
            precision=self._precision,
            module=USE_CASES[row.use_case or 0].module,
            product=row.product,
            samples=row.batch_size or 0,
            mode=tuned.chosen(self.trials),
            trials=self.trials,
            seconds=round(self.seconds, 1),
            framework_version=str(row.framework_version),
            code_sha256=str(row.code_sha256),
            cpus=row.cpus,
            run_id=self._run.id,
            microbatch=self._planned.microbatch,
        )
        tuned.keep(results, str(row.device_name), choice)


def following(trials: Sequence[Trial], row: Row) -> str | None:
    """Return the mode to try after ``trials``, for the device and point of ``row``; None if none is left."""
    tried = {trial.mode for trial in trials}
    ran = {trial.mode: trial.throughput for trial in trials if trial.throughput} or {modes.DEFAULT: 0.0}
    near = (mode for fast in sorted(ran, key=ran.__getitem__, reverse=True) for mode in neighbours(fast, row))
    return next((mode for mode in (_canonical(modes.TUNED, row), *near) if mode not in tried), None)


def neighbours(mode: str, row: Row) -> list[str]:
    """Return the modes that differ from ``mode`` in one switch, and in what that needs or excludes."""
    switches = applicable(str(row.framework), str(row.benchmark), row.use_case or 0, row.device_kind)
    values, found = _settings(mode, row), []
    for switch in switches.values():
        now = values[switch.name] if values[switch.name] in switch.tried else switch.values[0]
        for value in (one for one in switch.tried if one != now):
            turned = values | {switch.name: value}
            for other in switches.values():
                if value == ON and other.name == switch.needs:
                    turned[other.name] = ON
                if value == ON and switch.name == other.excludes:
                    turned[other.name] = OFF
                if value == ON and other.name == switch.excludes:
                    turned[other.name] = OFF
                if value == OFF and switch.name == other.needs:
                    turned[other.name] = OFF
            with contextlib.suppress(UserError):  # another switch needs or excludes one that this changes
                found.append(_canonical(_spelled(turned, row), row))
    return found


def _settings(mode: str, row: Row) -> dict[str, str]:
    here = (str(row.framework), str(row.benchmark), row.use_case or 0, str(row.precision), str(row.device_kind))
    return modes.settings(mode, *here, cudnn=not gpus.by_amd(str(row.device_name)))


def _spelled(values: dict[str, str], row: Row) -> str:
    default = _settings(modes.DEFAULT, row)
    return modes.spelled(modes.DEFAULT, {name: value for name, value in values.items() if value != default[name]})


def _canonical(mode: str, row: Row) -> str:
    """Return ``mode`` spelled from ``default`` on, in switch order. Raises UserError if it contradicts itself."""
    return _spelled(_settings(mode, row), row)
