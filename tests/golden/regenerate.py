"""Rewrite the golden files from the code: ``make golden``. Read the difference before you commit it."""

import contextlib
import csv
import dataclasses
import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.twins import BOUND, interval

from duel import files
from duel.catalogue import DEVICE_KINDS, FRAMEWORKS, PAIRED
from duel.cli import commands
from duel.cli import main as cli
from duel.job import Job
from duel.launch import cluster, script
from duel.launch.fit import FITS, Cell, Found
from duel.record import Row
from duel.report import document, points, published, records
from duel.results import Results
from duel.switches import SWITCHES

REMEDY = "if the change is meant, 'make golden' rewrites tests/golden and the tables made from the code"
GOLDEN = Path(__file__).resolve().parent
ROOT = GOLDEN.parent.parent

Ends = tuple[float, float, float]  # a ratio between those of its interval

TOPICS = (
    *("", "benchmarks", "use_cases", "presets", "precisions", "modes", "submit", "status", "cancel", "resubmit"),
    *("validate", "fit", "init"),
)


def scripts() -> dict[str, str]:
    """File name to text: the main job's script for each framework and target of golden/cluster.yaml."""
    targets = cluster.load(GOLDEN / "cluster.yaml").targets
    jobs = [
        Job(framework, "resnet50", 1, "standard", "fp32", None, name)
        for framework in (*FRAMEWORKS, PAIRED)
        for name in targets
    ]
    return {f"{j.stem}-{j.target}.sh": script.render(j, targets[j.target], Path("/opt/duel")) for j in jobs}


