"""A first cluster.yaml, from what Slurm says of its partitions and of the user's accounts.

Nothing that the tools print is trusted: what could mean more than itself gets into comments, but into no directive.
"""

import contextlib
import itertools
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from duel.errors import UserError
from duel.files import write_atomically
from duel.launch import cluster, directives, state

TIMEOUT_SECONDS = 60.0
MINUTES = 30.0  # asked for where the partition allows as much
NODES = ("partition", "available", "limit", "sizes", "count", "cpus", "memory", "gres", "features")
SINFO = "%R|%a|%l|%s|%D|%c|%m|%G|%f"
ACCOUNTS = ("Cluster", "DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs")
# As it stands, it means nothing but itself to sbatch and to YAML.
WORD = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._+@:/-]*[A-Za-z0-9_+-])?")
BEGINNING = """\
# Where jobs run: a first version, which 'python main.py init' made from what Slurm says. Change what you like.
# 'python main.py --target NAME' takes an entry of 'targets'; without it, 'default' is taken. '--dry_run' shows what
# would be started, 'python main.py doctor' checks every entry, 'git show HEAD:cluster.yaml' explains every key.
# The last lines say what is not known.
default: local

targets:
  # This machine: both frameworks strictly one after the other, because two at once would share its cores.
  local:
    scheduler: local
    python: {jax: .venv/jax/bin/python, pytorch: .venv/pytorch/bin/python}
"""
ALWAYS_UNKNOWN = (
    "whether compute nodes reach the internet: if not, set 'internet: false' and bring the datasets into 'data'",
    "whether compute nodes see this folder and its .venv under the same path",
    "modules, variables, launchers other than srun: 'setup', 'launcher' and 'variants' take them",
    "more directives that the site wants, such as --constraint or --reservation, and its flags for TPUs",
    "limits of your QOS: of time, devices, and jobs at once ('max_jobs')",
    "Weights & Biases: 'wandb' takes project and mode",
)
Row = dict[str, str]


@dataclass(frozen=True)
class Site:
    """What Slurm's tools say, and in words what they do not."""

    nodes: list[Row]  # in each, nodes of one partition that are alike
    partitions: dict[str, Row]
    config: Row
    accounts: list[Row]  # the user's, those to prefer first
    unknown: list[str]


def init(path: Path, say: Callable[[str], None]) -> int:
    """Write ``path`` anew and ``say`` what is in it and what could not be known; a file that is there is kept.

    Raises UserError, with nothing written, where there is no Slurm or no partition to make a target of.
    """
    site = look_around()
    text, names, notes = render(site)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        cluster.load(draft)
    kept = _keep(path, text)
    write_atomically(path, text)
    say(f"{path.name}: {len(names) + 1} targets: local (the default), {', '.join(names)}")
    for line in ([f"the file that was there is now {kept}"] if kept else []) + notes:
        say(line)
    return 0


def _keep(path: Path, text: str) -> str:
    """Copy ``path`` to a name that is free and return that; empty where nothing would be lost."""
    if not path.exists() or (content := path.read_bytes()) == text.encode():
        return ""
    for number in itertools.count(1):
        copy = path.with_name(f"{path.name}.before{f'-{number}' if number > 1 else ''}")
        with contextlib.suppress(FileExistsError), open(copy, "xb") as file:
            file.write(content)
            break
    return copy.name


def look_around() -> Site:
    """Ask Slurm. Raises UserError where sinfo does not answer."""
    try:
        nodes = _table(_ask("sinfo", "--noheader", "--exact", f"--format={SINFO}"), NODES)
    except UserError as error:
        raise UserError(
            f"no Slurm to describe: {error}; call this on a login node of the cluster. Nothing was written; the target "
            "'local' of the cluster.yaml that comes with Duel needs no Slurm"
        ) from None
    unknown = []

    def answer(what: str, *command: str) -> list[str]:
        try:
            if said := _ask(*command).strip():
                return said.split("\n")
            unknown.append(f"{what} ({command[0]} says nothing of it)")
        except UserError as error:
            unknown.append(f"{what} ({error})")
        return []

    about = answer("who may use a partition, and its memory", "scontrol", "--all", "--oneliner", "show", "partition")
    partitions = [dict(word.partition("=")[::2] for word in line.split()) for line in about]
    settings = answer("the site's settings, as for memory", "scontrol", "show", "config")
    config = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in settings)}
    what = "your accounts: add --account=... and --qos=... if the site wants them"
    asked = ("sacctmgr", "--noheader", "--parsable2", "show", "user", state.user(), "withassoc")
    rows = _table("\n".join(answer(what, *asked, f"format={','.join(ACCOUNTS)}")), ACCOUNTS)
    here = config.get("ClusterName", "").lower()  # the accounting is in lower case
    accounts = [row for row in rows if WORD.fullmatch(row["Account"]) and here in ("", row["Cluster"].lower())]
    accounts.sort(key=lambda row: (row["Account"] != row["DefaultAccount"], not row["Partition"]))
    return Site(nodes, {each.get("PartitionName", ""): each for each in partitions}, config, accounts, unknown)


