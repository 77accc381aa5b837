"""Run scripts on this machine: one detached process takes its runs strictly one after the other.

submitit's local executor would start all of them at once; they would share the cores (or the one GPU) and every number
would be void. Small proofs, in which nothing is timed, run concurrently; those that need the device to themselves wait
for each other.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from duel import ROOT, datasets, files
from duel.catalogue import BENCHMARKS, FRAMEWORKS
from duel.errors import UserError
from duel.files import process_started
from duel.launch import submit
from duel.launch.schema import Cluster
from duel.launch.submit import Launch
from duel.results import Results, Run
from duel.states import FAILED, QUEUED, TERMINAL
from duel.status import Owner, this_process
from duel.table import update

GO = b"go\n"
LOG_TAIL_BYTES = 4096
MOST_PROOFS = 4  # at once: each takes up to 2 GiB
LOOK_SECONDS = 10.0  # between two checks whether a run waiting for its session was cancelled


def check_interpreter(python: str, framework: str, where: str) -> str:
    """Return the framework's version in the interpreter ``python``. Raises UserError if either is missing."""
    distribution = FRAMEWORKS[framework]
    remedy = f"'make {framework}-env' makes one, or set {where}"
    try:
        asked = _ask_version(python, distribution)
    except FileNotFoundError:
        raise UserError(f"{where}: no interpreter {python!r}; {remedy}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{where}: {python!r} does not run: {error}; {remedy}") from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{where}: {python!r} has no {distribution} ({last}); {remedy}")
    return asked.stdout.strip()


def _ask_version(python: str, distribution: str) -> "subprocess.CompletedProcess[str]":
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)


class Local:
    """Starts scripts on this machine (``duel.launch.submit.Scheduler``)."""

    def check(self, launches: list[Launch]) -> None:
        """Raise UserError if an interpreter or a data set is missing or unusable."""
        for launch in launches:
            for framework in launch.job.frameworks:
                where = f"cluster.yaml: targets.{launch.job.target}.python.{framework}"
                check_interpreter(getattr(launch.target.python, framework), framework, where)
        for name in {BENCHMARKS[launch.job.benchmark].dataset for launch in launches if not launch.job.dataset}:
            try:
                datasets.check(name, ROOT / launches[0].target.data)
            except ValueError as error:
                raise UserError(str(error)) from error

    def preview(self, launches: list[Launch], cluster: Cluster) -> None:
        """Show nothing: the runs start at once."""

    def start(self, launches: list[Launch], results: Results, say: Callable[[str], None]) -> list[Run]:
        """Make the folders and start one process that works through them; returns the runs."""
        runs = submit.create(launches, results, this_process())
        start(runs)
        return runs


def start(runs: list[Run]) -> None:
    """Start the process that works through ``runs``, whose folders exist, and hand them over to it.

    The process waits for ``GO``: until then the folders are ours, so that no status has two writers. If we die before
    that, it exits, and the runs show as lost.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with open(runs[0].folder / "worker.txt", "ab") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "duel.launch.local", *(run.id for run in runs)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    owner = Owner(this_process().host, worker.pid, process_started(worker.pid))
    for run in runs:
        run.write_status(owner=owner)
    assert worker.stdin is not None
    worker.stdin.write(GO)
    worker.stdin.close()


def work(runs: list[Run], results: Results) -> None:
    """Run each script that is still queued, not before its time; a failure of one does not stop the next.

    Those that may begin earlier go first. Small proofs run concurrently, everything else one after the other.
    """
    began = time.time()
    planned = [run.launch().job for run in runs]
    starts = [began + job.delay if job else began for job in planned]
    in_turn = sorted(zip(starts, runs, strict=True), key=lambda each: each[0])
    proofs = all(job is not None and job.small_proof for job in planned)
    at_once = min(os.cpu_count() or 1, MOST_PROOFS) if proofs else 1
    with ThreadPoolExecutor(at_once) as workers:
        for done in [workers.submit(_run, run, results, start) for start, run in in_turn]:
            done.result()


def _run(run: Run, results: Results, start: float) -> None:
    while run.stored_status().state == QUEUED and (left := start - time.time()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
    if run.stored_status().state != QUEUED:
        return  # cancelled meanwhile
    with open(run.launcher_log, "ab") as log:
        code = subprocess.run(
            ["bash", str(run.script)],
            cwd=ROOT,
            env=os.environ | {"DUEL_RUN_ID": run.id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
        ).returncode
    if run.stored_status().state not in TERMINAL:
        run.settle(state=FAILED, exit_code=code, cause=_cause(run, code), why="code")
    with contextlib.suppress(OSError, UserError):  # a results.csv that is not ours: every driver command reports it
        update(results)


def _cause(run: Run, code: int) -> str:
    if code < 0 or code > 128:
        return f"killed by signal {abs(code) % 128}"
    text = files.read(run.launcher_log, LOG_TAIL_BYTES, last=True).decode(errors="replace")
    last = (text.strip().splitlines() or ["no output"])[-1]
    return f"exit code {code}: {last}"


if __name__ == "__main__":
    if sys.stdin.buffer.readline() == GO:
        everything = Results(ROOT / "results")
        work([everything.run(run_id) for run_id in sys.argv[1:]], everything)
