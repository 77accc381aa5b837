"""Draw the figures of a report from the CSV files next to this script. Change what you like and run it again:

    python figures.py            # all figures, each as SVG and PDF
    python figures.py ratios     # one of them

It needs altair, pandas and vl-convert-python, but not Duel. Each function takes the table of its figure and returns
panels, which are drawn one below the other.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import vl_convert

FRAMEWORKS = {"jax": "#0072b2", "pytorch": "#d55e00"}  # Okabe and Ito's, which colour-blind readers can tell apart
VERDICTS = {
    "JAX is faster": "#0072b2",
    "PyTorch is faster": "#d55e00",
    "equal within 5 %": "#009e73",
    "undecided": "#888888",
    "no verdict": "#cccccc",
}
EQUAL = 1.05
WIDTH, LINE = 560, 15  # pixels: the width of a panel, the height of a line in it
MOST = 60  # points in a panel; the CSV has the rest
PARTS = {"forward": 1.0, "backward": 0.65, "optimizer": 0.35}  # opacity

Chart = Any  # from Altair, whose methods return types that depend on their arguments
Panels = list[Chart]
Draw = Any  # Callable[[pd.DataFrame], Panels], with the name that every function has


def ratios(data: pd.DataFrame) -> Panels:
    """JAX / PyTorch: its interval (thick), what another session may show (thin), and a tick for each session.

    Gray: how far a framework differs from itself, if known, and 1/1.05 to 1.05. A verdict with * counts as undecided.
    """
    known = data.verdict.str.extract(rf"^({'|'.join(VERDICTS)})(?!\*)", expand=False)
    data = data.assign(kind=known.fillna("undecided"))
    tip = ("ratio", "low", "high", "another_low", "another_high", "floor", "sessions", "pairs", "verdict")
    panels = []
    for title, part in split(titled(data, "use_case"), "title"):
        once = part[part.session == 1]
        x = log_x("ratio", "JAX / PyTorch throughput (right of 1: JAX is faster)")
        color = alt.Color("kind:N", title=None).scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
        lines = by_point(once).encode(yOffset=below("mode"))
        band = pd.DataFrame({"low": [1 / EQUAL], "high": [EQUAL]})
        floors = lines.transform_calculate(below="1 / datum.floor").mark_bar(opacity=0.2, color="gray")
        ticks = by_point(part).mark_tick(opacity=0.7, height=7)
        points = lines.mark_point(size=45, filled=True, opacity=1)
        layers = [
            alt.Chart(band).mark_rect(opacity=0.1, color="gray").encode(x="low:Q", x2="high:Q"),
            *([floors.encode(x="below:Q", x2="floor:Q")] if once.floor.notna().any() else []),
            lines.mark_rule(opacity=0.5).encode(x="another_low:Q", x2="another_high:Q", color=color),
            lines.mark_rule(strokeWidth=3).encode(x="low:Q", x2="high:Q", color=color),
            ticks.encode(x="session_ratio:Q", yOffset=below("mode"), color=color),
            points.encode(x=x, color=color, shape=_mode(), tooltip=tips(*tip)),
        ]
        panels.append(panel([_one(), *layers], title, lines=2 * once.point.nunique()))
    return panels


def devices(data: pd.DataFrame) -> Panels:
    """JAX / PyTorch on each device. Nothing is averaged over devices."""
    most = max(data.ratio.max(), 1 / data.ratio.min(), EQUAL)
    color = alt.Color("ratio:Q", title="JAX / PyTorch")
    color = color.scale(type="log", scheme="blueorange", reverse=True, domain=[1 / most, most])
    panels = []
    for title, part in split(titled(data[data.session == 1], "use_case", "mode", together=True), "title"):
        base = by_point(part).encode(x=alt.X("device_name:N", title=None))
        cells = base.mark_rect().encode(color=color, tooltip=tips("device_name", "ratio", "low", "high", "verdict"))
        numbers = base.mark_text(color="black").encode(text=alt.Text("ratio:Q", format=".2f"))
        panels.append(panel([cells, numbers], title, lines=2 * part.point.nunique()))
    return panels


def itself(data: pd.DataFrame) -> Panels:
    """JAX against itself and PyTorch against itself, with the same intervals: how far to trust the other ratios."""
    panels = []
    for title, part in split(titled(data, "use_case", "mode"), "title"):
        lines = by_point(part).encode(yOffset=below("framework"), color=sides())
        x = log_x("ratio", "throughput of a framework / itself")
        rules = lines.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
        points = lines.mark_point(filled=True, opacity=1).encode(x=x, tooltip=tips("framework", "ratio", "low", "high"))
        panels.append(panel([_one(), rules, points], title, lines=2 * part.point.nunique()))
    return panels


def throughput(data: pd.DataFrame) -> Panels:
    """Throughput against batch size; points with a single batch size are in separate panels."""
    data = titled(data[data.devices == 1], "what", "use_case")
    several = data.groupby("title").batch_size.transform("nunique") > 1
    panels = []
    for title, part in split(data[several], "title"):
        y = alt.Y("throughput:Q", title=part.unit.iloc[0]).scale(type="log")
        lines = alt.Chart(part).mark_line(point=True).encode(x=_batch(), y=y, color=sides())
        dash = alt.StrokeDash("mode:N", title=None)
        panels.append(panel([lines.encode(strokeDash=dash, tooltip=tips("framework", "throughput", "unit"))], title))
    return panels + _dots(data[~several], "throughput", "items per second", ("framework", "throughput", "unit"))


def latency(data: pd.DataFrame) -> Panels:
    """Latency of single calls against batch size: the median, and a band up to the 95th percentile.

    Points with a single batch size are in separate panels.
    """
    data = data.drop_duplicates([name for name in data.columns if name != "milliseconds"]).pivot(
        index=[name for name in data.columns if name not in ("percentile", "milliseconds")],
        columns="percentile",
        values="milliseconds",
    )
    data = titled(data.reset_index(), "what", "mode")
    known = [name for name in ("p50", "p95", "p99") if name in data]
    several = data.groupby("title").batch_size.transform("nunique") > 1
    panels = []
    for title, part in split(data[several], "title"):
        base = alt.Chart(part).encode(x=_batch(), color=sides())
        y = alt.Y("p50:Q", title="ms per call").scale(type="log")
        lines = base.mark_line(point=True).encode(y=y, tooltip=tips("framework", *known))
        panels.append(panel([base.mark_area(opacity=0.2).encode(y="p50:Q", y2="p95:Q"), lines], title))
    return panels + _dots(data[~several], "p50", "ms per call, median", ("framework", *known))


def scaling(data: pd.DataFrame) -> Panels:
    """Throughput on several devices, labelled with the efficiency relative to one device."""
    data = data.assign(label=data.efficiency.map("{:.0%}".format, na_action="ignore"))
    each = data.batch_size // data.devices.where(data.scaling == "weak", 1)  # on each device, or over all
    data = data.assign(batch="batch " + each.astype(str), besides="").sort_values("devices")
    panels = []
    for title, part in split(titled(data, "what", "use_case", "scaling", "batch", "mode"), "title"):
        y = alt.Y("throughput:Q", title=part.unit.iloc[0]).stack(None)
        side = alt.XOffset("framework:N", sort="ascending")
        base = alt.Chart(part).encode(x=alt.X("place:O", title="devices", sort=None), xOffset=side, y=y)
        bars = base.mark_bar().encode(color=sides(), tooltip=tips("framework", "throughput", "efficiency"))
        panels.append(panel([bars, base.mark_text(dy=-6).encode(text="label:N")], title))
    return panels


def start(data: pd.DataFrame) -> Panels:
    """Seconds until the first step is done, labelled with the steps after which the slower start has paid off."""
    data = data.assign(label=data.break_even_steps.map("{:,.0f} steps".format, na_action="ignore"))
    tip = ("framework", "start_seconds", "step_seconds", "break_even_steps")
    return _dots(data, "start_seconds", "seconds until the first step is done", tip)


def parts(data: pd.DataFrame) -> Panels:
    """Forward pass, backward pass and optimizer, relative to the slower side's step."""
    total = data.groupby(["id", "framework"]).milliseconds.transform("sum")
    slower = total.groupby(data.id).transform("max")
    data = data.assign(share=data.milliseconds / slower, order=data.part.map(list(PARTS).index))
    panels = []
    for title, part in split(titled(data, "use_case", "mode"), "title"):
        opacity = alt.Opacity("part:O", title=None).scale(domain=list(PARTS), range=list(PARTS.values()))
        x = alt.X("share:Q", title="time of a step, relative to the slower side").stack("zero")
        bars = by_point(part).mark_bar().encode(x=x, yOffset=below("framework"), color=sides(), opacity=opacity)
        bars = bars.encode(order="order:Q", tooltip=tips("framework", "part", "milliseconds"))
        panels.append(panel([bars], title, lines=2 * part.point.nunique()))
    return panels


