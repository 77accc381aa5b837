"""Render the script of a job on a target, after checking with bash that the target's own lines parse."""

import functools
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duel import ROOT, tree, variables
from duel.catalogue import FRAMEWORKS, MANY, PAIRED, USE_CASES, VALIDATE
from duel.errors import UserError
from duel.files import stamp, write_atomically
from duel.job import EDITED, Job, script_state, seal
from duel.launch import directives
from duel.launch.schema import SCOPES, Target


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
    environment.filters["case"] = _case_patterns
    return environment


@functools.cache
def _case_patterns(patterns: tuple[str, ...]) -> str:
    """Format the alternatives of one clause of bash's 'case', wrapped to several lines."""
    text = "\N{NO-BREAK SPACE}| ".join(patterns)  # so that no line begins with a bar
    return " \\\n            ".join(textwrap.wrap(text, 100)).replace("\N{NO-BREAK SPACE}", " ")


ENVIRONMENT = _environment()


def render(job: Job, target: Target, root: Path = ROOT, code: Path | None = None, commit: str = "") -> str:
    """Return the script of ``job`` on ``target``, for a checkout at ``root``, with the ``code`` there or in a copy,
    which does not know its ``commit``.

    Values are quoted for the shell; the target's own lines pass unchanged. Raises UserError if the target cannot run
    the job, has no interpreter for it, or if the path of the checkout cannot appear in a directive.
    """
    target = target.for_job(job)
    _parse(job, target)
    pythons = {framework: getattr(target.python, framework) for framework in job.frameworks}
    for framework, python in pythons.items():
        if python is None:
            raise UserError(
                f"target {job.target!r} has no interpreter for {framework} (cluster.yaml: "
                f"targets.{job.target}.python.{framework} is null); valid: {_instead(job, target)}"
            )
    lead, *others = job.frameworks  # the lead's interpreter supervises, unless each side has its own start
    exports = {"WANDB_PROJECT": target.wandb.project}
    if target.wandb.mode != "auto" or not target.internet:
        exports["WANDB_MODE"] = "offline" if target.wandb.mode == "auto" else target.wandb.mode
    if code is not None:
        exports |= {"DUEL_CHECKOUT": str(root), tree.COMMIT: commit}
    exports |= {variables.PROFILER: target.profiler} if job.profile and target.profiler else {}
    python, where = pythons[lead], f"python.{lead}); make {lead}-env makes one"
    if target.sides:
        python, where = target.python.supervisor or _this_python(), "python.supervisor)"
        exports |= {variables.starter(name): _start(job, target, name, root) for name in job.frameworks}
    paired = {name: pythons[name] for name in (job.frameworks if target.sides else others)}
    slurm = target.scheduler == "slurm"
    lines = directives_of(job, target, root) if slurm else []
    template = "slurm.sh.j2" if slurm else "job.sh.j2"
    text = ENVIRONMENT.get_template(template).render(
        shebang=target.shebang,
        framework=" and ".join(job.frameworks) + (" in turn" if others else ""),
        benchmark=job.benchmark,
        use_case=job.use_case,
        use_case_meaning=USE_CASES[job.use_case].meaning,
        preset=job.preset,
        precision=job.precision,
        target=job.target,
        template=template,
        script=f"{job.stem}.sh",
        stem=job.stem,
        by_hand=target.submit if slurm else "bash",
        root=str(root),
        directives=lines,
        warning=directives.warning_signal(lines),
        launcher=f"{target.launcher} " if target.launcher else "",
        node_launcher=target.node_launcher,
        setup=target.setup,
        exports=exports,
        obeyed=variables.OBEYED,
        allocated=variables.ALLOCATED,
        foreign=variables.FOREIGN,
        given=variables.GIVEN,
        python=python,
        remedy=f"(cluster.yaml: targets.{job.target}.{where}",
        command=shlex.join(_command(job, target, paired, root, code)),
    )
    return seal(text)


def _command(job: Job, target: Target, paired: Mapping[str, str], root: Path, code: Path | None) -> list[str]:
    """Return run.py, of the checkout or of a copy of its code, with all its arguments."""
    lead = job.frameworks[0]
    program = f"{lead}/run.py" if code is None else os.path.relpath(code / lead / "run.py", root)
    device = ["--device", target.device] if target.device and not job.device else []
    spawn = ["--spawn"] if job.use_case in MANY and target.scheduler == "local" else []
    pairs = [f"--paired={name}={python}" for name, python in paired.items()]
    return [program, *job.options, *device, f"--data={target.data}", *pairs, *spawn]


def _this_python() -> str:
    """Return the interpreter of main.py, relative to the checkout if it is in there."""
    inside = Path(sys.executable).is_relative_to(ROOT)
    return os.path.relpath(sys.executable, ROOT) if inside else sys.executable


