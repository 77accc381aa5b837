"""What ``run.py`` does, the same in both frameworks.

``python <framework>/run.py --benchmark B --use_case N`` supervises: it owns the run's folder, starts one fresh
process of itself for each row, streams what that writes to Weights & Biases, and records how it ended, whatever ended
it. Such a process (``--run_folder F --row K``) measures one row and is the only one that loads the framework.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from duel import modes
from duel.catalogue import FRAMEWORKS, MANY, PAIRED, PRESETS, VALIDATE
from duel.comparability import disturbances
from duel.errors import UserError
from duel.job import ROOT, Job, script_state
from duel.measure import probes, ranks, timing
from duel.measure.device import World
from duel.measure.row import describe, measure
from duel.measure.sinks import MetricsReader, WandbSink
from duel.options import SAFETENSORS, VARIANTS, add_options, check_use_cases, folder_name, target_name
from duel.record import CANCELLED, FAILED, FINISHED, LOST, QUEUED, RUNNING, SKIPPED, TERMINAL, Row
from duel.results import HEARTBEAT_SECONDS, Results, Run, locked, this_process, utc

POLL_SECONDS = 0.5
PROGRESS = ("phase", "loss", "block")  # events that a status is made of
# How gloo, NCCL and the servers of both frameworks say that another process is gone, or does not come.
BEREAVED = (
    *("closed by peer", "reset by peer", "connection re", "socket closed", "heartbeat", "unavailable", "remote"),
    "getkeyvalue() timed out",
)
# A measuring process that is silent for so long hangs: the slowest thing that it does without a word is to compile.
SILENCE_SECONDS = float(os.environ.get("DUEL_SILENCE_SECONDS") or 1800)
CRASH = "CUDA_ERROR_ILLEGAL_ADDRESS"
Commands = dict[str, list[str]]  # run.py with its interpreter, by framework
PORTS = 3  # tries at a row whose port somebody else takes
AGAIN = 4  # more tries at a row that others disturb
GRACE_SECONDS = 20.0
USER_ERROR = 2
# Slurm's preemption and scancel, Ctrl-C, and the warning that our scripts ask for before a time limit.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def main(framework: str, arguments: list[str] | None = None) -> int:
    """The command line of ``<framework>/run.py``."""
    parser = argparse.ArgumentParser(
        prog=f"{framework}/run.py", description=f"Measure {framework} in this interpreter."
    )
    add_options(parser)
    parser.add_argument("--target", type=target_name, default="local", metavar="NAME", help="recorded in the rows")
    parser.add_argument("--data", type=folder_name, default=ROOT / "data", metavar="DIR", help="folder of data sets")
    parser.add_argument("--run_folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--paired", default="", metavar="FRAMEWORK=PYTHON", help="measure that one, too, in turn")
    parser.add_argument("--spawn", action="store_true", help="start the processes for all devices, on this machine")
    # Of a measuring process, from its supervisor:
    for name in ("--row", "--rank", "--ranks", "--local_rank"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        version = importlib.metadata.version(FRAMEWORKS[framework])
    except importlib.metadata.PackageNotFoundError:
        parser.error(
            f"{sys.executable} has no {FRAMEWORKS[framework]}; 'make {framework}-env' makes an interpreter that has"
        )
    if args.run_folder is not None:
        if args.cpus:  # before the framework makes its threads
            os.sched_setaffinity(0, map(int, args.cpus.split(",")))
        world = World(args.rank or 0, args.ranks or 1, args.local_rank or 0, args.meet)
        code = measure(Run(args.run_folder), args.row, args.data, args.device, version, world)
        if world.size > 1:
            # Threads of both frameworks' collectives outlive these, and now and then crash an interpreter that is taken
            # down ("terminate called without an active exception"), or wait there for ranks that are gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    if args.benchmark is None or args.use_case is None:
        parser.error("--benchmark and --use_case are needed")
    check_use_cases(parser, args, (args.use_case,))
    if args.use_case in MANY and (args.nodes or 1) * (args.devices or 1) < 2:
        parser.error(f"use case {args.use_case} needs several devices: --devices, and --nodes, say how many")
    if args.weights is not None and not args.weights.endswith(SAFETENSORS):
        parser.error(f"--weights: run.py reads {SAFETENSORS} files; 'main.py --weights' takes the others, too")
    # -u: what a crash leaves unwritten in a buffer is what one needs to read.
    commands = {framework: [sys.executable, "-u", str(Path(sys.argv[0]).resolve())]}
    if args.paired:
        other, _, python = args.paired.partition("=")
        if other not in FRAMEWORKS or other == framework or shutil.which(python) is None:
            parser.error(f"--paired {args.paired}: another framework's name, '=' and its interpreter are valid")
        commands[other] = [python, "-u", str(ROOT / other / "run.py")]
    options = {
        name: getattr(args, name)
        for name in ("benchmark", "use_case", "preset", "precision", "device", "target", "weights", "size")
    } | {name: getattr(args, name) for name in VARIANTS}
    options |= {"nodes": args.nodes or 1, "devices_per_node": args.devices or 1}
    try:
        return _supervise(Job(PAIRED if args.paired else framework, **options), args.data, args.spawn, commands)
    except OSError as error:
        print(f"{framework}/run.py: {error.filename or 'results'}: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR


class _Stopped(BaseException):
    """A signal asked the run to end. No Exception: wandb, or its sink, would take it for one of wandb's own."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


