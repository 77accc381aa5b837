"""How a row is tried: its processes, from their start until all have ended, and what is recorded of how they ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from duel import evidence, modes
from duel.catalogue import PRESETS, VALIDATE
from duel.comparability import disturbances
from duel.files import utc
from duel.measure import probes, ranks, timing
from duel.measure.row import kind_of
from duel.measure.sinks import MetricsReader, WandbSink
from duel.record import Row
from duel.results import Results, Run
from duel.states import FAILED, FINISHED, RUNNING, TERMINAL
from duel.status import HEARTBEAT_SECONDS, Progress

POLL_SECONDS = 0.5
PROGRESS = ("loss", "block")  # events that tell how far a phase has come
# How gloo, NCCL and the servers of both frameworks say that another process is gone, or does not come.
PEER_LOST = (
    *("closed by peer", "reset by peer", "connection re", "socket closed", "heartbeat", "unavailable", "remote"),
    "getkeyvalue() timed out",
)
# A measuring process that is silent for so long hangs: the slowest thing that it does without a word is to compile.
SILENCE_SECONDS = probes.seconds("DUEL_SILENCE_SECONDS", 1800.0)
CRASH = "CUDA_ERROR_ILLEGAL_ADDRESS"
Commands = dict[str, list[str]]  # run.py with its interpreter, by framework
PORTS = 3  # tries at a row whose port somebody else takes
GRACE_SECONDS = 20.0


class Team:
    """Who measures a run's rows: a process of this supervisor, and on many devices one of each other rank's."""

    def __init__(
        self, run: Run, size: int, results: Results, commands: Commands, options: list[str], spawn: bool
    ) -> None:
        self._run, self._commands, self._options = run, commands, options
        self._cpus = ranks.shares(size) if spawn else [[] for _ in range(size)]
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")  # of the row's compilers
        self.coordinator: ranks.Coordinator | None = None
        if size == 1:
            return
        run.write_status(phase=f"waiting for {size - 1} other ranks")
        if spawn:
            os.environ["DUEL_MEETING"] = run.id
        self.coordinator = ranks.Coordinator(size, ranks.meeting(results.folder))
        try:
            for rank in range(1, size) if spawn else ():
                own = {"DUEL_RANK": str(rank), "DUEL_RANKS": str(size)}
                self._spawned.append(
                    subprocess.Popen([sys.executable, "-u", *sys.argv], env=os.environ | own, start_new_session=True)
                )
            self.coordinator.gather()
        except BaseException:
            self.close()
            raise

    def start(self, row: Row) -> "subprocess.Popen[bytes]":
        """Start this row's measuring processes; returns the one here."""
        number, here, framework = row.row or 0, self._options, str(row.framework)
        self._caches.cleanup()
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        if self.coordinator is not None and row.device_count != 1:
            here = [*here, *self.coordinator.start(self._run, number, framework, self._options, self._cpus)]
        cpus = self._cpus[0] or _chosen_cpus(row)
        here = [*here, "--cpus", ",".join(map(str, cpus))] if cpus else here
        # A session of its own: Ctrl-C reaches the supervisor alone, which then ends the row in order.
        return subprocess.Popen(
            [*self._commands[framework], "--run_folder", str(self._run.folder), "--row", str(number), *here],
            env=ranks.environment(self._caches.name, row.use_case != VALIDATE),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def close(self) -> None:
        """Send all home."""
        self._caches.cleanup()
        if self.coordinator is not None:
            self.coordinator.close()
        for process in self._spawned:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ranks.END_SECONDS)
            process.kill()


def _chosen_cpus(row: Row) -> list[int]:
    """Those that the switch ``threads`` leaves to the row; none where it leaves all."""
    asked = re.search(r"\+threads=(\d+)", str(row.mode))
    return probes.usable_cpus()[: int(asked[1])] if asked else []


