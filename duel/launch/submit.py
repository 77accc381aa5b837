"""From rendered scripts to runs: check beforehand, make the runs' folders, start them on their target."""

import shutil

from duel import datasets
from duel.catalogue import BENCHMARKS
from duel.errors import UserError
from duel.job import ROOT, Job
from duel.launch import local
from duel.launch.cluster import Target
from duel.results import Results, Run, stamp, this_process


def check(jobs: list[Job], target: Target) -> None:
    """Raises UserError, before anything is written, for what would keep a job from running."""
    if target.scheduler == "local":
        for job in jobs:
            where = f"cluster.yaml: targets.{job.target}.python.{job.framework}"
            local.check_interpreter(getattr(target.python, job.framework), job.framework, where)
        for name in {BENCHMARKS[job.benchmark].dataset for job in jobs}:
            try:
                datasets.check(name, ROOT / target.data)
            except ValueError as error:
                raise UserError(str(error)) from error
    elif shutil.which("sbatch") is None:
        raise UserError(f"target {jobs[0].target!r} needs Slurm, and there is no sbatch here; 'local' does without")


def start(jobs: list[Job], texts: list[str], target: Target, results: Results) -> list[Run]:
    """Make one folder per job and start the scripts; returns the runs, queued."""
    pair_stamp = stamp()
    runs = [results.run(job.run_id(pair_stamp)) for job in jobs]
    try:
        for run, job, text in zip(runs, jobs, texts, strict=True):
            run.create(job.rows(), owner=this_process(), target=job.target)
            run.script.write_text(text)
    except BaseException:  # a full disk, say: leave no half of a run behind
        for run in runs:
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    if target.scheduler == "local":
        local.start(runs)
    else:
        from duel.launch import slurm  # submitit takes its time to import, and only this needs it

        slurm.start(runs, results)
    return runs
