"""Try a row: run its processes from their start until all have ended, and record how they ended."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duel import evidence, modes, profile, variables
from duel.catalogue import VALIDATE
from duel.comparability import disturbances
from duel.errors import kind_of
from duel.files import utc
from duel.measure import probes, ranks, timing
from duel.measure.sinks import MetricsReader, WandbSink
from duel.record import Row
from duel.results import Results, Run
from duel.states import FAILED, FINISHED, RUNNING, TERMINAL
from duel.status import HEARTBEAT_SECONDS, Progress

POLL_SECONDS = 0.5
LISTED_SECONDS = 65.0  # NFS may list a folder as it was a minute ago, without what other nodes have written
PROGRESS = ("loss", "block", "learning")  # events that report the progress of a phase
# How gloo, NCCL and both frameworks' servers report that another process is gone or does not join.
PEER_LOST = (
    *("closed by peer", "reset by peer", "connection re", "socket closed", "heartbeat", "unavailable", "remote"),
    "getkeyvalue() timed out",
)
# A measuring process that is silent for this long hangs: the slowest thing it does without output is compiling.
SILENCE_SECONDS = probes.seconds("DUEL_SILENCE_SECONDS", 1800.0)
CRASH = "CUDA_ERROR_ILLEGAL_ADDRESS"
Commands = dict[str, list[str]]  # run.py with its interpreter, by framework
PORTS = 3  # tries at a row whose port another process takes
GRACE_SECONDS = 20.0
TRAINING_GRACE_SECONDS = 50.0  # to end its step and write a checkpoint; 'cancel' waits for 60


class Team:
    """The processes that measure a run's rows: this supervisor's and, on many devices, one per other rank."""

    def __init__(
        self, run: Run, size: int, results: Results, commands: Commands, options: list[str], spawn: bool
    ) -> None:
        self._run, self._commands, self._options = run, commands, options
        self._cpus = ranks.shares(size) if spawn else [[] for _ in range(size)]
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")  # for the row's compilers
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
            self.coordinator.gather(run.write_status)
        except BaseException:
            self.close()
            raise

    def start(self, row: Row, *more: str, under: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        """Start this row's measuring processes; return the local one, with ``more`` options, ``under`` a tool."""
        number, here, framework = row.row or 0, [*self._options, *more], str(row.framework)
        self._caches.cleanup()
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        if self.coordinator is not None and row.device_count != 1:
            here = [*here, *self.coordinator.start(self._run, number, framework, self._options, self._cpus)]
        cpus = self._cpus[0] or _chosen_cpus(row)
        here = [*here, "--cpus", ",".join(map(str, cpus))] if cpus else here
        return ranks.started(
            [*under, *self._commands[framework], "--run_folder", str(self._run.folder), "--row", str(number), *here],
            ranks.environment(self._caches.name, row.use_case != VALIDATE),
            subprocess.PIPE,
        )

    def close(self) -> None:
        """End all other processes and remove the caches."""
        self._caches.cleanup()
        if self.coordinator is not None:
            self.coordinator.close()
        for process in self._spawned:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ranks.END_SECONDS)
            process.kill()


def _chosen_cpus(row: Row) -> list[int]:
    """Return the CPUs that the switch ``threads`` leaves to the row, which checks their number; empty: all."""
    asked = re.search(r"\+threads=(\d+)", str(row.mode))
    return probes.usable_cpus()[: int(asked[1])] if asked and hasattr(os, "sched_setaffinity") else []


def measure_row(run: Run, row: Row, team: Team, reader: MetricsReader, sink: WandbSink | None, again: int = 0) -> bool:
    """Measure one row and leave its row file in the end, whatever happens to its processes.

    If XLA's autotuner crashes, another row is appended, on the next rung of ``modes.RUNGS``. If others disturbed a row,
    another is appended too, at most ``again`` times: what was computed plays no part in that decision, and all these
    rows are kept. Return whether the last of them was undisturbed.
    """
    while True:
        before = _size(run.log)
        for _ in range(PORTS):
            deaths = _try_row(run, row, team, reader, sink)
            if not any(ranks.port_taken(text) for text in deaths.values()):
                break
            print("the port was taken in the meantime: the row starts again with another one", flush=True)
        ended = run.read_row(row.row or 0)
        rung = modes.next_rung(row.rung or 0, str(row.precision))
        disturbed = [f"{field} {much}" for field, much in disturbances(ended)] if ended.status == FINISHED else []
        number = len(run.rows())
        if rung is not None and _autotuner_crashed(ended, ranks.tail(run.log, before)):
            row = row.replace(row=number, rung=rung, switches=None, tuning=None)  # that are the rung's
            print(
                f"XLA's autotuner crashed: row {number} is another attempt, rung {rung} of {modes.HANDICAPPED}",
                flush=True,
            )
        elif disturbed and again:
            row, again = row.replace(row=number), again - 1
            print(f"disturbed, {', '.join(disturbed)}: row {number} is another attempt, {again} left", flush=True)
        else:
            return not disturbed