def measure_row(run: Run, row: Row, team: Team, reader: MetricsReader, sink: WandbSink | None, again: int = 0) -> bool:
    """Measure one row and leave its row file at its end, whatever happens to its processes.

    Where XLA's autotuner crashes there is another row behind all others, on the next rung of ``modes.RUNGS``. So there
    is where others took what was measured on, ``again`` times at most, if the preset is to claim anything: what was
    computed has no part in that decision, and all these rows stay. Returns whether the last of them was left in peace.
    """
    while True:
        before = _size(run.log)
        for _ in range(PORTS):
            deaths = _try_row(run, row, team, reader, sink)
            if not any(ranks.port_taken(said) for said in deaths.values()):
                break
            print("somebody took the port in the meantime: the row begins again with another", flush=True)
        ended = run.read_row(row.row or 0)
        rung = modes.next_rung(row.rung or 0, str(row.precision))
        disturbed = [f"{field} {much}" for field, much in disturbances(ended)] if ended.status == FINISHED else []
        number = len(run.rows())
        if rung is not None and _autotuner_crashed(ended, ranks.tail(run.log, before)):
            row = row.replace(row=number, rung=rung)
            print(
                f"XLA's autotuner crashed: row {number} is another attempt, rung {rung} of {modes.HANDICAPPED}",
                flush=True,
            )
        elif disturbed and again and PRESETS[str(row.preset)].thorough:
            row, again = row.replace(row=number), again - 1
            print(f"disturbed, {', '.join(disturbed)}: row {number} is another attempt, {again} are left", flush=True)
        else:
            return not disturbed


def _autotuner_crashed(row: Row, said: str) -> bool:
    """Whether a row of JAX on a GPU died of a bad kernel before its step was compiled, which is when XLA tries some."""
    on_gpu = row.framework == "jax" and row.device_kind == "gpu"
    return on_gpu and row.status == FAILED and row.compile_seconds is None and CRASH in said


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _try_row(run: Run, row: Row, team: Team, reader: MetricsReader, sink: WandbSink | None) -> dict[int, str]:
    """One try at a row; on many devices the end of what each rank said that ended as it should not have."""
    run.write_row(row.replace(status=RUNNING, started=utc()))
    before = _size(run.log)
    process = team.start(row)
    coordinator = team.coordinator if row.device_count != 1 else None
    copier = threading.Thread(target=_copy_output, args=(process, run.log), daemon=True)
    copier.start()
    deaths: dict[int, str] = {}
    heard, silent = time.monotonic(), 0.0
    try:
        while process.poll() is None and not deaths and silent < SILENCE_SECONDS:
            heard = time.monotonic() if _pass_on(run, reader, sink) else heard
            time.sleep(POLL_SECONDS)
            deaths = coordinator.deaths() if coordinator else {}
            silent = time.monotonic() - heard
        if coordinator:
            deaths = _wind_up(process, coordinator)
            copier.join(GRACE_SECONDS)
            if process.poll():
                deaths = deaths | {0: ranks.tail(run.log, before)}
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        copier.join(GRACE_SECONDS)
        _pass_on(run, reader, sink)
        row = _with_partial_figures(run, run.read_row(row.row or 0))
        run.write_row(row)
    if row.status == FINISHED:
        row = _sealed(run, row)
        row = _with_efficiency(row, run.rows()) if row.device_count != 1 else row
        run.write_row(row)
    others = {rank: said for rank, said in deaths.items() if rank}
    if others:
        for rank, said in others.items():
            text = f"--- rank {rank}, the end of log.{rank}.txt\n{said}\n"
            with open(run.log, "a", encoding="utf-8") as log:
                log.write(text)
            print(text, flush=True)
        cause, why = _first_cause(row, process.returncode, others)
        run.write_row(row.replace(status=FAILED, cause=cause, why=why, ended=utc()))
    elif row.status not in TERMINAL:
        cause, why = _cause(process.returncode)
        if silent >= SILENCE_SECONDS:
            cause, why = f"hung: no output for {silent:.0f} s, in the phase '{run.stored_status().phase}'", "code"
        run.write_row(row.replace(status=FAILED, cause=cause, why=why, ended=utc()))
    return deaths


def _sealed(run: Run, row: Row) -> Row:
    """``row`` with the hash of its evidence, if all ranks have left some."""
    files = run.evidence_files(row.row or 0)
    if len(files) != row.device_count:
        return row.replace(missing={"evidence_sha256": f"{len(files)} of {row.device_count} ranks have recorded it"})
    return row.replace(evidence_sha256=evidence.sha256(file.read_bytes() for file in files))


