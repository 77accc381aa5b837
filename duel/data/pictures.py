"""Encoded pictures as they are published: a folder of class folders, or a data set of Hugging Face's ``datasets``."""

import errno
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duel.data.samples import Bytes, DataError

SPLITS = {"train": ("train",), "held_out": ("val", "validation", "test")}  # the names that are looked for, in order
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm")


@dataclass(frozen=True)
class Encoded:
    """One picture of a split: where it came from, its label, and its file's content when it is needed."""

    where: str
    label: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Source:
    """Encoded pictures: ``source`` says from where; ``classes`` names them in the order of their labels."""

    source: str
    classes: tuple[str, ...]
    splits: dict[str, Callable[[], Iterator[Encoded]]]


def of_folder(root: Path) -> Source | None:
    """Return the pictures of ``root``/train/<class>/ and ``root``/val/<class>/, or None if there is no such folder.

    Classes are numbered in the order of their folders' names. Raises DataError if a split or class is empty or missing.
    """
    if not (root / "train").is_dir():
        return None
    folders = {}
    for split, names in SPLITS.items():
        found = [root / name for name in names if (root / name).is_dir()]
        if not found:
            raise DataError(f"{root}: no folder {' or '.join(names)} beside train; it holds what is evaluated")
        folders[split] = found[0]
    classes = tuple(sorted(entry.name for entry in os.scandir(folders["train"]) if entry.is_dir()))
    if not classes:
        raise DataError(f"{folders['train']}: no class folders in it; each class has a folder of its own")
    for folder in folders.values():
        there = {entry.name for entry in os.scandir(folder) if entry.is_dir()}
        if wrong := sorted(there ^ set(classes)):
            raise DataError(
                f"{folder}: {len(wrong)} class folders differ from those of train, such as {wrong[0]}; "
                "both splits must have the same (ImageNet's validation pictures are published in one folder and must "
                "be sorted by class first)"
            )
        for name in classes:
            with os.scandir(folder / name) as entries:
                found_one = any(map(_is_picture, entries))
            if not found_one:
                raise DataError(f"{folder / name}: an empty class: no picture in it ({', '.join(SUFFIXES)})")
    splits = {split: _lister(folder, classes) for split, folder in folders.items()}
    return Source(f"the class folders in {root}", classes, splits)


def _is_picture(entry: "os.DirEntry[str]") -> bool:
    return entry.name.lower().endswith(SUFFIXES) and entry.is_file()


def _lister(folder: Path, classes: tuple[str, ...]) -> Callable[[], Iterator[Encoded]]:
    def listed() -> Iterator[Encoded]:
        for label, name in enumerate(classes):
            for path in sorted(entry.path for entry in os.scandir(folder / name) if _is_picture(entry)):
                yield Encoded(path, label, Path(path).read_bytes)

    return listed


def of_hugging_face(name: str, download: bool) -> Source | None:
    """Return the data set ``name`` of Hugging Face's hub, or of a folder that ``datasets`` saved; None if not there.

    Its cache is where HF_HOME, HF_DATASETS_CACHE and their siblings say. Unless ``download``, nothing is fetched.
    """
    if not download:  # read when the library is loaded
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        import datasets
    except ImportError:
        return None
    saved = Path(name).is_dir()
    try:
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        shut = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)
        if download or saved or shut:
            hint = "; the library writes to its cache (HF_DATASETS_CACHE)" if shut else ""
            raise DataError(f"Hugging Face, {name}: {_first_line(error)}{hint}") from None
        return None
    if not isinstance(found, datasets.DatasetDict):
        raise DataError(f"Hugging Face, {name}: one split alone; those for training and validation are needed")
    splits, classes = {}, ()
    for split, names in SPLITS.items():
        there = next((found[each] for each in names if each in found), None)
        if there is None:
            raise DataError(f"Hugging Face, {name}: no split {' or '.join(names)}; it has {', '.join(found)}")
        image = next((key for key, kind in there.features.items() if isinstance(kind, datasets.Image)), None)
        label = next((key for key, kind in there.features.items() if isinstance(kind, datasets.ClassLabel)), None)
        if image is None or label is None:
            raise DataError(f"Hugging Face, {name}: no column of pictures, or none of classes; it has {there.features}")
        classes = tuple(there.features[label].names)
        plain = there.cast_column(image, datasets.Image(decode=False))
        splits[split] = _rows(f"{name}, {split}", plain, image, label, len(classes))
    return Source(f"Hugging Face's {name}", classes, splits)


def _rows(
    where: str, table: Iterable[dict[str, Any]], image: str, label: str, classes: int
) -> Callable[[], Iterator[Encoded]]:
    def listed() -> Iterator[Encoded]:
        for number, row in enumerate(table):
            found = row[label]
            if found is None or not 0 <= found < classes:  # a split to be guessed has -1
                raise DataError(f"Hugging Face, {where}, row {number}: label {found}; labels are 0 to {classes - 1}")
            yield Encoded(f"{where}, row {number}", int(found), functools.partial(_content, row[image]))

    return listed


def _content(held: dict[str, Any]) -> bytes:
    content = held.get("bytes")
    return content if isinstance(content, bytes) else Path(str(held["path"])).read_bytes()


def decoded(content: bytes, longest: int) -> Bytes:
    """Return a picture as RGB bytes (height, width, 3), upright, its longer side at most ``longest`` pixels.

    Grey, palette and CMYK pictures become RGB; what EXIF says about turning is done. Raises DataError if it is damaged
    or no picture.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as opened:
            opened.load()
            picture = ImageOps.exif_transpose(opened).convert("RGB")
            if max(picture.size) > longest:
                picture.thumbnail((longest, longest), Image.Resampling.BILINEAR, reducing_gap=2.0)
            return np.asarray(picture)
    except (OSError, ValueError, SyntaxError, ZeroDivisionError, Image.DecompressionBombError) as error:
        raise DataError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