def profile_row(run: Run, row: Row, team: Team) -> None:
    """Profile the program of ``row`` if it finished, on one device. Whatever happens, the row stays as it is."""
    if row.status != FINISHED or row.device_count != 1 or (row.repeat or 0) >= profile.MOST:
        return
    number, framework = row.row or 0, str(row.framework)
    run.write_status(part=f"row {number + 1}, {framework}", phase="profiling")
    file = profile.path(run.folder, number)
    why = _beside(run, team.start(row, "--profile"))
    if why and not file.exists():
        profile.write(run.folder, profile.Profile(run.id, number, framework, why=why))
    if tool := os.environ.get(variables.PROFILER):
        file.with_suffix("").mkdir(parents=True, exist_ok=True)
        try:
            words = [word.replace("{output}", str(file.with_suffix("") / "profiler")) for word in shlex.split(tool)]
            why = _beside(run, team.start(row, "--profile", "--untraced", under=words))
        except (OSError, ValueError) as error:  # it is not installed, or this is no command
            why = str(error)
        if why:
            text = "; ".join(filter(None, (f"{tool}: {why}", profile.ADVICE.get(Path(tool.split()[0]).name))))
            print(f"profile: {text}", flush=True)
            profile.note(run.folder, number, text)


def _beside(run: Run, process: "subprocess.Popen[bytes]") -> str:
    """Wait for a process that measures nothing, copy its output, and keep the status alive.

    Return why it failed, empty if it did not.
    """
    copier = threading.Thread(target=_copy_output, args=(process, run.log), daemon=True)
    copier.start()
    until = time.monotonic() + SILENCE_SECONDS
    try:
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(HEARTBEAT_SECONDS, SILENCE_SECONDS))
            run.write_status()
        if process.returncode is None:
            return f"it took more than {SILENCE_SECONDS:.0f} s"
        return "" if process.returncode == 0 else _cause(process.returncode)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        copier.join(GRACE_SECONDS)


