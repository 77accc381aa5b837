"""The ratios of a report as a LaTeX table to include, with booktabs and siunitx."""

from collections.abc import Sequence

from duel.report.figure_data import label, work
from duel.report.points import Line, legend

HEAD = r"""% \usepackage{booktabs, longtable, siunitx}
\begin{longtable}{l l S[table-format=3.3] l S[table-format=1.3] l}
\toprule
{Point} & {Mode} & {JAX / PyTorch} & {95\,\% interval} & {Noise floor} & {Verdict} \\
\midrule
\endhead
"""
TAIL = r"""\bottomrule
\end{longtable}
"""
# Characters that TeX does not read as text.
ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}


def _row(line: Line) -> str:
    ratio = "{--}" if line.ratio is None else f"{line.ratio:.3f}"
    ends = "" if line.low is None or line.high is None else rf"\numrange{{{line.low:.3f}}}{{{line.high:.3f}}}"
    floor = "{--}" if line.floor is None else f"{line.floor:.3f}"
    cells = [escaped(label(line)), escaped(line.mode), ratio, ends, floor, escaped(line.marked)]
    return " & ".join(cells) + " \\\\\n"


def table(lines: Sequence[Line]) -> str:
    """Return a line for each point and mode, under a heading for each device and use case."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(f"{line.device_name}, {work(line)}", []).append(line)
    text = HEAD
    for where, some in groups.items():
        text += rf"\multicolumn{{6}}{{l}}{{\emph{{{escaped(where)}}}}} \\" + "\n"
        text += "".join(map(_row, some))
    if meaning := legend(lines):
        text += rf"\midrule \multicolumn{{6}}{{l}}{{{escaped(meaning)}}} \\" + "\n"
    return text + TAIL


def escaped(text: str) -> str:
    """Return ``text`` escaped for TeX. Letters that pdfTeX has no font for become question marks."""
    kept = "".join(ESCAPES.get(letter, letter) for letter in text)
    return kept.encode("latin-1", "replace").decode("latin-1").replace("\n", " ").replace("\r", " ")
