"""The code that jobs run: its digest, its commit, and the copy of it that a submission makes.

A job may wait for a night, and its attempts for longer: they run the code of the submission, not what the checkout has
become since. All submissions of the same code share a copy, ``results/trees/<digest>``. What was committed of it may
differ between them, so each script has that itself.
"""

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from duel import CODE, ROOT
from duel.errors import UserError

FOLDERS = ("duel", "jax", "pytorch")
COMMIT = "DUEL_COMMIT"  # in a script that runs a copy: as ``described`` returns it
CHANGED = "+changes"


@functools.cache
def digest(root: Path = CODE) -> str:
    """Return the first 12 hex digits of a hash over all Python files of the code in ``root``."""
    return _digest(root)


def _digest(root: Path) -> str:
    found = hashlib.sha256()
    for path in _files(root):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _files(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def commit() -> tuple[str | None, bool | None]:
    """Return the commit of this code and whether tracked files differ from it; (None, None) if it has none.

    cluster.yaml does not count: each site has its own, and the run's script shows what became of it.
    """
    if CODE != ROOT:  # a copy: as it was at the submission
        stored = os.environ.get(COMMIT, "")
        return (stored.removesuffix(CHANGED), stored.endswith(CHANGED)) if stored else (None, None)

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(
            ask("status", "--porcelain", "--untracked-files=no", "--", ".", ":!cluster.yaml")
        )
    except (OSError, subprocess.SubprocessError):
        return None, None


def described() -> str:
    """Return the commit of this code in one word, which says whether files differ from it; empty if it has none."""
    sha, dirty = commit()
    return f"{sha}{CHANGED if dirty else ''}" if sha else ""


def copy(results: Path) -> Path:
    """Return the copy of this code in ``results``, which is made unless it is there.

    Raises UserError without room, and if the code was changed since this process began.
    """
    place = results / "trees" / digest()
    if place.is_dir():
        return place
    new = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        for path in _files(CODE):
            target = new / path.relative_to(CODE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        if _digest(new) != digest():
            shutil.rmtree(new)
            raise UserError("the code was changed while it was being submitted: repeat the command")
        new.rename(place)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if place.is_dir():  # another driver was faster
            return place
        raise UserError(f"{place}: the code of this submission cannot be kept: {error.strerror}") from error
    return place
