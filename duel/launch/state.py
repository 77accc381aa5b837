"""What runs are doing: what their own folders report and, if they do not, what Slurm reports.

A run's folder is the truth about what it did: whatever ended it, a finished run reports that itself. Slurm explains a
run that waits, and one that ended without a report. A run that neither accounts for is ``lost``, never finished.
"""

import contextlib
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

from duel import files, index
from duel.files import Damaged
from duel.launch import array, intent, queue, reasons
from duel.launch.views import RunView, Snapshot
from duel.results import Results, Run
from duel.states import CANCELLED, FAILED, FINISHED, LOST, QUEUED, RUNNING, TERMINAL
from duel.status import LOST_AFTER_SECONDS, LaunchRecord, SlurmWord

TAIL_BYTES = 4096
RESUBMIT = "'python main.py resubmit'"
RECENT = 20  # settled runs that are looked at although nothing more is expected of them
# A submission may begin and end while Slurm is queried; a run younger than this is not yet considered missing.
SUBMITTING_SECONDS = 60.0


def look(
    results: Results,
    runs: list[Run] | None = None,
    before: Snapshot | None = None,
    ask: bool = False,
    recent: bool = False,
) -> Snapshot:
    """Return the state of ``runs`` (or all), from one squeue and at most one sacct; unless ``ask`` from the answer in
    ``before``, if that is given.

    A run that has ended according to Slurm, but has not reported it, is settled with Slurm's report. Runs that were
    settled in ``before`` are not read again. With ``recent`` only the last of the settled ones are looked at.
    """
    submissions = intent.waiting(results).values()  # first: one may be completed while Slurm is queried
    sender = intent.sender(results) if submissions else ""
    intended = {run_id: note for noted in submissions for note in [_waits(noted, sender)] for run_id in noted.runs}
    settled = {seen.id: seen for seen in before.runs if seen.is_settled} if before else {}
    found = results.names() if runs is None else [run.id for run in runs]
    left_out = _left_out(found, results, before) if recent else frozenset()
    every = [settled.get(run_id) or _own(results.run(run_id)) for run_id in found if run_id not in left_out]
    open_runs = [seen for seen in every if seen.needs_slurm()]
    unsettled = any(seen.state not in TERMINAL - {LOST} for seen in open_runs)
    old = None if ask else before
    answer, asked = (old.answer, old.asked) if old else (None, 0.0)
    if old is None and shutil.which("squeue"):
        users = {seen.user for seen in open_runs if seen.user} | {queue.user()}
        since = min((seen.queued for seen in open_runs), default=time.time())

        def known(jobs: list[queue.SlurmJob]) -> bool:
            there = _by_name(jobs)
            return all(_job_of(seen, there) or queue.elsewhere(seen.launch.cluster) for seen in open_runs)

        answer, asked = queue.ask(users, since, known), time.time()
    jobs = _by_name(answer.jobs if answer else [])
    for seen in open_runs:
        if seen.id in intended and not seen.slurm_job_id:
            seen.note = intended[seen.id]
        if answer is None:
            seen.note = "Slurm is not available here"
            continue
        if queue.elsewhere(seen.launch.cluster):
            seen.note = f"its job is on the cluster {seen.launch.cluster}; this is {queue.cluster_name()}"
            continue
        job = _job_of(seen, jobs)
        # An old answer explains a run that still waits, or has not reported for long. It cannot know what has begun or
        # ended since, but that a training which was warned of its job's end may go on.
        silent = seen.state == LOST and not seen.status.ended
        explained = seen.state == QUEUED or silent or (seen.trains and seen.status.why == "warned")
        if old is None or (job is not None and explained):
            _explain(seen, job, answer, seen.id in intended)
    mine = {seen.slurm_job_id for seen in every} | {seen.id for seen in every}
    stems = {path.stem for path in (results.folder.parent / "slurm_scripts").glob("*.sh")}
    by_hand = [
        job
        for job in (answer.jobs if answer else [])
        if job.name in stems and job.id not in mine and reasons.judge(job).kind != reasons.ENDED
    ]
    return Snapshot(every, by_hand, answer.notes if answer and unsettled else [], answer, asked, left_out)


def _waits(noted: intent.Intent, sender: str) -> str:
    """Say why a run is not sent yet, and who will send it; ``sender`` sends ours."""
    if who := intent.whose(noted):
        return f"{noted.waits or 'is to be sent'}; {who} sends it"
    why = noted.waits if noted.created else ""
    if not why and noted.created and sender:
        return f"{sender} is sending it"
    if not why:
        how = "continues it" if noted.created else "says what is left of it"
        return f"is being submitted, or that was interrupted: {RESUBMIT} {how}"
    return f"{why}; {sender or RESUBMIT} sends it"


