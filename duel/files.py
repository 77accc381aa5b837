"""Files that several processes share: replaced whole, locked, and read without trust.

Nothing here knows what is in them. Anybody may have written what is read: it must be a regular file of bounded size, or
``Damaged`` is raised.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from duel.errors import UserError

RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
FORMAT = 1  # of the JSON files that have one; a larger one was written by a newer version
RECORD_BYTES = 4 << 20  # of one JSON record; real ones have a few kilobytes
LOG_BYTES = 1 << 30  # of what a job appends to while it runs

T = TypeVar("T")


class Damaged(UserError):
    """A file is not what its name promises; the message says which, and how."""


class OtherVersion(Damaged):
    """Another version of Duel wrote the file, and this one cannot read it."""


def utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def stamp() -> str:
    """Return what makes a run id unique and sorts by time: UTC to 1/256 s, and 4 random hex digits."""
    now = time.time()
    return f"{time.strftime('%y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 256):02x}{os.urandom(2).hex()}"


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path`` with ``text``, completely and durably, or leave it as it was."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` once it is complete; after an error ``path`` is as it was.

    Unless ``durable``, a crash of the machine may leave less of it: for what can be derived again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(2).hex()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path, wait: bool, shared: bool = False) -> Iterator[TextIO | None]:
    """Hold the lock file ``path``; yields it, or None if somebody else holds it (never with ``wait``).

    A ``shared`` lock can be held together with other shared ones only. The kernel releases a lock when the last process
    that has this very file open dies.
    """
    with open(_open(path, os.O_RDWR | os.O_CREAT), "r+") as file:
        held: TextIO | None = file
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            raise UserError(
                f"{path.parent} is on a file system without locks ({error.strerror}), where commands could overwrite "
                "each other's records: mount it with them (Lustre: -o flock), or put the checkout on another one"
            ) from error
        yield held


def read(path: Path, most: int = RECORD_BYTES, last: bool = False) -> bytes:
    """Return the bytes of a regular file; with ``last``, no more than its last ``most`` ones.

    Raises FileNotFoundError if there is none, and Damaged if it is a pipe, a device or a folder, may not be read, or is
    larger than ``most`` bytes: none of these may keep a command waiting or fill its memory.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            if not last:
                raise Damaged(f"{path.name} has {size} bytes; at most {most} are allowed")
            file.seek(size - most)
        return file.read(most)


def opened(path: Path) -> BinaryIO:
    """Open a regular file of any size for reading. Raises as ``read`` does."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
    return open(descriptor, "rb")


def _open(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file. Raises OSError, or Damaged for any other kind of file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is not a regular file")
    return descriptor


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises FileNotFoundError if there is none, and Damaged for anything else."""
    try:
        stored = json.loads(read(path))
        json.dumps(stored, ensure_ascii=False).encode()  # half of a surrogate pair could never be written again
    except (ValueError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path.name} is damaged: {_first_line(error)}") from error
    if not isinstance(stored, dict):
        raise Damaged(f"{path.name} is damaged: it is not a JSON object")
    return stored


def events(text: str) -> tuple[list[dict[str, Any]], int]:
    """Return the events in the lines of a metrics.jsonl, and how many could not be read: a kill can tear a line."""
    found, torn = [], 0
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
        else:
            torn += 1
    return found, torn


def read_record(path: Path, kind: type[T]) -> T:
    """Return the record of type ``kind`` in ``path``; keys that ``kind`` does not have are left out.

    Raises FileNotFoundError if there is no file, OtherVersion, and Damaged if it does not fit ``kind``.
    """
    stored = read_object(path)
    version = stored.get("format", FORMAT)
    if version != FORMAT:
        text = f"{path.name} was written by another version of Duel (format {version!r}; this one reads {FORMAT})"
        raise OtherVersion(text)
    return fitting(stored, kind, path.name)


def fitting(stored: Any, kind: type[T], name: str) -> T:
    """Return ``stored``, plain data from JSON, as a ``kind``. Raises Damaged, naming ``name``, if it does not fit."""
    import msgspec  # imported only when a record is read, so that --help stays fast

    try:
        return msgspec.convert(stored, kind)
    except (ValueError, TypeError, AssertionError, OverflowError, RecursionError) as error:
        raise Damaged(f"{name} is damaged: {_first_line(error) or 'a value is invalid'}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def digest(values: dict[str, Any]) -> str:
    """Return 12 hex digits that are equal exactly when ``values`` are."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def process_started(pid: int) -> str | None:
    """Return when process ``pid`` of this machine started, in a comparable form, or None if it is gone or a zombie.

    A bare pid is not enough: the kernel reuses numbers.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # no /proc: macOS
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return "alive"