def _may_share(job: Job) -> bool:
    """Whether small proofs may compute beside it: JAX takes most of a GPU's memory, and a TPU has one process."""
    return job.small_proof and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _open_run(job: Job, results: Results, script: str | None) -> Run | None:
    """The folder that the driver made for this job, or a new one for a script that was started by hand.

    None where the driver's run was cancelled before it began. A job that Slurm starts over gets a new one: half a
    measurement from each life would be none.
    """
    run_id = os.environ.pop("DUEL_RUN_ID", None)
    if run_id is not None:
        run = results.run(run_id)
        status = run.stored_status()
        # Lost: some other cluster's Slurm was asked, and did not know the job.
        if status.get("state") in (QUEUED, LOST) and "started" not in status:
            return run
        if status.get("state") == CANCELLED and "started" not in status:
            return None
    run = results.run(job.run_id())
    run.create(job.rows(), script=script, owner=this_process(), target=job.target)
    return run


def _supervise(job: Job, data: Path, spawn: bool, commands: Commands) -> int:
    results = Results(ROOT / "results")
    place = ranks.place()
    if place.rank > 0:
        if place.size != job.ranks:
            return 0  # rank 0 says what is wrong
        for number in STOPS:
            signal.signal(number, _stop)
        try:
            return ranks.assist(place, ranks.meeting(results.folder), commands)
        except _Stopped as stopped:
            return 128 + signal.Signals[str(stopped)].value
    for number in STOPS:
        signal.signal(number, _stop)
    # The script hands over its own text; what comes in by '$(...)' has lost the last line's end.
    script = os.environ.pop("DUEL_SCRIPT", None)
    script = None if script is None else script + "\n"
    run = _open_run(job, results, script)
    if run is None:
        print("this run was cancelled before it started", flush=True)
        return 0
    # Only a job that is ours, whole: inside someone's salloc or notebook SLURM_JOB_ID is there too.
    slurm_job_id = os.environ.pop("DUEL_SLURM_JOB_ID", None)
    slurm = {"slurm_job_id": slurm_job_id} if slurm_job_id else {}
    run.write_status(
        owner=this_process(), user=probes.user(), phase="waiting for another run on this machine to end", **slurm
    )
    print(f"run {run.id}, folder {os.path.relpath(run.folder, ROOT)}", flush=True)
    sink: WandbSink | None = None
    team: _Team | None = None
    state, cause, code = FAILED, "", 1
    alone = contextlib.ExitStack()
    try:
        # In a Slurm allocation the devices are the job's own; elsewhere two runs at once would void both.
        if "SLURM_JOB_ID" not in os.environ:
            alone.enter_context(locked(results.device_lock, wait=True, shared=_may_share(job)))
        if run.stored_status()["state"] == CANCELLED:  # while it waited
            raise _Stopped(signal.SIGTERM.name)
        run.write_status(state=RUNNING, started=utc(), phase="starting", owner=this_process())
        common = _common_columns(script) | {"group": _group(run)}
        rows = [row.replace(**common) for row in run.rows()]
        for row in rows:
            run.write_row(row)
        if place.size != (1 if spawn else job.ranks):
            raise UserError(
                f"{job.ranks} tasks are valid, one for each device of the job; the target starts {place.size} "
                "(--ntasks, --ntasks-per-node)"
            )
        if job.use_case != VALIDATE:  # a proof has no curves to watch
            sink = WandbSink(run.folder, rows, probes.environment(), _group(run))
            run.write_status(wandb=sink.note)
            print(sink.note, flush=True)
        reader = MetricsReader(run.metrics)
        options = ["--data", str(data), *(["--device", job.device] if job.device else [])]
        team = _Team(run, job.ranks, results, commands, options, spawn)
        lost: set[int | None] = set()  # points of which no ratio can be made any more
        for row in rows:
            again = AGAIN if job.framework == PAIRED and row.point not in lost else 0
            if not _run_row(run, row, team, reader, sink, again):
                lost.add(row.point)
        state, cause, code = _verdict(run.rows())
    except UserError as error:
        cause, code = f"input: {error}", USER_ERROR
    except ranks.Missing as error:
        cause = str(error)
    except _Stopped as stopped:
        state, cause, code = CANCELLED, f"ended by {stopped}", 128 + signal.Signals[str(stopped)].value
        if str(stopped) == signal.SIGUSR2.name:
            state, cause = FAILED, f"{cause}: Slurm warned that the time limit, or a preemption, was near"
    except Exception as error:  # not hidden, but its words belong into the record too
        cause = describe(error)
        raise
    finally:
        # From here on a second signal must not cut the record short.
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        if team is not None:
            team.close()
        run.settle(state=state, cause=cause, exit_code=code)
        alone.close()  # not before: processes of an ended row would run into the next run's
        try:
            rows = [row for row in results.merge(wait=False) if row.run_id == run.id]
        except UserError as error:  # the row is safe in its own file; whoever merges next says so again
            print(f"not merged: {error}", file=sys.stderr)
            rows = []
        if sink is not None:
            sink.finish(rows or run.rows(), code)
            # It may have given up long before the end, too.
            if sink.note != run.stored_status().get("wandb"):
                run.write_status(wandb=sink.note)
                print(sink.note, flush=True)
    print(f"run {run.id}: {state}" + (f": {cause}" if cause else ""), flush=True)
    return code


