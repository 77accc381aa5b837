"""cluster.yaml: where jobs run. Its schema, its strict reading, and errors that name line and column."""

import io
import re
import reprlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from duel.errors import UserError
from duel.job import Job
from duel.launch import directives
from duel.options import TARGET_NAME

MAX_BYTES = 1_000_000
MAX_NODES = 100_000  # of the tree: aliases of aliases make a short file a huge one
PLACEHOLDERS = ("nodes", "devices_per_node", "devices", "tasks_per_node", "tasks", "framework", "benchmark", "name")


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of printable characters")
    return text


def _directive(text: str) -> str:
    if not re.match("--?[A-Za-z]", _one_line(text)):
        raise ValueError(f"{text!r} is no option of sbatch; write it as on its command line, such as --partition=gpu")
    for name in re.findall(r"(?<!\$)\{(\w+)\}", text):
        if name not in PLACEHOLDERS:
            raise ValueError(f"unknown placeholder {{{name}}}; valid: {', '.join(f'{{{p}}}' for p in PLACEHOLDERS)}")
    return text


def _shell_line(text: str) -> str:
    _one_line(text.replace("\t", " "))
    return text


def _pasted(given: Any) -> Any:
    """Lines pasted as one text ('directives: |'), without the blank ones, are as good as a list."""
    return [line.rstrip() for line in given.split("\n") if line.strip()] if isinstance(given, str) else given


def _pasted_directives(given: Any) -> Any:
    """The same from a script: with '#SBATCH' before each line, and comments between them."""
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
        raise ValueError(f"{text!r} has a comment, which would hide the command behind it")
    return text


def _variable(text: str) -> str:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is no variable's name, such as SBATCH_ACCOUNT")
    return text


def _shebang(text: str) -> str:
    if not _one_line(text).startswith("#!"):
        raise ValueError(f"{text!r} does not begin with '#!'")
    return text


def _range(given: Any) -> Any:
    """``3``, ``2-4`` or ``5+`` as (lowest, highest)."""
    form = re.fullmatch(r"([1-9]\d{0,5})(?:(\+)|-([1-9]\d{0,5}))?", str(given)) if type(given) in (int, str) else None
    if form is None:
        raise ValueError(f"{given!r} is no range; valid: a number such as 1, '2-4', or '5+'")
    lowest = int(form[1])
    highest = 10**6 if form[2] else int(form[3] or lowest)
    if highest < lowest:
        raise ValueError(f"{given!r} ends before it begins")
    return lowest, highest


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} is not a number from 1 on")
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
    """One interpreter per framework: an absolute path, one below the repository, or a name on the PATH; null: none."""

    jax: Line | None
    pytorch: Line | None


class Wandb(_Strict):
    project: Line = "duel"
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"


class Setup(_Strict):
    """Shell lines, by where a site needs them."""

    submit: Lines = []  # on the login node, in the shell that calls sbatch
    job: Lines = []  # in the batch shell, once
    node: Lines = []  # once on each node
    task: Lines = []  # in each task, before the interpreter

    def __add__(self, other: "Setup") -> "Setup":
        return Setup.model_validate({name: [*getattr(self, name), *getattr(other, name)] for name in SCOPES})


SCOPES = tuple(Setup.model_fields)


class When(_Strict):
    """What a variant is for; all that is given must hold."""

    framework: Literal["jax", "pytorch"] | None = None
    nodes: Range | None = None
    devices: Range | None = None

    def holds(self, values: dict[str, int | str]) -> bool:
        """Whether this is for a job with these values of ``PLACEHOLDERS``."""
        for name in ("nodes", "devices"):
            span = getattr(self, name)
            if span is not None and not span[0] <= int(values[name]) <= span[1]:
                return False
        return self.framework in (None, values["framework"])


class Variant(_Strict):
    """Lines for some jobs only: directives replace those of the same option, set-up lines come behind the others."""

    when: When
    directives: Directives = []
    launcher: Words | None = None
    setup: Setup = Setup()


# What a script that runs on this machine has no use for; left in, it would look as if it did something.
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
        """This machine's CPUs count as two devices: what takes several can then be tried anywhere."""
        if isinstance(given, dict) and given.get("scheduler") == "local":
            return {"devices_per_node": [1, 2]} | given
        return given

    @model_validator(mode="after")
    def _only_what_counts(self) -> "Target":
        unused = [name for name in SLURM_ONLY if name in self.model_fields_set]
        if self.scheduler == "local" and unused:
            raise ValueError(f"only a slurm target has {', '.join(unused)}; this one says 'scheduler: local'")
        return self

    def allocation(self, job: Job) -> dict[str, int | str]:
        """What is asked of Slurm for ``job``: the values of ``PLACEHOLDERS``.

        Whole nodes, or the smallest allowed count of devices that is enough. Raises UserError where none is.
        """
        enough = [count for count in self.devices_per_node if count >= job.devices_per_node]
        if not enough:
            raise UserError(
                f"target {job.target!r} gives {self.devices_per_node[-1]} devices per node at most; "
                f"{job.devices_per_node} asked for (cluster.yaml: targets.{job.target}.devices_per_node)"
            )
        if job.nodes > self.nodes:
            raise UserError(
                f"target {job.target!r} gives {self.nodes} nodes at most; "
                f"{job.nodes} asked for (cluster.yaml: targets.{job.target}.nodes)"
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
        """This target as it is for one job: its variants applied, its placeholders filled. Raises UserError."""
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


def fill(line: str, values: dict[str, int | str]) -> str:
    """``line`` with its placeholders' values; every other brace, such as the shell's ``${HOME}``, stays."""
    return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), line)


