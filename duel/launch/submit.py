"""From planned jobs to runs: check beforehand, create the runs' folders, start them on their target.

A submission to Slurm is recorded first (``duel.launch.intent``), then each run's folder is created, then sbatch is
called with the run's id as job name. So if the driver dies at any point, the next one finds what it had begun, looks up
by name what reached Slurm, and sends the rest.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from duel import ROOT, certificate, index, tree, variables
from duel.catalogue import PAIRED
from duel.errors import UserError
from duel.files import stamp
from duel.job import Job
from duel.launch import builds, directives, fit, queue, script
from duel.launch.schema import Cluster, Target
from duel.results import Results, Run
from duel.states import TERMINAL
from duel.status import LaunchRecord, Owner

Say = Callable[[str], None]


@dataclass(frozen=True)
class Before:
    """The run that a launch follows: a new run is another attempt at it, or the run itself ``continues``."""

    run_id: str
    group: str
    continues: bool = False


@dataclass(frozen=True)
class Launch:
    """One script to be started: what it measures, where, its text, and the run that it becomes."""

    job: Job
    target: Target  # as ``Target.for_job`` made it
    text: str
    run_id: str
    group: str  # what both sides have in common, through all attempts
    after: str = ""  # the run that this is another attempt at
    continues: bool = False  # the run itself, which was interrupted

    @property
    def record(self) -> LaunchRecord:
        """What launch.json keeps of it."""
        return LaunchRecord(
            job=self.job, pair=self.group, after=self.after, code=tree.digest(), user=queue.user(), cluster=""
        )


def plan(jobs: list[Job], target: Target, after: list[Before] | None = None) -> list[Launch]:
    """Return the launches of ``jobs``, all on ``target`` and with one stamp.

    ``after``: what each of them follows; each group then gets its own stamp. Raises UserError if the target cannot run
    a job.
    """
    found = []
    stamps: dict[str, str] = {}
    for place, job in enumerate(jobs):
        before = after[place] if after else Before("", "")
        own = target.for_job(job)
        text = script.render(job, own)
        if before.continues:
            found.append(Launch(job, own, text, before.run_id, before.group, continues=True))
            continue
        run_id = job.run_id(stamps.setdefault(before.group, stamp()))
        if any(run_id == one.run_id for one in found):
            raise UserError(f"{run_id.partition('-')[0]} would be started twice by one command: leave one out")
        group = before.group or run_id.removeprefix(f"{job.framework}_")
        found.append(Launch(job, own, text, run_id, group, before.run_id))
    return found


class RefusedError(UserError):
    """Slurm refused some of ``runs``; the others were submitted."""

    def __init__(self, text: str, runs: list[Run]) -> None:
        super().__init__(text)
        self.runs = runs


class Scheduler(Protocol):
    """What starts scripts: this machine, or Slurm."""

    def check(self, launches: list[Launch]) -> None:
        """Raise UserError for anything that would keep a job from running."""

    def preview(self, launches: list[Launch], cluster: Cluster) -> None:
        """Show what would happen to the launches. Raises UserError for what would be refused."""

    def start(self, launches: list[Launch], results: Results, say: Say) -> list[Run]:
        """Create a folder for each launch and start them; returns the queued runs."""


def scheduler(target: Target) -> Scheduler:
    """Return the scheduler that ``target`` names."""
    if target.scheduler == "local":
        from duel.launch import local

        return local.Local()
    from duel.launch import slurm

    return slurm.Slurm()


def launch(
    jobs: list[Job], cluster: Cluster, results: Results, say: Say, after: list[Before] | None = None
) -> list[Run]:
    """Start ``jobs``, which are all for one target; returns their runs. ``after`` is as in ``plan``.

    Raises UserError, before anything is written, for anything that would keep a job from running; and RefusedError with
    sbatch's message for each script that it refused, once the others are on their way.
    """
    name, target = cluster.target(jobs[0].target)
    launches = plan(jobs, target, after)
    where = scheduler(target)
    check(launches)
    where.check(launches)
    where.preview(launches, cluster)
    if paired := next((job for job in jobs if job.framework == PAIRED), None):
        for number in target.one_sided(paired):
            say(f"targets.{name}.variants.{number}.directives are for one framework: --paired leaves them out")
    if names := _kept_back(launches):
        line = f"cluster.yaml: targets.{name}.setup: {{job: [export {names[0]}=...]}}"
        say(f"not passed to the jobs: {', '.join(names)}; to set one for the jobs, use {line}")
    for text in dict.fromkeys(text for job in jobs for text in _known_of(job, target, results)):
        say(text)
    script.write(jobs, [launch.text for launch in launches], say)
    if target.scheduler == "slurm":
        from duel.launch import sender

        sender.before(target, len(launches), results)
    runs = where.start(launches, results, say)
    for run in runs:
        job_id = run.launch().slurm_job_id
        if job_id or target.scheduler == "local":
            say(f"started {run.id} on {name}" + (f", job {job_id}" if job_id else ""))
    if target.scheduler == "slurm":
        sender.follow_up(target, runs, results, say)
    if refused := [f"Slurm refused {run.id}: {why}" for run in runs if (why := run.launch().refused)]:
        raise RefusedError("\n".join(refused), runs)
    return runs


def _known_of(job: Job, target: Target, results: Results) -> list[str]:
    """Return what speaks against the job: programs that were compiled ahead, and the target's last thorough check."""
    chip = target.for_job(job).chip
    found = fit.remarks(job, chip, results.folder) if chip and "jax" in job.frameworks else []
    if not (results.folder / "doctor").is_dir():
        return found
    from duel.launch import thorough

    return found + thorough.remarks(job, target, results)