def _with_efficiency(row: Row, rows: list[Row]) -> Row:
    """``row`` of many devices with what its throughput is worth beside that on one, which was planned just before."""
    wanted = (row.framework, row.repeat, (row.point or 0) - 1)
    alone = [other for other in rows if (other.framework, other.repeat, other.point) == wanted][-1]
    if alone.status != FINISHED or not alone.throughput or not row.throughput or not row.device_count:
        return row.replace(missing={"scaling_efficiency": "the row on one device did not finish"})
    return row.replace(scaling_efficiency=row.throughput / (row.device_count * alone.throughput))


def _wind_up(process: "subprocess.Popen[bytes]", coordinator: ranks.Coordinator) -> dict[int, str]:
    """End a row on many devices whose first process has ended: all others soon do, or are told to.

    Returns what those said that ended by themselves and as they should not have: a death takes others along.
    """
    until = time.monotonic() + ranks.END_SECONDS
    while time.monotonic() < until and not (coordinator.ended() and process.poll() is not None):
        time.sleep(ranks.POLL_SECONDS)
    deaths = coordinator.deaths()
    if process.poll() is None:
        process.terminate()
    if not coordinator.ended():
        coordinator.stop()
        until = time.monotonic() + ranks.END_SECONDS
        while time.monotonic() < until and not coordinator.ended():
            time.sleep(ranks.POLL_SECONDS)
    return deaths


def _first_cause(row: Row, returncode: int, others: dict[int, str]) -> tuple[str, str]:
    """What became of all ranks, in one line, and its kind; that one has lost another comes after what that died of."""
    causes = [f"rank {rank}: {_last_line(said)}" for rank, said in others.items()]
    if returncode > 0:  # else it was ended by us
        own, why = (row.cause, row.why) if row.cause else _cause(returncode)
        if why == "input":
            return str(own), why
        causes.insert(0, f"rank 0: {own}")
    causes.sort(key=lambda cause: any(words in cause.lower() for words in PEER_LOST))
    return "; ".join(causes), kind_of(causes[0])


def _last_line(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing").strip()


def _with_partial_figures(run: Run, row: Row) -> Row:
    """``row``, which ended early, with the figures of the blocks that it had timed; ``partial`` says so."""
    events = [event for event in run.events()[0] if event.get("row") == row.row and event["event"] == "block"]
    if row.status in TERMINAL or len(events) < 2 or row.batch_size is None:
        return row
    blocks = [
        timing.Block(event["step"] - event["steps"], event["steps"], event["steps"] * event["step_seconds"])
        for event in events
    ]
    said = f"{events[-1]['done']} steps of at least {events[-1]['needed']} were timed before the end"
    return row.replace(partial=said, **timing.summary(blocks, row.batch_size))


def _copy_output(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.stdout is not None
    with process.stdout, open(log, "ab", buffering=0) as file:
        while chunk := os.read(process.stdout.fileno(), 65536):
            file.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()


def _pass_on(run: Run, reader: MetricsReader, sink: WandbSink | None) -> bool:
    """Stream what the measuring process has written since, and keep the status alive. Whether there was anything."""
    events = reader()
    if sink is not None:
        sink.log(events)
    changes: dict[str, Any] = {}
    for event in events:
        if event["event"] == "phase":  # how far the one before had come is not where this one is
            changes = {"row": event["row"], "phase": event["phase"], "phase_started": time.time()}
            changes["progress"] = Progress()
        elif event["event"] in PROGRESS:
            known = {name: event[name] for name in Progress.__dataclass_fields__ if name in event}
            changes["progress"] = Progress(**known)
    if events or run.stored_status().age > HEARTBEAT_SECONDS:
        run.write_status(**changes)
    return bool(events)


def _cause(returncode: int) -> tuple[str, str]:
    """How a process ended, in words, and as a kind."""
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL; where memory ran out, this is what the kernel does", "killed"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}", "code"
    return f"its process ended with exit code {returncode} and without a report; see log.txt", "code"
