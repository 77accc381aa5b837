"""cluster.yaml, which says where jobs run. ``schema`` has its keys, ``document`` reads the file."""

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from duel.launch import directives
from duel.launch.document import Document, Location
from duel.launch.schema import SLURM_ONLY, Cluster, Pythons, Setup, Target, Variant, Wandb, When
from duel.launch.values import Directives
from duel.options import TARGET_NAME

DIRECTIVES = TypeAdapter(Directives)


def load(path: Path) -> Cluster:
    """Read cluster.yaml. Raises UserError, with ``file:line:column`` for errors in its content."""
    file = Document(path, "'default' and 'targets'", f"'git checkout {path.name}' restores the original")
    try:
        cluster = Cluster.model_validate(_inherit(file))
        cluster._line = functools.partial(_line, file.text)
    except ValidationError as error:
        raise file.errors(error, _valid_keys) from error
    for name in cluster.targets:
        if not TARGET_NAME.fullmatch(name):
            raise file.error(("targets", name), f"target {name!r}: letters, digits, '.', '_' and '-' are valid")
    if cluster.default not in cluster.targets:
        valid = ", ".join(cluster.targets) or "none, since 'targets' is empty"
        raise file.error(("default",), f"default: unknown target {cluster.default!r}; valid: {valid}")
    return cluster


def _inherit(file: Document) -> dict[str, Any]:
    """Return the file's content with each target whole: with the keys of the one it is ``like``, or of ``defaults``."""
    plain = file.plain
    targets, defaults = plain.get("targets"), plain.get("defaults", {})
    if not isinstance(defaults, dict):
        raise file.error(("defaults",), "defaults: expected a mapping with keys of a target")
    if not isinstance(targets, dict):
        return plain

    def whole(name: str, likes: tuple[str, ...] = ()) -> Any:
        own = targets[name]
        if not isinstance(own, dict):
            return own
        other = own.get("like")
        if "like" in own and (not isinstance(other, str) or other not in targets or other in (name, *likes)):
            valid = ", ".join(key for key in targets if key not in (name, *likes)) or "none"
            where = ("targets", name, "like")
            raise file.error(where, f"targets.{name}.like: no such target {other!r}; valid: {valid}")
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


def _valid_keys(location: Location) -> list[str]:
    models: dict[Location, type[BaseModel]] = {
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