def _kept_back(launches: list[Launch]) -> list[str]:
    """Return variables of this shell, or of an --export, that the scripts unset and their targets' lines do not set.

    Thread counts are left out: the target could not set them either.
    """
    names, lines = set(os.environ), []
    for target in (launch.target for launch in launches):
        names.update(re.findall(r"\w+", directives.value(target.directives, "--export") or ""))
        lines += [*target.setup.job, *target.setup.task]
        lines += [line for side in target.sides.values() for line in (*side.job, *side.task)]
    text = "\n".join(lines)
    return [
        name
        for name in variables.obeyed(sorted(names))
        if not variables.matches(name, variables.THREADS) and not re.search(rf"\b{name}\b", text)
    ]


def check(launches: list[Launch]) -> None:
    """Raise UserError, before anything is written, for anything that would keep a job from running anywhere."""
    for launch in launches:
        job = launch.job
        certificate.check_files(job.benchmark)
        for framework in job.frameworks:
            where = f"cluster.yaml: targets.{job.target}.python.{framework}"
            python = getattr(launch.target.python, framework)
            builds.check_device(python, framework, job.device or launch.target.device, where)
        if job.weights and not (ROOT / job.weights).is_file():  # the first attempt had it
            raise UserError(f"{job.weights}, the initial weights, is gone: start again with main.py --weights")


def create(launches: list[Launch], results: Results, owner: Owner | None = None) -> list[Run]:
    """Create the runs' folders, all or none; those created by an interrupted submission are left as they are.

    Each gets the script that runs a copy of the code as it is now. A run that continues is reopened. Without an
    ``owner`` the runs wait in Slurm's queue, under their own ids.
    """
    runs = [results.run(launch.run_id) for launch in launches]
    code, commit, made = tree.copy(results.folder), tree.described(), []
    try:
        for run, launch in zip(runs, launches, strict=True):
            text = script.render(launch.job, launch.target, code=code, commit=commit)
            holder = owner or Owner(slurm_job_name=run.id)
            if launch.continues and run.stored_status().state in TERMINAL:
                _reopen(run, launch, text, holder, results)
            if run.folder.exists():
                continue
            run.create(
                launch.job.rows(),
                owner=holder,
                target=launch.job.target,
                script=text,
                launch=launch.record,
            )
            made.append(run)
    except BaseException:  # such as a full disk: leave no half of a pair
        for run in made:
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    return runs


def _reopen(run: Run, launch: Launch, text: str, owner: Owner, results: Results) -> None:
    before = run.launch()
    earlier = ",".join(filter(None, (before.earlier, before.slurm_job_id)))
    cleared = {"slurm_job_id": "", "array": "", "sent": "", "adopted": "", "refused": "", "slurm": None}
    with index.forgotten(results, run.id):
        run.reopen(launch.job.rows(), text, owner, job=launch.job, earlier=earlier, code=tree.digest(), **cleared)
