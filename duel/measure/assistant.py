"""The side of every rank but the first: does what rank 0 says (``duel.measure.ranks`` has the other side)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from duel.measure.ranks import (
    ALIVE_SECONDS,
    CONNECT_SECONDS,
    END_SECONDS,
    GATHER_SECONDS,
    POLL_SECONDS,
    SILENT_SECONDS,
    Place,
    environment,
    tail,
)


class _Worker:
    """The measuring process of this rank, a fresh one for each row. ``commands``: ``run.py`` with its interpreter."""

    def __init__(self, me: Place, commands: dict[str, list[str]]) -> None:
        self._me, self._commands = me, commands
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        self._process: subprocess.Popen[bytes] | None = None
        self._log, self._before = Path(), 0  # where it writes, and how much others have written there before
        self._start = 0  # the number of the start, as rank 0 counts them
        self._stopped: float | None = None  # when it was told to end

    def start(self, message: dict[str, Any]) -> None:
        self._start, self._log = int(message["start"]), Path(message["folder"]) / f"log.{self._me.rank}.txt"
        options = ["--run_folder", message["folder"], "--row", str(message["row"])]
        options += [*message["options"], "--local_rank", str(self._me.local_rank)]
        self._caches.cleanup()
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        with open(self._log, "ab") as output:
            self._before = output.tell()
            self._process = subprocess.Popen(
                [*self._commands[message["framework"]], *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self._caches.name),
                start_new_session=True,
            )

    def stop(self) -> None:
        """Tell the process to end; ``report`` kills it where it does not."""
        if self._process is not None:
            self._process.terminate()
            self._stopped = time.monotonic()

    def report(self) -> dict[str, Any] | None:
        """How the process ended, once; None while it runs, and where there is none."""
        if self._process is None:
            return None
        if self._process.poll() is not None:
            said = _last_words(self._process, self._log, self._before)
            report = {"start": self._start, "code": self._process.returncode, "said": said}
            self._process = self._stopped = None
            return report
        if self._stopped is not None and time.monotonic() - self._stopped > END_SECONDS / 2:
            self._process.kill()
        return None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._caches.cleanup()


def assist(me: Place, where: Path, commands: dict[str, list[str]]) -> int:
    """Do what rank 0 says until it says to end; the exit code. ``commands``: ``run.py`` with its interpreter."""
    found = _find(where)
    if found is None:
        print(f"rank {me.rank}: rank 0 was not to be found by {where} within {GATHER_SECONDS:.0f} s", file=sys.stderr)
        return 1
    connection, address, key = found
    worker = _Worker(me, commands)
    try:
        _say(connection, rank=me.rank, host=os.uname().nodename, address=address, key=key)
        connection.settimeout(POLL_SECONDS)
        return _obey(connection, worker)
    except OSError:  # the connection is gone, and rank 0 with it
        return 1
    finally:
        connection.close()
        worker.close()


def _obey(connection: socket.socket, worker: _Worker) -> int:
    """Let ``worker`` do what comes by ``connection``, and report; the exit code."""
    received = b""
    heard = said = time.monotonic()
    while time.monotonic() - heard < SILENT_SECONDS:
        report = worker.report()
        if report is not None:
            _say(connection, **report)
        if time.monotonic() - said > ALIVE_SECONDS:
            said = time.monotonic()
            _say(connection)
        try:
            chunk = connection.recv(65536)
        except TimeoutError:
            continue
        if not chunk:
            return 1  # rank 0 has died
        heard = time.monotonic()
        *lines, received = (received + chunk).split(b"\n")
        for message in map(json.loads, lines):
            match message["do"]:
                case "start":
                    worker.start(message)
                case "stop":
                    worker.stop()
                case "end":
                    return 0
    return 1


def _say(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _find(where: Path) -> tuple[socket.socket, str, str] | None:
    """(connection to rank 0, its address, the key), as soon as the file ``where`` leads to one."""
    until = time.monotonic() + GATHER_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or of an earlier life of this job
            told = json.loads(where.read_text())
            for address in told["addresses"]:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((address, told["port"]), CONNECT_SECONDS)
                    return connection, address, told["key"]
        time.sleep(POLL_SECONDS)
    return None


def _last_words(process: "subprocess.Popen[bytes]", log: Path, before: int) -> str:
    said = tail(log, before).strip()
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"{said}\nended by {name}".strip()
    return said or f"exit code {process.returncode}, and not a word"
