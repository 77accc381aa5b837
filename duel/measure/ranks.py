"""The processes of a run on many devices: they find each other, start each row together, and end together.

Every device has a supervisor, ``run.py`` as on one device. Rank 0's owns the run's folder; the others wait for its
commands, start a fresh measuring process for each row, and report how that ended (``duel.measure.assistant``). They
exchange lines of JSON over TCP; a file in the results folder, which all nodes see, says where rank 0 listens.

Duel has a protocol here rather than a launcher step for each row because such a step needs a fresh srun inside the
allocation, which mpirun and local runs do not have, and because rows are decided as they go.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from duel import variables
from duel.errors import UserError
from duel.measure import probes
from duel.results import Run

# A container may have to be unpacked on each node first, but the wait must be finite.
GATHER_SECONDS = probes.seconds("DUEL_GATHER_SECONDS", 180.0)
ALIVE_SECONDS, SILENT_SECONDS = 5.0, 30.0
CONNECT_SECONDS = 5.0
END_SECONDS = 10.0  # between a first death and stopping the others, and for them to end
POLL_SECONDS, REPORT_SECONDS = 0.2, 30.0
TAIL_BYTES = 8192
PORT_TAKEN = ("address already in use", "failed to add port to server")  # PyTorch; gRPC in JAX, which may crash then
CACHES = (
    *("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "AMD_COMGR_CACHE_DIR"),
)
# By default JAX does not cache what it compiles within a second.
KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
# Rank, number of ranks, rank on the node, as each launcher calls them. The first ones set count: inside a Slurm job,
# mpirun's own are the right ones.
LAUNCHERS = (
    ("DUEL_RANK", "DUEL_RANKS", "DUEL_RANK"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun's
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# The warning before a time limit: as our scripts pass it on, and as a site's own --signal may send it to the steps.
WARNINGS = (signal.SIGUSR2, signal.SIGUSR1)
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun; a RANK alone may come from a shell's start-up files
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Place:
    """Which of ``size`` processes this one is, over all nodes and on its own node."""

    rank: int
    size: int
    local_rank: int


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return what the launcher says; without one, a single process.

    A launcher may show each process all devices of the node or only its own ones: among those, the rank on the node
    counts modulo their number.
    """
    for names in LAUNCHERS:
        if all(name in environment for name in names) and ("RANK" not in names or TORCHRUN in environment):
            rank, size, local_rank = (int(environment[name]) for name in names)
            shown = [len(environment[name].split(",")) for name in VISIBLE if environment.get(name)]
            return Place(rank, size, local_rank % min(shown, default=size))
    return Place(0, 1, 0)


