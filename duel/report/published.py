"""Records kept in the repository: results/published/<name>/, and the tables made from them.

results.csv     the rows, with the columns of results/results.csv
outside.csv     what else the device did, by row: what failed, searches, trainings, pairs that are not in the set
ratios.csv      a line for each point: the outcome of its sessions (duel.report.points), from which all tables are made
runs/<run>/     samples.jsonl: every timed block of each row with its conditions, and every call; the run's
                environment.json and script.sh, without the checkout's path; the profiles of its rows, if any
parity/         the certificates that the rows rest on
README.md       a table of everything; 'make golden' puts a short one into the repository's README.md
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from duel import ROOT, certificate, files, profile
from duel.catalogue import CLAIM_PAIRS, PRESETS
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.job import EDITED
from duel.record import Row
from duel.report import markdown, points, records
from duel.report.pairs import Outcome, in_turn, outcomes
from duel.report.sessions import claims, over_sessions
from duel.report.waterfall import waterfalls
from duel.results import Results
from duel.states import FINISHED, TERMINAL
from duel.table import archived, merge, read_rows, write_rows

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
KEPT = ("environment.json", "script.sh")
CHECKOUT = re.compile(r"^cd -- (.+) \|\| exit 97$|^export DUEL_CHECKOUT=(.+)$", re.M)  # in a script

Say = Callable[[str], None]


def publish(name: str, results: Results, say: Say) -> None:
    """Add the pairs in results.csv that could make a ratio to the set ``name``, and remake its tables.

    A set is of one device, because means over benchmarks are; a new one is of the device measured last. What is there
    stays: keeping some sessions and not others would be choosing among results. Raises UserError if there is nothing
    to publish.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: use at most 32 lower-case letters, digits, '-' and '_'")
    folder = results.folder / "published" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(folder.with_name(f".{name}.lock"), wait=True):
        _publish(folder, results, say)


def _publish(folder: Path, results: Results, say: Say) -> None:
    """Add to the set in ``folder``; the caller holds its lock."""
    before, merged = read_rows(folder / "results.csv"), merge(results, check=True)
    if before:
        write_tables(folder)  # a kill may have left those of fewer rows
    new = _new(before, merged, results, say)
    (folder / "parity").mkdir(parents=True, exist_ok=True)
    for source, target in _certificates(before, new, results, folder).items():
        if source.exists():  # a pair that is not comparable may have none
            shutil.copyfile(source, target)
    rows = sorted(
        [*before, *new],
        key=lambda row: (row.benchmark or "", row.size or "", row.use_case or 0, row.run_id or "", row.row or 0),
    )
    for run_id in dict.fromkeys(str(row.run_id) for row in new):
        _keep(run_id, [row for row in rows if row.run_id == run_id], results, folder / "runs" / run_id)
    write_rows(folder / "results.csv", rows)
    _note_outside(folder, rows, merged)
    write_tables(folder)
    say(f"{folder.relative_to(results.folder.parent)}: {len(rows)} rows, {len(new)} of them new")


def _note_outside(folder: Path, rows: list[Row], merged: list[Row]) -> None:
    """Note in ``folder`` what the device of its ``rows`` did besides, according to the ``merged`` results.csv."""
    there, device, targets = {(row.run_id, row.row) for row in rows}, _device(rows), {row.target for row in rows}
    noted = {(one.run_id, one.row): one for one in records.read_outside(folder)}
    for row in merged:
        # One that failed before it found a device is taken to have been on that of its target.
        here = row.device_name == device or (row.device_name is None and row.target in targets)
        if row.run_id and row.row is not None and row.started and here:
            hours = round(records.seconds(row) * (row.device_count or 1) / 3600, 6)
            noted[row.run_id, row.row] = records.Outside(row.run_id, row.row, str(row.status), hours)
    records.write_outside(folder, (noted[key] for key in sorted(noted.keys() - there)))


def _new(before: list[Row], rows: list[Row], results: Results, say: Say) -> list[Row]:
    """Return which of ``rows`` join those published ``before``. Raises UserError if none do."""
    there = {(row.group, row.point) for row in before}
    measured = [outcome for outcome in outcomes(rows) if (outcome.row.group, outcome.row.point) not in there]
    device = _device(before or [outcome.row for outcome in measured])
    packed = archived(results).keys() - {run.id for run in results.runs()}  # some may have been restored
    left_out, wanted = [], set()
    for outcome in measured:
        if why := _archived(outcome, packed) or _unfit(outcome, device, results):
            left_out.append(f"{outcome.row.run_id}: {why}")
        else:
            wanted.add((outcome.row.group, outcome.row.point))
    for text in dict.fromkeys(left_out):
        say(f"left out: {text}")
    if not wanted:
        again = "; all that qualify are already there" if there else ""
        raise UserError(
            f"nothing to publish: no pairs of a preset that claims a ratio{again}; 'main.py --paired' makes them"
        )
    return [row for row in rows if (row.group, row.point) in wanted]


def _certificates(before: list[Row], new: list[Row], results: Results, folder: Path) -> dict[Path, Path]:
    """Return the certificates of ``new`` rows and where they go. Raises UserError if one would replace another's."""
    found = {
        certificate.path(results.folder, *what): certificate.path(folder, *what)
        for what in ((str(row.benchmark), str(row.size), str(row.device_kind)) for row in new)
    }
    for row in before:
        source = certificate.path(results.folder, str(row.benchmark), str(row.size), str(row.device_kind))
        if source in found and row.comparable == COMPARABLE and _uncertified(row, results):
            raise UserError(
                f"{row.run_id}, already published there, has other code, weights or versions than the certificate "
                f"in results/parity/{source.name}; choose another --name"
            )
    return found


