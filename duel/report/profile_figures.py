"""Draw the figures of a report that show where the time of a step goes, from the CSV files next to this script.

Run it like figures.py, which it needs.
"""

import pandas as pd

try:
    from duel.report import figures
except ImportError:  # next to the tables of a report
    import figures  # type: ignore[import-not-found,no-redef]  # mypy sees only the package

import altair as alt

Panels = figures.Panels
# None is a framework's or a verdict's (``figures``); grays for what is not computing.
COLOURS = {
    "matrix product": "#7a5195",
    "convolution": "#56b4e9",
    "depthwise convolution": "#003f5c",
    "attention": "#cc79a7",
    "normalisation and reduction": "#88b04b",
    "elementwise": "#f0e442",
    "scatter and gather": "#e69f00",
    "optimizer": "#882255",
    "host": "#aa4499",
    "random": "#117733",
    "collective": "#332288",
    "copy and layout": "#999999",
    "other": "#6b6b6b",
    "idle": "#dddddd",
}


def kinds(data: pd.DataFrame) -> Panels:
    """Time of a step by kind of work, JAX above PyTorch. Idle is the time in which no kernel runs."""
    total = data.groupby(["id", "framework"]).milliseconds.transform("sum")
    data = data.assign(share=data.milliseconds / total.groupby(data.id).transform("max"))
    data = data.assign(order=data.kind.map(list(COLOURS).index))
    panels = []
    for title, part in figures.split(figures.titled(data, "use_case", "mode"), "title"):
        x = alt.X("share:Q", title="time of a step, relative to the slower side").stack("zero")
        bars = figures.by_point(part).mark_bar().encode(x=x, yOffset=figures.below("framework"), color=_color(data))
        bars = bars.encode(order="order:Q", tooltip=figures.tips("framework", "kind", "milliseconds"))
        panels.append(figures.panel([bars], title, lines=2 * part.point.nunique()))
    return panels


def modules(data: pd.DataFrame) -> Panels:
    """Time of a step in the modules of the model that differ most between both sides."""
    panels = []
    for title, part in figures.split(figures.titled(data, "use_case", "point", "mode"), "title"):
        y = alt.Y("module:N", sort=None, title=None)
        base = alt.Chart(part).encode(y=y, x=figures.log_x("milliseconds", "ms of a step"), color=figures.sides())
        dots = base.mark_point(filled=True, opacity=1, size=50)
        dots = dots.encode(tooltip=figures.tips("framework", "module", "milliseconds"))
        panels.append(figures.panel([dots], title, lines=part.module.nunique()))
    return panels


def roofs(data: pd.DataFrame) -> Panels:
    """FLOP/s of each kind of work below the machine's roof: measured matrix products and copies."""
    panels = []
    for title, part in figures.split(figures.titled(data, "device_name", "precision"), "title"):
        product, copy = part.product_flops_per_second.median(), part.copy_bytes_per_second.median()
        ends = [part.flops_per_byte.min() / 2, product / copy, max(part.flops_per_byte.max(), product / copy) * 2]
        roof = pd.DataFrame({"flops_per_byte": ends, "flops_per_second": [min(product, copy * end) for end in ends]})
        x = figures.log_x("flops_per_byte", "FLOP per byte")
        y = alt.Y("flops_per_second:Q", title="FLOP/s").scale(type="log").axis(format=".0e")
        shape = alt.Shape("kind:N", title=None)
        points = alt.Chart(part).mark_point(opacity=0.8).encode(x=x, y=y, color=figures.sides(), shape=shape)
        points = points.encode(tooltip=figures.tips("framework", "kind", "flops_per_second", "flops_per_byte"))
        panels.append(figures.panel([alt.Chart(roof).mark_line().encode(x=x, y=y), points], title))
    return panels


def timeline(data: pd.DataFrame) -> Panels:
    """The longest kernels of one traced step of each side, by kind of work; in several lanes where kernels overlap."""
    panels = []
    for title, part in figures.split(figures.titled(data, "use_case", "point", "mode"), "title"):
        x = alt.X("begin:Q", title="ms since the step began, while it was traced")
        bars = alt.Chart(part).mark_bar().encode(x=x, x2="end:Q", y=alt.Y("lane:N", sort=None, title=None))
        bars = bars.encode(color=_color(data), tooltip=figures.tips("framework", "kind", "module", "begin", "end"))
        panels.append(figures.panel([bars], title, lines=2 * part.lane.nunique()))
    return panels


def _color(data: pd.DataFrame) -> alt.Color:
    """Return the colours of the kinds that there are."""
    there = {kind: colour for kind, colour in COLOURS.items() if kind in set(data.kind)}
    return alt.Color("kind:N", title=None).scale(domain=list(there), range=list(there.values()))


DRAW = {draw.__name__: draw for draw in (kinds, modules, roofs, timeline)}

if __name__ == "__main__":
    figures.main(DRAW)