def _left_out(runs: list[str], results: Results, before: Snapshot | None) -> frozenset[str]:
    """Return which of ``runs`` are settled, by the index of results.csv, and not among the last."""
    known = before.left_out if before else index.load(results).settled
    return frozenset(run_id for run_id in runs[:-RECENT] if run_id in known)


def _by_name(jobs: list[queue.SlurmJob]) -> dict[str, list[queue.SlurmJob]]:
    found: dict[str, list[queue.SlurmJob]] = {}
    for job in jobs:
        found.setdefault(array.of_job(job), []).append(job)
    return found


def _job_of(seen: RunView, jobs: dict[str, list[queue.SlurmJob]]) -> queue.SlurmJob | None:
    """Return the job of a run, by user, id and name together: each alone may be another's. (Its cluster was checked.)

    A run of the driver's is in Slurm under its own id, one that was started by hand under its script's name.
    """
    if seen.job or not seen.slurm_job_id:
        named = jobs.get(array.of_run(seen.id, seen.launch), [])
    else:
        named = [job for some in jobs.values() for job in some if seen.id.startswith(f"{job.name}-")]
    for job in named:
        same_id = job.id == seen.slurm_job_id or not (seen.slurm_job_id or job.id in seen.launch.earlier.split(","))
        if same_id and job.user == (seen.user or queue.user()):
            return job
    return None


def with_verdicts(seen: Snapshot, results: Results) -> Snapshot:
    """Return the same snapshot, with the verdict of the pair of each finished run."""
    from duel.report import sessions  # here, because few commands need it

    try:
        verdicts = sessions.by_run(results, [one.id for one in seen.runs if one.state == FINISHED])
    except ValueError as error:
        return replace(seen, notes=[*seen.notes, f"verdicts: {error}"])
    for one in seen.runs:
        if one.state == FINISHED:
            one.verdict = verdicts.get(one.id, "")
    return seen


def _own(run: Run) -> RunView:
    """Return what the run's folder says."""
    try:
        launch = run.launch()
    except Damaged as error:
        return RunView(run, run.status(), LaunchRecord(), f"damaged: {error}")
    seen = RunView(run, run.status(), launch, slurm=launch.slurm)
    owner = seen.status.owner
    if seen.state == QUEUED and not seen.in_slurm and not owner.is_here:
        seen.note = f"held on {owner.host or 'an unknown machine'}"
    return seen


def _explain(seen: RunView, job: queue.SlurmJob | None, answer: queue.Answer, intended: bool) -> None:
    """Put Slurm's report into ``seen``, and settle the run if that report is final."""
    if job is None:
        _unknown(seen, answer, intended)
        return
    verdict, seen.note = reasons.judge(job), ""
    seen.slurm = SlurmWord(
        state=job.raw,
        kind=verdict.kind,
        cause=verdict.cause or None,
        words=verdict.words,
        nodes=job.nodes,
        start=job.start,
        reason=job.reason,
        limit=job.limit,
    )
    seen.change(slurm_job_id=job.id)
    if verdict.kind != reasons.ENDED:
        _waits_or_runs(seen, verdict)
        return
    if not answer.controller and verdict.cause in (reasons.PREEMPTED, reasons.INFRASTRUCTURE):
        return  # it may be back in the queue, which only the controller knows immediately
    state = _last_state(seen.run)  # the run may have ended by itself since its status was read
    if state in TERMINAL - {LOST}:
        _keep(seen)
        if seen.state not in TERMINAL - {LOST}:
            seen.status = _own(seen.run).status
        return
    cause, why = _cause(verdict, log_tail(seen.run, job.id))
    _settle(seen, CANCELLED if why == reasons.CANCELLED else FAILED, cause, why)


def _waits_or_runs(seen: RunView, verdict: reasons.Verdict) -> None:
    """Update a run whose job has not ended."""
    waits = verdict.kind in (reasons.WAITING, reasons.BLOCKED)
    if seen.state == LOST and (not seen.status.started or (seen.trains and waits)):
        seen.change(state=QUEUED, cause="", why=None)
    if seen.state == LOST and verdict.kind == reasons.ALIVE:
        seen.change(state=RUNNING, cause="", why=None)
    if waits and seen.state == RUNNING and not seen.trains and _last_state(seen.run) == RUNNING:
        cause = "Slurm requeued its job, which will begin a new run"
        _settle(seen, FAILED, cause, reasons.PREEMPTED)


