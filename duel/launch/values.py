"""The values of cluster.yaml: what each kind may be, and how a value that is not is refused."""

import re
import shlex
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from duel.launch import directives

PLACEHOLDERS = ("nodes", "devices_per_node", "devices", "tasks_per_node", "tasks", "framework", "benchmark", "name")
PER = ("device", "node")  # {cpus_per_device} and {cpus_per_node} are made of a target's per_device: {cpus: N}


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
    return _one_line(text.replace("\t", " ")) and text if text else text


def _pasted(given: Any) -> Any:
    """Accept lines pasted as one text ('setup: {job: |') in place of a list: blank ones may be of a here-document."""
    return [line.rstrip() for line in given.strip("\n").splitlines()] if isinstance(given, str) else given


def _pasted_directives(given: Any) -> Any:
    """Accept the same from a script, with '#SBATCH' before each line and comments in between."""
    return directives.pasted([line for line in _pasted(given) if line]) if isinstance(given, str) else given


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
    if ":" in words or any(re.match("--(het|pack)-group", word) for word in words):
        raise ValueError(f"{text!r}: {directives.HETEROGENEOUS}")
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


def _hours(given: Any) -> Any:
    """Parse ``20:00-06:00`` into minutes of the day."""
    form = re.fullmatch(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)", given) if isinstance(given, str) else None
    times = [int(number) for number in form.groups()] if form else []
    spans = [(times[0] * 60 + times[1]), (times[2] * 60 + times[3])] if times else []
    if not spans or max(times[::2]) > 23 or max(times[1::2]) > 59 or spans[0] == spans[1]:
        raise ValueError(f"{given!r} is not a span of hours, such as '20:00-06:00'")
    return tuple(spans)


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
    if any(f"{text}_per_{what}" in PLACEHOLDERS for what in PER):
        raise ValueError(f"{text!r}: {{{text}_per_node}} is of the job; use another name, such as cpus")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Lines = Annotated[list[Annotated[str, AfterValidator(_shell_line)]], BeforeValidator(_pasted)]
Directives = Annotated[list[Annotated[str, AfterValidator(_directive)]], BeforeValidator(_pasted_directives)]
Words = Annotated[str, AfterValidator(_words)]
Positive = Annotated[int, AfterValidator(_positive)]
Hours = Annotated[tuple[int, int], BeforeValidator(_hours)]
Range = Annotated[tuple[int, int], BeforeValidator(_range)]
Counts = Annotated[list[int], AfterValidator(_counts), BeforeValidator(_listed)]
Name = Annotated[str, AfterValidator(_name)]
Options = Annotated[list[Annotated[str, AfterValidator(_option)]], BeforeValidator(_listed)]
Shebang = Annotated[str, AfterValidator(_shebang)]
Variables = Annotated[list[Annotated[str, AfterValidator(_variable)]], BeforeValidator(_listed)]
