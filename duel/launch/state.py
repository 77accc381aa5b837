"""What runs are doing: their own folders first, Slurm's word for what they do not say.

A run's folder is the truth about what it did: whatever ended it, a finished run says so itself. Slurm explains a run
that waits, and one that ended without a word. What neither knows is ``lost``, never finished.
"""

import calendar
import contextlib
import json
import os
import pwd
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duel.errors import UserError
from duel.launch import queue
from duel.record import CANCELLED, FAILED, FINISHED, LOST, QUEUED, RUNNING, TERMINAL
from duel.results import LOST_AFTER_SECONDS, Results, Run

SHOWN = 20
TAIL_BYTES = 4096
# Slurm keeps its word on a job for at least this long; older ones are not asked for again.
EXPLAIN_SECONDS = 7 * 24 * 3600.0
# A submission may begin and end while Slurm is asked; a run that is younger is not yet missed.
SUBMITTING_SECONDS = 60.0
# How a run ends itself when it is told to; who told it, and why, only Slurm knows.
TOLD = ("ended by SIGTERM", "ended by SIGUSR2")


@dataclass(frozen=True)
class Look:
    """Every run, as it is now."""

    statuses: list[dict[str, Any]]  # status.json made true, with launch.json's and Slurm's words
    by_hand: list[queue.SlurmJob]  # jobs of our scripts that wait and have no run yet
    notes: list[str]  # what could not be asked
    answer: queue.Answer | None  # Slurm's, if it was asked
    asked: float  # when, in s since 1970

    def only(self, statuses: list[dict[str, Any]]) -> "Look":
        """The same, for these statuses alone."""
        return replace(self, statuses=statuses, by_hand=[])


def look(results: Results, runs: list[Run] | None = None, before: Look | None = None) -> Look:
    """The state of ``runs`` (or of all), from one squeue and at most one sacct, or from the answer that ``before`` had.

    A run that Slurm knows to have ended, and that does not say so itself, is settled with Slurm's word.
    """
    intended = _intended(results)  # first: a submission may come to its end while Slurm is asked
    runs = results.runs() if runs is None else runs
    statuses = [_own(run) for run in runs]
    open_runs = [(run, status) for run, status in zip(runs, statuses, strict=True) if _needs_slurm(status)]
    unsettled = any(status["state"] not in TERMINAL - {LOST} for _, status in open_runs)
    answer, asked = (before.answer, before.asked) if before else (None, 0.0)
    if before is None and shutil.which("squeue"):
        users = {str(status["user"]) for _, status in open_runs if status.get("user")} | {user()}
        since = min((status["since"] for _, status in open_runs), default=time.time())

        def known(jobs: list[queue.SlurmJob]) -> bool:
            there = {job.name for job in jobs} | {job.id for job in jobs}
            return all(s["run_id"] in there or s.get("slurm_job_id") in there for _, s in open_runs)

        answer, asked = queue.ask(users, since, known), time.time()
    if answer is not None:
        ids = {job.id: job for job in answer.jobs}
        names = {job.name: job for job in answer.jobs}
        for run, status in open_runs:
            # A driver's run is known by its name; a number alone may be another job's, on another cluster say.
            by_number = None if status.get("job") else ids.get(status.get("slurm_job_id") or "")
            job = names.get(run.id) or by_number
            # An old answer explains a run that still waits. What has begun or ended since, it cannot know of.
            if before is None or (job is not None and status["state"] == QUEUED):
                _explain(run, status, job, answer, run.id in intended)
    elif open_runs:
        for _, status in open_runs:
            status.setdefault("words", "Slurm is not here to be asked")
    mine = {status.get("slurm_job_id") for status in statuses} | {status["run_id"] for status in statuses}
    stems = {path.stem for path in (results.folder.parent / "slurm_scripts").glob("*.sh")}
    by_hand = [
        job
        for job in (answer.jobs if answer else [])
        if job.name in stems and job.id not in mine and queue.judge(job).kind != queue.ENDED
    ]
    return Look(statuses, by_hand, answer.notes if answer and unsettled else [], answer, asked)


def with_verdicts(seen: Look, results: Results) -> Look:
    """The same, with what the pair of each finished run comes to."""
    from duel.report import pairs  # here, because few commands need it

    try:
        verdicts = pairs.by_run(results)
    except ValueError as error:
        return replace(seen, notes=[*seen.notes, f"verdicts: {error}"])
    for status in seen.statuses:
        if status["state"] == FINISHED and status["run_id"] in verdicts:
            status["verdict"] = verdicts[status["run_id"]]
    return seen


def user() -> str:
    """Under which name Slurm knows us; by the uid, as Slurm does, and not by variables such as USER."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())


def _own(run: Run) -> dict[str, Any]:
    """What the run's folder says."""
    status = run.status()
    try:
        launch = run.launch()
    except UserError as error:
        launch = {"damaged": str(error)}
    for name in ("pair", "after", "slurm_job_id", "user", "job", "slurm", "damaged", "code"):
        if name in launch and name not in status:
            status[name] = launch[name]
    return status