def memory(data: pd.DataFrame) -> Panels:
    """Peak memory of the measured process."""
    return _dots(data, "mebibytes", "MiB", ("framework", "mebibytes", "kind"))


def energy(data: pd.DataFrame) -> Panels:
    """Energy per item."""
    return _dots(data, "joules_per_item", "J per item", ("framework", "joules_per_item", "source"))


def roofline(data: pd.DataFrame) -> Panels:
    """FLOP/s of a step below the machine's roof: measured matrix products and copies, the same for both sides."""
    panels = []
    for title, part in split(titled(data, "device_name", "precision"), "title"):
        product, copy = part.product_flops_per_second.median(), part.copy_bytes_per_second.median()
        ends = [part.flops_per_byte.min() / 2, product / copy, max(part.flops_per_byte.max(), product / copy) * 2]
        roof = pd.DataFrame({"flops_per_byte": ends, "flops_per_second": [min(product, copy * end) for end in ends]})
        x = log_x("flops_per_byte", "FLOP per byte")
        y = alt.Y("flops_per_second:Q", title="FLOP/s").scale(type="log").axis(format=".0e")
        points = alt.Chart(part).mark_point(filled=True, opacity=0.8).encode(x=x, y=y, color=sides(), shape=_mode())
        points = points.encode(tooltip=tips("framework", "flops_per_second", "flops_per_byte"))
        panels.append(panel([alt.Chart(roof).mark_line().encode(x=x, y=y), points], title))
    return panels


