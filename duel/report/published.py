"""Records that go with the repository: results/published/<name>/, and the tables that are made of them.

results.csv          the rows, with the columns of results/results.csv
samples/<run>.jsonl  a line for each row: every timed block with its conditions, every call
parity/              the certificates that the rows stand on
README.md            a table of it all; README.md of the repository has a short one
"""

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duel import certificate
from duel.catalogue import CLAIM_PAIRS, FRAMEWORKS, PRESETS
from duel.comparability import COMPARABLE
from duel.errors import UserError
from duel.modes import MODES
from duel.record import Row
from duel.report.pairs import Outcome, outcomes, over_benchmarks
from duel.report.waterfall import waterfalls
from duel.results import Results
from duel.states import FINISHED
from duel.table import merge, read_rows, write_rows

BEGIN, END = "<!-- results -->", "<!-- /results -->"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

Say = Callable[[str], None]


def publish(name: str, results: Results, readme: Path, say: Say) -> None:
    """Copy what results.csv has of pairs that a ratio could be made of to ``name``, and make the tables anew.

    A folder is of one device, a new one of that which was measured last: means over benchmarks are of one device, too.
    A point that is there already, measured before, is replaced. Raises UserError where there is nothing to publish.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: small letters, digits, '-' and '_' are valid, at most 32 of them")
    folder = results.folder / "published" / name
    before, rows = read_rows(folder / "results.csv"), merge(results)
    measured = outcomes(rows)
    device = _device(before or [outcome.pairs[0][0] for outcome in measured])
    found, left_out = [], []
    for outcome in measured:
        if why := _unfit(outcome, device, results):
            left_out.append(f"{outcome.pairs[0][0].run_id}: {why}")
        else:
            found.append(outcome)
    for words in dict.fromkeys(left_out):
        say(f"left out: {words}")
    if not found:
        raise UserError("nothing to publish: no pairs of a preset that claims a ratio; 'main.py --paired' makes them")
    latest = {outcome.pairs[0][0].pair: outcome for outcome in found}
    # With those that were measured again.
    points = {(outcome.pairs[0][0].group, outcome.pairs[0][0].point) for outcome in latest.values()}
    new = [row for row in rows if (row.group, row.point) in points]
    kept = [row for row in before if row.pair not in latest]
    certificates = {
        certificate.path(results.folder, *what): certificate.path(folder, *what)
        for what in ((str(row.benchmark), str(row.size), str(row.device_kind)) for row in new)
    }
    for row in kept:
        source = certificate.path(results.folder, str(row.benchmark), str(row.size), str(row.device_kind))
        if source in certificates and row.comparable == COMPARABLE and _uncertified(row, results):
            raise UserError(
                f"{row.run_id}, which is published there, is of other code, weights or versions than the certificate "
                f"in results/parity/{source.name}: measure it again, too, or choose another --name"
            )
    (folder / "parity").mkdir(parents=True, exist_ok=True)
    for source, target in certificates.items():
        if source.exists():  # a pair that is not comparable may have none
            shutil.copyfile(source, target)
    rows = sorted(
        [*kept, *new],
        key=lambda row: (row.benchmark or "", row.size or "", row.use_case or 0, row.run_id or "", row.row or 0),
    )
    write_rows(folder / "results.csv", rows)
    _keep_samples(rows, results, folder / "samples")
    (folder / "README.md").write_text(f"# {name}\n\n{table(rows)}")
    say(f"{folder.relative_to(results.folder.parent)}: {len(rows)} rows, {len(new)} of them new")
    write_table(results, readme)


def _device(rows: list[Row]) -> str | None:
    """The name of the device that ``rows`` were measured on, the last of them."""
    return max(((row.started or "", row.device_name) for row in rows if row.device_name), default=("", None))[1]


def _uncertified(row: Row, results: Results) -> str:
    """Why the certificate of now does not hold for ``row``; empty where it does."""
    found = certificate.verdict(row, results.folder)
    return "" if found == certificate.VERIFIED else found


def _unfit(outcome: Outcome, device: str | None, results: Results) -> str:
    """Why an outcome is not to be published; empty if it is. One that is not comparable is: with the reason."""
    rows = [row for pair in outcome.pairs for row in pair]
    if any(row.status != FINISHED for row in rows):
        return "not all of it has finished"
    if others := {str(row.device_name) for row in rows} - {device}:
        return f"measured on {', '.join(sorted(others))}, the folder is of {device}: another --name is valid"
    preset = str(rows[0].preset)
    if len(outcome.pairs) < CLAIM_PAIRS:
        claims = ", ".join(p.name for p in PRESETS.values() if p.pairs >= CLAIM_PAIRS)
        return f"{len(outcome.pairs)} pairs of preset {preset}: --paired with {claims} is valid"
    if any(row.git_dirty or row.git_sha is None for row in rows):
        return "the code that ran was no commit"
    if outcome.found is None:
        return ""
    return next(filter(None, (_uncertified(row, results) for row in rows)), "")


def _keep_samples(rows: list[Row], results: Results, folder: Path) -> None:
    """Write down every sample of ``rows`` whose run's folder is still here; drop those of rows that are not there."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        numbers.setdefault(str(row.run_id), []).append(row.row or 0)
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.jsonl"):
        if file.stem not in numbers:  # of a measurement that was replaced
            file.unlink()
    for run_id, wanted in numbers.items():
        events = results.run(run_id).events()[0]
        if events:
            lines = [json.dumps({"row": number} | _samples(events, number)) for number in sorted(wanted)]
            (folder / f"{run_id}.jsonl").write_text("\n".join(lines) + "\n")


