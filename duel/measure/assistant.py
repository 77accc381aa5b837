"""Follow rank 0's commands, as every other rank does (``duel.measure.ranks`` is rank 0's side)."""

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
    started,
    tail,
)


class _Worker:
    """This rank's measuring process, a fresh one for each row. ``commands`` has ``run.py`` with its interpreter."""

    def __init__(self, me: Place, commands: dict[str, list[str]]) -> None:
        self._me, self._commands = me, commands
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        self._process: subprocess.Popen[bytes] | None = None
        self._log, self._before = Path(), 0  # its log, and the size of that before it started
        self._start = 0  # number of this start, as counted by rank 0
        self._stopped: float | None = None  # when it was sent SIGTERM

    def start(self, message: dict[str, Any]) -> None:
        self._start, self._log = int(message["start"]), Path(message["folder"]) / f"log.{self._me.rank}.txt"
        options = ["--run_folder", message["folder"], "--row", str(message["row"])]
        options += [*message["options"], "--local_rank", str(self._me.local_rank)]
        self._caches.cleanup()
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        with open(self._log, "ab") as output:
            self._before = output.tell()
            self._process = started(
                [*self._commands[message["framework"]], *options], environment(self._caches.name), output
            )

    def stop(self) -> None:
        """Terminate the process; ``report`` kills it if it does not exit."""
        if self._process is not None:
            self._process.terminate()
            self._stopped = time.monotonic()

    def report(self) -> dict[str, Any] | None:
        """Return how the process ended, once; None while it runs or if there is none."""
        if self._process is None:
            return None
        if self._process.poll() is not None:
            output = _last_output(self._process, self._log, self._before)
            report = {"start": self._start, "code": self._process.returncode, "said": output}
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
    """Follow rank 0's commands until it ends the run; return the exit code. ``commands`` is as for ``_Worker``."""
    found = _find(where)
    if found is None:
        print(f"rank {me.rank}: could not find rank 0 through {where} within {GATHER_SECONDS:.0f} s", file=sys.stderr)
        return 1
    connection, address, key = found
    worker = _Worker(me, commands)
    try:
        _send(connection, rank=me.rank, host=os.uname().nodename, address=address, key=key)
        connection.settimeout(POLL_SECONDS)
        return _obey(connection, worker)
    except OSError:  # the connection is gone, and rank 0 with it
        return 1
    finally:
        connection.close()
        worker.close()


def _obey(connection: socket.socket, worker: _Worker) -> int:
    """Have ``worker`` execute the commands from ``connection``, and report to it; return the exit code."""
    received = b""
    heard = sent = time.monotonic()
    while time.monotonic() - heard < SILENT_SECONDS:
        report = worker.report()
        if report is not None:
            _send(connection, **report)
        if time.monotonic() - sent > ALIVE_SECONDS:
            sent = time.monotonic()
            _send(connection)
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
                    try:
                        worker.start(message)
                    except OSError as error:  # such as a full disk: rank 0 is there, and quotes it
                        _send(connection, start=int(message["start"]), code=1, said=f"{type(error).__name__}: {error}")
                case "stop":
                    worker.stop()
                case "end":
                    return 0
    return 1


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _find(where: Path) -> tuple[socket.socket, str, str] | None:
    """Return (connection to rank 0, its address, the key) once the file ``where`` leads to it; None on timeout."""
    until = time.monotonic() + GATHER_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or left from before the job restarted
            found = json.loads(where.read_text())
            for address in found["addresses"]:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((address, found["port"]), CONNECT_SECONDS)
                    return connection, address, found["key"]
        time.sleep(POLL_SECONDS)
    return None


def _last_output(process: "subprocess.Popen[bytes]", log: Path, before: int) -> str:
    text = tail(log, before).strip()
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"{text}\nended by {name}".strip()
    return text or f"exit code {process.returncode}, no output"
