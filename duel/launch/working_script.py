"""Turn a job script that works on a site into a target: 'python main.py init --from job.sh'."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from duel import files
from duel.errors import UserError
from duel.files import Damaged
from duel.launch import directives

MAX_BYTES = 1_000_000
# What belongs to the one job that the script was for.
OF_THE_JOB = (
    *("--job-name", "--output", "--error", "--input", "--array", "--dependency", "--begin", "--deadline", "--comment"),
    *("--mail-type", "--mail-user", "--chdir", "--open-mode", "--nodelist", "--exclude", "--wrap", "--wait"),
)
CPUS = "--cpus-per-task="
COUNTS = {"--nodes": "{nodes}", "--ntasks": "{tasks}", "--ntasks-per-node": "{tasks_per_node}"}
DEVICES = {"--gpus-per-node": "{devices_per_node}", "--gres": "{devices_per_node}", "--gpus": "{devices}"}
LAUNCHERS = ("srun", "mpirun", "mpiexec", "ibrun", "jsrun")
# The same counts in a launcher's options; jsrun's -n are resource sets, nice's -n is no count.
OF_LAUNCHERS = {
    r"(?<!nice )(?:-n|-np|--np|--ntasks)": "{tasks}",
    r"(?:-N|--nodes)": "{nodes}",
    r"(?:--ntasks-per-node|-npernode|--npernode|-ppn|--ppn)": "{tasks_per_node}",
}
# The command that the job is for: it is found by its interpreter, and what comes before that starts it.
PROGRAM = re.compile(r"(^|.*\s)(exec\s+)?(\S*/)?(python[0-9.]*|torchrun|accelerate)(\s|$)")
SET_UP = ("module", "ml", "spack", "conda", "mamba", "source", ".", "echo", "export", "pip")  # may name python, too


def target(path: Path, say: Callable[[str], None]) -> None:
    """Print the target that does as the script in ``path``, to be pasted into cluster.yaml. Raises UserError."""
    try:
        text = files.read(path, MAX_BYTES).decode()
    except FileNotFoundError:
        raise UserError(f"--from {path}: no such file") from None
    except (Damaged, UnicodeDecodeError) as error:
        raise UserError(f"--from {path}: {error}") from error
    if any(directives.is_heterogeneous(line) for line in text.splitlines()):
        raise UserError(f"--from {path}: {directives.HETEROGENEOUS}")
    given = directives.of_script(text)
    if not given:
        raise UserError(f"--from {path}: no '#SBATCH' line before its first command: a script for Slurm is needed")
    lines, counts = _directives(given)
    setup, launcher, notes = _body(text)
    print("\n".join(_yaml(path.stem, lines, counts, setup, launcher)))
    if (count := counts["devices_per_node"]) > 1:
        notes.append(
            f"devices_per_node: {count} is known to work; write [1, {count}] if your site gives parts of nodes"
        )
    for note in notes:
        say(note)
    say("paste this below 'targets:' in cluster.yaml, then: python main.py doctor --target NAME")


def _directives(given: list[str]) -> tuple[list[str], dict[str, int]]:
    """Return the lines of the target, with placeholders for counts, and the counts of nodes and devices."""
    lines, counts = [], {"nodes": 1, "devices_per_node": 1}
    for name, value in (option for line in given for option in directives.options(line)):
        if name in OF_THE_JOB:
            continue
        if name == "--nodes" and value.isdecimal():
            counts["nodes"] = int(value)
        if name in DEVICES:
            items = value.split(",")
            for place, item in enumerate(items):
                kind, colon, number = item.rpartition(":")
                if number.isdecimal() and (name != "--gres" or item.startswith("gpu")):
                    counts["devices_per_node"] = int(number)
                    items[place] = f"{kind}{colon}{DEVICES[name]}"
            value = ",".join(items)
        lines.append(f"{name}={COUNTS.get(name, value)}" if value else name)
    names = [name for line in given for name in directives.names(line)]
    if "--gpus" in names:  # over all nodes
        counts["devices_per_node"] = max(1, counts["devices_per_node"] // counts["nodes"])
    many = counts["nodes"] * counts["devices_per_node"] > 1
    if many and not any(name.startswith("--ntasks") for name in names):
        lines.append("--ntasks-per-node={tasks_per_node}")
    each = [line.removeprefix(CPUS) for line in lines if line.startswith(CPUS)]
    tasks = _tasks_per_node(given, counts)
    if many and tasks < counts["devices_per_node"] and each and each[-1].isdecimal():  # which used all devices
        share = max(1, int(each[-1]) * tasks // counts["devices_per_node"])
        lines = [f"{CPUS}{share}" if line.startswith(CPUS) else line for line in lines]
    return lines, counts


def _tasks_per_node(given: list[str], counts: dict[str, int]) -> int:
    """Return how many tasks the script has on a node: one if it does not say, as many as devices if in other words."""
    each, all_of_them = (directives.value(given, name) or "" for name in ("--ntasks-per-node", "--ntasks"))
    if each.isdecimal():
        return int(each)
    if any(name.startswith("--ntasks-per-") for line in given for name in directives.names(line)):
        return counts["devices_per_node"]
    return max(1, int(all_of_them) // counts["nodes"]) if all_of_them.isdecimal() else 1


def _body(text: str) -> tuple[list[str], str | None, list[str]]:
    """Return the set-up lines of a script, its launcher, and notes on what needs a look."""
    body: list[str] = []
    for line in text.splitlines():
        if body and body[-1].endswith("\\"):
            body[-1] = f"{body[-1][:-1].rstrip()} {line.strip()}"
        elif line.strip() and not line.lstrip().startswith("#"):
            body.append(line.rstrip())
    work = [bool(PROGRAM.match(line)) and line.split()[0] not in SET_UP for line in body]
    place = work.index(True) if True in work else len(body)
    setup = [line for line in body[:place] if not line.startswith(("set ", "cd "))]
    notes = [f"left out: {line!r}: jobs begin in the checkout" for line in body[:place] if line.startswith("cd ")]
    notes += ["the work of the script was not found: no line calls python"] if place == len(body) else []
    if after := body[place + 1 :]:
        notes.append(f"left out: {len(after)} lines from {after[0]!r} on, after the program")
    words = body[place].split() if place < len(body) else []
    start = next((number for number, word in enumerate(words) if PROGRAM.match(word)), 0)
    launcher = " ".join(words[:start]).removeprefix("exec").strip()
    if launcher and words[0] not in LAUNCHERS:
        notes.append(f"launcher {launcher!r}: check that it starts what follows it")
    elif launcher and words[0] != "jsrun":
        for option, count in OF_LAUNCHERS.items():
            launcher = re.sub(rf"(?<=\s)({option}[ =]?)\d+(?=\s|$)", rf"\1{count}", launcher)
    return setup, launcher or None, notes


def _yaml(name: str, lines: list[str], counts: dict[str, int], setup: list[str], launcher: str | None) -> list[str]:
    """Return the target as lines of cluster.yaml. JSON's strings are YAML's, too."""
    name = re.sub("[^A-Za-z0-9._-]", "_", name).lstrip("-.") or "site"
    text = [f"  {name}:", "    scheduler: slurm"]
    text.append("    python: {jax: .venv/jax/bin/python, pytorch: .venv/pytorch/bin/python}")
    text += [f"    {key}: {count}" for key, count in counts.items() if count > 1]
    text += ["    directives:", *(f"      - {json.dumps(line)}" for line in lines)]
    text.append(f"    launcher: {json.dumps(launcher)}")
    return [*text, "    setup:", "      job:", *(f"        - {json.dumps(line)}" for line in setup)] if setup else text