def _samples(events: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """What was timed of row ``number``: of each kind of event its fields, of the blocks a list of each."""
    mine = [event for event in events if event.get("row") == number]
    kept = {
        event["event"]: {name: value for name, value in event.items() if name not in ("event", "row", "time")}
        for event in mine
        if event["event"] in ("settling", "calls", "passes")
    }
    blocks = [event for event in mine if event["event"] == "block"]
    names = dict.fromkeys(name for event in blocks for name in event if name not in ("event", "row"))
    return kept | {"blocks": {name: [event.get(name) for event in blocks] for name in names}}


def write_table(results: Results, readme: Path) -> None:
    """Make the part between README's marks anew, of all that is published. Raises UserError where they are gone."""
    text = readme.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{readme.name}: the marks {BEGIN} and {END}, between which the table goes, are not there")
    readme.write_text(head + begin + "\n" + summaries(results) + end + tail)


def summaries(results: Results) -> str:
    """What README says of all that is published."""
    files = sorted((results.folder / "published").glob("*/results.csv"))
    return "\n".join(summary(read_rows(file), file.parent.name) for file in files)


def summary(rows: list[Row], name: str) -> str:
    """The rows of the folder ``name`` as a short Markdown table: JAX / PyTorch, a line a point, a column a mode.

    Modes with a name of their own alone: there is no end to those with single switches.
    """
    found = [outcome for outcome in outcomes(rows) if outcome.pairs[0][0].mode in MODES]
    modes = sorted({str(outcome.pairs[0][0].mode) for outcome in found})
    lines: dict[str, dict[str, str]] = {}
    for outcome in found:
        lines.setdefault(" | ".join(_what(outcome)), {})[str(outcome.pairs[0][0].mode)] = _short(outcome)
    link = f"results/published/{name}/README.md"
    return "\n".join(
        [
            f"{_where(rows)} JAX's throughput as a multiple of PyTorch's, of pairs that are COMPARABLE,",
            "with its 95 % interval, and who is faster by that and by the noise floor. Noise floors, numbers of pairs,",
            f"throughputs and reasons: [{link}]({link}).",
            "",
            f"| benchmark | use case | batch | {' | '.join(modes)} |",
            f"|---|---|---|{'---|' * len(modes)}",
            *(f"| {what} | {' | '.join(by.get(mode, '') for mode in modes)} |" for what, by in lines.items()),
            *_means(found),
            "",
        ]
    )


def table(rows: list[Row]) -> str:
    """The rows of one folder as a Markdown table, with what they were measured on above it."""
    found = outcomes(rows)
    return "\n".join(
        [
            _where(rows),
            "",
            "| benchmark | use case | batch | mode | JAX | PyTorch | JAX / PyTorch | noise floor | verdict |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(outcome) for outcome in found),
            *_means(found),
            *_fenced(waterfalls(found)),
            "",
        ]
    )


def _where(rows: list[Row]) -> str:
    """What was measured on, with what, and when."""
    devices = ", ".join(sorted({f"{row.device_name} ({row.device_kind}, {row.cpus} CPUs)" for row in rows}))
    versions = {f: sorted({str(row.framework_version) for row in rows if row.framework == f}) for f in FRAMEWORKS}
    said = ", ".join(f"{framework} {'/'.join(each)}" for framework, each in versions.items())
    dates = sorted(str(row.started)[:10] for row in rows)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{devices}; {said}; {when}."


def _means(found: list[Outcome]) -> list[str]:
    means = [
        f"- {name}: {mean.ratio:.3f} [{mean.low:.3f}, {mean.high:.3f}], {mean.n} benchmarks"
        for name, mean in over_benchmarks(found).items()
    ]
    return ["", "Geometric means of JAX / PyTorch over benchmarks:", "", *means] if means else []


def _fenced(lines: list[str]) -> list[str]:
    return ["", "```", *lines, "```"] if lines else []


def _what(outcome: Outcome) -> list[str]:
    return [outcome.benchmark, outcome.use_case, str(outcome.pairs[0][0].batch_size)]


def _short(outcome: Outcome) -> str:
    """A cell of ``summary``."""
    if outcome.found is None:
        return outcome.kind.lower()
    found = outcome.found
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] {outcome.faster or 'no difference shown'}"


def _line(outcome: Outcome) -> str:
    one = outcome.pairs[0][0]
    each = [statistics.median(row.throughput or 0.0 for row in side) for side in zip(*outcome.pairs, strict=True)]
    medians = [f"{throughput:.4g} {one.throughput_unit}" for throughput in each]
    if outcome.found is None or outcome.floor is None:
        figures = ["-", "-", outcome.why]
    else:
        found = outcome.found
        figures = [f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}], {found.n} pairs", f"{outcome.floor:.3f}"]
        figures.append(outcome.kind)
    return f"| {' | '.join([*_what(outcome), str(one.mode), *medians, *figures])} |"
