"""The schema of cluster.yaml, and how a target applies to one job."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from duel.catalogue import FRAMEWORKS, PAIRED
from duel.errors import UserError
from duel.job import Job
from duel.launch import directives
from duel.launch.values import (
    PER,
    PLACEHOLDERS,
    Counts,
    Directives,
    Hours,
    Line,
    Lines,
    Name,
    Options,
    Positive,
    Range,
    Shebang,
    Variables,
    Words,
    placeholders,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Pythons(_Strict):
    """One interpreter per framework: a path, absolute or below the repository, or a name on the PATH; null: none.

    ``supervisor`` runs a paired script whose frameworks are started each in its own way; null: the one of main.py.
    """

    jax: Line | None
    pytorch: Line | None
    supervisor: Line | None = None


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
    devices_per_node: Range | None = None

    def holds(self, values: dict[str, int | str]) -> bool:
        """Return whether this holds for a job with these values of ``PLACEHOLDERS``."""
        for name in ("nodes", "devices", "devices_per_node"):
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


class Side(NamedTuple):
    """How a paired script starts the processes of one framework, as far as that is not as for the other."""

    launcher: str | None  # None: within the script's own tasks
    job: list[str]  # lines before the launcher
    task: list[str]  # lines before the interpreter


# Keys without effect on this machine; if accepted, they would look as if they did something.
SLURM_ONLY = (
    *("directives", "without", "submit", "pass_variables", "pause", "max_jobs", "array"),
    *("hours", "sender"),
    *("launcher", "node_launcher"),
)


class Target(_Strict):
    """One entry of ``targets``."""

    scheduler: Literal["local", "slurm"]
    python: Pythons
    device: Literal["cpu", "gpu", "tpu", "mps"] | None = None
    chip: Literal["v4", "v5e", "v5p", "v6e"] | None = None
    nodes: Positive = 1
    devices_per_node: Counts = [1]
    per_device: dict[Name, Positive] = {}
    max_jobs: Positive | None = None
    array: Annotated[int, Field(ge=2, le=1000)] | None = None
    hours: Hours | None = None
    sender: Literal["process", "none"] | Directives = "process"
    internet: bool = True
    directives: Directives = []
    without: Options = []
    shebang: Shebang = "#!/usr/bin/env bash"
    submit: Words = "sbatch"
    pass_variables: Variables = []
    pause: Annotated[float, Field(ge=0, le=3600)] = 0.2
    launcher: Words | None = "srun"
    profiler: Line | None = None
    node_launcher: Words = "srun --ntasks-per-node=1 --ntasks={nodes}"
    setup: Setup = Setup()
    variants: list[Variant] = []
    data: Line = "data"
    wandb: Wandb = Wandb()
    # Of a paired job, by framework; empty if both are started alike. Set by ``for_job``.
    _sides: dict[str, Side] = PrivateAttr(default_factory=dict)

    @property
    def sides(self) -> dict[str, Side]:
        return self._sides

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
        of_variants = {name for variant in self.variants for name in variant.model_fields_set}
        unused += [f"variants.{name}" for name in ("directives", "launcher") if name in of_variants]
        if self.scheduler == "local" and unused:
            raise ValueError(f"only a slurm target takes {', '.join(unused)}; this one has 'scheduler: local'")
        for line in _lines(self):
            for name in placeholders(line):
                amount, _, per = name.rpartition("_per_")
                if name not in PLACEHOLDERS and per in PER and amount not in self.per_device:
                    raise ValueError(f"{line!r} needs 'per_device: {{{amount}: NUMBER}}'")
        if found := [name for line in self.sender if not isinstance(self.sender, str) for name in placeholders(line)]:
            raise ValueError(f"sender: {{{found[0]}}} is of a job, which the sender is not; write a number")
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
        """Return the numbers of the variants with directives for one of the frameworks of a paired ``job``: these get
        no effect.
        """
        values = self.allocation(job)
        return [
            number
            for number, variant in enumerate(self.variants)
            if variant.directives
            and variant.when.framework
            and variant.when.holds(values | {"framework": variant.when.framework})
        ]

    def for_job(self, job: Job) -> "Target":
        """Return this target for one job: variants applied, placeholders filled. Raises UserError.

        A paired job gets what its frameworks have in common, and ``sides`` for the rest.
        """
        whole = self._for(job)
        if job.framework != PAIRED or self.sides:
            return whole
        both = [self._for(replace(job, framework=framework)) for framework in FRAMEWORKS]
        alike = len({side.launcher for side in both}) == 1
        if not alike and job.ranks > 1:
            raise UserError(
                f"target {job.target!r} has a launcher for each framework: --paired can use them on one device, not on "
                f"{job.ranks} (cluster.yaml: targets.{job.target})"
            )
        common = {scope: _common(*(getattr(side.setup, scope) for side in both)) for scope in SCOPES}
        if not alike:
            common["task"] = []  # within the containers
        own = [{scope: getattr(side.setup, scope)[len(common[scope]) :] for scope in SCOPES} for side in both]
        for scope in ("submit", "node"):
            common[scope] += [line for lines in own for line in lines[scope]]
        whole = whole.model_copy(
            update={"setup": Setup.model_validate(common), "launcher": both[0].launcher if alike else None}
        )
        if not alike or any(lines["job"] or lines["task"] for lines in own):
            whole._sides = {
                framework: Side(None if alike else side.launcher or "", lines["job"], lines["task"])
                for framework, side, lines in zip(FRAMEWORKS, both, own, strict=True)
            }
        return whole

    def _for(self, job: Job) -> "Target":
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


def _lines(target: Target) -> list[str]:
    """Return every line of ``target`` in which placeholders are filled."""
    parts: list[Target | Variant] = [target, *target.variants]
    setups = [setup for part in parts for setup in (part.setup, getattr(part, "setup_instead", Setup()))]
    lines = [line for part in parts for line in (*part.directives, part.launcher or "")] + [target.node_launcher]
    return lines + [line for setup in setups for scope in SCOPES for line in getattr(setup, scope)]


def _common(one: list[str], other: list[str]) -> list[str]:
    """Return the lines with which both begin."""
    return [line for line, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))]


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
