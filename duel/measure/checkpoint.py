"""Checkpoints of a training: everything that its next step depends on, replaced atomically, the newest two kept.

They are numpy's own archives of plain arrays, one form for both sides. Each framework has a format of its own (Orbax,
torch.save), which would be two more to test for a cut in the middle; the arrays are the same, the zip's checksums show
damage, and reading and writing them is bound by the disk.
"""

import dataclasses
import errno
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from duel.errors import UserError
from duel.files import replacing

KEPT = 2
COURSE = "course"  # the archive's entry beside the arrays
_NAME = re.compile(r"step-([0-9]{9})\.npz")
# What reading changed bytes raises: a changed directory of the archive may name a cipher or a method.
DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: mean training loss, and the held-out samples' mean loss and accuracies, shares of 1.

    ``seconds`` and ``joules`` are of its training alone, ``waiting`` the seconds of these spent waiting for data.
    ``evaluation_seconds`` come on top.
    """

    number: int  # from 1; 0 is the evaluation of the initial weights
    step: int  # steps taken by its end
    loss: float | None
    held_out_loss: float
    top1: float
    top5: float | None
    seconds: float
    waiting: float
    evaluation_seconds: float
    joules: float | None = None
    seen: str = ""  # hash of all batches by its end


@dataclass
class Course:
    """Where a training stands. The sums are of the epoch that is under way."""

    step: int = 0  # steps taken
    seen: str = ""  # hash of all batches so far
    epochs: list[Epoch] = field(default_factory=list)
    losses: float = 0.0
    counted: int = 0  # steps in ``losses``
    seconds: float = 0.0
    waiting: float = 0.0
    joules: float | None = 0.0  # None once it could not be measured
    foreign: float | None = 0.0  # of all epochs: others' CPU seconds by usable CPU; None once they are not known
    disturbed: float = 0.0  # of all epochs: seconds in which conditions had a fault
    places: list[str] = field(default_factory=list)  # machines and devices that it was trained on


class Checkpoints:
    """The checkpoints of one row's training in ``folder``; ``identity`` is what they must have in common with it."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self._folder, self._identity = folder, dict(identity)

    def save(self, course: Course, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a checkpoint, and remove all but it and the newest before it, ``KEPT`` in all.

        Later steps were passed over: their files are damaged. Raises UserError if it cannot be written.
        """
        stored = {"identity": self._identity, "course": dataclasses.asdict(course), "arrays": sorted(arrays)}
        entries: dict[str, Any] = {COURSE: np.frombuffer(json.dumps(stored).encode(), np.uint8), **arrays}
        path = self._folder / f"step-{course.step:09d}.npz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(".step-*.npz.*"):  # by a process that was killed
                left.unlink(missing_ok=True)
            with replacing(path) as file:
                np.savez(file, **entries)
        except OSError as error:
            raise UserError(
                f"{path}: this checkpoint cannot be written ({error.strerror or error}); those before it are kept"
            ) from error
        there = self._files()
        passed_over = [old for old in there if old.name > path.name]
        for old in passed_over + there[len(passed_over) + KEPT :]:
            old.unlink()

    def newest(self) -> tuple[Course, dict[str, npt.NDArray[Any]]] | None:
        """Return the newest checkpoint that is whole, or None without any.

        One that is damaged is said and passed over. Raises UserError if it cannot be read, or is of another training.
        """
        there = self._files()
        for path in there:
            try:
                with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}  # which checks each one's checksum
                stored = json.loads(arrays.pop(COURSE).tobytes())
                course = msgspec.convert(stored["course"], Course)
                if sorted(arrays) != stored["arrays"]:  # one changed bit of a ZIP file's directory may hide entries
                    raise ValueError(f"{len(arrays)} of {len(stored['arrays'])} arrays are there")
            except MemoryError:  # damaged or not cannot be told, and what is passed over is removed later
                raise UserError(f"{path}: this checkpoint cannot be read: there is no memory for it") from None
            except DAMAGE as error:
                if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a damaged offset
                    raise UserError(f"{path}: this checkpoint cannot be read ({error.strerror})") from error
                text = next(iter(str(error).splitlines()), "")
                print(f"checkpoint {path.name} is damaged ({text}): passed over", flush=True)
                continue
            self._check(path, stored["identity"])
            return course, arrays
        if there:
            print(f"no checkpoint in {self._folder} is whole: the training starts over", flush=True)
        return None

    def _check(self, path: Path, identity: Mapping[str, str]) -> None:
        names = [*self._identity, *(name for name in identity if name not in self._identity)]
        other = [
            f"{name} ({identity.get(name, 'none')}, here {self._identity.get(name, 'none')})"
            for name in names
            if identity.get(name) != self._identity.get(name)
        ]
        if other:
            raise UserError(f"{path}: a checkpoint of another training: {'; '.join(other)}; remove it to start over")

    def _files(self) -> list[Path]:
        """Return all checkpoints, the newest first."""
        there = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((path for path in there if _NAME.fullmatch(path.name)), reverse=True)
