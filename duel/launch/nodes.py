"""The nodes of a partition: which take no jobs now, why and until when, and their maximum resources."""

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from duel.launch import directives

ASK_SECONDS = 60.0
SHOWN = 8  # node names, and groups of them, in one message
# Parts of the state of a node that starts no jobs; a trailing '*' means that it does not respond.
_CLOSED = re.compile(r"DOWN|DRAIN|FAIL|MAINT|RESERVED|UNKNOWN|RESPOND|INVAL|REBOOT|\*")
_SWITCHED_OFF = re.compile(r"POWER(ED|ING)_DOWN")  # Slurm powers it up for a job
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Node:
    """One node: its configuration and current state."""

    name: str
    partitions: tuple[str, ...]
    state: str
    reason: str  # why it is out of service, and since when
    cpus: int
    memory: int  # MB
    gres: str  # 'gpu:h100:4,tpu:2'

    @property
    def closed(self) -> bool:
        return bool(_CLOSED.search(_SWITCHED_OFF.sub("", self.state)))

    def devices(self, name: str, kind: str) -> int:
        """Return how many of ``name`` ('gpu') it has, of type ``kind`` or, if that is empty, of any type."""
        total = 0
        for found in re.finditer(r"(?:^|,)([^:,(]+)(?::([^:,(]+))??(?::(\d+))?(?=[(,]|$)", self.gres):
            if found[1] == name and kind.lower() in ("", (found[2] or "").lower()):
                total += int(found[3] or 1)
        return total


def of_partitions(names: Iterable[str]) -> list[Node]:
    """Return the nodes of these partitions; none if Slurm does not list them."""
    wanted = set(names)
    return [node for node in map(_node, _lines("node")) if node and wanted & set(node.partitions)]


def _lines(what: str) -> list[str]:
    """Return the lines of ``scontrol show``, one for each ``what``; none if it fails."""
    command = ["scontrol", "show", what, "--oneliner"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.splitlines()


def _node(line: str) -> Node | None:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    reason = re.search(r"\bReason=(.*?) \[\S+@(\S+)\]", line)
    try:
        return Node(
            fields["NodeName"],
            tuple(fields.get("Partitions", "").split(",")),
            fields["State"],
            f"{reason[1]}, since {reason[2]}" if reason else "",
            int(fields["CPUTot"]),
            int(fields["RealMemory"]),
            fields.get("Gres", "").replace("(null)", ""),
        )
    except (KeyError, ValueError):  # a line in another format
        return None


def closed(nodes: list[Node]) -> str:
    """Describe which of ``nodes`` take no jobs now, and why; empty if all do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.closed:
            groups.setdefault((node.state.lower(), node.reason), []).append(node.name)
    lines = []
    for (state, reason), names in groups.items():
        lines.append(f"{_named(names)} {state}" + (f" ({reason})" if reason else ""))
    more = [f"and {len(lines) - SHOWN} more such groups"] if len(lines) > SHOWN else []
    return "; ".join([*lines[:SHOWN], *more])


def reserved(partitions: Iterable[str], maintenance: bool) -> str:
    """Describe which nodes of ``partitions`` are reserved, by what and until when; empty if none is.

    ``maintenance``: only reservations for maintenance.
    """
    found = []
    for line in _lines("reservation"):
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        kind = " for maintenance" if "MAINT" in fields.get("Flags", "").split(",") else ""
        if "ReservationName" in fields and (kind or not maintenance):
            found.append((kind, fields))
    ours = {node.name for node in of_partitions(partitions)} if found else set()
    lines = []
    for kind, fields in found:
        if names := [name for name in expanded(fields.get("Nodes", "")) if name in ours]:
            span = f"from {fields.get('StartTime')} until {fields.get('EndTime')}"
            lines.append(f"{_named(names)} reserved{kind} ({fields['ReservationName']}) {span}")
    return "; ".join(lines[:SHOWN])


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def expanded(names: str) -> list[str]:
    """Expand ``h100-[1-2]`` into two names by Slurm's own rules, which need no controller."""
    command = ["scontrol", "show", "hostnames", names]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def too_much(lines: list[str], nodes: list[Node]) -> tuple[str, str] | None:
    """Return the option by which ``lines`` request more than these nodes have even with all in service, and why.

    None if they have enough, or if that cannot be determined: not every option is checked.
    """
    first = re.match(r"\d+", directives.value(lines, "--nodes") or "1")
    wanted = int(first[0]) if first else 1
    fitting = nodes
    if len(nodes) < wanted:
        return "--nodes", f"there are only {len(nodes)} nodes"
    for option, what, has in _conditions(lines):
        fitting = [node for node in fitting if has(node)]
        if len(fitting) < wanted:
            enough = "no node has" if not fitting else f"only {len(fitting)} of {len(nodes)} nodes have"
            return option, f"{enough} {what}"
    return None


def _conditions(lines: list[str]) -> list[tuple[str, str, Callable[[Node], bool]]]:
    """Return what each node must have: the option that requests it, its description, and a test of one node."""
    found: list[tuple[str, str, Callable[[Node], bool]]] = []
    memory = re.fullmatch(r"(\d+)([KMGT]?)B?", (directives.value(lines, "--mem") or "").upper())
    if memory:
        megabytes = int(memory[1]) * _UNITS[memory[2] or "M"]
        found.append(("--mem", f"{memory[0]} of memory", lambda node: node.memory >= megabytes))
    cpus = directives.value(lines, "--cpus-per-task") or "1"
    tasks = directives.value(lines, "--ntasks-per-node") or "1"
    if cpus.isdecimal() and tasks.isdecimal():
        count = int(cpus) * int(tasks)
        found.append(("--cpus-per-task", f"{count} CPUs", lambda node: node.cpus >= count))
    for option, text in (("--gpus-per-node", "gpu:{}"), ("--gres", "{}")):
        for item in filter(None, (directives.value(lines, option) or "").split(",")):
            name, kind, number = _gres(text.format(item.removeprefix("gres:").removeprefix("gres/")))
            if number is not None:
                what = f"{number} {name}" + (f" of type {kind}" if kind else "")
                found.append((option, what, _has_devices(name, kind, number)))
    return found


def _gres(text: str) -> tuple[str, str, int | None]:
    """Return name, type and count of ``gpu:h100:4``, ``gpu:4`` or ``gpu``; no count for any other format."""
    form = re.fullmatch(r"([A-Za-z_]\w*)(?::(\w[\w.-]*))??(?::(\d+))?", text)
    return (form[1], form[2] or "", int(form[3] or 1)) if form else (text, "", None)


def _has_devices(name: str, kind: str, number: int) -> Callable[[Node], bool]:
    return lambda node: node.devices(name, kind) >= number
