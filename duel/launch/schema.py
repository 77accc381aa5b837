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
PER = ("device", "node")  # {cpus_per_device} and {cpus_per_node} are made of a target's per_device: {cpus: N}
_OTHER_SCHEDULERS = re.compile(r"#(PBS|BSUB|COBALT|OAR|\$)\s+-")
_NOT_READ = re.compile(r"#[#\s]*SBATCH[\s=:]*(-|$)", re.IGNORECASE)


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of printable characters")
    return text


def _directive(text: str) -> str:
    if not re.match("--?[A-Za-z]", _one_line(text)):
        raise ValueError(f"{text!r} is not an sbatch option; write it as on the command line, such as --partition=gpu")
    for name in placeholders(text):
        if name not in PLACEHOLDERS and name.rpartition("_per_")[2] not in PER:
            raise ValueError(f"unknown placeholder {{{name}}}; valid: {', '.join(f'{{{p}}}' for p in PLACEHOLDERS)}")
    return text


def placeholders(text: str) -> list[str]:
    """Return the names in braces in ``text``, without the shell's own ``${NAME}``."""
    return re.findall(r"(?<!\$)\{(\w+)\}", text)


def _shell_line(text: str) -> str:
    _one_line(text.replace("\t", " "))
    return text


def _pasted(given: Any) -> Any:
    """Accept lines pasted as one text ('directives: |') in place of a list, dropping blank ones."""
    return [line.rstrip() for line in given.split("\n") if line.strip()] if isinstance(given, str) else given


def _pasted_directives(given: Any) -> Any:
    """Accept the same from a script, with '#SBATCH' before each line and comments in between."""
    if not isinstance(given, str):
        return given
    lines = []
    for line in map(str.strip, _pasted(given)):
        if _OTHER_SCHEDULERS.match(line):
            raise ValueError(f"{line!r} is for another scheduler: write what sbatch takes, or delete it")
        if re.match(r"#SBATCH\s+-", line):
            lines.append(line.removeprefix("#SBATCH").strip())
        elif _NOT_READ.match(line):
            raise ValueError(f"{line!r}: Slurm only reads lines that begin with '#SBATCH -': correct or delete it")
        elif not line.startswith("#"):
            lines.append(line)
    return lines


def _listed(given: Any) -> Any:
    """Accept a single value in place of a list of one."""
    return [given] if isinstance(given, str | int) and not isinstance(given, bool) else given


def _option(text: str) -> str:
    if not re.fullmatch("--[a-z][a-z0-9-]*", text):
        raise ValueError(f"{text!r} is not the long name of an sbatch option, such as --signal")
    return text


def _words(text: str) -> str:
    text = _one_line(text.rstrip("\n"))  # a folded text of YAML ends in a line break
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


def _name(text: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9_]*", text):
        raise ValueError(f"{text!r}: use lower-case letters, digits and '_', such as cpus")
    return text


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
    setup_instead: Setup = Setup()  # its scopes replace the target's
    refuse: Line | None = None  # why the site takes no such job


# Keys without effect on this machine; if accepted, they would look as if they did something.
SLURM_ONLY = ("directives", "without", "submit", "pass_variables", "pause", "max_jobs", "launcher", "node_launcher")


class Target(_Strict):
    """One entry of ``targets``."""

    scheduler: Literal["local", "slurm"]
    python: Pythons
    device: Literal["cpu", "gpu", "tpu", "mps"] | None = None
    nodes: Positive = 1
    devices_per_node: Annotated[list[int], AfterValidator(_counts), BeforeValidator(_listed)] = [1]
    per_device: dict[Annotated[str, AfterValidator(_name)], Positive] = {}
    max_jobs: Positive | None = None
    internet: bool = True
    directives: Directives = []
    without: Annotated[list[Annotated[str, AfterValidator(_option)]], BeforeValidator(_listed)] = []
    shebang: Annotated[str, AfterValidator(_shebang)] = "#!/usr/bin/env bash"
    submit: Words = "sbatch"
    pass_variables: Annotated[list[Variable], BeforeValidator(_listed)] = []
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
        for line in (*self.directives, *(line for variant in self.variants for line in variant.directives)):
            for name in placeholders(line):
                if name not in PLACEHOLDERS and name.rpartition("_per_")[0] not in self.per_device:
                    raise ValueError(f"{line!r} needs 'per_device: {{{name.rpartition('_per_')[0]}: NUMBER}}'")
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
        values: dict[str, int | str] = {
            "nodes": job.nodes,
            "devices_per_node": enough[0],
            "devices": job.nodes * enough[0],
            "tasks_per_node": job.devices_per_node,
            "tasks": job.nodes * job.devices_per_node,
            "framework": job.framework,
            "benchmark": job.benchmark,
            "name": job.stem,
        }
        for name, amount in self.per_device.items():
            values |= {f"{name}_per_device": amount, f"{name}_per_node": amount * enough[0]}
        return values

    def one_sided(self, job: Job) -> list[int]:
        """Return the numbers of the variants for one of the frameworks of a paired ``job``, which get no effect."""
        values = self.allocation(job)
        return [
            number
            for number, variant in enumerate(self.variants)
            if variant.when.framework and variant.when.holds(values | {"framework": variant.when.framework})
        ]

    def for_job(self, job: Job) -> "Target":
        """Return this target for one job: variants applied, placeholders filled. Raises UserError."""
        values = self.allocation(job)
        lines, launcher, setup = self.directives, self.launcher, self.setup
        for number, variant in enumerate(self.variants):
            if not variant.when.holds(values):
                continue
            if variant.refuse:
                raise UserError(
                    f"target {job.target!r} takes no job of {job.nodes} x {job.devices_per_node} devices "
                    f"({job.framework}): {variant.refuse} (cluster.yaml: targets.{job.target}.variants.{number}.refuse)"
                )
            lines = directives.replace(lines, variant.directives)
            if "launcher" in variant.model_fields_set:  # null is a choice, too
                launcher = variant.launcher
            instead = variant.setup_instead
            setup = setup.model_copy(update={name: getattr(instead, name) for name in instead.model_fields_set})
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
    # Returns the line, from 1, of a target's directive, of which so many come before. Set by ``duel.launch.cluster``.
    _line: Callable[[str, str, int], int] = PrivateAttr()

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
        lines = [(True, raw) for raw in target.directives]
        lines += [(v.when.holds(values), raw) for v in target.variants for raw in v.directives]
        found = [place for place, (holds, raw) in enumerate(lines) if holds and fill(raw, values) == line]
        if not found:
            return ""
        raw = lines[found[-1]][1]  # a variant's line replaces the target's own
        same = [text for _, text in lines[: found[-1]]].count(raw)
        return f"cluster.yaml:{self._line(job.target, raw, same)}"