def switches(data: pd.DataFrame) -> Panels:
    """The factor by which each switch between default and tuned changes JAX / PyTorch."""
    panels = []
    for title, part in split(titled(data, "use_case", "point"), "title"):
        y = alt.Y("switch:N", sort=None, title=None)
        lines = alt.Chart(part).encode(y=y, yOffset=below("order"), color=alt.Color("order:N", title=None))
        rules = lines.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
        points = lines.mark_point(filled=True, opacity=1).encode(x=log_x("factor", "change in JAX / PyTorch (factor)"))
        points = points.encode(tooltip=tips("switch", "order", "factor", "low", "high"))
        panels.append(panel([_one(), rules, points], title, lines=2 * part.switch.nunique()))
    return panels


def training(data: pd.DataFrame) -> Panels:
    """Training loss of both sides over the timed steps, and accuracy on held-out data if the data are real."""
    panels = []
    for title, part in split(titled(data, "point", "mode"), "title"):
        found = part.groupby("framework").accuracy.first().dropna()
        accuracy = "".join(f"; held-out accuracy of {name} {value:.3f}" for name, value in found.items())
        y = alt.Y("loss:Q", title="training loss").scale(type="log" if (part.loss > 0).all() else "linear")
        curves = part[["framework", "step", "loss", "id"]]
        panels.append(panel([alt.Chart(curves).mark_line().encode(x="step:Q", y=y, color=sides())], title + accuracy))
    return panels


def learning(data: pd.DataFrame) -> Panels:
    """Held-out top-1 accuracy of trainings against steps, seconds and joules; a line for each training."""
    panels = []
    for title, part in split(titled(data, "point", "mode"), "title"):
        for column, name in (("step", "steps"), ("seconds", "s of training"), ("joules", "J of training")):
            y = alt.Y("top1:Q", title="held-out top-1 accuracy").axis(format="%").scale(zero=False)
            x, each = alt.X(f"{column}:Q", title=name), ["seed:N", "group:N"]
            lines = alt.Chart(part).mark_line(point=True).encode(x=x, y=y, detail=each, tooltip=["run_id:N", "epoch:Q"])
            if part[column].notna().any():
                panels.append(panel([lines.encode(color=sides())], f"{title}: {name}"))
    return panels


def _dots(data: pd.DataFrame, column: str, title: str, tip: tuple[str, ...]) -> Panels:
    """Draw a line for each point, a dot on it for each framework, and after them the ``label``, if any."""
    panels = []
    for name, part in split(titled(data, "use_case", "mode"), "title"):
        lines = by_point(part)
        dots = lines.mark_point(filled=True, opacity=1, size=50).encode(x=log_x(column, title), color=sides())
        layers = [dots.encode(tooltip=tips(*tip))]
        if "label" in part and part.label.notna().any():
            last = part.loc[part.groupby("id")[column].idxmax()]
            text = by_point(last[last.label.notna()]).mark_text(align="left", dx=8)
            layers.append(text.encode(x=f"{column}:Q", text="label:N"))
        panels.append(panel(layers, name, lines=part.point.nunique()))
    return panels


