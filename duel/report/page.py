"""The page of a report: one HTML file, which opens from disk and sends no requests."""

import base64
import csv
import functools
import gzip
import io
import statistics
from collections.abc import Sequence
from typing import Any

import altair as alt
import msgspec
import pandas as pd
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duel import ROOT
from duel.report import figures, markdown, profile_figures, prose
from duel.report.command import again
from duel.report.figure_data import Record, anchor, label, work
from duel.report.pairs import Outcome, Session
from duel.report.points import Line, legend
from duel.report.records import Records

MOST_POINTS = 200  # in the page; ratios.csv has the others
# How to measure the data of a figure.
HOW = {
    "ratios": "python main.py --benchmark mnist --use_case 1 --paired --sessions 3",
    "devices": "python main.py report --name ONE OTHER, with sets from several devices",
    "itself": "python main.py --benchmark mnist --use_case 1 --paired --sessions 3 --mode tuned",
    "throughput": "python main.py --benchmark mnist --use_case 5 --paired",
    "latency": "python main.py --benchmark mnist --use_case 5 --paired",
    "scaling": "python main.py --benchmark mnist --use_case 2 --paired --devices 2",
    "start": "python main.py --benchmark mnist --use_case 1 --paired",
    "parts": "python main.py --benchmark mnist --use_case 1 --paired",
    "memory": "python main.py --benchmark mnist --use_case 1 --paired",
    "energy": "the same measurements where an energy counter can be read: NVML on GPUs, RAPL on CPUs",
    "roofline": "python main.py --benchmark mnist --use_case 1 --paired",
    "switches": "python main.py --benchmark mnist --use_case 1 --paired --mode waterfall --device cpu",
    "training": "python main.py --benchmark mnist --use_case 1 --paired",
    "learning": "python main.py --benchmark mnist --use_case 1 --paired --dataset digits --seeds 5",
    **dict.fromkeys(profile_figures.DRAW, "python main.py --benchmark mnist --use_case 1 --paired --profile"),
}
DRAW = figures.DRAW | profile_figures.DRAW


def html(
    sets: Sequence[Records],
    tables: dict[str, list[Record]],
    sections: list[dict[str, Any]],
    refresh: int | None = None,
) -> str:
    """Return the page of ``sets``, with figures from ``tables`` and the ``prose.sections`` below.

    It reloads every ``refresh`` seconds.
    """
    found = [one for records in sets for one in records.found]
    lines = [line for _, line in found]
    drawn = [_figure(name, tables.get(name, [])) for name in prose.TITLES]
    names = sorted({line.device_name for line in lines})
    shown = found[:MOST_POINTS]
    more = f"The first {MOST_POINTS} of {len(found)} are here, the others in ratios.csv."
    contents = [("summary", "Summary"), ("figures", "Figures"), ("points", "Points")]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=f"JAX and PyTorch on {', '.join(names)}" if names else "JAX and PyTorch",
            where=markdown.where(lines),
            refresh=refresh,
            contents=contents + [(section["id"], section["title"]) for section in sections],
            summary=prose.summary(sets),
            figures=drawn,
            points=[_point(outcome, line) for outcome, line in shown],
            points_left_out=more if len(found) > len(shown) else "",
            meaning=legend(lines),
            sections=sections,
            specs=_packed(_json({panel["id"]: panel["spec"] for figure in drawn for panel in figure["panels"]})),
            config=figures.theme(alt.Chart().mark_point(), "currentColor", "transparent").to_dict()["config"],
            bundle=_packed(_vega()),
        )
    )


def _json(value: object) -> str:
    """Return ``value`` as a browser reads it, in which NaN is null."""
    return msgspec.json.encode(value).decode()


