"""Write the golden files anew from the code: ``make golden``. Read the difference before you commit it."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from duel.catalogue import DEVICE_KINDS, FRAMEWORKS, PAIRED
from duel.job import Job
from duel.launch import cluster, script
from duel.modes import SWITCHES
from duel.record import Row

REMEDY = "if the change is meant, 'make golden' rewrites tests/golden and the tables made from the code"
GOLDEN = Path(__file__).resolve().parent
ROOT = GOLDEN.parent.parent

COMMANDS = ("", "status", "compare", "logs", "cancel", "collect", "publish", "doctor")


def scripts() -> dict[str, str]:
    """File name to text: the main job's script for each framework and target of golden/cluster.yaml."""
    targets = cluster.load(GOLDEN / "cluster.yaml").targets
    jobs = [
        Job(framework, "resnet50", 1, "standard", "fp32", None, name)
        for framework in (*FRAMEWORKS, PAIRED)
        for name in targets
    ]
    return {f"{j.stem}-{j.target}.sh": script.render(j, targets[j.target], Path("/opt/duel")) for j in jobs}


def command_line() -> str:
    """Every --help, 100 columns wide."""
    words = [[sys.executable, "main.py", *command.split(), "--help"] for command in COMMANDS]
    environment = os.environ | {"COLUMNS": "100"}
    texts = [
        subprocess.run(w, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout for w in words
    ]
    return "\n".join(texts)


def columns() -> str:
    """The columns of results.csv as a Markdown table."""
    fields = [(f.name, f.metadata["unit"] or "-", f.metadata["meaning"]) for f in dataclasses.fields(Row)]
    return "".join(f"| `{name}` | {unit} | {meaning} |\n" for name, unit, meaning in fields)


def switches() -> str:
    """Every switch as a row of a Markdown table."""
    head = "| switch | of | on | for | values, the first by default | shown by | |\n|---|---|---|---|---|---|---|\n"
    lines = []
    for switch in SWITCHES:
        values = ", ".join([*switch.values, *(["a number"] if switch.counts else [])])
        where = "all" if switch.device_kinds == DEVICE_KINDS else ", ".join(switch.device_kinds)
        cells = [f"`{switch.name}`", switch.framework, where, ", ".join(switch.modules), values, switch.proof]
        lines.append(f"| {' | '.join([*cells, switch.meaning])} |")
    return head + "\n".join(lines) + "\n"


def between(text: str, mark: str, new: str) -> str:
    """``text`` with ``new`` between the marks called ``mark``."""
    head, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- /{mark} -->")
    assert begin
    assert end
    return head + begin + new + end + tail


def main() -> None:
    for name, text in scripts().items():
        (GOLDEN / name).write_text(text)
    (GOLDEN / "help.txt").write_text(command_line())
    readme = ROOT / "results" / "README.md"
    head, mark, _ = readme.read_text().partition("|---|---|---|\n")
    readme.write_text(head + mark + columns())
    methodology = ROOT / "docs" / "methodology.md"
    methodology.write_text(between(methodology.read_text(), "switches", switches()))


if __name__ == "__main__":
    main()