class Cluster(_Strict):
    default: Line
    targets: dict[str, Target]
    _tree: Any = PrivateAttr(default=None)

    def target(self, name: str | None) -> tuple[str, Target]:
        """The target called ``name``, or the default one. Raises UserError with the valid names."""
        name = name or self.default
        if name not in self.targets:
            raise UserError(f"unknown target {name!r}; valid in cluster.yaml: {', '.join(self.targets)}")
        return name, self.targets[name]

    def where(self, job: Job, line: str) -> str:
        """``cluster.yaml:LINE`` of the directive that became ``line`` in the script of ``job``; empty if none did."""
        target = self.targets[job.target]
        values = target.allocation(job)
        # The last one first: a variant's line stands in the place of the target's own.
        places: list[tuple[tuple[int | str, ...], list[str]]] = [(("directives",), target.directives)]
        for number, variant in enumerate(target.variants):
            if variant.when.holds(values):
                places.append((("variants", number, "directives"), variant.directives))
        for path, lines in reversed(places):
            for number, raw in enumerate(lines):
                if fill(raw, values) == line:
                    return f"cluster.yaml:{_position(self._tree, ('targets', job.target, *path, number))[0]}"
        return ""


def load(path: Path) -> Cluster:
    """Read cluster.yaml. Raises UserError, with ``file:line:column`` for what is wrong inside."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{path.name}: not found in {path.parent}; 'git checkout {path.name}' brings back the first one"
        ) from None
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path.name}: {len(content)} bytes; at most {MAX_BYTES} are valid")
    try:
        # The round-trip loader builds plain data only, keeps lines and columns, and follows YAML 1.2: 'no' is a text
        # and 12:30:00 is not 45,000.
        tree: Any = YAML(typ="rt").load(io.StringIO(content.decode()))
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: not UTF-8 text, at byte {error.start}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{path.name}{where}: {(error.problem or str(error)).splitlines()[0]}") from error
    except YAMLError as error:
        raise UserError(f"{path.name}: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UserError(f"{path.name}: nested too deeply") from error
    except ValueError as error:  # a scalar that is written like a number or a date, and is none
        raise UserError(f"{path.name}: {error}") from error
    if tree is None:
        raise UserError(f"{path.name}: empty; it needs 'default' and 'targets'")
    try:
        plain = _plain(tree, iter(range(MAX_NODES)))
    except (RecursionError, StopIteration) as error:
        raise UserError(f"{path.name}: nested too deeply, or over {MAX_NODES} entries with all aliases") from error
    if not isinstance(plain, dict):
        what = type(plain).__name__
        raise UserError(f"{path.name}:1:1: a mapping with 'default' and 'targets' was expected, not {what}")
    try:
        cluster = Cluster.model_validate(plain)
        cluster._tree = tree
    except ValidationError as error:
        raise UserError("\n".join(_explain(path.name, tree, dict(e)) for e in error.errors())) from error
    for name in cluster.targets:
        if not TARGET_NAME.fullmatch(name):
            line, column = _position(tree, ("targets", name))
            raise UserError(
                f"{path.name}:{line}:{column}: target {name!r}: letters, digits, '.', '_' and '-' are valid"
            )
    if cluster.default not in cluster.targets:
        line, column = _position(tree, ("default",))
        valid = ", ".join(cluster.targets) or "none, since 'targets' is empty"
        raise UserError(f"{path.name}:{line}:{column}: default: unknown target {cluster.default!r}; valid: {valid}")
    return cluster


def _plain(node: Any, room: Iterator[int]) -> Any:
    """The loader's nodes as plain dicts and lists, which strict validation wants; each takes one item of ``room``."""
    next(room)
    if isinstance(node, dict):
        return {key: _plain(value, room) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, room) for value in node]
    return str(node) if isinstance(node, str) else node


def _position(tree: Any, location: tuple[int | str, ...]) -> tuple[int, int]:
    """Line and column, from 1, of the deepest part of ``location`` that the file has."""
    line, column = tree.lc.line, tree.lc.col
    for part in location:
        try:
            line, column = tree.lc.item(part) if isinstance(part, int) else tree.lc.key(part)
            tree = tree[part]
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return line + 1, column + 1


def _explain(file: str, tree: Any, error: dict[str, Any]) -> str:
    location: tuple[int | str, ...] = error["loc"]
    line, column = _position(tree, location)
    name = ".".join(str(part) for part in location if part != "[key]") or "the file"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"unknown key; valid: {', '.join(_valid_keys(location[:-1]))}"
    elif error["type"] == "missing":
        message = "this key is missing"
    elif error["type"] != "value_error":
        if error["type"] in ("model_type", "dict_type"):
            message = "Input should be a mapping"
        message += f", not {reprlib.repr(error['input'])}"
    return f"{file}:{line}:{column}: {name}: {message}"


def _valid_keys(location: tuple[int | str, ...]) -> list[str]:
    models: dict[tuple[int | str, ...], type[_Strict]] = {
        (): Cluster,
        ("targets", "*"): Target,
        ("targets", "*", "python"): Pythons,
        ("targets", "*", "wandb"): Wandb,
        ("targets", "*", "setup"): Setup,
        ("targets", "*", "variants", "*"): Variant,
        ("targets", "*", "variants", "*", "when"): When,
        ("targets", "*", "variants", "*", "setup"): Setup,
    }
    generic = tuple("*" if index == 1 or isinstance(part, int) else part for index, part in enumerate(location))
    return list(models[generic].model_fields)
