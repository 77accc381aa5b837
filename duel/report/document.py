"""The report as files: a page, figures with the tables behind them, the ratios as LaTeX and Markdown.

index.html      the whole report, for a browser
ratios.csv      a line for each point
figures/        SVG, PDF and tidy CSV of each figure; figures.py and profile_figures.py draw them again
tables/         ratios.tex and ratios.md; of several devices devices.md, with a column for each
report.md       the text of the page, with what artifact reviewers ask for
croissant.json  metadata of the rows, in MLCommons' vocabulary
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from duel.errors import UserError
from duel.files import write_atomically
from duel.report import (
    appendix,
    figure_data,
    figures,
    latex,
    learned,
    markdown,
    page,
    points,
    profile_data,
    profile_figures,
    prose,
)
from duel.report.figure_data import Record
from duel.report.records import Records
from duel.table import tidy


def write(sets: Sequence[Records], folder: Path, say: Callable[[str], None], refresh: int | None = None) -> None:
    """Write the report of ``sets`` to ``folder``; its page reloads every ``refresh`` seconds.

    Raises UserError if the folder cannot be written, or if there are no pairs and no trainings to report. A report that
    is to be written again waits for them.
    """
    sets = told_apart(sets)
    found = [one for records in sets for one in records.found]
    profiled = [profile_data.profiled(records) for records in sets]
    tables = _tables(sets, profiled)
    if not found and not tables["learning"]:
        if refresh:
            return
        sides = dict.fromkeys(str(row.framework) for records in sets for row in records.rows if row.framework)
        there = f"there are only rows of {', '.join(sides)}" if len(sides) == 1 else "no row has a partner"
        raise UserError(f"nothing to report: {there}; 'main.py --paired' measures both sides")
    lines = [line for _, line in found]
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        (folder / "tables").mkdir(exist_ok=True)
        scripts = _figures(tables, folder / "figures")
        with ThreadPoolExecutor() as pool:
            drawing = pool.map(_draw, scripts)
            points.write(folder / points.NAME, lines)
            write_atomically(folder / "tables" / "ratios.tex", latex.table(lines))
            write_atomically(folder / "tables" / "ratios.md", markdown.table(lines) + "\n")
            beside = folder / "tables" / "devices.md"
            beside.unlink(missing_ok=True)  # an earlier report may have been of several
            if len({line.device_name for line in lines}) > 1:
                write_atomically(beside, markdown.side_by_side(lines) + "\n")
            whys = [profile_data.sentences(*each) for each in zip(profiled, sets, strict=True)]
            sections = prose.sections(sets, [text for each in whys for text in each])
            parts = [{"title": "Summary", "paragraphs": prose.summary(sets)}, *sections]
            texts = [text for part in parts for text in (f"## {part['title']}", *part["paragraphs"])]
            write_atomically(folder / "report.md", "\n\n".join(" ".join(text.split()) for text in texts) + "\n")
            for records in sets:
                name = "croissant.json" if len(sets) == 1 else f"croissant-{records.name}.json"
                write_atomically(folder / name, appendix.croissant(records, folder))
            write_atomically(folder / "index.html", page.html(sets, tables, sections, refresh))
            list(drawing)  # raises what went wrong
    except OSError as error:
        raise UserError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    say(f"{os.path.relpath(folder / 'index.html')}: {len(found)} points")


def told_apart(sets: Sequence[Records]) -> list[Records]:
    """Name the set in the lines of a device that several of ``sets`` have: their points are not the same."""
    devices = Counter(name for records in sets for name in {line.device_name for line in records.lines})
    found = []
    for records in sets:
        named = []
        for outcome, line in records.found:
            if devices[line.device_name] > 1:
                line = dataclasses.replace(line, which=", ".join(filter(None, (line.which, f"set {records.name}"))))
            named.append((outcome, line))
        found.append(dataclasses.replace(records, found=named))
    return found


def _tables(sets: Sequence[Records], profiled: Sequence[profile_data.Found]) -> dict[str, list[Record]]:
    """Return the tables of all sets together; that of devices is empty unless there are several."""
    made = [
        figure_data.tables(records.found, records.curve)
        | {"learning": learned.curves(records.rows, records.folder)}
        | profile_data.tables(each)
        for records, each in zip(sets, profiled, strict=True)
    ]
    tables = {name: [record for each in made for record in each[name]] for name in made[0]}
    names = {record["device_name"] for record in tables["ratios"]}
    return tables | {"devices": tables["ratios"] if len(names) > 1 else []}


def _figures(tables: dict[str, list[Record]], folder: Path) -> list[Path]:
    """Write the table of each figure, and return the scripts, copied there, that draw those that are not empty."""
    for name, records in tables.items():
        if not records:  # an earlier report may have had some
            for kind in ("csv", "svg", "pdf"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
            continue
        lines = [list(records[0]), *(record.values() for record in records)]  # all have the same keys in the same order
        write_atomically(folder / f"{name}.csv", tidy(lines))
    copies = {Path(shutil.copy(str(script.__file__), folder)): script.DRAW for script in (figures, profile_figures)}
    return [copy for copy, draws in copies.items() if any(tables.get(name) for name in draws)]


def _draw(script: Path) -> None:
    """Draw SVG and PDF of all figures of ``script``, in a process of its own beside the rest of the report."""
    # -B: no __pycache__ among the figures
    if subprocess.run([sys.executable, "-B", str(script)], check=False).returncode:
        raise UserError(f"{os.path.relpath(script)} failed with what is printed above")