def _cause(verdict: reasons.Verdict, tail: str) -> tuple[str, str]:
    """Return why a job ended whose run has not reported it, as text and as a kind; ``tail`` is the end of its log."""
    cause, why = f"Slurm: {verdict.words}", verdict.cause
    if why == reasons.CODE and reasons.looks_out_of_memory(tail):
        cause, why = f"out of memory ({verdict.words})", reasons.OUT_OF_MEMORY
    elif why == reasons.COMPLETED:
        cause, why = "incomplete: Slurm reports completed, but the run has not reported its end", reasons.CODE
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    # After a failure, Slurm's own tools add nothing but its exit code.
    last = next((line for line in reversed(lines) if not line.startswith(("srun: ", "slurmstepd: "))), "")
    if why == reasons.CODE and last:
        cause += f"; the last line of its log: {last[:200]}"
    return cause, why


def _last_state(run: Run) -> str:
    """Return the current state in the run's folder."""
    os.listdir(run.folder)  # on a network file system this queries the server, while a read may be served from a cache
    return run.stored_status().state


def _unknown(seen: RunView, answer: queue.Answer, intended: bool) -> None:
    """Handle a run that neither squeue nor sacct knows."""
    if not answer.controller:
        seen.note = "Slurm does not answer"
        return
    if intended and not seen.slurm_job_id:
        return
    if seen.user not in ("", queue.user()):
        seen.note = f"Slurm does not show its job; it may hide jobs of {seen.user} from you"
        return
    if seen.state in TERMINAL - {LOST}:
        if answer.accounting:
            seen.slurm = SlurmWord(state="unknown to Slurm")
            _keep(seen)  # why it was terminated will never be known: do not query again
        return
    if seen.state == LOST and seen.status.ended:
        return
    if seen.state == RUNNING and seen.status.age < LOST_AFTER_SECONDS:
        return  # it still reports; perhaps the Slurm that answers here is another cluster's
    if _last_state(seen.run) in TERMINAL - {LOST}:
        seen.status = _own(seen.run).status
        return
    if not seen.slurm_job_id and time.time() - seen.queued < SUBMITTING_SECONDS:
        seen.note = "is being submitted"
        return
    if not seen.slurm_job_id:
        cause, why = "never submitted: Slurm knows no job of its name", reasons.NEVER_RAN
    else:
        cause, why = f"it left Slurm's queue without a report, and {_forgotten(answer)}", reasons.INFRASTRUCTURE
    if answer.accounting or answer.keeps_no_accounts:
        _settle(seen, LOST, cause, why)
    else:
        seen.change(state=LOST, cause=cause, why=why)  # not in its folder: the accounting may know more
        seen.note = "why it ended is not known until the accounting answers"


def _forgotten(answer: queue.Answer) -> str:
    return "the accounting does not know it either" if answer.accounting else "the accounting is unavailable"


def _settle(seen: RunView, state: str, cause: str, why: str) -> None:
    """Record how the run ended; if its folder cannot be written (someone else's run), change only ``seen``."""
    seen.change(state=state, cause=cause, why=why)
    with contextlib.suppress(OSError, Damaged):
        _keep(seen)
        seen.run.settle(state=state, cause=cause, why=why)


def _keep(seen: RunView) -> None:
    """Keep Slurm's report, which Slurm itself will forget."""
    with contextlib.suppress(OSError, Damaged):
        seen.run.write_launch(slurm=seen.slurm, slurm_job_id=seen.slurm_job_id)


def slurm_log(run: Run, job_id: str) -> Path:
    """Return the path of Slurm's log of a job, or of an element of an array; only numbers become part of it."""
    known = re.fullmatch(r"\d+(_\d+)?", job_id)
    return run.folder.parent.parent / "logs" / f"{job_id if known else 0}_0_log.out"


def log_tail(run: Run, job_id: str = "") -> str:
    """Return the end of a run's output, from the first log that has any; empty if none has."""
    for path in (*([slurm_log(run, job_id)] if job_id else []), run.log, run.launcher_log):
        with contextlib.suppress(FileNotFoundError, Damaged):
            if tail := files.read(path, TAIL_BYTES, last=True).decode(errors="replace").strip():
                return tail
    return ""
