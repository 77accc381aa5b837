"""From rendered scripts to runs: check beforehand, make the runs' folders, start them on their target.

What is to be submitted to Slurm is written down first (``Results.intent``), then each run's folder, then sbatch is
called under the run's id as job name. So after a death at any instant the same command finds what it had begun, asks
Slurm by name what went in, and sends the rest.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from typing import Any

from duel import certificate, datasets, variables
from duel.catalogue import BENCHMARKS
from duel.errors import UserError
from duel.job import ROOT, Job
from duel.launch import directives, local, preflight, script, state
from duel.launch.cluster import Cluster, Target
from duel.record import FAILED
from duel.results import FORMAT, Results, Run, stamp, this_process, write_atomically

CODE = ("duel", "jax", "pytorch")

Say = Callable[[str], None]


def launch(
    jobs: list[Job],
    cluster: Cluster,
    results: Results,
    say: Say,
    run_ids: list[str] | None = None,
    launches: list[dict[str, Any]] | None = None,
) -> list[Run]:
    """Render the scripts of ``jobs``, which are all for one target, ask Slurm about them, and start them.

    Returns the runs. Raises UserError, before anything is written, for what would keep a job from running.
    """
    name, target = cluster.target(jobs[0].target)
    texts = [script.render(job, target) for job in jobs]
    check(jobs, target)
    if target.scheduler == "slurm":
        table, warnings = preflight.plan(jobs, texts, cluster)
        say("\n".join([table, *(f"warning: {warning}" for warning in warnings)]))
    if names := _kept_back([target.for_job(job) for job in jobs]):
        where = f"cluster.yaml: targets.{name}.setup: {{job: [export {names[0]}=...]}}"
        say(f"not passed to the jobs: {', '.join(names)}; what they are to have is set by {where}")
    script.write(jobs, texts, say)
    runs = start(jobs, texts, target, results, say, run_ids, launches)
    for run in runs:
        job_id = run.launch().get("slurm_job_id")
        say(f"started {run.id} on {name}" + (f", job {job_id}" if job_id else ""))
    return runs


def _kept_back(targets: list[Target]) -> list[str]:
    """Variables of this shell, or of an --export, that the scripts unset and the lines of ``targets`` do not set.

    Not those of numbers of threads: the target could not set them either.
    """
    names, lines = set(os.environ), []
    for target in targets:
        names.update(re.findall(r"\w+", directives.value(target.directives, "--export") or ""))
        lines += [*target.setup.job, *target.setup.task]
    text = "\n".join(lines)
    return [
        name
        for name in variables.obeyed(sorted(names))
        if not variables.matches(name, variables.THREADS) and not re.search(rf"\b{name}\b", text)
    ]


def check(jobs: list[Job], target: Target) -> None:
    """Raises UserError, before anything is written, for what would keep a job from running."""
    for job in jobs:
        certificate.check_files(job.benchmark)
        for framework in job.frameworks:
            python = getattr(target.python, framework)
            where = f"cluster.yaml: targets.{job.target}.python.{framework}"
            if target.scheduler == "local":
                local.check_interpreter(python, framework, where)
            local.check_device(python, framework, job.device or target.device, where)
        if job.weights and not (ROOT / job.weights).is_file():  # it was there at the first attempt
            raise UserError(f"{job.weights}, the initial weights, is gone: start anew with main.py --weights")
    if target.scheduler == "local":
        for name in {BENCHMARKS[job.benchmark].dataset for job in jobs}:
            try:
                datasets.check(name, ROOT / target.data)
            except ValueError as error:
                raise UserError(str(error)) from error
        return
    # srun: submitit's executor asks for it. A command that the target's own lines bring along is not there yet.
    needed = ["srun", *([] if target.setup.submit else [shlex.split(target.submit)[0]])]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        name, gone = jobs[0].target, " and no ".join(missing)
        raise UserError(f"target {name!r} needs Slurm, and there is no {gone} here; 'local' does without")


def start(
    jobs: list[Job],
    texts: list[str],
    target: Target,
    results: Results,
    say: Say,
    run_ids: list[str] | None = None,
    launches: list[dict[str, Any]] | None = None,
) -> list[Run]:
    """Make one folder per job and start the scripts; returns the runs, queued.

    ``run_ids`` are made here if not given; ``launches`` has what else is to be kept in each run's launch.json.
    """
    pair_stamp = stamp()
    run_ids = run_ids or [job.run_id(pair_stamp) for job in jobs]
    launches = launches or [{} for _ in jobs]
    if target.scheduler == "local":
        runs = _create(run_ids, jobs, texts, results, launches, owner=this_process())
        local.start(runs)
        return runs
    from duel.launch import slurm

    with slurm.only_driver(results, say):
        interrupted = recover(jobs, results, say)
        run_ids = interrupted or run_ids
        if not interrupted:
            intent = {
                "format": FORMAT,
                "since": time.time(),
                "runs": dict(zip(run_ids, map(_plain, jobs), strict=True)),
            }
            write_atomically(results.intent, json.dumps(intent, indent=1) + "\n")
        runs = _create(run_ids, jobs, texts, results, launches)
        refused = slurm.send(runs, [target.for_job(job) for job in jobs], results, say)
        results.intent.unlink()  # all are decided
    if refused:
        raise UserError("\n".join(refused))
    return runs


def recover(jobs: list[Job], results: Results, say: Say) -> list[str]:
    """The run ids of an interrupted submission of exactly these jobs, to go on with; else what there is, settled.

    Runs whose job went in are told so in either case. Raises UserError where the note of it comes from another version.
    """
    from duel.launch import slurm

    try:
        intent = json.loads(results.intent.read_text())
        planned, since, version = dict(intent["runs"]), float(intent["since"]), intent["format"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        say(f"{results.intent} is damaged and left out: 'python main.py status' looks for each run by its name")
        results.intent.unlink()
        return []
    if version != FORMAT:
        raise UserError(f"{results.intent}: of another version of Duel (format {version}; this one reads {FORMAT})")
    open_runs = [run for run in map(results.run, planned) if run.folder.exists() and not _settled(run)]
    found, answer = slurm.find([run.id for run in open_runs], since) if open_runs else ({}, None)
    for run in open_runs:
        if run.id in found:
            run.write_launch(slurm_job_id=found[run.id].id, adopted="found after an interruption")
        elif answer is not None and not answer.controller:
            raise UserError(f"an interrupted submission cannot be sorted out: {'; '.join(answer.notes)}")
    if list(planned.values()) == [_plain(job) for job in jobs]:
        say(f"going on with the submission of {len(jobs)} jobs that was interrupted")
        return list(planned)
    unsent = [run for run in open_runs if run.id not in found]
    for run in unsent:
        run.settle(state=FAILED, cause="never submitted: the driver was interrupted before")
    if unsent:
        say(f"{len(unsent)} jobs of an interrupted submission were never sent: 'python main.py resubmit' sends them")
    results.intent.unlink()
    return []


def _settled(run: Run) -> bool:
    launch = run.launch()
    return bool(launch.get("slurm_job_id") or launch.get("refused"))


def _plain(job: Job) -> dict[str, Any]:
    """The job as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(job)))
    return plain


def _create(
    run_ids: list[str],
    jobs: list[Job],
    texts: list[str],
    results: Results,
    launches: list[dict[str, Any]],
    owner: dict[str, Any] | None = None,
) -> list[Run]:
    """The runs' folders, all of them or none; those that an interrupted submission made are left as they are."""
    runs = [results.run(run_id) for run_id in run_ids]
    made = []
    try:
        for run, job, text, launch in zip(runs, jobs, texts, launches, strict=True):
            if run.folder.exists():
                continue
            pair = run.id.removeprefix(f"{job.framework}_")
            common = {"job": _plain(job), "pair": pair, "code": code_digest(), "user": state.user()}
            who = owner or {"slurm_job_name": run.id}
            run.create(job.rows(), script=text, launch=common | launch, owner=who, target=job.target)
            made.append(run)
    except BaseException:  # a full disk, say: leave no half of a pair behind
        for run in made:
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    return runs


@functools.cache
def code_digest() -> str:
    """Equal exactly when the code that jobs run is: 12 hex digits over every Python file of it."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