def _packed(text: str) -> str:
    """Return ``text`` as the page unpacks it: 1.17 MB of charts, of a set of 122 points, take 0.11."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def _vega() -> str:
    """Return the scripts that draw in a browser."""
    return vl_convert.javascript_bundle()  # type: ignore[call-arg]  # it has a default, which its stub lacks


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )


def _figure(name: str, records: list[Record]) -> dict[str, Any]:
    draw = DRAW[name]
    caption = " ".join((draw.__doc__ or "").split())
    panels = []
    for number, panel in enumerate(draw(pd.DataFrame(records)) if records else []):
        spec = _responsive(panel.to_dict()) | {"description": _spoken(caption, panel)}
        panels.append({"id": f"{name}-{number}", "spec": spec})
    points = len({record["point"] for record in records})
    left_out = f"each panel has its first {figures.MOST} points" if points > figures.MOST else ""
    how = f"To measure it: {HOW[name]}"
    return {
        "name": name,
        "title": prose.TITLES[name],
        "caption": caption,
        "panels": panels,
        "left_out": left_out,
        "how": how,
    }


def _spoken(caption: str, panel: Any) -> str:
    """Return what a screen reader reads for a panel; its figures are in the table of points and in the CSV file."""
    return f"{panel.title}. {caption} The figures are in the CSV file below and with the points."


def _responsive(spec: dict[str, Any]) -> dict[str, Any]:
    """Make a chart as wide as its place in the page, with its data as CSV: column names once, not in each record."""
    kept = {name: _csv(records) for name, records in spec.pop("datasets", {}).items()}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("data"), dict) and node["data"].get("name") in kept:
                node["data"]["format"] = {"type": "csv"}
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(spec)
    return spec | {"datasets": kept, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def _csv(records: list[Record]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        rounded = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in record.items()}
        writer.writerow({name: "" if value == "nan" else value for name, value in rounded.items()})
    return text.getvalue()


def _point(outcome: Outcome, line: Line) -> dict[str, Any]:
    """Return what the page shows of a point and its sessions."""
    columns = ["session", "started", "host", "pairs", f"JAX, {line.throughput_unit}", "PyTorch", "JAX / PyTorch"]
    sessions = enumerate(zip(outcome.sessions, outcome.session_ratios, strict=True), 1)
    return {
        "id": anchor(line),
        "head": f"{work(line)}, {label(line)}, {line.mode}: {line.short}",
        "verdict": f"{line.marked}: {outcome.figures}" if outcome.found else outcome.verdict,
        "notes": _notes(outcome, line),
        "columns": [*columns, "others' CPU time", "blocks left out", "runs"],
        "rows": [_session(number, pairs, ratio) for number, (pairs, ratio) in sessions] if outcome.shown else [],
        "command": "with the points on several devices" if line.is_baseline else again(outcome, None),
    }


def _session(number: int, pairs: Session, ratio: float) -> list[Any]:
    rows = [row for pair in pairs for row in pair]
    rates = [statistics.median(row.throughput or 0.0 for row in side) for side in zip(*pairs, strict=True)]
    load = max((row.foreign_load or 0.0 for row in rows), default=0.0)
    left_out, blocks = (sum(getattr(row, name) or 0 for row in rows) for name in ("left_out_blocks", "blocks"))
    runs = ", ".join(dict.fromkeys(str(row.run_id) for row in rows))
    started = min(row.started or "" for row in rows)
    figures = [f"{rate:.4g}" for rate in rates] + [f"{ratio:.3f}", f"{load:.1%}"]
    return [number, started, rows[0].host or "", len(pairs), *figures, f"{left_out} of {left_out + blocks}", runs]


def _notes(outcome: Outcome, line: Line) -> list[str]:
    sides = [list(side) for side in zip(*outcome.pairs, strict=True)]
    texts = [f"proof: {line.proof or 'none'}"]
    for side in sides:
        one = side[0]
        texts.append(f"{one.framework} {one.framework_version}, {one.execution}: {one.switches or 'no switches'}")
        if one.tuning:
            texts.append(f"{one.framework} tuned: {one.tuning}")
        memory = [row.peak_memory_bytes for row in side if row.peak_memory_bytes]
        if memory:
            peak = statistics.median(memory) / 2**20
            texts.append(f"{one.framework} peak memory: {peak:,.0f} MiB ({one.peak_memory_kind})")
    commits = dict.fromkeys(str(row.git_sha)[:12] for side in sides for row in side)
    weights, data = str(outcome.row.weights_sha256)[:12], str(outcome.row.data_sha256)[:12]
    texts.append(f"commit {', '.join(commits)}; weights {weights}, data {data}")
    return texts + [text for text in (line.far_off, line.apart) if text]