def _start(job: Job, target: Target, framework: str, root: Path) -> str:
    """Return the shell text that starts the command "$@" as the target starts processes of ``framework``."""
    side = target.sides[framework]
    missing = f"no interpreter $1 (cluster.yaml: targets.{job.target}.python.{framework})"
    task = [
        *side.task,
        f'command -v -- "$1" >/dev/null || {{ echo "{missing}" >&2; exit 96; }}',
        f'export {variables.GIVEN}="$(compgen -e)"  # variables set by the target stay',
        'exec "$@"',
    ]
    if side.launcher is None:
        return "\n".join([*side.job, *task])
    inside = "\n".join([f"cd -- {shlex.quote(str(root))} || exit 97", *task])
    launched = f'exec env {side.launcher} bash -eo pipefail -c {shlex.quote(inside)} {framework} "$@"'
    return "\n".join([*side.job, launched])


def _parse(job: Job, target: Target) -> None:
    """Raise UserError for lines of the target that bash rejects, or that would swallow the lines after them."""
    texts = {f"setup.{scope}": "\n".join(getattr(target.setup, scope)) for scope in SCOPES}
    texts |= {"launcher": f"{target.launcher or ''} true", "node_launcher": f"{target.node_launcher} true"}
    for framework, side in target.sides.items():
        texts |= {f"setup for {framework}": "\n".join([*side.job, *side.task])}
        texts |= {f"launcher for {framework}": f"{side.launcher or ''} true"}
    for key, text in texts.items():
        if text and (complaint := _complaint(text)):
            raise UserError(f"cluster.yaml: targets.{job.target}.{key}: {complaint}")


@functools.lru_cache(maxsize=64)
def _complaint(text: str) -> str:
    """Return bash's error about ``text``, or its warning of an unterminated here-document; empty if there is none."""
    if text.endswith("\\"):
        return "the last line ends in a backslash, but no line follows"
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}  # and no BASH_ENV
    parsed = subprocess.run(["bash", "-n"], input=text, env=environment, capture_output=True, text=True, check=False)
    return next(iter(parsed.stderr.splitlines()), "").removeprefix("bash: ")


def directives_of(job: Job, target: Target, root: Path) -> list[str]:
    """Return the '#SBATCH' lines in order: Duel's own, the target's (as ``for_job`` made it), the job's changes.

    Raises UserError if the path of the checkout cannot appear in one.
    """
    logs = str(root / "results" / "logs")
    limit = directives.minutes(directives.value([*target.directives, *job.changes], "--time") or "")
    warn = 60 if limit is None else round(min(max(limit * 6, 15), 120))  # s: a tenth of it, to end a row cleanly
    # A training goes on, in the same log; a measurement would not be one.
    again = ["--requeue", "--open-mode=append"] if job.dataset else ["--no-requeue"]
    own = directives.without(
        [f"--job-name={job.stem}", f"--output={logs}/%j_0_log.out", *again, f"--signal=B:USR2@{warn}"],
        target.directives,
        target.without,
    )
    safe = logs.isprintable() and set(logs).isdisjoint(" '\"\\#;%")
    if any(logs in line for line in own) and not safe:
        raise UserError(
            f"{root}: a path with a space, quote, backslash, ';', '#' or '%' cannot appear in an #SBATCH line"
        )
    own_begin = directives.value(target.directives, "--begin")
    if job.delay and ("--begin" in target.without or own_begin is not None):
        why = "forbids --begin" if own_begin is None else f"has its own --begin={own_begin}"
        where = "without" if own_begin is None else "directives"
        raise UserError(
            f"target {job.target!r} {why} (cluster.yaml: targets.{job.target}.{where}), which starts later sessions: "
            "repeat the command at another time instead of --sessions"
        )
    begin = [f"--begin=now+{job.delay}"] if job.delay else []  # seconds
    changes = directives.without([*begin, *job.changes], [], target.without)
    return directives.replace([*own, *target.directives], changes)


def _instead(job: Job, target: Target) -> str:
    """Return what is possible where an interpreter is missing."""
    if job.use_case == VALIDATE or job.trials:
        return "a target with interpreters for both"
    others = [f"--framework {name}" for name in FRAMEWORKS if getattr(target.python, name) is not None]
    return (", ".join(others) or "none") + (" in place of --paired" if others and job.framework == PAIRED else "")


def write(jobs: list[Job], texts: list[str], say: Callable[[str], None]) -> list[Path]:
    """Write each text to ``slurm_scripts/<stem>.sh``; returns the paths. A hand-edited script is kept next to it."""
    # A script may be submitted by hand next, and Slurm fails a job silently if it cannot open its log.
    (ROOT / "results" / "logs").mkdir(parents=True, exist_ok=True)
    paths = [ROOT / "slurm_scripts" / f"{job.stem}.sh" for job in jobs]
    for path, text in zip(paths, texts, strict=True):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and script_state(path.read_text(errors="replace")) == EDITED:
            kept = path.with_suffix(".edited.sh")
            if kept.exists():  # of an earlier edit
                kept = path.with_suffix(f".edited-{stamp()}.sh")
            path.replace(kept)
            say(f"{path.name} was edited by hand: kept as {kept.name}, and rendered again")
        write_atomically(path, text)
        path.chmod(0o755)
    return paths
