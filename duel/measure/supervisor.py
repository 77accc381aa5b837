"""What ``run.py`` does, the same in both frameworks.

``python <framework>/run.py --benchmark B --use_case N`` supervises: it owns the run's folder, starts one fresh
process of itself for each row, streams what that writes to Weights & Biases, and records how it ended, whatever the
reason. Such a process (``--run_folder F --row K``) measures one row and is the only one that loads the framework.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from duel import ROOT, tree, variables
from duel.catalogue import FIT, PAIRED, PRESETS, VALIDATE
from duel.comparability import judged
from duel.errors import UserError, kind_of
from duel.files import locked, utc
from duel.job import TRAINING, Job, script_state
from duel.measure import assistant, command_line, continuing, growing, probes, profiled, ranks, search
from duel.measure.attempt import Commands, Team, measure_row, profile_row
from duel.measure.device import World, keep_memory
from duel.measure.row import FolderGoneError, describe, measure
from duel.measure.sinks import MetricsReader, WandbSink
from duel.options import VARIANTS
from duel.record import Row
from duel.results import Results, Run
from duel.states import CANCELLED, FAILED, FINISHED, LOST, QUEUED, RUNNING, SKIPPED
from duel.status import this_process
from duel.table import evidence, update
from duel.tries import counted

RETRIES = 4  # further tries at a row that others disturb
TRIAL_RETRIES = 2  # and at a trial of a search, which is one of many
IN_VAIN = 3  # trials of a search that stayed disturbed: the machine is busy
USER_ERROR = 2
STOPS = (signal.SIGTERM, signal.SIGINT, *ranks.WARNINGS)  # with Slurm's preemption and scancel, and Ctrl-C


def main(framework: str, arguments: list[str] | None = None) -> int:
    """Run the command line of ``<framework>/run.py``."""
    args = command_line.parsed(framework, sys.argv[1:] if arguments is None else arguments)
    if args.run_folder is not None:
        return _measure(args, framework)
    named = ("benchmark", "use_case", "preset", "precision", "device", "target", "weights", "size", *VARIANTS)
    options = {name: getattr(args, name) for name in named}
    options |= {"nodes": args.nodes or 1, "devices_per_node": args.devices or 1}
    options |= {name: getattr(args, name) for name in ("pairs", "trials", "profile", *TRAINING)}
    try:
        return _supervise(Job(PAIRED if args.paired else framework, **options), args.data, args.spawn, args.commands)
    except OSError as error:
        print(f"{framework}/run.py: {error.filename or 'results'}: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR


def _measure(args: argparse.Namespace, framework: str) -> int:
    """Measure one row, as one of its ranks, in this process."""
    if variables.starter(framework) in os.environ:  # the lines before us may have set what must not reach us
        for name in filter(ranks.kept_out, list(os.environ)):
            del os.environ[name]
    if args.keep_memory:  # before the framework makes its threads, as below
        keep_memory()
    if args.cpus:
        os.sched_setaffinity(0, map(int, args.cpus.split(",")))
    if args.profile:
        return profiled.measure(Run(args.run_folder), args.row, args.data, args.device, traced=not args.untraced)
    world = World(args.rank or 0, args.ranks or 1, args.local_rank or 0, args.meet)
    try:
        code = measure(Run(args.run_folder), args.row, args.data, args.device, args.version, world)
    except FolderGoneError as error:
        print(f"error: {error}", file=sys.stderr)
        code = USER_ERROR
    if world.size > 1:
        # Threads of both frameworks' collectives outlive them, and now and then crash the interpreter at shutdown
        # ("terminate called without an active exception"), or wait there for ranks that are gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _Stopped(BaseException):
    """A signal asked the run to end. Not an Exception: wandb, or its sink, would take it for one of wandb's own."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


