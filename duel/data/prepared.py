"""Pictures decoded once, into files of bytes that jobs map into memory.

A prepared data set is a folder::

    about.json                 what it was made of, its classes and channels, and the sha256 of every other file
    <split>-00000.bin, ...     the pictures' bytes, height x width x channels, one after the other
    <split>.npy                a record of each picture: file, offset, height, width, label
"""

import concurrent.futures
import errno
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duel import files
from duel.data.pictures import SPLITS, Encoded, Source, decoded
from duel.data.samples import Bytes, DataError, Dataset, Labels

FORMAT = 1
LONGEST = 512  # pixels of a stored picture's longer side
SHARD_BYTES = 1 << 30
ABOUT = "about.json"
RECORD = np.dtype([("file", "<i4"), ("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("label", "<i4")])
# Of ImageNet's training pictures, as all published recipes standardise them (of bytes, red, green, blue).
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
AGAIN = "remove the folder and prepare it again"
AHEAD = 64  # pictures that are being decoded

Say = Callable[[str], None]


@dataclass(frozen=True)
class About:
    """What about.json holds."""

    source: str
    classes: tuple[str, ...]
    longest: int
    samples: dict[str, int]
    files: dict[str, str] = field(default_factory=dict)  # sha256 by name
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name
    skipped: tuple[str, ...] = ()  # damaged pictures, each with the reason
    format: int = FORMAT


@dataclass(frozen=True)
class Stored:
    """Prepared pictures of one split; a ``duel.data.samples.Pictures``."""

    shards: tuple[Bytes, ...]
    records: npt.NDArray[Any]

    @functools.cached_property
    def labels(self) -> Labels:
        return np.ascontiguousarray(self.records["label"])

    def at(self, positions: npt.NDArray[np.int64]) -> list[Bytes]:
        found = []
        for number, offset, height, width, _ in self.records[positions].tolist():
            pixels = self.shards[number][offset : offset + height * width * 3]
            found.append(pixels.reshape(height, width, 3))
        return found


def prepare(source: Source, folder: Path, skip: bool, say: Say) -> About:
    """Decode all pictures of ``source`` into ``folder``, whole or not at all.

    Another process that prepares the same waits for the first, and finds its result. With ``skip``, damaged pictures
    are left out and named; without, the first one ends it. Raises DataError.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(folder.with_name(f".{folder.name}.lock"), wait=True):
            for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
                if left.is_dir() and left.suffix[1:].isdecimal():
                    shutil.rmtree(left, ignore_errors=True)
            if os.path.lexists(folder):  # the renaming at the end would fail
                return about(folder)
            new = folder.with_name(f".{folder.name}.{os.getpid()}")
            try:
                new.mkdir()
                found = _written(source, new, skip, say)
                os.rename(new, folder)
                return found
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; nothing is kept" if full else error.strerror or str(error)
        raise DataError(f"{folder}: {what} (DUEL_PREPARED names another folder)") from error


def _written(source: Source, folder: Path, skip: bool, say: Say) -> About:
    skipped: list[str] = []
    samples = {}
    for split in SPLITS:
        labels = _write_split(split, source.splits[split](), folder, skipped if skip else None, say)
        samples[split] = len(labels)
        if not labels:
            raise DataError(f"{source.source}: no picture for {split} could be read")
        if split == "train" and (missing := sorted(set(range(len(source.classes))) - set(labels))):
            emptied = ", ".join(source.classes[label] for label in missing[:10])
            raise DataError(f"{source.source}: no picture to train on of class {emptied}; {len(skipped)} were skipped")
    names = sorted(entry.name for entry in os.scandir(folder))
    sizes = {name: (folder / name).stat().st_size for name in names}
    found = About(
        *(source.source, source.classes, LONGEST, samples, {name: _sha256(folder / name) for name in names}, sizes),
        tuple(skipped),
    )
    for text in skipped:
        say(f"skipped: {text}")
    (folder / ABOUT).write_text(json.dumps(vars(found), indent=1) + "\n")
    return found


def _write_split(
    split: str, pictures: Iterator[Encoded], folder: Path, skipped: list[str] | None, say: Say
) -> list[int]:
    """Write the pictures of one split; return their labels."""
    records: list[tuple[int, int, int, int, int]] = []
    number, offset = 0, 0
    out = open(_shard(folder, split, 0), "wb")  # noqa: SIM115 - it is replaced by the next one
    try:
        for one, pixels in _decoded(pictures, skipped):
            if offset and offset + pixels.size > SHARD_BYTES:
                out.close()
                number, offset = number + 1, 0
                out = open(_shard(folder, split, number), "wb")  # noqa: SIM115 - closed below
            out.write(pixels.tobytes())
            records.append((number, offset, *pixels.shape[:2], one.label))
            offset += pixels.size
            if len(records) % 10000 == 0:
                say(f"{split}: {len(records):,} pictures")
    finally:
        out.close()
    np.save(folder / f"{split}.npy", np.array(records, RECORD))
    return [record[-1] for record in records]


def _decoded(pictures: Iterator[Encoded], skipped: list[str] | None) -> Iterator[tuple[Encoded, Bytes]]:
    """Yield ``pictures`` decoded, in their order, by as many threads as there are CPUs."""

    def one(encoded: Encoded) -> Bytes:
        try:
            return decoded(encoded.read(), LONGEST)
        except (DataError, MemoryError):  # the second says nothing of the picture
            raise
        except Exception as error:  # a file that may not be read, or whatever damaged metadata make a decoder raise
            raise DataError(f"{type(error).__name__}: {error}") from None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        while some := list(itertools.islice(pictures, AHEAD)):
            for encoded, future in [(each, pool.submit(one, each)) for each in some]:
                try:
                    yield encoded, future.result()
                except DataError as error:
                    text = f"{encoded.where}: a damaged picture ({error})"
                    if skipped is None:
                        raise DataError(f"{text}; --skip_damaged leaves such out") from None
                    skipped.append(text)


def _shard(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.bin"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def about(folder: Path) -> About:
    """Return what a prepared folder says of itself. Raises DataError if it is damaged or of another version."""
    try:
        stored = files.read_object(folder / ABOUT)
        if stored.get("format") != FORMAT:
            raise DataError(f"{folder}: prepared by another version of Duel; remove it and prepare it again")
        return files.fitting(stored, About, ABOUT)
    except FileNotFoundError:
        raise DataError(f"{folder}: it has no {ABOUT}, so it is not whole; {AGAIN}") from None
    except files.Damaged as error:
        raise DataError(f"{folder}: {error}; remove it and prepare it again") from None


def check(folder: Path) -> About:
    """Read every file of a prepared folder. Raises DataError for the first one that is not what was written."""
    found = about(folder)
    for name, digest in found.files.items():
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise DataError(f"{folder / name}: missing or changed since it was prepared; {AGAIN}")
    return found


def load(name: str, folder: Path) -> Dataset:
    """Map a prepared data set into memory. Raises DataError if a file is missing or has another size."""
    found = about(folder)
    for file, size in found.sizes.items():
        there = (folder / file).stat().st_size if (folder / file).is_file() else None
        if there != size:
            raise DataError(f"{folder / file}: {there} bytes, {size} were written; {AGAIN}")
    splits = {}
    for split in SPLITS:
        records = np.load(folder / f"{split}.npy", allow_pickle=False)
        shards = sorted(file for file in found.sizes if file.startswith(f"{split}-"))
        splits[split] = Stored(tuple(np.memmap(folder / file, np.uint8, "r") for file in shards), records)
    source = f"{found.source}, stored at no more than {found.longest} pixels a side"
    source += f", without {len(found.skipped)} damaged pictures" if found.skipped else ""
    return Dataset(name, source, splits["train"], splits["held_out"], len(found.classes), 3, MEAN, STD)