def _ask(*command: str) -> str:
    """What ``command`` prints. Raises UserError that says why there is nothing."""
    taste = ("SINFO_", "SCONTROL_", "SLURM_")  # the user's own formats, filters and clusters
    env = {name: value for name, value in os.environ.items() if not name.startswith(taste) or name == "SLURM_CONF"}
    try:
        ran = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=TIMEOUT_SECONDS
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on the PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} does not answer: {error}") from error
    if ran.returncode:
        raise UserError(f"{command[0]} says: {_clean(ran.stderr) or f'nothing, exit code {ran.returncode}'}")
    return ran.stdout


def _table(text: str, columns: tuple[str, ...]) -> list[Row]:
    rows = [[part.strip() for part in line.split("|")] for line in text.split("\n")]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def render(site: Site) -> tuple[str, list[str], list[str]]:
    """The file, its targets but ``local``, and what is not in it. Raises UserError where ``local`` would be alone."""
    targets: dict[str, str] = {}
    left_out = []
    for partition in filter(None, dict.fromkeys([*(row["partition"] for row in site.nodes), *site.partitions])):
        nodes = [row for row in site.nodes if row["partition"] == partition and _number(row["count"])]
        kinds = dict.fromkeys(kind for row in nodes for kind in _devices(row))
        try:
            accounts = _accounts(site, partition, nodes)
            for kind in kinds:
                name = _name(partition if len(kinds) == 1 else f"{partition}-{kind[1] or kind[0]}", {"local", *targets})
                targets[name] = _target(site, name, kind, [row for row in nodes if kind in _devices(row)], accounts)
        except UserError as reason:
            left_out.append(_clean(f"left out: partition {partition}: {reason}"))
    if not targets:
        raise UserError("\n".join(["Slurm shows no partition to make a target of; nothing was written", *left_out]))
    notes = [*left_out, "Not known, look at these:", *(f"- {line}" for line in (*site.unknown, *ALWAYS_UNKNOWN))]
    return "".join([BEGINNING, *targets.values(), "\n", *map(_comment, notes)]), list(targets), notes


def _accounts(site: Site, partition: str, nodes: list[Row]) -> list[Row]:
    """The user's accounts, as far as known, with their QOS. Raises UserError where ``partition`` takes none of them."""
    about = site.partitions.get(partition, {})

    def allows(what: str, name: str) -> bool:
        allowed, denied = about.get(f"Allow{what}", "ALL").lower(), about.get(f"Deny{what}", "").lower()
        return (allowed == "all" or name.lower() in allowed.split(",")) and name.lower() not in denied.split(",")

    if not WORD.fullmatch(partition):
        raise UserError("its name cannot stand in a directive as it is")
    for setting in ("Hidden", "RootOnly", "ReqResv"):  # the first two sinfo shows to root only
        if about.get(setting) == "YES":
            raise UserError(f"Slurm says {setting}=YES")
    if not nodes:
        raise UserError("sinfo shows no nodes of it: it has none, or it is hidden, or it is not for your groups")
    if nodes[0]["available"] != "up":
        raise UserError(f"its state is {nodes[0]['available']}")
    usable = []
    for row in site.accounts:
        if row["Partition"].lower() in ("", partition.lower()) and allows("Accounts", row["Account"]):
            names = [name for name in row["QOS"].split(",") if WORD.fullmatch(name)]
            allowed = [name for name in names if allows("Qos", name)]
            if allowed or not names:
                usable.append(row | {"QOS": ",".join(allowed)})
    if site.accounts and not usable:
        raise UserError("it is not for your accounts or their QOS")
    return usable


def _devices(row: Row) -> dict[tuple[str, str], int]:
    """How many each of these nodes has of every (GRES, type), ("constraint", feature) or ("cpu", "")."""
    devices: dict[tuple[str, str], int] = {}
    for item in re.sub(r"\([^)]*\)", "", row["gres"]).split(","):  # 'gpu:a100:4(S:0-1)', without its sockets
        name, *rest = item.replace(":no_consume", "").split(":")
        number = _number(rest[-1]) if rest else None
        label = ":".join(rest if number is None else rest[:-1])
        kind = name, label if WORD.fullmatch(label) else ""
        if name in ("gpu", "tpu") and number != 0:
            devices[kind] = devices.get(kind, 0) + (number or 1)
    features = [word for word in row["features"].split(",") if word.lower().startswith("tpu") and WORD.fullmatch(word)]
    return devices or {("constraint", word): 1 for word in features[:1]} or {("cpu", ""): 1}