def meeting(results: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file that says where rank 0 listens, the same for all ranks of a job and for no other job."""
    life = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
    return results / f".ranks-{environment.get('DUEL_MEETING') or '-'.join(life)}.json"


def shares(ranks: int) -> list[list[int]]:
    """Return this process's CPUs in equal parts, one per rank; with fewer CPUs than ranks, each gets all of them."""
    if not hasattr(os, "sched_getaffinity"):  # macOS cannot set it
        return [[] for _ in range(ranks)]
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // ranks
    return [cpus[rank * each : (rank + 1) * each] if each else cpus for rank in range(ranks)]


def environment(caches: str, timed: bool = True) -> dict[str, str]:
    """Return this process's environment for one that measures, whose compilers keep their output in ``caches``.

    That folder is empty at first, so that a cold start is one, and never the user's own. Proxies are removed: messages
    between ranks are not for them (gRPC would use them). CUDA counts its devices as NVML does.

    If ``timed``, variables that set a number of threads are removed. A proof may run next to others: its threads sleep
    while they wait for each other, because spinning would take the cores from the others.
    """
    kept = {name: value for name, value in os.environ.items() if not kept_out(name, timed)}
    own = {name: f"{caches}/{name.lower()}" for name in CACHES} | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | KEEP_ALL
    own |= {} if timed else {"OMP_WAIT_POLICY": "passive"}
    return kept | own | {variables.OWN: " ".join(own)}


def started(command: list[str], env: dict[str, str], output: int | IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a measuring process in a session of its own, so that Ctrl-C reaches its supervisor alone, which then ends
    the row cleanly. So do Slurm's warnings, which it sends to all processes of a step: this one has them blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kept_out(name: str, timed: bool = True) -> bool:
    """Return whether a variable does not reach a process that measures (see ``environment``).

    torchrun's own, for one: with TORCHELASTIC_USE_AGENT_STORE some versions of PyTorch take the store at Duel's address
    for torchrun's, which every rank joins and nobody opens.
    """
    foreign = name.lower().endswith("_proxy") or name.startswith("TORCHELASTIC_")
    return foreign or (timed and variables.matches(name, variables.THREADS))


def tail(log: Path, start: int = 0) -> str:
    """Return the end of ``log``, from byte ``start`` on."""
    with contextlib.suppress(FileNotFoundError), open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


class Missing(Exception):
    """Not all ranks have connected; the message says which."""


class _Member:
    """One other rank, as rank 0 sees it."""

    def __init__(self, connection: socket.socket, lines: TextIO, hello: dict[str, Any]) -> None:
        self.rank, self.host, self.address = int(hello["rank"]), str(hello["host"]), str(hello["address"])
        self._connection, self._lines = connection, lines
        self.heard, self.gone = time.monotonic(), False
        self.reports: dict[int, dict[str, Any]] = {}  # by number of the start

    def listen(self) -> None:
        """Receive what it reports, until it is gone."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                self.heard = time.monotonic()
                message = json.loads(line)
                if "code" in message:
                    self.reports[int(message["start"])] = message
        self.gone = True

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # gone, as its listener finds
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    @property
    def lost(self) -> bool:
        return self.gone or time.monotonic() - self.heard > SILENT_SECONDS


class Coordinator:
    """Rank 0's side, for ``size`` ranks that find it through the file ``where``."""

    def __init__(self, size: int, where: Path) -> None:
        self._size, self._where, self._starts, self._addresses = size, where, 0, _addresses()
        self._key = secrets.token_hex(16)
        self._members: dict[int, _Member] = {}
        self._server = _server()
        text = json.dumps({"addresses": self._addresses, "port": self._server.getsockname()[1], "key": self._key})
        temporary = where.with_name(f"{where.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(temporary, where)
        for forever in (self._accept, self._keep_alive):
            threading.Thread(target=forever, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(CONNECT_SECONDS)
            lines = connection.makefile("r", encoding="utf-8")
            hello = json.loads(lines.readline(1000))
            if not hmac.compare_digest(str(hello["key"]), self._key):
                raise ValueError("wrong key")
            connection.settimeout(None)
            member = _Member(connection, lines, hello)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        self._members[member.rank] = member
        member.listen()

    @property
    def hosts(self) -> str:
        """The hosts of all ranks, in their order, each once."""
        others = [member.host for _, member in sorted(self._members.items())]
        return " ".join(dict.fromkeys([os.uname().nodename, *others]))

    def gather(self, report: Callable[[], None]) -> None:
        """Wait for all ranks, and ``report`` now and then that we do. Raises Missing if some do not connect."""
        begun = reported = time.monotonic()
        until = begun + GATHER_SECONDS
        while len(self._members) < self._size - 1:
            if time.monotonic() > until:
                absent = sorted(set(range(1, self._size)) - set(self._members))
                raise Missing(
                    f"{_ranks(absent)} of {self._size} did not connect to {'/'.join(self._addresses)}:"
                    f"{self._server.getsockname()[1]} within {GATHER_SECONDS:.0f} s"
                )
            if time.monotonic() > reported + REPORT_SECONDS:
                report()
                reported = time.monotonic()
            time.sleep(POLL_SECONDS)

    def start(self, run: Run, row: int, framework: str, arguments: list[str], cpus: list[list[int]]) -> list[str]:
        """Make all other ranks measure ``row``, by the framework's ``run.py`` with ``arguments``, each on its ``cpus``.

        Return what rank 0's own process needs in addition to the arguments.
        """
        self._starts += 1
        with _server() as server:  # free a moment ago: see ``port_taken``
            port = server.getsockname()[1]
        # One that all can reach: a rank that could not reach our first address has used a later one.
        reached = [member.address for member in self._members.values()]
        address = max(reached, key=self._addresses.index)
        meet = f"{address}:{port}"
        for rank, member in self._members.items():
            options = [*arguments, "--rank", str(rank), "--ranks", str(self._size), "--meet", meet]
            options += ["--cpus", ",".join(map(str, cpus[rank]))] if cpus[rank] else []
            member.send(
                do="start", start=self._starts, framework=framework, folder=str(run.folder), row=row, options=options
            )
        return ["--rank", "0", "--ranks", str(self._size), "--meet", meet]

    def deaths(self) -> dict[int, str]:
        """Return the last output of every rank that failed in this row, or that it is lost."""
        found = {}
        for rank, member in sorted(self._members.items()):
            report = member.reports.get(self._starts)
            if report is None and member.lost:
                found[rank] = f"its process on {member.host} is lost"
            elif report is not None and report["code"] != 0:
                found[rank] = str(report["said"])
        return found

    def ended(self) -> bool:
        """Return whether all others have ended this row or are lost."""
        return all(self._starts in member.reports or member.lost for member in self._members.values())

    def stop(self) -> None:
        """Have all others end this row."""
        for member in self._members.values():
            member.send(do="stop")

    def _keep_alive(self) -> None:
        while self._server.fileno() >= 0:
            for member in list(self._members.values()):
                member.send(do="nothing")
            time.sleep(ALIVE_SECONDS)

    def close(self) -> None:
        """End all other ranks and stop listening."""
        for member in self._members.values():
            member.send(do="end")
        self._server.close()
        self._where.unlink(missing_ok=True)


def port_taken(output: str) -> bool:
    """Return whether a measuring process failed because its port was taken in the meantime."""
    return any(text in output.lower() for text in PORT_TAKEN)


def _server() -> socket.socket:
    """Return a socket that listens on a free port: on one of those that the target allows, if it does by DUEL_PORTS."""
    if not (allowed := os.environ.get("DUEL_PORTS")):
        return socket.create_server(("", 0))
    form = re.fullmatch(r"(\d{1,5})-(\d{1,5})", allowed)
    first, last = map(int, form.groups()) if form else (1, 0)
    for port in range(first, min(last, 65535) + 1):
        with contextlib.suppress(OSError):  # taken
            return socket.create_server(("", port))
    raise UserError(f"DUEL_PORTS={allowed}: " + ("every port is taken" if first <= last else "expected FIRST-LAST"))


def _addresses() -> list[str]:
    """Return where other nodes may reach this one, the likeliest first: DUEL_ADDRESS, which the target may set, its
    name, then its outward address.
    """
    found = [*filter(None, [os.environ.get("DUEL_ADDRESS")]), os.uname().nodename]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:
        outwards.connect(("192.0.2.1", 9))  # RFC 5737: an address reserved for documentation; nothing is sent
        found.append(outwards.getsockname()[0])
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
