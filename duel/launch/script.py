"""From a job and a target to the text of its script. Pure: nothing here touches the disk but to read templates."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duel.catalogue import USE_CASES
from duel.errors import UserError
from duel.job import ROOT, Job
from duel.launch.cluster import Target
from duel.results import write_atomically


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["shell"] = shlex.quote
    return environment


ENVIRONMENT = _environment()


def render(job: Job, target: Target, root: Path = ROOT) -> str:
    """The script of ``job`` on ``target``, for a checkout at ``root``.

    Values are quoted for the shell; the target's own lines pass as they are. Raises UserError where the path of the
    checkout cannot stand in a directive.
    """
    logs = str(root / "results" / "logs")
    if target.scheduler == "slurm" and not set(logs).isdisjoint(" \t'\"\\#;%"):
        raise UserError(
            f"{root}: a path with a space, quote, backslash, ';', '#' or '%' cannot stand in an #SBATCH line"
        )
    template = "slurm.sh.j2" if target.scheduler == "slurm" else "job.sh.j2"
    variables = {"WANDB_PROJECT": target.wandb.project}
    if target.wandb.mode != "auto":
        variables["WANDB_MODE"] = target.wandb.mode
    return ENVIRONMENT.get_template(template).render(
        framework=job.framework,
        benchmark=job.benchmark,
        use_case=job.use_case,
        use_case_meaning=USE_CASES[job.use_case].meaning,
        preset=job.preset,
        precision=job.precision,
        target=job.target,
        template=template,
        script=f"{job.stem}.sh",
        stem=job.stem,
        by_hand="sbatch" if target.scheduler == "slurm" else "bash",
        root=str(root),
        logs=logs,
        directives=target.directives,
        launcher=target.launcher,
        setup=target.setup,
        variables=variables,
        python=getattr(target.python, job.framework),
        remedy=f"'make {job.framework}-env' makes one",
        options=[*job.options, "--data", target.data],
    )


def write(jobs: list[Job], texts: list[str]) -> list[Path]:
    """Write each text to ``slurm_scripts/<stem>.sh``; returns the paths."""
    paths = [ROOT / "slurm_scripts" / f"{job.stem}.sh" for job in jobs]
    for path, text in zip(paths, texts, strict=True):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text)
        path.chmod(0o755)
    return paths