def _target(site: Site, name: str, kind: tuple[str, str], nodes: list[Row], accounts: list[Row]) -> str:
    """One entry of 'targets', for the nodes of one partition that have devices of one ``kind``."""
    counts = [_devices(row)[kind] for row in nodes]
    total = sum(_number(row["count"]) or 0 for row in nodes)
    largest = _number(nodes[0]["sizes"].rpartition("-")[2])  # '4', '1-4' or '1-infinite'
    device = "tpu" if kind[0] == "constraint" else kind[0]
    pytorch = "null" if device == "tpu" else ".venv/pytorch/bin/python"
    keys = {
        "scheduler": "slurm",
        "python": f"{{jax: .venv/jax/bin/python, pytorch: {pytorch}}}",
        "device": device,
        "nodes": max(1, min(total, largest or total)),
        "devices_per_node": sorted({*counts, *(2**power for power in range(max(counts).bit_length()))}),
        "max_jobs": _number(accounts[0]["MaxSubmitJobs"]) if accounts else None,
    }
    quoted = name if name[0].isalpha() and name.lower() not in ("null", "true", "false") else f'"{name}"'
    entry = [f"  {quoted}:", *(f"    {key}: {value}" for key, value in keys.items() if value), "    directives:"]
    entry += [f"      - {line}" for line in _directives(site, kind, nodes, accounts)]
    have = "; ".join("{count} x ({cpus} CPUs, {memory} MB, {gres}, {features})".format(**row) for row in nodes)
    head = _comment(f"Nodes: {have.replace(', (null)', '')}; time limit: {nodes[0]['limit']}", "  ")
    return "\n" + head + "\n".join([*entry, ""])


def _directives(site: Site, kind: tuple[str, str], nodes: list[Row], accounts: list[Row]) -> list[str]:
    """The target's directives, with comments."""
    (gres, label), partition = kind, nodes[0]["partition"]
    about = site.partitions.get(partition, {})
    most = _number(about.get("MaxCPUsPerNode", "")) or 10**9
    cpus = min(min(_number(row["cpus"]) or 0, most) // _devices(row)[kind] for row in nodes)
    lines = [f"--partition={partition}", "--nodes={nodes}", "--ntasks-per-node={tasks_per_node}"]
    if cpus:
        lines += [f"--cpus-per-task={cpus}  # a device's part of its node", *_memory(site, about, nodes)]
    count = f"{label}:{{devices_per_node}}" if label else "{devices_per_node}"
    if gres == "constraint":
        lines.append(f"--constraint={label}")
    elif gres == "gpu" and site.config.get("SelectType", "select/cons_tres") == "select/cons_tres":
        lines.append(f"--gpus-per-node={count}")
    elif gres != "cpu":
        lines.append(f"--gres={gres}:{count}")
    limit = directives.minutes(nodes[0]["limit"][:20])
    lines.append(f"--time={directives.limit(min(MINUTES, limit or MINUTES))}")
    if accounts:
        best = accounts[0]
        lines.append(_choice("--account", dict.fromkeys(row["Account"] for row in accounts)))
        # Without a default of its own an account takes 'normal'.
        qos = sorted(best["QOS"].split(","), key=lambda each: (each != best["DefaultQOS"], each != "normal"))
        lines += [_choice("--qos", qos)] if best["QOS"] else []
    return lines


def _choice(option: str, names: Iterable[str]) -> str:
    first, *others = names
    return f"{option}={first}" + (f"  # or {textwrap.shorten(', '.join(others), 80)}" if others else "")


def _memory(site: Site, about: Row, nodes: list[Row]) -> list[str]:
    """A directive where Slurm counts memory, unless a CPU gets about its part of the node by itself."""
    if "MEMORY" not in site.config.get("SelectTypeParameters", "").upper():
        return []
    whole = min((_number(row["memory"]) or 0) // (_number(row["cpus"]) or 1) for row in nodes)
    part = whole * 9 // 10  # the rest stays with the system
    keys = ("DefMemPerCPU", "DefMemPerNode")
    given = [(key, _number(source.get(key, "")) or 0) for source in (about, site.config) for key in keys]
    default, amount = next((pair for pair in given if pair[1]), ("all that a node has", 0))
    if not part or (default == "DefMemPerCPU" and part <= amount <= whole):
        return []
    return [f"--mem-per-cpu={part}M  # without it: {f'{default}={amount}' if amount else default}"]


def _name(text: str, taken: set[str]) -> str:
    """A valid name that no other target has."""
    first = re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:32] or "partition"
    names = itertools.chain([first], (f"{first[:26]}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _clean(text: str) -> str:
    """``text`` as one printable line that is not too long."""
    return textwrap.shorten("".join(letter if letter.isprintable() else " " for letter in text), 800)


def _comment(text: str, indent: str = "") -> str:
    lead = f"{indent}# "
    lines = textwrap.wrap(_clean(text), 120, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)