def _group(run: Run) -> str:
    """What both sides of a pair have in common, through all attempts; by hand the id without its framework."""
    try:
        pair = run.launch().get("pair")
    except UserError:  # damaged, which 'status' tells; no reason not to measure
        pair = None
    return str(pair or run.id.partition("_")[2])


def _common_columns(script: str | None) -> dict[str, Any]:
    sha, dirty = probes.git(ROOT)
    missing = {} if sha else {"git_sha": "the code is not in a git checkout", "git_dirty": "no git checkout"}
    slurm = os.environ.get("SLURM_JOB_ID")
    missing |= {} if slurm else {"slurm_job_id": "not run under Slurm", "restarts": "not run under Slurm"}
    missing |= {} if script else {"script": "run.py was called without one"}
    columns: dict[str, Any] = {"user": probes.user(), "host": os.uname().nodename, "git_sha": sha, "git_dirty": dirty}
    columns |= {"slurm_job_id": slurm, "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0) if slurm else None}
    return columns | {"script": script_state(script) if script else None, "missing": missing}


def _verdict(rows: list[Row]) -> tuple[str, str, int]:
    failed = [row for row in rows if row.status not in (FINISHED, SKIPPED)]
    if failed:
        code = USER_ERROR if (failed[0].cause or "").startswith("input: ") else 1
        return FAILED, failed[0].cause or "", code
    if all(row.status == SKIPPED for row in rows):
        return SKIPPED, rows[0].cause or "", 0
    return FINISHED, "", 0


class _Team:
    """Who measures a run's rows: a process of this supervisor, and on many devices one of each other rank's."""

    def __init__(
        self, run: Run, size: int, results: Results, commands: Commands, options: list[str], spawn: bool
    ) -> None:
        self._run, self._commands, self._options = run, commands, options
        self._cpus = ranks.shares(size) if spawn else [[] for _ in range(size)]
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")  # of the row's compilers
        self.chief: ranks.Chief | None = None
        if size == 1:
            return
        run.write_status(phase=f"waiting for {size - 1} other ranks")
        if spawn:
            os.environ["DUEL_MEETING"] = run.id
        self.chief = ranks.Chief(size, ranks.meeting(results.folder))
        try:
            for rank in range(1, size) if spawn else ():
                own = {"DUEL_RANK": str(rank), "DUEL_RANKS": str(size)}
                self._spawned.append(
                    subprocess.Popen([sys.executable, "-u", *sys.argv], env=os.environ | own, start_new_session=True)
                )
            self.chief.gather()
        except BaseException:
            self.close()
            raise

    def start(self, row: Row) -> "subprocess.Popen[bytes]":
        """Start this row's measuring processes; returns the one here."""
        number, here, framework = row.row or 0, self._options, str(row.framework)
        self._caches.cleanup()
        self._caches = tempfile.TemporaryDirectory(prefix="duel-")
        if self.chief is not None and row.device_count != 1:
            here = [*here, *self.chief.start(self._run, number, framework, self._options, self._cpus)]
        cpus = self._cpus[0] or _chosen_cpus(row)
        here = [*here, "--cpus", ",".join(map(str, cpus))] if cpus else here
        # A session of its own: Ctrl-C reaches the supervisor alone, which then ends the row in order.
        return subprocess.Popen(
            [*self._commands[framework], "--run_folder", str(self._run.folder), "--row", str(number), *here],
            env=ranks.environment(self._caches.name),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def close(self) -> None:
        """Send all home."""
        self._caches.cleanup()
        if self.chief is not None:
            self.chief.close()
        for process in self._spawned:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ranks.END_SECONDS)
            process.kill()


def _chosen_cpus(row: Row) -> list[int]:
    """Those that the switch ``threads`` leaves to the row; none where it leaves all."""
    asked = re.search(r"\+threads=(\d+)", str(row.mode))
    return probes.usable_cpus()[: int(asked[1])] if asked else []


def _run_row(run: Run, row: Row, team: _Team, reader: MetricsReader, sink: WandbSink | None, again: int = 0) -> bool:
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


def _try_row(run: Run, row: Row, team: _Team, reader: MetricsReader, sink: WandbSink | None) -> dict[int, str]:
    """One try at a row; on many devices the end of what each rank said that ended as it should not have."""
    run.write_row(row.replace(status=RUNNING, started=utc()))
    before = _size(run.log)
    process = team.start(row)
    chief = team.chief if row.device_count != 1 else None
    copier = threading.Thread(target=_copy_output, args=(process, run.log), daemon=True)
    copier.start()
    deaths: dict[int, str] = {}
    heard, silent = time.monotonic(), 0.0
    try:
        while process.poll() is None and not deaths and silent < SILENCE_SECONDS:
            heard = time.monotonic() if _pass_on(run, reader, sink) else heard
            time.sleep(POLL_SECONDS)
            deaths = chief.deaths() if chief else {}
            silent = time.monotonic() - heard
        if chief:
            deaths = _wind_up(process, chief)
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
    if row.status == FINISHED and row.device_count != 1:
        row = _with_efficiency(row, run.rows())
        run.write_row(row)
    others = {rank: said for rank, said in deaths.items() if rank}
    if others:
        for rank, said in others.items():
            text = f"--- rank {rank}, the end of log.{rank}.txt\n{said}\n"
            with open(run.log, "a", encoding="utf-8") as log:
                log.write(text)
            print(text, flush=True)
        run.write_row(row.replace(status=FAILED, cause=_first_cause(row, process.returncode, others), ended=utc()))
    elif row.status not in TERMINAL:
        cause = _cause(process.returncode)
        if silent >= SILENCE_SECONDS:
            cause = f"hung: not a word for {silent:.0f} s; the last was '{run.stored_status().get('phase')}'"
        run.write_row(row.replace(status=FAILED, cause=cause, ended=utc()))
    return deaths


def _with_efficiency(row: Row, rows: list[Row]) -> Row:
    """``row`` of many devices with what its throughput is worth beside that on one, which was planned just before."""
    wanted = (row.framework, row.repeat, (row.point or 0) - 1)
    alone = [other for other in rows if (other.framework, other.repeat, other.point) == wanted][-1]
    if alone.status != FINISHED or not alone.throughput or not row.throughput or not row.device_count:
        return row.replace(missing={"scaling_efficiency": "the row on one device did not finish"})
    return row.replace(scaling_efficiency=row.throughput / (row.device_count * alone.throughput))


def _wind_up(process: "subprocess.Popen[bytes]", chief: ranks.Chief) -> dict[int, str]:
    """End a row on many devices whose first process has ended: all others soon do, or are told to.

    Returns what those said that ended by themselves and as they should not have: a death takes others along.
    """
    until = time.monotonic() + ranks.END_SECONDS
    while time.monotonic() < until and not (chief.ended() and process.poll() is not None):
        time.sleep(ranks.POLL_SECONDS)
    deaths = chief.deaths()
    if process.poll() is None:
        process.terminate()
    if not chief.ended():
        chief.stop()
        until = time.monotonic() + ranks.END_SECONDS
        while time.monotonic() < until and not chief.ended():
            time.sleep(ranks.POLL_SECONDS)
    return deaths


def _first_cause(row: Row, returncode: int, others: dict[int, str]) -> str:
    """What became of all ranks, in one line; that one has lost another comes behind what that one died of."""
    causes = [f"rank {rank}: {_last_line(said)}" for rank, said in others.items()]
    if returncode > 0:  # else it was ended by us
        own = row.cause or _cause(returncode)
        if own.startswith("input: "):
            return own
        causes.insert(0, f"rank 0: {own}")
    return "; ".join(sorted(causes, key=lambda said: any(words in said.lower() for words in BEREAVED)))


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
    said = [event for event in events if event["event"] in PROGRESS]
    progress = {name: value for event in said for name, value in event.items() if name not in ("event", "time")}
    if events or time.time() - run.stored_status()["updated"] > HEARTBEAT_SECONDS:
        run.write_status(**progress)
    return bool(events)


def _cause(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL; where memory ran out, this is what the kernel does"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    return f"its process ended with exit code {returncode} and without a word; see log.txt"
