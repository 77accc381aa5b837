"""The nodes of a partition: which take no jobs now, why and until when, and what they have at most."""

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from duel.launch import directives

ASK_SECONDS = 60.0
SHOWN = 8  # names of nodes, and groups of them, in one remark
# Parts of a node's state in which it starts nothing; '*' behind it: it does not respond.
_CLOSED = re.compile(r"DOWN|DRAIN|FAIL|MAINT|RESERVED|UNKNOWN|RESPOND|INVAL|REBOOT|\*")
_SWITCHED_OFF = re.compile(r"POWER(ED|ING)_DOWN")  # Slurm switches it on for a job
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Node:
    """One node as it is configured, and its state of the moment."""

    name: str
    partitions: tuple[str, ...]
    state: str
    reason: str  # who took it out of service says why, and when
    cpus: int
    memory: int  # MB
    gres: str  # 'gpu:h100:4,tpu:2'

    @property
    def closed(self) -> bool:
        return bool(_CLOSED.search(_SWITCHED_OFF.sub("", self.state)))

    def devices(self, name: str, kind: str) -> int:
        """How many of ``name`` ('gpu') it has, of the type ``kind`` or of any."""
        total = 0
        for found in re.finditer(r"(?:^|,)([^:,(]+)(?::([A-Za-z][^:,(]*))?(?::(\d+))?(?=[(,]|$)", self.gres):
            if found[1] == name and kind.lower() in ("", (found[2] or "").lower()):
                total += int(found[3] or 1)
        return total


def of_partitions(names: Iterable[str]) -> list[Node]:
    """The nodes of these partitions; none where Slurm does not say."""
    wanted = set(names)
    return [node for node in map(_node, _lines("node")) if node and wanted & set(node.partitions)]


def _lines(what: str) -> list[str]:
    """What ``scontrol show`` prints of each ``what``, a line for each."""
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
    except (KeyError, ValueError):  # a line of another form
        return None


def closed(nodes: list[Node]) -> str:
    """Which of ``nodes`` take no jobs now, and why, in words; empty where all do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.closed:
            groups.setdefault((node.state.lower(), node.reason), []).append(node.name)
    said = []
    for (state, reason), names in groups.items():
        said.append(f"{_named(names)} {state}" + (f" ({reason})" if reason else ""))
    more = [f"and {len(said) - SHOWN} more such groups"] if len(said) > SHOWN else []
    return "; ".join([*said[:SHOWN], *more])


def reserved(partitions: Iterable[str], maintenance: bool) -> str:
    """Which nodes of ``partitions`` are reserved, by what and until when, in words; empty where none is.

    ``maintenance``: for that alone.
    """
    found = []
    for line in _lines("reservation"):
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        kind = " for maintenance" if "MAINT" in fields.get("Flags", "").split(",") else ""
        if "ReservationName" in fields and (kind or not maintenance):
            found.append((kind, fields))
    ours = {node.name for node in of_partitions(partitions)} if found else set()
    said = []
    for kind, fields in found:
        if names := [name for name in _expanded(fields.get("Nodes", "")) if name in ours]:
            span = f"from {fields.get('StartTime')} until {fields.get('EndTime')}"
            said.append(f"{_named(names)} reserved{kind} ({fields['ReservationName']}) {span}")
    return "; ".join(said[:SHOWN])


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _expanded(names: str) -> list[str]:
    """``h100-[1-2]`` as two names; Slurm's own rules, which ask no controller."""
    command = ["scontrol", "show", "hostnames", names]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def too_much(lines: list[str], nodes: list[Node]) -> tuple[str, str] | None:
    """The option by which ``lines`` ask for more than these nodes have when all are in service, and why.

    None where they have it, or where that cannot be told: not every option is looked at.
    """
    first = re.match(r"\d+", directives.value(lines, "--nodes") or "1")
    wanted = int(first[0]) if first else 1
    fitting = nodes
    if len(nodes) < wanted:
        return "--nodes", f"there are {len(nodes)} nodes"
    for option, what, has in _conditions(lines):
        fitting = [node for node in fitting if has(node)]
        if len(fitting) < wanted:
            enough = "no node has" if not fitting else f"{len(fitting)} of {len(nodes)} nodes have"
            return option, f"{enough} {what}"
    return None


def _conditions(lines: list[str]) -> list[tuple[str, str, Callable[[Node], bool]]]:
    """What each node must have: the option that asks for it, in words, and as a question to a node."""
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
    """Name, type and count of ``gpu:h100:4``, ``gpu:4`` or ``gpu``; no count where it is of another form."""
    form = re.fullmatch(r"([A-Za-z_]\w*)(?::([A-Za-z][\w.-]*))?(?::(\d+))?", text)
    return (form[1], form[2] or "", int(form[3] or 1)) if form else (text, "", None)


def _has_devices(name: str, kind: str, number: int) -> Callable[[Node], bool]:
    return lambda node: node.devices(name, kind) >= number
