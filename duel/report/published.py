"""Records that go with the repository: results/published/<name>/, and the table that README has of them.

results.csv              the rows, with the columns of results/results.csv
blocks/<run>-<row>.json  every timed block and call of a row, with its conditions
parity/                  the certificates that the rows stand on
"""

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from duel import certificate
from duel.catalogue import CLAIM_PAIRS, FRAMEWORKS, PRESETS, USE_CASES
from duel.errors import UserError
from duel.record import FINISHED, Row
from duel.report.pairs import Outcome, outcomes, over_benchmarks
from duel.results import Results, read_rows, write_rows

BEGIN, END = "<!-- results -->", "<!-- /results -->"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
SERIES = ("settling", "calls", "block")  # events that are kept of each row

Say = Callable[[str], None]


def publish(name: str, results: Results, readme: Path, say: Say) -> None:
    """Copy what results.csv has of pairs that a ratio could be made of to ``name``, and make README's table anew.

    A point that is there already, measured before, is replaced. Raises UserError where there is nothing to publish.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: small letters, digits, '-' and '_' are valid, at most 32 of them")
    folder = results.folder / "published" / name
    found, left_out = [], []
    for outcome in outcomes(results.merge()):
        if why := _unfit(outcome):
            left_out.append(f"{outcome.pairs[0][0].run_id}: {why}")
        else:
            found.append(outcome)
    for words in dict.fromkeys(left_out):
        say(f"left out: {words}")
    if not found:
        raise UserError("nothing to publish: no pairs of a preset that claims a ratio; 'main.py --paired' makes them")
    latest = {_point(outcome): outcome for outcome in found}
    new = [row for outcome in latest.values() for pair in outcome.pairs for row in pair]
    kept = [row for row in read_rows(folder / "results.csv") if (row.pair, row.device_name) not in latest]
    for outcome in latest.values():
        for row in (row for pair in outcome.pairs for row in pair):
            _keep_series(row, results, folder)
            source = certificate.path(results.folder, str(row.benchmark), str(row.size), str(row.device_kind))
            target = certificate.path(folder, str(row.benchmark), str(row.size), str(row.device_kind))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    rows = sorted(
        [*kept, *new], key=lambda row: (row.benchmark or "", row.use_case or 0, row.run_id or "", row.row or 0)
    )
    write_rows(folder / "results.csv", rows)
    wanted = {_series(row, folder) for row in rows}
    for file in (folder / "blocks").glob("*.json"):
        if file not in wanted:  # of a measurement that was replaced
            file.unlink()
    say(f"{folder.relative_to(results.folder.parent)}: {len(rows)} rows, {len(new)} of them new")
    write_table(results, readme)


def _unfit(outcome: Outcome) -> str:
    """Why an outcome is not to be published; empty if it is. One that is not comparable is: with the reason."""
    rows = [row for pair in outcome.pairs for row in pair]
    if any(row.status != FINISHED for row in rows):
        return "not all of it has finished"
    preset = str(rows[0].preset)
    if len(outcome.pairs) < CLAIM_PAIRS:
        claims = ", ".join(p.name for p in PRESETS.values() if p.pairs >= CLAIM_PAIRS)
        return f"{len(outcome.pairs)} pairs of preset {preset}: --paired with {claims} is valid"
    if any(row.git_dirty or row.git_sha is None for row in rows):
        return "the code that ran was no commit"
    return ""


def _point(outcome: Outcome) -> tuple[str | None, str | None]:
    row = outcome.pairs[0][0]
    return row.pair, row.device_name


def _series(row: Row, folder: Path) -> Path:
    return folder / "blocks" / f"{row.run_id}-{row.row:03d}.json"


def _keep_series(row: Row, results: Results, folder: Path) -> None:
    """Write every sample of ``row`` down, if its run's folder is still there."""
    events = [event for event in results.run(str(row.run_id)).events()[0] if event.get("row") == row.row]
    if not events:
        return
    file = _series(row, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(event) for event in events if event["event"] in SERIES]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def write_table(results: Results, readme: Path) -> None:
    """Make the table between README's marks anew, of all that is published. Raises UserError where they are gone."""
    text = readme.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{readme.name}: the marks {BEGIN} and {END}, between which the table goes, are not there")
    tables = [
        table(read_rows(file), file.parent.name)
        for file in sorted((results.folder / "published").glob("*/results.csv"))
    ]
    readme.write_text(head + begin + "\n" + "\n".join(tables) + end + tail)


def table(rows: list[Row], name: str) -> str:
    """The rows of one folder as a Markdown table, with what they were measured on above it."""
    one, found = rows[-1], outcomes(rows)
    versions = {f: sorted({str(row.framework_version) for row in rows if row.framework == f}) for f in FRAMEWORKS}
    said = ", ".join(f"{framework} {'/'.join(found)}" for framework, found in versions.items())
    dates = sorted(str(row.started)[:10] for row in rows)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"`results/published/{name}/`: {one.device_name}, {one.device_kind}; {said}; {when}.",
        "",
        "| benchmark | use case | batch | mode | JAX | PyTorch | JAX / PyTorch | noise floor | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(outcome) for outcome in found),
    ]
    means = [
        f"- {name}: {mean.ratio:.3f} [{mean.low:.3f}, {mean.high:.3f}], {mean.n} benchmarks"
        for name, mean in over_benchmarks(found).items()
    ]
    lines += ["", "Geometric means of JAX / PyTorch over benchmarks:", "", *means] if means else []
    return "\n".join(lines) + "\n"


def _line(outcome: Outcome) -> str:
    one = outcome.pairs[0][0]
    what = f"{one.benchmark} ({one.size}, {one.precision})"
    case = USE_CASES[one.use_case or 0].name + (f", {one.product}" if one.product else "")
    each = [statistics.median(row.throughput or 0.0 for row in side) for side in zip(*outcome.pairs, strict=True)]
    medians = [f"{throughput:.4g} {one.throughput_unit}" for throughput in each]
    if outcome.found is None or outcome.floor is None:
        figures = ["-", "-", outcome.why]
    else:
        found = outcome.found
        figures = [f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}], {found.n} pairs", f"{outcome.floor:.3f}"]
        figures.append(outcome.verdict.partition(":")[0])
    return f"| {' | '.join([what, case, str(one.batch_size), str(one.mode), *medians, *figures])} |"
