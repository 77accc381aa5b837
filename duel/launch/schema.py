"""The schema of cluster.yaml, and how a target applies to one job."""

import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from duel.errors import UserError
from duel.job import Job
from duel.launch import directives

PLACEHOLDERS = ("nodes", "devices_per_node", "devices", "tasks_per_node", "tasks", "framework", "benchmark", "name")


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of printable characters")
    return text


def _directive(text: str) -> str:
    if not re.match("--?[A-Za-z]", _one_line(text)):
        raise ValueError(f"{text!r} is not an sbatch option; write it as on the command line, such as --partition=gpu")
    for name in re.findall(r"(?<!\$)\{(\w+)\}", text):
        if name not in PLACEHOLDERS:
            raise ValueError(f"unknown placeholder {{{name}}}; valid: {', '.join(f'{{{p}}}' for p in PLACEHOLDERS)}")
    return text


def _shell_line(text: str) -> str:
    _one_line(text.replace("\t", " "))
    return text


def _pasted(given: Any) -> Any:
    """Accept lines pasted as one text ('directives: |') in place of a list, dropping blank ones."""
    return [line.rstrip() for line in given.split("\n") if line.strip()] if isinstance(given, str) else given


def _pasted_directives(given: Any) -> Any:
    """Accept the same from a script, with '#SBATCH' before each line and comments in between."""
    lines = _pasted(given)
    if isinstance(given, str):
        lines = [re.sub(r"^\s*#SBATCH\s+", "", line).strip() for line in lines]
        lines = [line for line in lines if not line.startswith("#")]
    return lines


def _words(text: str) -> str:
    _one_line(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if any(word.startswith("#") for word in words):
        raise ValueError(f"{text!r} has a comment, which would hide the command after it")
    return text


def _variable(text: str) -> str:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is not the name of a variable, such as SBATCH_ACCOUNT")
    return text


def _shebang(text: str) -> str:
    if not _one_line(text).startswith("#!"):
        raise ValueError(f"{text!r} does not begin with '#!'")
    return text


def _range(given: Any) -> Any:
    """Parse ``3``, ``2-4`` or ``5+`` into (lowest, highest)."""
    form = re.fullmatch(r"([1-9]\d{0,5})(?:(\+)|-([1-9]\d{0,5}))?", str(given)) if type(given) in (int, str) else None
    if form is None:
        raise ValueError(f"{given!r} is not a range; valid: a number such as 1, '2-4', or '5+'")
    lowest = int(form[1])
    highest = 10**6 if form[2] else int(form[3] or lowest)
    if highest < lowest:
        raise ValueError(f"{given!r} ends before it begins")
    return lowest, highest


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} is not a positive number")
    return number


def _counts(counts: list[int]) -> list[int]:
    if not counts:
        raise ValueError("at least one number is needed")
    return sorted(_positive(count) for count in counts)