def _needs_slurm(status: dict[str, Any]) -> bool:
    """Whether Slurm may know more of a run than its folder says."""
    in_slurm = "slurm_job_name" in status.get("owner", {}) or "slurm_job_id" in status
    if not in_slurm:
        return False
    if "queued" not in status:
        return False  # its folder is damaged, and says so
    status["since"] = _seconds(status["queued"])
    if status["state"] in (QUEUED, RUNNING) or (status["state"] == LOST and "ended" not in status):
        return True
    told = str(status.get("cause", "")).startswith(TOLD) and "slurm" not in status
    return told and time.time() - status["since"] < EXPLAIN_SECONDS


def _seconds(utc: str) -> float:
    """The inverse of ``duel.results.utc``: s since 1970."""
    return calendar.timegm(time.strptime(utc, "%Y-%m-%dT%H:%M:%SZ"))


def _intended(results: Results) -> set[str]:
    """Runs that a driver is about to submit, or was when it died."""
    try:
        return set(json.loads(results.intent.read_text())["runs"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def _explain(
    run: Run, status: dict[str, Any], job: queue.SlurmJob | None, answer: queue.Answer, intended: bool
) -> None:
    """Put Slurm's word into ``status``, and settle the run where that word is the last one."""
    if job is None:
        _unknown(run, status, answer, intended)
        return
    verdict = queue.judge(job)
    status["slurm_job_id"] = job.id
    status["slurm"] = {"state": job.raw, "kind": verdict.kind, "cause": verdict.cause, "words": verdict.words}
    status["slurm"] |= {"nodes": job.nodes, "start": job.start, "reason": job.reason, "limit": job.limit}
    if status["state"] == LOST and verdict.kind != queue.ENDED and status.get("started") is None:
        status |= {"state": QUEUED}
    if status["state"] == LOST and verdict.kind == queue.ALIVE:
        status |= {"state": RUNNING, "cause": ""}
    if verdict.kind != queue.ENDED:
        requeued = verdict.kind in (queue.WAITING, queue.BLOCKED) and status["state"] == RUNNING
        if requeued and _last_word(run) == RUNNING:
            cause = "Slurm put its job back into the queue: a new run begins there"
            _settle(run, status, FAILED, cause, queue.PREEMPTED)
        return
    if not answer.controller and verdict.cause in (queue.PREEMPTED, queue.INFRASTRUCTURE):
        return  # it may be back in the queue, which only the controller knows at once
    state = _last_word(run)  # it may have ended, by itself, since it was read
    if state in TERMINAL - {LOST}:
        _keep(run, status["slurm"])
        if status["state"] not in TERMINAL - {LOST}:
            status |= _own(run) | {"slurm": status["slurm"]}
        return
    cause, words = verdict.cause, f"Slurm: {verdict.words}"
    tail = log_tail(run, job.id)
    if cause == queue.CODE and queue.looks_out_of_memory(tail):
        cause, words = queue.OUT_OF_MEMORY, f"out of memory ({verdict.words})"
    elif cause == queue.COMPLETED:
        cause, words = queue.CODE, "incomplete: Slurm says completed, and the run has not said how it ended"
    said = [line.strip() for line in tail.splitlines() if line.strip()]
    # What Slurm's own tools add behind a failure is no more than its exit code.
    last = next((line for line in reversed(said) if not line.startswith(("srun: ", "slurmstepd: "))), "")
    if cause == queue.CODE and last:
        words += f"; the last line of its log: {last[:200]}"
    _settle(run, status, CANCELLED if cause == queue.CANCELLED else FAILED, words, cause)


def _last_word(run: Run) -> str:
    """The state in the run's folder, as it is now."""
    os.listdir(run.folder)  # on a network file system this asks the server, where reading a file may ask a cache
    return str(run.stored_status().get("state", LOST))


def _unknown(run: Run, status: dict[str, Any], answer: queue.Answer, intended: bool) -> None:
    """Neither squeue nor sacct has it."""
    if not answer.controller:
        status["words"] = "Slurm does not answer"
        return
    if status.get("user", user()) != user():
        status["words"] = f"Slurm shows nothing of it; it may not show you jobs of {status['user']}"
        return
    if status["state"] in TERMINAL - {LOST}:
        if answer.accounting:
            _keep(run, {})  # why it was told to end will not be known: not to be asked again
        return
    if intended and "slurm_job_id" not in status:
        status["words"] = "is being submitted, or that was interrupted: then the same command goes on with it"
        return
    if status["state"] == RUNNING and status["age"] < LOST_AFTER_SECONDS:
        return  # it speaks; whoever answers as Slurm here is another cluster, perhaps
    if _last_word(run) in TERMINAL - {LOST}:
        status |= _own(run)
        return
    if "slurm_job_id" not in status and time.time() - status["since"] < SUBMITTING_SECONDS:
        status["words"] = "is being submitted"
        return
    if "slurm_job_id" not in status:
        cause, why = "never submitted: Slurm knows no job of its name", queue.NEVER_RAN
    else:
        cause, why = f"it left Slurm's queue without a word, and {_forgotten(answer)}", queue.INFRASTRUCTURE
    _settle(run, status, LOST, cause, why)


def _forgotten(answer: queue.Answer) -> str:
    return "the accounting does not know it either" if answer.accounting else "the accounting cannot be asked why"


def _settle(run: Run, status: dict[str, Any], state: str, cause: str, why: str) -> None:
    """Write down how the run ended; where it cannot be written (someone else's run), only say so."""
    status |= {"state": state, "cause": cause, "why": why}
    try:
        _keep(run, status.get("slurm", {}))
        run.settle(state=state, cause=cause, why=why)
    except PermissionError:
        pass


def _keep(run: Run, word: dict[str, Any]) -> None:
    with contextlib.suppress(PermissionError, UserError):  # someone else's, or damaged: Slurm can be asked again
        run.write_launch(slurm=word)


def slurm_log(run: Run, job_id: str) -> Path:
    """Where the job's output is, unless the target's own --output says otherwise."""
    return run.folder.parent.parent / "logs" / f"{job_id}_0_log.out"


def log_tail(run: Run, job_id: str = "") -> str:
    """The end of what the run printed; empty if it printed nothing."""
    for path in (slurm_log(run, job_id), run.log, run.launcher_log):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                if tail := file.read().decode(errors="replace").strip():
                    return tail
        except FileNotFoundError:
            continue
    return ""


def describe(status: dict[str, Any]) -> str:
    """What a run is doing, in a few words."""
    slurm = status.get("slurm", {})
    if status["state"] == RUNNING:
        words = str(status.get("phase", ""))
        progress = status.get("progress", {})
        if words == "measuring" and "done" in progress:
            words += f": {progress['done']} steps of at least {progress['needed']}"
            words += f", {progress['throughput']:.4g} {progress['unit']}"
            words += f", loss {progress['loss']:.4g}" if "loss" in progress else ""
        elif words.startswith("training") and "loss" in progress:
            words += f": step {progress['step'] + 1}, loss {progress['loss']:.4g}"
        part = f"{status['part']}: " if status.get("part") else ""
        words = f"{part}{words} ({status['age']:.0f} s ago)"
        unusual = slurm.get("kind") == queue.ALIVE and slurm.get("state") != "RUNNING"
        return f"{words}; its job {slurm['words']}" if unusual else words
    if status["state"] == QUEUED:
        if slurm.get("kind") == queue.ALIVE:
            return f"its job {slurm['words']} on {slurm['nodes'] or 'its nodes'}; the run has not reported yet"
        if slurm:
            start = queue.when(slurm["start"], time.time())
            return str(slurm["words"]) + (f"; {start}" if start and slurm["kind"] == queue.WAITING else "")
        return str(status.get("words") or status.get("phase") or "waits for its turn")
    words = status.get("cause") or status.get("verdict") or ""
    told = str(words).startswith(TOLD) and slurm
    return f"{words}: {slurm['words']}" if told else str(words)


def table(seen: Look) -> str:
    """One line a run, the last ones of many; then what waits by hand, and what is not known."""
    statuses = seen.statuses
    if not statuses and not seen.by_hand:
        return "no runs yet; 'python main.py --benchmark resnet50 --use_case 1' starts two"
    recent = {status["run_id"] for status in statuses[-SHOWN:]}
    shown = [s for s in statuses if s["state"] not in TERMINAL or s["run_id"] in recent]
    lines = [(s["run_id"], _word(s), s.get("slurm_job_id") or "-", describe(s)) for s in shown]
    lines += [
        (f"{job.name} (by hand)", QUEUED, job.id, f"{queue.judge(job).words}; its run begins with it")
        for job in seen.by_hand
    ]
    width = max(len(line[0]) for line in lines)
    job_width = max(len("job"), *(len(line[2]) for line in lines))
    text = [f"{'run':{width}}  {'state':9}  {'job':{job_width}}"]
    text += [f"{a:{width}}  {b:9}  {c:{job_width}}  {d}".rstrip() for a, b, c, d in lines]
    if len(shown) < len(statuses):
        text.append(f"({len(statuses) - len(shown)} older ones: 'python main.py status --json' has all)")
    text += [f"not known: {note}" for note in seen.notes]
    return "\n".join(text)


def _word(status: dict[str, Any]) -> str:
    blocked = status["state"] == QUEUED and status.get("slurm", {}).get("kind") == queue.BLOCKED
    return "BLOCKED" if blocked else str(status["state"])


def age(seen: Look) -> str:
    """How old what is shown is."""
    now = time.strftime("%H:%M:%S")
    if seen.answer is None:
        return f"{now}: the runs' folders are as of now"
    return f"{now}: the runs' folders are as of now, Slurm's word is {time.time() - seen.asked:.0f} s old"