def mistakes() -> str:
    """The command lines of golden/mistakes.txt, each with what it is answered by: the exit code, and standard error.

    In a checkout without runs.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copy(ROOT / "cluster.yaml", root)
        shutil.copytree(ROOT / "templates", root / "templates")
        (root / "results").mkdir()
        with mock.patch.object(commands, "ROOT", root), mock.patch.object(cli, "ROOT", root):
            for line in (GOLDEN / "mistakes.txt").read_text().splitlines():
                if line.startswith("$"):
                    words = shlex.split(line[1:].replace("ESC", "\x1b"))
                    found += [line, *_answer(words).replace(folder, "/opt/duel").splitlines()]
    return "\n".join(found) + "\n"


def _answer(words: list[str]) -> str:
    answer = io.StringIO()
    with contextlib.redirect_stderr(answer), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    return f"{code}: {answer.getvalue()}"


def command_line() -> str:
    """Every --help, 80 columns wide."""
    words = [[sys.executable, "main.py", "help", *topic.split()] for topic in TOPICS]
    environment = os.environ | {"COLUMNS": "80"}
    texts = [
        subprocess.run(w, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout for w in words
    ]
    return "\n".join(texts)


def columns() -> str:
    """The columns of results.csv as a Markdown table."""
    fields = [(f.name, f.metadata["unit"] or "-", f.metadata["meaning"]) for f in dataclasses.fields(Row)]
    return "".join(f"| `{name}` | {unit} | {meaning} |\n" for name, unit, meaning in fields)


def ratio_columns() -> str:
    """The columns of ratios.csv as a Markdown table."""
    lines = (f"| `{f.name}` | {f.metadata['meaning']} |\n" for f in dataclasses.fields(points.Line))
    return "| column | meaning |\n|---|---|\n" + "".join(lines)


def switches() -> str:
    """Every switch as a row of a Markdown table."""
    head = "| switch | of | on | for | values, the first by default | shown by | |\n|---|---|---|---|---|---|---|\n"
    lines = []
    for switch in SWITCHES:
        values = ", ".join([*switch.values, *(["a number"] if switch.counts else [])])
        where = "all" if switch.device_kinds == DEVICE_KINDS else ", ".join(switch.device_kinds)
        modules = ", ".join(switch.modules) + ("" if switch.many else "; on one device")
        cells = [f"`{switch.name}`", switch.framework, where, modules, values, switch.proof]
        lines.append(f"| {' | '.join([*cells, switch.meaning])} |")
    return head + "\n".join(lines) + "\n"


def plans() -> str:
    """What compiling ahead for TPUs came to at size tiny, as a Markdown table: a line per cell, a column per chip."""
    return _compiled("tiny", "MiB planned on each chip", lambda cell: cell, lambda found: _planned(found[0]))


def largest() -> str:
    """The largest batch of full size that fits a chip, as a Markdown table: a line per step, a column per chip."""
    return _compiled("full", "Largest batch", lambda cell: dataclasses.replace(cell, batch_size=0), _largest)


def _compiled(size: str, what: str, line: Callable[[Cell], Cell], said: Callable[[list[Found]], str]) -> str:
    """What docs/fit has of a size, as a table: what is ``said`` of the records of one chip and one ``line``."""
    cells: dict[Cell, dict[str, list[Found]]] = {}
    chips, versions = {}, set()
    for file in sorted((ROOT / "docs" / "fit").glob("*.json")):
        for one in files.fitting(files.read_object(file)["found"], list[Found], file.name):
            if one.cell.size != size:
                continue
            chips[file.stem] = None
            cells.setdefault(line(dataclasses.replace(one.cell, chip="")), {}).setdefault(file.stem, []).append(one)
            if one.versions:  # not known of what did not compile within the limit
                versions.add(", ".join(f"{name} {one.versions[name]}" for name in ("jax", "libtpu")))
    lines = [f"| program | {' | '.join(chips)} |", f"|---|{'---|' * len(chips)}"]
    for cell, found in sorted(cells.items(), key=lambda item: (item[0].benchmark, item[0].use_case)):
        told = [said(found[chip]) if chip in found else "" for chip in chips]
        lines.append(f"| {cell.name.replace(', batch 0', '')} | {' | '.join(told)} |")
    return "\n".join([f"{what}; {'; '.join(sorted(versions))}.", "", *lines, ""])


def _planned(found: Found) -> str:
    return f"{found.planned_bytes / 2**20:.3g}" if found.planned_bytes else found.outcome


def _largest(found: list[Found]) -> str:
    """The largest batch that fits, and what became of the next larger one that was tried."""
    fits = [one for one in found if one.outcome == FITS]
    if not fits:
        return "; ".join(f"{one.cell.batch_size}: {one.outcome}" for one in found)
    best = max(fits, key=lambda one: one.cell.batch_size)
    more = [one for one in found if one.cell.batch_size > best.cell.batch_size]
    after = min(more, key=lambda one: one.cell.batch_size, default=None)
    text = f"{best.cell.batch_size} ({(best.planned_bytes or 0) / 2**30:.3g} GiB)"
    return f"{text}; {after.cell.batch_size}: {after.outcome}" if after else text


def twins() -> str:
    """What benchmarks/twins.py found, as a Markdown table: at each point, on each device, what is nearest the bound."""
    with (ROOT / "benchmarks" / "twins.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    measured = [line for line in kept if line["high"]]
    points: dict[tuple[str, str], dict[str, dict[str, list[Ends]]]] = {}  # by framework, then by what is beside it
    for line in measured:
        name, device, framework = _point(line)
        beside = points.setdefault((name, device), {}).setdefault(framework, {})
        ends = float(line["low"]), float(line["ratio"]), float(line["high"])
        beside.setdefault(f"`{line['mode']}`; {line['other']}", []).append(ends)
    lines = ["| point | CPU | JAX: mode; beside | ratio | PyTorch: mode; beside | ratio |", "|---|---|---|---|---|---|"]
    incomplete = {_point(line) for line in kept if line["reason"]}
    held: dict[str, list[bool]] = {}
    for (name, device), found in sorted(points.items()):
        nearest = {framework: _nearest(beside) for framework, beside in found.items()}
        cells = [cell for framework in FRAMEWORKS for cell in nearest.get(framework, ("", "", True))[:2]]
        lines.append(f"| {' | '.join([name, device, *cells])} |")
        for framework, (_, _, holds) in nearest.items():
            held.setdefault(device, []).append(holds and (name, device, framework) not in incomplete)
    sources = {f"{line['device']}, {line['framework']} {line['version']}, {line['measured'][:10]}" for line in measured}
    counts = [f"On {device}, {sum(held[device])} of {len(held[device])} hold the bound." for device in sorted(held)]
    failed = {f"- {one['benchmark']} {one['work']}, {one['other']}: {one['reason']}" for one in kept if one["reason"]}
    told = [*lines, "", f"Measured on {'; '.join(sorted(sources))}.", "", *counts, "", *sorted(failed)]
    return "\n".join(told).rstrip() + "\n"


def _point(line: dict[str, str]) -> tuple[str, str, str]:
    """Its name, the device and the framework."""
    return f"{line['benchmark']} {line['work']}, batch {line['batch']}", line["device"], line["framework"]


def _nearest(beside: dict[str, list[Ends]]) -> tuple[str, str, bool]:
    """What may be the fastest beside the twin, how fast it is, and whether the bound holds."""
    label = max(beside, key=lambda label: over_runs(beside[label])[2])
    low, ratio, high = over_runs(beside[label])
    runs = len(beside[label])
    return label, f"{ratio:.3f} [{low:.3f}, {high:.3f}]" + (f", {runs} runs" if runs > 1 else ""), high <= BOUND


def over_runs(runs: list[Ends]) -> Ends:
    """The ratio of ``runs`` between the ends of its interval.

    From three runs on that is over them, as processes can be further apart than each one's own interval is wide. Of
    fewer it is the one with the highest end, within that process.
    """
    if len(runs) < 3:
        return max(runs, key=lambda ends: ends[2])
    return interval(([ratio for _, ratio, _ in runs], [1.0] * len(runs)))


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
    (GOLDEN / "mistakes.txt").write_text(mistakes())
    readme = ROOT / "results" / "README.md"
    head, mark, _ = readme.read_text().partition("|---|---|---|\n")
    readme.write_text(between(head + mark + columns(), "ratios", ratio_columns()))
    methodology = ROOT / "docs" / "methodology.md"
    methodology.write_text(between(methodology.read_text(), "switches", switches()))
    models = ROOT / "docs" / "models.md"
    models.write_text(between(models.read_text(), "twins", twins()))
    tpu = ROOT / "docs" / "tpu-cells.md"
    tpu.write_text(between(between(tpu.read_text(), "cells", plans()), "largest", largest()))
    results = Results(ROOT / "results")
    for rows in results.folder.glob("published/*/results.csv"):
        published.write_tables(rows.parent)
        published.draw(rows.parent)
        document.write([records.published(results, rows.parent.name)], rows.parent / "report", print)
    front = ROOT / "README.md"
    front.write_text(between(front.read_text(), "results", published.summaries(results)))


if __name__ == "__main__":
    main()