def titled(data: pd.DataFrame, *columns: str, together: bool = False) -> pd.DataFrame:
    """Add ``columns``, joined, as ``title``, after the device unless ``together``; ``what`` is all of a benchmark."""
    if not together and "device_name" not in columns and data.device_name.nunique() > 1:
        columns = ("device_name", *columns)
    texts = data.assign(what="")
    if "size" in data:  # from a CSV file, a column is of numbers if all are empty
        texts["what"] = data.benchmark + " (" + data["size"] + ", " + data.precision + ")"
        for name in ("product", "which", "besides"):
            texts["what"] += " " + data[name].astype(object).fillna("").astype(str)
        texts["what"] = texts["what"].str.split().str.join(" ")
    title = texts[columns[0]].astype(str)
    for column in columns[1:]:
        title = title + ", " + texts[column].astype(str)
    return data.assign(title=title)


def split(data: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the parts of ``data`` by ``column`` in order of first appearance, without what no panel shows."""
    shown = data.drop(columns=["benchmark", "size", "product", "which", "besides", "scaling"], errors="ignore")
    for name in dict.fromkeys(data[column]):
        part = shown[data[column] == name]
        yield name, part[part.point.isin(list(dict.fromkeys(part.point))[:MOST])]


def by_point(data: pd.DataFrame) -> Chart:
    """Return a chart with a line for each point, in their order."""
    return alt.Chart(data).encode(y=alt.Y("point:N", sort=None, title=None))


def below(column: str) -> alt.YOffset:
    """Place the values of ``column`` one below the other within a line."""
    return alt.YOffset(f"{column}:N", sort="ascending")


def _one() -> Chart:
    """Draw the rule at 1, where neither side is faster."""
    return alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[3, 3]).encode(x="one:Q")


def log_x(column: str, title: str) -> alt.X:
    return alt.X(f"{column}:Q", title=title).scale(type="log", nice=False, padding=12)


def _batch() -> alt.X:
    return alt.X("batch_size:Q", title="batch size").scale(type="log", base=2)


def sides() -> alt.Color:
    return alt.Color("framework:N", title=None).scale(domain=list(FRAMEWORKS), range=list(FRAMEWORKS.values()))


def _mode() -> alt.Shape:
    return alt.Shape("mode:N", title=None).scale(domain=["default", "tuned"], range=["circle", "diamond"])


def tips(*columns: str) -> list[str]:
    """Return the columns of a tooltip."""
    return ["point:N", "mode:N", *columns]


def panel(layers: list[Chart], title: str, lines: int = 0) -> Chart:
    """Stack ``layers`` in a panel high enough for so many ``lines``."""
    return alt.layer(*layers).properties(title=title, width=WIDTH, height=max(4 * LINE, LINE * lines) if lines else 220)


def theme(chart: Chart, ink: str = "black", paper: str = "white") -> Chart:
    """Draw text and lines in ``ink``, which the page sets to its text colour."""
    texts = dict.fromkeys(("labelColor", "titleColor"), ink)
    lines, symbols = dict.fromkeys(("domainColor", "tickColor"), ink), {"symbolBaseFillColor": ink}
    chart = chart.configure(font="DejaVu Sans, Liberation Sans, sans-serif", background=paper)
    chart = chart.configure_axis(**texts, **lines, gridOpacity=0.2, labelLimit=320)
    chart = chart.configure_legend(**texts, **symbols, orient="bottom", symbolOpacity=1, columns=2)
    chart = chart.configure_title(color=ink, anchor="start").configure_text(color=ink).configure_view(stroke=None)
    return chart.configure_rule(color=ink).configure_line(stroke=ink)


def whole(panels: Panels) -> Chart:
    """Return the panels of a figure, one below the other, with one legend."""
    return theme(alt.vconcat(*panels))


DRAW: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        *(ratios, devices, itself, throughput, latency, scaling, start, parts),
        *(memory, energy, roofline, switches, training, learning),
    )
}


def save(draw: Draw, data: pd.DataFrame, folder: Path) -> None:
    """Write a figure as SVG and PDF; do nothing if there is nothing to show."""
    if panels := draw(data):
        drawn = folder / f"{draw.__name__}.svg"
        whole(panels).save(str(drawn))
        drawn.with_suffix(".pdf").write_bytes(vl_convert.svg_to_pdf(drawn.read_text()))


def main(figures: dict[str, Draw]) -> None:
    here, names = Path(__file__).parent, sys.argv[1:]
    for name in names or figures:
        source = here / f"{name}.csv"
        if source.exists() or names:
            save(figures[name], pd.read_csv(source), here)


if __name__ == "__main__":
    main(DRAW)
