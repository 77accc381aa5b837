"""What ``main.py data`` does: show which data sets are there, fetch, prepare and check them."""

import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from duel import ROOT
from duel.data import known, pictures, prepared
from duel.data.known import KNOWN, File, Known, Place
from duel.data.samples import DataError
from duel.errors import UserError
from duel.files import replacing
from duel.launch.schema import Target
from duel.recipes import DATASETS
from duel.terminal import Table

CHUNK = 1 << 20
TIMEOUT_SECONDS = 60
FOUND, MISSING, DAMAGED = "found", "missing", "DAMAGED"

Say = Callable[[str], None]


def place_of(target: Target) -> Place:
    """Return where the data sets of ``target`` are: its folder, and the packages of the interpreters seen from here."""
    packages: list[Path] = []
    for python in (target.python.jax, target.python.pytorch):
        found = python and shutil.which(str(ROOT / python) if "/" in python else python)
        if found:
            # Not resolved: a virtual environment's interpreter is a link to one with other packages.
            packages += Path(found).parent.parent.glob("lib/python3*/*-packages")
    return Place(ROOT / target.data, tuple(packages))


def table(place: Place) -> Table:
    """Return every data set: which benchmarks train on it, whether it is there, and where it was looked for or is."""
    lines = []
    for name, one in KNOWN.items():
        state, text = _state(one, place)
        lines.append([name, ", ".join(DATASETS[name]), state, text])
    notes = [f"the data folder is {place.data}", "'python main.py data NAME' says how to get one that is missing"]
    return Table(["data set", "benchmarks", "", ""], lines, notes)


def _state(one: Known, place: Place) -> tuple[str, str]:
    try:
        found = one.find(place)
    except (DataError, OSError) as error:
        return DAMAGED, str(error)
    return (FOUND, found) if found else (MISSING, one.looked)


def described(name: str, place: Place) -> list[str]:
    """Return what is known of one data set, in lines."""
    one = KNOWN[name]
    state, text = _state(one, place)
    lines = [f"{name}: {one.title}, for {', '.join(DATASETS[name])}", f"{state}: {text}"]
    return lines if state == FOUND else [*lines, f"to get it: {one.get}"]


def download(name: str, data: Path, say: Say) -> None:
    """Fetch the published files of a data set below ``data``. Raises UserError."""
    one = KNOWN[name]
    if not one.files:
        if one.hub:
            raise UserError(f"{name} is not fetched by itself: 'main.py data {name} --prepare --download' does both")
        raise UserError(f"{name} cannot be fetched: {one.get}")
    for file in one.files:
        path = data / file.name
        if path.exists() and _md5(path) == file.md5:
            say(f"{path} is there")
            continue
        _fetch(file, path)
        say(f"{path}: {path.stat().st_size:,} bytes")


def _fetch(file: File, path: Path) -> None:
    """Fetch one file, whole and with its checksum, or leave what was there."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(file.url, timeout=TIMEOUT_SECONDS) as answer, replacing(path) as out:
            while chunk := answer.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
            if digest.hexdigest() != file.md5:
                raise UserError(f"{file.url}: its checksum is {digest.hexdigest()}, published is {file.md5}; try again")
    except urllib.error.URLError as error:
        raise UserError(f"{file.url}: {error.reason}; check the internet connection and proxy settings") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def prepare(name: str, data: Path, skip: bool, fetch: bool, say: Say) -> None:
    """Decode the pictures of a data set for jobs. Raises UserError."""
    one, place = KNOWN[name], Place(data)
    if not one.hub:
        raise UserError(f"{name} needs no preparation: it is read as it is")
    try:
        source = pictures.of_folder(data / name) or pictures.of_hugging_face(_saved(data, name) or one.hub, fetch)
        if source is None:
            raise UserError(f"{name}: no pictures in {data / name}, nor {one.hub} in Hugging Face's cache; {one.get}")
        found = prepared.prepare(source, place.prepared / name, skip, say)
    except DataError as error:
        raise UserError(str(error)) from error
    counts = ", ".join(f"{count:,} {split}" for split, count in found.samples.items())
    say(f"{os.path.relpath(place.prepared / name, ROOT)}: {counts}, {len(found.classes)} classes")


def _saved(data: Path, name: str) -> str:
    """Return the folder that Hugging Face's ``save_to_disk`` wrote for ``name``; empty without one."""
    folder = data / f"{name}-hf"
    return str(folder) if folder.is_dir() else ""


def check(name: str, place: Place, say: Say) -> None:
    """Read all of a data set. Raises UserError for what is damaged, or was fetched and is not what was published."""
    data = place.data
    fetched = [file for file in KNOWN[name].files if (data / file.name).is_file()]
    try:
        if KNOWN[name].hub and (place.prepared / name).is_dir():
            prepared.check(place.prepared / name)
        found = known.load(name, place, 32)
        sums = {file: _md5(data / file.name) for file in fetched}
    except (DataError, OSError) as error:
        raise UserError(str(error)) from error
    for file, md5 in sums.items():
        if md5 != file.md5:
            raise UserError(
                f"{data / file.name}: its checksum is {md5}, that of the published file {file.md5}; "
                f"'main.py data {name} --download' fetches it again"
            )
    sums_of = f"; as published: {', '.join(file.name for file in fetched)}" if fetched else ""
    say(f"{name} is whole: {found.source}{sums_of}")