def _autotuner_crashed(row: Row, output: str) -> bool:
    """Return whether a bad kernel killed a JAX row on a GPU while XLA tried some: a training also compiles later."""
    on_gpu = row.framework == "jax" and row.device_kind == "gpu"
    compiles = row.compile_seconds is None or bool(row.recipe)
    return on_gpu and row.status == FAILED and compiles and CRASH in output


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _try_row(run: Run, row: Row, team: Team, reader: MetricsReader, sink: WandbSink | None) -> dict[int, str]:
    """Try a row once; on many devices, return the last output of every rank that failed."""
    team_hosts = {"host": team.coordinator.hosts} if team.coordinator is not None and row.device_count != 1 else {}
    run.write_row(row.replace(status=RUNNING, started=utc(), **team_hosts))
    before, process = _size(run.log), team.start(row)
    coordinator = team.coordinator if row.device_count != 1 else None
    copier = threading.Thread(target=_copy_output, args=(process, run.log), daemon=True)
    copier.start()
    deaths: dict[int, str] = {}
    heard, silent, size = time.monotonic(), 0.0, before
    try:
        while process.poll() is None and not deaths and silent < SILENCE_SECONDS:
            size, shown = _size(run.log), size
            heard = time.monotonic() if _pass_on(run, reader, sink) or size != shown else heard
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
                process.wait(TRAINING_GRACE_SECONDS if row.recipe else GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        copier.join(GRACE_SECONDS)
        _pass_on(run, reader, sink)
        row = _with_partial_figures(run, run.read_row(row.row or 0))
        run.write_row(row)
    if row.status == FINISHED:
        row = _sealed(run, row, LISTED_SECONDS if (row.nodes or 1) > 1 and not deaths else 0.0)
        row = _with_efficiency(row, run.rows()) if row.device_count != 1 and not row.recipe else row
        run.write_row(row)
    others = {rank: output for rank, output in deaths.items() if rank}
    if others:
        for rank, output in others.items():
            text = f"--- rank {rank}, the end of log.{rank}.txt\n{output}\n"
            with open(run.log, "a", encoding="utf-8") as log:
                log.write(text)
            print(text, flush=True)
        cause, why = _first_cause(row, process.returncode, others)
        run.write_row(row.replace(status=FAILED, cause=cause, why=why, ended=utc()))
    elif row.status not in TERMINAL:
        cause, why = _cause(process.returncode)
        if silent >= SILENCE_SECONDS:
            cause, why = f"hung: no output for {silent:.0f} s in phase '{run.stored_status().phase}'", "code"
        run.write_row(row.replace(status=FAILED, cause=cause, why=why, ended=utc()))
    return deaths


def _sealed(run: Run, row: Row, patience: float) -> Row:
    """Return ``row`` with the hash of its evidence, if that of all ranks is listed within ``patience`` seconds."""
    until = time.monotonic() + patience
    while len(files := run.evidence_files(row.row or 0)) != row.device_count and time.monotonic() < until:
        run.write_status()
        time.sleep(POLL_SECONDS)
    if len(files) != row.device_count:
        return row.replace(missing={"evidence_sha256": f"{len(files)} of {row.device_count} ranks have recorded it"})
    return row.replace(evidence_sha256=evidence.sha256(file.read_bytes() for file in files))


def _with_efficiency(row: Row, rows: list[Row]) -> Row:
    """Return ``row``, of many devices, with its efficiency relative to the row on one, planned just before."""
    wanted = (row.framework, row.repeat, (row.point or 0) - 1)
    alone = [other for other in rows if (other.framework, other.repeat, other.point) == wanted][-1]
    apart = alone.attempt != row.attempt  # a run that continued, in another hour and maybe on other nodes
    if apart or alone.status != FINISHED or not alone.throughput or not row.throughput or not row.device_count:
        what = "is of before an interruption" if apart else "did not finish"
        return row.replace(missing={"scaling_efficiency": f"the row on one device {what}"})
    return row.replace(scaling_efficiency=row.throughput / (row.device_count * alone.throughput))


def _wind_up(process: "subprocess.Popen[bytes]", coordinator: ranks.Coordinator) -> dict[int, str]:
    """End a row on many devices after its first process has ended: the others soon do, too, or are stopped.

    Return the last output of those that failed before they were stopped: one death takes others along.
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
    """Return what became of all ranks, in one line, and its kind; failures come before the lost peers they caused."""
    causes = [f"rank {rank}: {_last_line(output)}" for rank, output in others.items()]
    if returncode > 0:  # otherwise we ended it
        own, why = (row.cause, row.why) if row.cause else _cause(returncode)
        if why == "input":
            return str(own), why
        causes.insert(0, f"rank 0: {own}")
    causes.sort(key=lambda cause: any(text in cause.lower() for text in PEER_LOST))
    return "; ".join(causes), kind_of(causes[0])


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output").strip()


def _with_partial_figures(run: Run, row: Row) -> Row:
    """Return ``row``, which ended early, with the figures of the blocks it had timed; ``partial`` says so."""
    events = [event for event in run.events()[0] if event.get("row") == row.row and event["event"] == "block"]
    if row.status in TERMINAL or len(events) < 2 or row.batch_size is None:
        return row
    blocks = [timing.Block(e["step"] - e["steps"], e["steps"], e["steps"] * e["step_seconds"]) for e in events]
    partial = f"{events[-1]['done']} of at least {events[-1]['needed']} steps were timed before the end"
    return row.replace(partial=partial, **timing.summary(blocks, row.batch_size))


def _copy_output(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.stdout is not None
    with process.stdout, open(log, "ab", buffering=0) as file:
        while chunk := os.read(process.stdout.fileno(), 65536):
            file.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()


def _pass_on(run: Run, reader: MetricsReader, sink: WandbSink | None) -> bool:
    """Stream what the measuring process has written since, and keep the status alive; return whether it wrote any."""
    events = reader()
    if sink is not None:
        sink.log(events)
    changes: dict[str, Any] = {}
    for event in events:
        if event["event"] == "phase":  # the previous phase's progress is not this one's
            changes = {"row": event["row"], "phase": event["phase"], "phase_started": time.time()}
            changes["progress"] = Progress()
        elif event["event"] in PROGRESS:
            known = {name: event[name] for name in Progress.__dataclass_fields__ if name in event}
            changes["progress"] = Progress(**known)
    if events or run.stored_status().age > HEARTBEAT_SECONDS:
        run.write_status(**changes)
    return bool(events)


def _cause(returncode: int) -> tuple[str, str]:
    """Return how a process ended, as a text, and its kind."""
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL; this is what the kernel does when memory runs out", "killed"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}", "code"
    return f"its process exited with code {returncode} without a report; see log.txt", "code"