def _device(rows: list[Row]) -> str | None:
    """Return the name of the device that the latest of ``rows`` was measured on."""
    return max(((row.started or "", row.device_name) for row in rows if row.device_name), default=("", None))[1]


def _uncertified(row: Row, results: Results) -> str:
    """Return why the current certificate does not hold for ``row``; empty if it does."""
    found = certificate.verdict(row, results.folder)
    return "" if found == certificate.VERIFIED else found


def _archived(outcome: Outcome, packed: Container[str]) -> str:
    """Return that a run of ``outcome`` is in an archive, without its folder and so its samples; empty if none is."""
    ids = [str(row.run_id) for pair in outcome.pairs for row in pair]
    return next((f"{run_id} is archived: restore its folder first" for run_id in ids if run_id in packed), "")


def _unfit(outcome: Outcome, device: str | None, results: Results) -> str:
    """Return why an outcome cannot be published; empty if it can. One that is not comparable can, with its reason."""
    rows = [row for pair in outcome.pairs for row in pair]
    if any(row.status != FINISHED for row in rows):
        return "not all of its rows finished"
    runs = [results.run(run_id) for run_id in dict.fromkeys(str(row.run_id) for row in rows)]
    if any(run.folder.is_dir() and run.status().state not in TERMINAL for run in runs):
        return "not all of its runs have ended"  # profiles come after the rows
    if others := {str(row.device_name) for row in rows} - {device}:
        return f"measured on {', '.join(sorted(others))}, but the set is of {device}: choose another --name"
    if not claims(outcome):
        claiming = [preset.name for preset in PRESETS.values() if preset.pairs >= CLAIM_PAIRS]
        how = "in turn" if in_turn(outcome.pairs) else "not in turn"
        return f"preset {outcome.row.preset}, {how}: --paired and preset {' or '.join(claiming)} are needed"
    if any(row.git_dirty or row.git_sha is None for row in rows):
        return "the code that ran was not committed"
    if any(row.script == EDITED for row in rows):
        return "its script was edited by hand"
    if not outcome.shown:
        return ""
    return next(filter(None, (_uncertified(row, results) for row in rows)), "")


def _keep(run_id: str, rows: list[Row], results: Results, folder: Path) -> None:
    """Keep every sample of the ``rows`` of a run, their profiles, its environment and its script, if they are here."""
    run = results.run(run_id)
    folder.mkdir(parents=True, exist_ok=True)
    if events := run.events()[0]:
        lines = [json.dumps({"row": row.row} | _samples(events, row.row or 0)) for row in rows]
        (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    for row in rows:
        if (source := profile.path(run.folder, row.row or 0)).exists():
            (folder / "profiles").mkdir(exist_ok=True)
            shutil.copyfile(source, profile.path(folder, row.row or 0))
    kept = {name: (run.folder / name).read_text() for name in KEPT if (run.folder / name).exists()}
    checkouts = _checkouts(kept.get(run.script.name, ""))
    for name, text in kept.items():
        for checkout in checkouts:
            text = text.replace(checkout, ".")
        (folder / name).write_text(text)


def _checkouts(script: str) -> list[str]:
    """Return the folders that published files shall not name, the longest first: this checkout and the script's own.

    They differ for runs that were brought from another machine, and for jobs that ran the tree of their submission.
    """
    named = {shlex.split(found[1] or found[2])[0] for found in CHECKOUT.finditer(script)}
    return sorted({str(ROOT)} | {path for path in named if path.startswith("/") and path != "/"}, key=len, reverse=True)


def _samples(events: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return what was timed in row ``number``: the fields of each kind of event, as lists for the blocks."""
    mine = [event for event in events if event.get("row") == number]
    kept = {
        event["event"]: {name: value for name, value in event.items() if name not in ("event", "row", "time")}
        for event in mine
        if event["event"] in ("settling", "calls", "passes")
    }
    blocks = [event for event in mine if event["event"] == "block"]
    names = dict.fromkeys(name for event in blocks for name in event if name not in ("event", "row"))
    return kept | {"blocks": {name: [event.get(name) for event in blocks] for name in names}}


def write_tables(folder: Path) -> None:
    """Write ratios.csv and README.md of a published folder from its results.csv."""
    found = over_sessions(outcomes(read_rows(folder / "results.csv")))
    points.write(folder / points.NAME, points.lines(found))
    (folder / "README.md").write_text(page(folder))


def page(folder: Path) -> str:
    """Return README.md of a published folder: all of ratios.csv, and the waterfalls of its rows."""
    lines = waterfalls(over_sessions(outcomes(read_rows(folder / "results.csv"))), missing=False)
    fenced = ["", "```", *lines, "```"] if lines else []
    return "\n".join([f"# {folder.name}", "", markdown.table(points.read(folder / points.NAME)), *fenced, ""])


def summaries(results: Results) -> str:
    """Return README's section on everything that is published."""
    there = sorted((results.folder / "published").glob(f"*/{points.NAME}"))
    texts = (markdown.summary(points.read(file), f"results/published/{file.parent.name}") for file in there)
    return "\n".join(texts)


def draw(folder: Path) -> None:
    """Draw ratios.svg, README's figure of a published folder."""
    import pandas as pd  # not needed by 'publish'

    from duel.report import figure_data, figures

    lines = points.read(folder / points.NAME)
    first = [line for modes in markdown.leading(lines)[: markdown.FIRST_POINTS] for line in modes.values()]
    drawn = [figure_data.point(line) | record for line in first for record in figure_data.ratio_records(line)]
    if drawn:
        figures.whole(figures.ratios(pd.DataFrame(drawn))).save(str(folder / "ratios.svg"))
