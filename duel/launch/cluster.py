"""cluster.yaml, which says where jobs run: read strictly, with line and column in errors. ``schema`` has its keys."""

import contextlib
import functools
import io
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from duel import files
from duel.errors import UserError
from duel.launch import directives
from duel.launch.schema import SLURM_ONLY, Cluster, Directives, Pythons, Setup, Target, Variant, Wandb, When
from duel.options import TARGET_NAME

DIRECTIVES = TypeAdapter(Directives)
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
        hint = "; quote a value that has a ',' or a bracket" if "flow" in str(error.context) else ""
        raise UserError(f"{path.name}{where}: {(error.problem or str(error)).splitlines()[0]}{hint}") from error
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
        cluster = Cluster.model_validate(_inherit(path.name, tree, plain))
        cluster._line = functools.partial(_line, content.decode())
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


def _inherit(file: str, tree: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the file's content with each target whole: with the keys of the one it is ``like``, or of ``defaults``."""
    targets, defaults = plain.get("targets"), plain.get("defaults", {})
    if not isinstance(defaults, dict):
        line, column = _position(tree, ("defaults",))
        raise UserError(f"{file}:{line}:{column}: defaults: expected a mapping with keys of a target")
    if not isinstance(targets, dict):
        return plain

    def whole(name: str, likes: tuple[str, ...] = ()) -> Any:
        own = targets[name]
        if not isinstance(own, dict):
            return own
        other = own.get("like")
        if "like" in own and (not isinstance(other, str) or other not in targets or other in (name, *likes)):
            line, column = _position(tree, ("targets", name, "like"))
            valid = ", ".join(key for key in targets if key not in (name, *likes)) or "none"
            raise UserError(f"{file}:{line}:{column}: targets.{name}.like: no such target {other!r}; valid: {valid}")
        base = defaults if other is None else whole(other, (*likes, name))
        return _merged(base, own) if isinstance(base, dict) else own

    rest = {key: value for key, value in plain.items() if key != "defaults"}
    return rest | {"targets": {name: whole(name) for name in targets}}


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of both; ``own`` ones count, and within a mapping or the directives each entry by itself."""
    if own.get("scheduler") == "local":
        base = {key: value for key, value in base.items() if key not in SLURM_ONLY}
    both = base | {key: value for key, value in own.items() if key != "like"}
    for key in base.keys() & own.keys():
        if isinstance(base[key], dict) and isinstance(own[key], dict):
            both[key] = base[key] | own[key]
    lines = [each.get("directives") for each in (base, own)]
    with contextlib.suppress(ValidationError):  # the whole target is validated next
        if all(lines):
            both["directives"] = directives.replace(*map(DIRECTIVES.validate_python, lines))
    return both


def _line(text: str, target: str, directive: str, same: int) -> int:
    """Return the number of the line of ``text`` that gives ``target`` a ``directive``: its own, or one it inherits.

    ``same`` equal lines of the target come before it.
    """
    lines = text.splitlines()
    head = re.compile(rf"(\s+)[\"']?{re.escape(target)}[\"']?\s*:")
    begin = next((number for number, line in enumerate(lines) if head.match(line)), 0)
    deeper = re.compile((head.match(lines[begin]) or ["", ""])[1] + r"\s|\s*(#|$)")
    end = next((number for number in range(begin + 1, len(lines)) if not deeper.match(lines[number])), len(lines))
    given = re.compile(rf"(?<![\w-]){re.escape(directive)}(?=[\s,\]\"']|$)")
    found = [number for number, line in enumerate(lines) if given.search(line)]
    own = [number for number in found if begin <= number < end]
    return (own[min(same, len(own) - 1)] if own else next(iter(found), begin)) + 1


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
        ("targets", "*", "variants", "*", "setup_instead"): Setup,
    }
    generic = tuple("*" if index == 1 or isinstance(part, int) else part for index, part in enumerate(location))
    more = {(): ["defaults"], ("targets", "*"): ["like"]}
    return [*models[generic].model_fields, *more.get(generic, [])]
