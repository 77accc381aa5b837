"""cluster.yaml: where jobs run. Its schema, its strict reading, and errors that name line and column."""

import io
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from duel.errors import UserError
from duel.options import TARGET_NAME

MAX_BYTES = 1_000_000


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of printable characters")
    return text


def _directive(text: str) -> str:
    if not _one_line(text).startswith("-"):
        raise ValueError(f"{text!r} is no option of sbatch; write it as on its command line, such as --partition=gpu")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Directive = Annotated[str, AfterValidator(_directive)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Pythons(_Strict):
    """One interpreter per framework: an absolute path, one below the repository, or a name on the PATH."""

    jax: Line
    pytorch: Line


class Wandb(_Strict):
    project: Line = "duel"
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"


class Target(_Strict):
    """One entry of ``targets``."""

    scheduler: Literal["local", "slurm"]
    python: Pythons
    directives: list[Directive] = []
    launcher: Line = "srun"
    setup: list[Line] = []
    data: Line = "data"
    wandb: Wandb = Wandb()


class Cluster(_Strict):
    default: Line
    targets: dict[str, Target]

    def target(self, name: str | None) -> tuple[str, Target]:
        """The target called ``name``, or the default one. Raises UserError with the valid names."""
        name = name or self.default
        if name not in self.targets:
            raise UserError(f"unknown target {name!r}; valid in cluster.yaml: {', '.join(self.targets)}")
        return name, self.targets[name]


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
    if tree is None:
        raise UserError(f"{path.name}: empty; it needs 'default' and 'targets'")
    try:
        cluster = Cluster.model_validate(_plain(tree))
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
        valid = ", ".join(cluster.targets)
        raise UserError(f"{path.name}:{line}:{column}: default: unknown target {cluster.default!r}; valid: {valid}")
    return cluster


def _plain(node: Any) -> Any:
    """The loader's nodes as plain dicts and lists, which strict validation wants."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
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
    if not hasattr(tree, "lc"):
        return f"{file}:1:1: a mapping with 'default' and 'targets' was expected, not {type(tree).__name__}"
    line, column = _position(tree, location)
    name = ".".join(str(part) for part in location if part != "[key]") or "the file"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"unknown key; valid: {', '.join(_valid_keys(location[:-1]))}"
    elif error["type"] == "missing":
        message = "this key is missing"
    elif error["type"] != "value_error":
        message += f", not {error['input']!r}"
    return f"{file}:{line}:{column}: {name}: {message}"


def _valid_keys(location: tuple[int | str, ...]) -> list[str]:
    models: dict[tuple[int | str, ...], type[_Strict]] = {
        (): Cluster,
        ("targets", "*"): Target,
        ("targets", "*", "python"): Pythons,
        ("targets", "*", "wandb"): Wandb,
    }
    generic = tuple("*" if index == 1 else part for index, part in enumerate(location))
    return list(models[generic].model_fields)