def _left_to_rank_0(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN this is not inherited by the measuring process."""


def _may_share(job: Job) -> bool:
    """Return whether small proofs may run next to it: JAX takes most of a GPU's memory, and a TPU has one process."""
    return job.small_proof and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _open_run(job: Job, results: Results, script: str | None) -> Run | None:
    """Return the run that the driver created for this job, or a new one for a script that was started by hand.

    Return None, and say why, if the driver's run was cancelled before it began, or is another job's by now. A job that
    Slurm restarts gets a new one, since half a measurement from each start would not be one; a training goes on.
    """
    run_id = os.environ.pop("DUEL_RUN_ID", None)
    if run_id is not None:
        run = results.run(run_id)
        status = run.stored_status()
        # Lost: another cluster's Slurm was asked, and did not know the job.
        if status.state in (QUEUED, LOST) and status.queued and not status.started:
            return run
        if status.state == CANCELLED and not status.started:
            print("this run was cancelled before it started", flush=True)
            return None
        try:
            if continuing.take_up(job, run, script):
                return run
        except continuing.TakenOver as error:
            print(error, flush=True)
            return None
    run = results.run(job.run_id())
    run.create(job.rows(), script=script, owner=this_process(), target=job.target)
    return run


class _Work:
    """What a supervisor holds open while its run is measured; ``close`` ends it all and leaves the record."""

    def __init__(self, job: Job, run: Run, results: Results) -> None:
        self._job, self._run, self._results = job, run, results
        self._alone = contextlib.ExitStack()
        self._sink: WandbSink | None = None
        self._team: Team | None = None

    def measure(self, place: ranks.Place, data: Path, spawn: bool, commands: Commands, script: str | None) -> None:
        """Measure every row in turn."""
        job, run = self._job, self._run
        # In a Slurm allocation the devices are the job's own; elsewhere two runs at once would void both.
        if "SLURM_JOB_ID" not in os.environ:
            self._alone.enter_context(locked(self._results.device_lock, wait=True, shared=_may_share(job)))
        if run.stored_status().state == CANCELLED:  # while it waited
            raise _Stopped(signal.SIGTERM.name)
        run.write_status(state=RUNNING, started=utc(), phase="starting", owner=this_process())
        common = _common_columns(script) | {"group": run.group}
        for row in run.left():
            run.write_row(row.replace(**common))
        every = run.rows()
        rows = run.left()
        if place.size != (1 if spawn else job.ranks):
            raise UserError(
                f"the job needs {job.ranks} tasks, one for each device; the target starts {place.size} "
                "(--ntasks, --ntasks-per-node)"
            )
        if job.use_case != VALIDATE:  # a proof has no curves to watch
            self._sink = WandbSink(run.folder, every, probes.environment(), run.group)
            run.write_status(wandb=self._sink.note)
            print(self._sink.note, flush=True)
        reader = MetricsReader(run.metrics)
        options = ["--data", str(data), *(["--device", job.device] if job.device else [])]
        self._team = Team(run, job.ranks, self._results, commands, options, spawn)
        lost: set[int | None] = set()  # points for which no ratio is possible any more
        following = iter(rows)
        if job.trials:
            following = search.rows(run, rows, job.trials, self._results.folder)
        elif job.preset == FIT:
            following = growing.rows(run, rows)
        for nth, row in enumerate(following, 1):
            done = len(counted(every)) - len(rows)
            part = f"row {done + nth} of {done + len(rows)}, {row.framework}" if done + len(rows) > 1 else ""
            part = f"trial {nth}, {row.framework} {row.mode}" if job.trials else part
            run.write_status(part=part, phase="starting")
            if not measure_row(run, row, self._team, reader, self._sink, self._retries(row, lost)):
                lost.add(row.point)
        if job.profile:  # not between the rows of a pair
            for row in counted(run.rows()):
                try:
                    profile_row(run, row, self._team)
                except (OSError, UserError) as error:  # such as a full disk: the rows are measured, and stay
                    print(f"profile: row {(row.row or 0) + 1} has none: {error}", flush=True)

    def _retries(self, row: Row, lost: set[int | None]) -> int:
        """Return how often ``row`` may be measured again if others disturb it; not in ``lost`` points."""
        if self._job.trials:
            return TRIAL_RETRIES if len(lost) < IN_VAIN else 0
        claims = self._job.framework == PAIRED and PRESETS[self._job.preset].thorough
        return RETRIES if claims and row.point not in lost else 0

    def close(self, state: str, cause: str, why: str | None, code: int) -> list[Row]:
        """Close everything; return the rows of the run, judged."""
        run, sink = self._run, self._sink
        if self._team is not None:
            self._team.close()
        if not run.folder.is_dir():  # nothing can be recorded
            self._alone.close()
            return []
        run.settle(state=state, cause=cause, why=why, exit_code=code)
        self._alone.close()  # not before: processes of an ended row would overlap the next run's
        try:
            rows = [row for row in update(self._results, wait=False).rows if row.run_id == run.id]
        except (OSError, UserError) as error:  # the row is safe in its own file; the next merge reports this again
            print(f"not merged: {error}", file=sys.stderr)
            rows = []
        if sink is not None:
            sink.finish(rows or run.rows(), code)
            # It may have given up long before the end, too.
            if sink.note != run.stored_status().wandb:
                run.write_status(wandb=sink.note)
                print(sink.note, flush=True)
        return rows or judged(run.rows(), lambda row: evidence(row, self._results))


def _supervise(job: Job, data: Path, spawn: bool, commands: Commands) -> int:
    results = Results(ROOT / "results")
    place = ranks.place()
    removed = variables.take_out(os.environ)  # here, so that no child process has them
    if removed and place.rank == 0:
        print(f"removed, because no target sets them here: {', '.join(removed)}", flush=True)
    for number in STOPS:
        # Slurm tells all ranks. Rank 0 ends the others: it may need them for a training's last step and checkpoint.
        signal.signal(number, _stop if place.rank == 0 else _left_to_rank_0)
    if place.rank > 0:  # if their number is not what the job needs, rank 0 reports it
        return assistant.assist(place, ranks.meeting(results.folder), commands) if place.size == job.ranks else 0
    # The script passes its own text; '$(...)' has stripped the final newline.
    script = os.environ.pop("DUEL_SCRIPT", None)
    script = None if script is None else script + "\n"
    run = _open_run(job, results, script)
    if run is None:
        return 0
    # Only if the whole job is ours: inside someone's salloc or notebook SLURM_JOB_ID is set, too.
    slurm_job_id = os.environ.pop("DUEL_SLURM_JOB_ID", "")
    phase = "waiting for another run on this machine to end"
    run.write_status(owner=this_process(), user=probes.user(), phase=phase, slurm_job_id=slurm_job_id)
    print(f"run {run.id}, folder {os.path.relpath(run.folder, ROOT)}", flush=True)
    work = _Work(job, run, results)
    state, cause, code = FAILED, "", 1
    why: str | None = "code"
    try:
        work.measure(place, data, spawn, commands, script)
        state, cause, why, code = _verdict(run.rows(), job)
    except UserError as error:
        cause, why, code = f"input: {error}", "input", USER_ERROR
    except ranks.Missing as error:
        cause, why = str(error), "infrastructure"
    except _Stopped as stopped:
        state, cause, why = CANCELLED, f"ended by {stopped}", "told to end"
        code = 128 + signal.Signals[str(stopped)].value
        if str(stopped) in [number.name for number in ranks.WARNINGS]:
            state, why = FAILED, "warned"
            cause += ": Slurm warned that the time limit, or a preemption, was near"
    except Exception as error:  # not hidden, but its text belongs in the record too
        cause, why = describe(error), kind_of(repr(error))
        if run.folder.is_dir():
            raise
        cause, why = str(FolderGoneError(run, error)), "infrastructure"
    finally:
        # From here on a second signal must not cut the record short.
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        if why in ("told to end", "warned") and _is_complete(run):  # it came after everything was measured
            state, cause, why, code = _verdict(run.rows(), job)
        if job.dataset and run.folder.is_dir():
            continuing.note_time(run)
        rows = work.close(state, cause, why, code)
        if job.dataset and why == "warned" and slurm_job_id and run.folder.is_dir():
            print(continuing.requeue(job, run, script, slurm_job_id), flush=True)
    print(f"run {run.id}: {state}" + (f": {cause}" if cause else ""), flush=True)
    _print_verdicts(run, rows)
    return code


def _print_verdicts(run: Run, rows: list[Row]) -> None:
    """Print which pairs are comparable. The ratio needs scipy, which a framework's environment may not have."""
    mine = [row for row in rows if row.comparable]
    pairs = Counter(str(row.comparable) for row in mine if row.framework == mine[0].framework)
    for verdict, times in pairs.items():
        print(f"{times} of {pairs.total()} pairs {verdict}", flush=True)
    if pairs:
        print(f"'python main.py compare {run.id}' prints both sides and the ratio", flush=True)


def _common_columns(script: str | None) -> dict[str, Any]:
    sha, dirty = tree.commit()
    missing = {} if sha else {"git_sha": "the code is not in a git checkout", "git_dirty": "no git checkout"}
    slurm = os.environ.get("SLURM_JOB_ID")
    missing |= {} if slurm else {"slurm_job_id": "not run under Slurm", "restarts": "not run under Slurm"}
    missing |= {} if script else {"script": "run.py was called without one"}
    columns: dict[str, Any] = {"user": probes.user(), "host": os.uname().nodename, "git_sha": sha, "git_dirty": dirty}
    columns |= {"slurm_job_id": slurm, "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0) if slurm else None}
    return columns | {"script": script_state(script) if script else None, "missing": missing}


def _is_complete(run: Run) -> bool:
    """Return whether every row has been measured or need not be."""
    rows = counted(run.rows())
    return bool(rows) and all(row.status in (FINISHED, SKIPPED) for row in rows)


def _verdict(rows: list[Row], job: Job) -> tuple[str, str, str | None, int]:
    """Return the state, cause, its kind and the exit code of a run whose rows have all been tried.

    In a search, a row that does not run is an answer too, if another of its side did.
    """
    rows = counted(rows)
    searches = job.trials or job.preset == FIT
    ran = {row.framework for row in rows if row.status == FINISHED} if searches else set()
    rows = [row for row in rows if row.status == FINISHED or row.framework not in ran]
    failed = [row for row in rows if row.status not in (FINISHED, SKIPPED)]
    if failed:
        code = USER_ERROR if failed[0].why == "input" else 1
        return FAILED, failed[0].cause or "", failed[0].why, code
    if all(row.status == SKIPPED for row in rows):
        return SKIPPED, rows[0].cause or "", None, 0
    return FINISHED, "", None, 0
