"""A training that takes longer than one job: it goes on in the same run, from its last checkpoint."""

import os
import subprocess
import time

from duel.job import Job
from duel.record import Row
from duel.results import Run
from duel.states import FINISHED, LOST, TERMINAL
from duel.status import Owner, seconds, this_process

REQUEUE_SECONDS = 60


def is_restarted() -> bool:
    """Return whether Slurm has begun this job before."""
    return bool(int(os.environ.get("SLURM_RESTART_COUNT") or 0))


def take_up(job: Job, run: Run, script: str | None) -> bool:
    """Return whether ``run`` is a training that this job, which Slurm began again, goes on with; if so, reopen it.

    Raises TakenOver if another job goes on with it.
    """
    status = run.stored_status()
    if not job.dataset or not status.started or not is_restarted():
        return False
    if status.slurm_job_id not in ("", os.environ.get("DUEL_SLURM_JOB_ID", "")):
        raise TakenOver(f"job {status.slurm_job_id} goes on with the training {run.id}")
    if status.state not in TERMINAL:  # its node died, or was taken away without a warning
        note_time(run, status.updated)
        run.write_status(state=LOST, why="infrastructure", cause="Slurm began its job again")
    run.reopen(job.rows(), script or "", this_process())
    return True


class TakenOver(Exception):
    """A training that this job had begun is another job's by now; the message says which."""


def note_time(run: Run, until: float | None = None) -> None:
    """Add the time since the run began, or went on, to what it has used; ``until`` is when that ended, if not now."""
    status = run.stored_status()
    if begun := seconds(status.started):
        run.write_status(used=status.used + max(0.0, (until or time.time()) - begun))


def requeue(job: Job, run: Run, script: str | None, slurm_job_id: str) -> str:
    """Have Slurm begin the job again, if its training may go on; return what was done, or why nothing was, in words.

    The run, which has been settled, is reopened once Slurm has agreed: then its queue owns it. If this process is ended
    before that, the job reopens it when it begins (``take_up``).
    """
    if not job.max_hours:
        return "'python main.py resubmit' goes on from the last checkpoint; with --max_hours it goes on by itself"
    used = run.stored_status().used
    if used >= 3600 * job.max_hours:
        return f"its {job.max_hours:g} hours are over; 'python main.py resubmit' goes on from the last checkpoint"
    if not has_got_further(run):
        return "this job added no checkpoint, so another one would not either"
    command = ["scontrol", "requeue", slurm_job_id]
    later = "'python main.py resubmit' goes on from the last checkpoint"
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"scontrol requeue has not answered for {REQUEUE_SECONDS} s; {later}"
    except OSError as error:
        return f"scontrol requeue failed: {error.strerror}; {later}"
    if asked.returncode:
        return f"scontrol requeue failed: {asked.stderr.strip() or asked.returncode}; {later}"
    run.reopen(job.rows(), script or "", Owner(slurm_job_name=run.id))
    return f"Slurm begins the job again, {used / 3600:.2g} of {job.max_hours:g} hours are used"


def has_got_further(run: Run) -> bool:
    """Return whether the run, since it last began, wrote a checkpoint or finished a training."""
    begun = seconds(run.stored_status().started)
    checkpoints = (run.folder / "checkpoints").glob("*/step-*.npz")
    rows: list[Row] = run.rows()
    ended = [row for row in rows if row.status == FINISHED and seconds(str(row.ended)) >= begun]
    return bool(ended) or any(path.stat().st_mtime >= begun for path in checkpoints)