Line = Annotated[str, AfterValidator(_one_line)]
Lines = Annotated[list[Annotated[str, AfterValidator(_shell_line)]], BeforeValidator(_pasted)]
Directives = Annotated[list[Annotated[str, AfterValidator(_directive)]], BeforeValidator(_pasted_directives)]
Words = Annotated[str, AfterValidator(_words)]
Variable = Annotated[str, AfterValidator(_variable)]
Positive = Annotated[int, AfterValidator(_positive)]
Range = Annotated[tuple[int, int], BeforeValidator(_range)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Pythons(_Strict):
    """One interpreter per framework: a path, absolute or below the repository, or a name on the PATH; null: none."""

    jax: Line | None
    pytorch: Line | None


class Wandb(_Strict):
    project: Line = "duel"
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"


class Setup(_Strict):
    """Shell lines, by where they run."""

    submit: Lines = []  # on the login node, in the shell that calls sbatch
    job: Lines = []  # in the batch shell, once
    node: Lines = []  # once on each node
    task: Lines = []  # in each task, before the interpreter

    def __add__(self, other: "Setup") -> "Setup":
        return Setup.model_validate({name: [*getattr(self, name), *getattr(other, name)] for name in SCOPES})


SCOPES = tuple(Setup.model_fields)


class When(_Strict):
    """When a variant applies: all given conditions must hold."""

    framework: Literal["jax", "pytorch"] | None = None
    nodes: Range | None = None
    devices: Range | None = None

    def holds(self, values: dict[str, int | str]) -> bool:
        """Return whether this holds for a job with these values of ``PLACEHOLDERS``."""
        for name in ("nodes", "devices"):
            span = getattr(self, name)
            if span is not None and not span[0] <= int(values[name]) <= span[1]:
                return False
        return self.framework in (None, values["framework"])


class Variant(_Strict):
    """Lines for some jobs only: directives replace those of the same option, set-up lines follow the others."""

    when: When
    directives: Directives = []
    launcher: Words | None = None
    setup: Setup = Setup()


# Keys without effect on this machine; if accepted, they would look as if they did something.
SLURM_ONLY = ("directives", "without", "submit", "pass_variables", "pause", "max_jobs", "launcher", "node_launcher")


class Target(_Strict):
    """One entry of ``targets``."""

    scheduler: Literal["local", "slurm"]
    python: Pythons
    device: Literal["cpu", "gpu", "tpu", "mps"] | None = None
    nodes: Positive = 1
    devices_per_node: Annotated[list[int], AfterValidator(_counts)] = [1]
    max_jobs: Positive | None = None
    internet: bool = True
    directives: Directives = []
    without: list[Literal["--job-name", "--output", "--no-requeue", "--signal"]] = []
    shebang: Annotated[str, AfterValidator(_shebang)] = "#!/usr/bin/env bash"
    submit: Words = "sbatch"
    pass_variables: list[Variable] = []
    pause: Annotated[float, Field(ge=0, le=3600)] = 0.2
    launcher: Words | None = "srun"
    node_launcher: Words = "srun --ntasks-per-node=1 --ntasks={nodes}"
    setup: Setup = Setup()
    variants: list[Variant] = []
    data: Line = "data"
    wandb: Wandb = Wandb()

    @model_validator(mode="before")
    @classmethod
    def _two_here(cls, given: Any) -> Any:
        """Count this machine's CPUs as two devices, so that multi-device use cases can be tried anywhere."""
        if isinstance(given, dict) and given.get("scheduler") == "local":
            return {"devices_per_node": [1, 2]} | given
        return given

    @model_validator(mode="after")
    def _only_what_counts(self) -> "Target":
        unused = [name for name in SLURM_ONLY if name in self.model_fields_set]
        if self.scheduler == "local" and unused:
            raise ValueError(f"only a slurm target takes {', '.join(unused)}; this one has 'scheduler: local'")
        return self

    def allocation(self, job: Job) -> dict[str, int | str]:
        """Return what to request from Slurm for ``job``: the values of ``PLACEHOLDERS``.

        Whole nodes, or the smallest allowed count of devices that suffices. Raises UserError if none does.
        """
        enough = [count for count in self.devices_per_node if count >= job.devices_per_node]
        if not enough:
            raise UserError(
                f"target {job.target!r} has at most {_counted(self.devices_per_node[-1], 'device')} per node, but "
                f"{job.devices_per_node} were asked for (cluster.yaml: targets.{job.target}.devices_per_node)"
            )
        if job.nodes > self.nodes:
            raise UserError(
                f"target {job.target!r} has at most {_counted(self.nodes, 'node')}, but "
                f"{job.nodes} were asked for (cluster.yaml: targets.{job.target}.nodes)"
            )
        return {
            "nodes": job.nodes,
            "devices_per_node": enough[0],
            "devices": job.nodes * enough[0],
            "tasks_per_node": job.devices_per_node,
            "tasks": job.nodes * job.devices_per_node,
            "framework": job.framework,
            "benchmark": job.benchmark,
            "name": job.stem,
        }

    def for_job(self, job: Job) -> "Target":
        """Return this target for one job: variants applied, placeholders filled. Raises UserError."""
        values = self.allocation(job)
        lines, launcher, setup = self.directives, self.launcher, self.setup
        for variant in self.variants:
            if variant.when.holds(values):
                lines = directives.replace(lines, variant.directives)
                launcher = variant.launcher or launcher
                setup += variant.setup
        return self.model_copy(
            update={
                "directives": [fill(line, values) for line in lines],
                "launcher": launcher and fill(launcher, values),
                "node_launcher": fill(self.node_launcher, values),
                "setup": Setup.model_validate(
                    {name: [fill(line, values) for line in getattr(setup, name)] for name in SCOPES}
                ),
                "variants": [],
            }
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def fill(line: str, values: dict[str, int | str]) -> str:
    """Replace the placeholders in ``line``; every other brace, such as the shell's ``${HOME}``, stays."""
    return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), line)


class Cluster(_Strict):
    default: Line
    targets: dict[str, Target]
    # Returns line and column, from 1, of a place in the file. Set by ``duel.launch.cluster``: there is no file here.
    _position: Callable[[tuple[int | str, ...]], tuple[int, int]] = PrivateAttr()

    def target(self, name: str | None) -> tuple[str, Target]:
        """Return the target called ``name``, or the default, with its name. Raises UserError with the valid names."""
        name = name or self.default
        if name not in self.targets:
            raise UserError(f"unknown target {name!r}; valid in cluster.yaml: {', '.join(self.targets)}")
        return name, self.targets[name]

    def where(self, job: Job, line: str) -> str:
        """Return ``cluster.yaml:LINE`` of the directive that became ``line`` in the script of ``job``, if any."""
        target = self.targets[job.target]
        values = target.allocation(job)
        # The last one first: a variant's line replaces the target's own.
        places: list[tuple[tuple[int | str, ...], list[str]]] = [(("directives",), target.directives)]
        for number, variant in enumerate(target.variants):
            if variant.when.holds(values):
                places.append((("variants", number, "directives"), variant.directives))
        for path, lines in reversed(places):
            for number, raw in enumerate(lines):
                if fill(raw, values) == line:
                    return f"cluster.yaml:{self._position(('targets', job.target, *path, number))[0]}"
        return ""
