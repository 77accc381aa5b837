"""cluster.yaml, which says where jobs run: read strictly, with line and column in errors. ``schema`` has its keys."""

import functools
import io
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from duel import files
from duel.errors import UserError
from duel.launch.schema import Cluster, Pythons, Setup, Target, Variant, Wandb, When
from duel.options import TARGET_NAME

MAX_BYTES = 1_000_000
MAX_NESTED = 10_000
MAX_NODES = 100_000  # of the tree: aliases of aliases make a short file huge


def load(path: Path) -> Cluster:
    """Read cluster.yaml. Raises UserError, with ``file:line:column`` for errors in its content."""
    try:
        content = files.read(path, MAX_BYTES)
    except FileNotFoundError:
        raise UserError(
            f"{path.name}: not found in {path.parent}; 'git checkout {path.name}' restores the original"
        ) from None
    if sum(map(content.count, (b"[", b"{", b"- "))) > MAX_NESTED:  # the loader's time is quadratic in this
        raise UserError(f"{path.name}: nested too deeply: over {MAX_NESTED} occurrences of '[', '{{' or '- '")
    try:
        # The round-trip loader builds plain data only, keeps lines and columns, and follows YAML 1.2: 'no' is a string
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
    except ValueError as error:  # a scalar that looks like a number or a date but is not one
        raise UserError(f"{path.name}: {error}") from error
    if tree is None:
        raise UserError(f"{path.name}: empty; it needs 'default' and 'targets'")
    try:
        plain = _plain(tree, iter(range(MAX_NODES)))
    except (RecursionError, StopIteration) as error:
        raise UserError(f"{path.name}: nested too deeply, or over {MAX_NODES} entries with aliases expanded") from error
    if not isinstance(plain, dict):
        what = type(plain).__name__
        raise UserError(f"{path.name}:1:1: expected a mapping with 'default' and 'targets', not {what}")
    try:
        cluster = Cluster.model_validate(plain)
        cluster._position = functools.partial(_position, tree)
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
    """Convert the loader's nodes to plain dicts and lists for strict validation; each takes one item of ``room``."""
    next(room)
    if isinstance(node, dict):
        return {key: _plain(value, room) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, room) for value in node]
    return str(node) if isinstance(node, str) else node


def _position(tree: Any, location: tuple[int | str, ...]) -> tuple[int, int]:
    """Return line and column, from 1, of the deepest part of ``location`` that is in the file."""
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
    models: dict[tuple[int | str, ...], type[BaseModel]] = {
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
