"""YAML files that people write: read strictly, with line and column in errors."""

import io
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from duel import files
from duel.errors import UserError

MAX_BYTES = 1_000_000
MAX_NESTED = 10_000
MAX_NODES = 100_000  # of the tree: aliases of aliases make a short file huge
Location = tuple[int | str, ...]


class Document:
    """A file's content as plain data, and where each part of it is in the file."""

    def __init__(self, path: Path, needs: str, remedy: str) -> None:
        """Read ``path``, which ``needs`` some keys. Raises UserError, with the ``remedy`` if there is no such file."""
        self.name = path.name
        try:
            content = files.read(path, MAX_BYTES)
        except FileNotFoundError:
            raise UserError(f"{path.name}: not found in {path.parent}; {remedy}") from None
        if sum(map(content.count, (b"[", b"{", b"- "))) > MAX_NESTED:  # the loader's time is quadratic in this
            raise UserError(f"{path.name}: nested too deeply: over {MAX_NESTED} occurrences of '[', '{{' or '- '")
        self._tree = _load(path.name, content)
        if self._tree is None:
            raise UserError(f"{path.name}: empty; it needs {needs}")
        self.text = content.decode()
        try:
            plain = _plain(self._tree, iter(range(MAX_NODES)))
        except (RecursionError, StopIteration) as error:
            raise UserError(
                f"{path.name}: nested too deeply, or over {MAX_NODES} entries with aliases expanded"
            ) from error
        if not isinstance(plain, dict):
            raise UserError(f"{path.name}:1:1: expected a mapping with {needs}, not {type(plain).__name__}")
        self.plain: dict[str, Any] = plain

    def error(self, location: Location, message: str) -> UserError:
        """Return the error ``message`` about the deepest part of ``location`` that is in the file."""
        tree, line, column = self._tree, self._tree.lc.line, self._tree.lc.col
        for part in location:
            try:
                line, column = tree.lc.item(part) if isinstance(part, int) else tree.lc.key(part)
                tree = tree[part]
            except (KeyError, IndexError, TypeError, AttributeError):
                break
        return UserError(f"{self.name}:{line + 1}:{column + 1}: {message}")

    def errors(self, found: ValidationError, valid_keys: Callable[[Location], list[str]]) -> UserError:
        """Return everything that a schema ``found`` wrong; ``valid_keys`` lists those of the mapping at a place."""
        return UserError("\n".join(str(self._explained(dict(error), valid_keys)) for error in found.errors()))

    def _explained(self, error: dict[str, Any], valid_keys: Callable[[Location], list[str]]) -> UserError:
        location: Location = error["loc"]
        name = ".".join(str(part) for part in location if part != "[key]") or "the file"
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            message = f"unknown key; valid: {', '.join(valid_keys(location[:-1]))}"
        elif error["type"] == "missing":
            message = "this key is missing"
        elif error["type"] != "value_error":
            if error["type"] in ("model_type", "dict_type"):
                message = "Input should be a mapping"
            message += f", not {reprlib.repr(error['input'])}"
        return self.error(location, f"{name}: {message}")


def _load(name: str, content: bytes) -> Any:
    """Return the loader's tree: plain data with lines and columns, by YAML 1.2: 'no' is a string, 12:30 is not 750."""
    try:
        return YAML(typ="rt").load(io.StringIO(content.decode()))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text, at byte {error.start}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        hint = "; quote a value that has a ',' or a bracket" if "flow" in str(error.context) else ""
        raise UserError(f"{name}{where}: {(error.problem or str(error)).splitlines()[0]}{hint}") from error
    except YAMLError as error:
        raise UserError(f"{name}: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UserError(f"{name}: nested too deeply") from error
    except ValueError as error:  # a scalar that looks like a number or a date but is not one
        raise UserError(f"{name}: {error}") from error


def _plain(node: Any, room: Iterator[int]) -> Any:
    """Convert the loader's nodes to plain dicts and lists for strict validation; each takes one item of ``room``."""
    next(room)
    if isinstance(node, dict):
        return {key: _plain(value, room) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, room) for value in node]
    # What has an anchor is of the loader's own types, which a strict schema refuses.
    for of_loader, kind in ((str, str), (ScalarBoolean, bool), (int, int), (float, float)):
        if isinstance(node, of_loader) and not isinstance(node, bool):
            return kind(node)
    return node
