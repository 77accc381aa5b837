"""Output: through rich on a terminal, in colour and redrawn in place; elsewhere as few plain lines.

No text that was read from anywhere reaches a terminal with its control characters. rich respects NO_COLOR and
TERM=dumb.
"""

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from duel.arguments import printable

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table as RichTable

PLAIN_WIDTH = 80  # of tables written to pipes and files
GAP = 2  # between two columns
INDENT = 4  # of a last column moved to separate lines
NARROWEST = 36  # a last column with less room than this moves to separate lines

STYLES = {
    "running": "cyan",
    "queued": "yellow",
    "BLOCKED": "bold red",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "cancelled": "magenta",
    "skipped": "dim",
    "NOT COMPARABLE": "red",
}


def say(text: str) -> None:
    """Print one or more lines, and flush them."""
    print(printable(text), flush=True)


def warn(text: str) -> None:
    """Do the same on standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def can_redraw() -> bool:
    """Whether printed text can be replaced in place."""
    return is_terminal() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


@dataclass(frozen=True)
class Table:
    """Columns of text, the last of which may be long, between a title and lines of prose.

    ``head`` is empty for a table without columns. ``folded`` columns are wrapped into the width that the others
    leave; ``right`` ones are right-aligned.
    """

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    folded: Sequence[int] = ()
    right: Sequence[int] = ()
    title: Sequence[str] = ()

    def __str__(self) -> str:
        """Return plain text for pipes and files, where only ``folded`` columns are wrapped."""
        text = [printable(line) for line in self.title]
        if self.head:
            widths = self._widths(PLAIN_WIDTH)
            for row in (self.head, *self._cells):
                broken = [
                    textwrap.wrap(cell, width, break_on_hyphens=False) if place in self.folded else [cell]
                    for place, (cell, width) in enumerate(zip(row, widths, strict=True))
                ]
                text += [self._padded(cells, widths) for cells in zip_longest(*broken, fillvalue="")]
        return "\n".join([*text, *map(printable, self.notes)])

    @property
    def _cells(self) -> list[list[str]]:
        """The lines, with each cell on one line."""
        return [[printable(cell.replace("\n", " ")) for cell in row] for row in self.lines]

    def _widths(self, room: int) -> list[int]:
        """Return the width of each column: that of its text, or for ``folded`` ones what the ``room`` allows."""
        widths = [max(map(len, column)) for column in zip(self.head, *self._cells, strict=True)]
        left = room - GAP * (len(widths) - 1) - sum(w for place, w in enumerate(widths) if place not in self.folded)
        for number, place in enumerate(sorted(self.folded, key=lambda place: widths[place])):
            widths[place] = min(widths[place], max(12, left // (len(self.folded) - number)))
            left -= widths[place]
        return widths

    def _padded(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            f"{cell:>{width}}" if place in self.right else f"{cell:{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return (" " * GAP).join(padded).rstrip()

    def rich(self, width: int) -> "Group":
        """Render for a terminal of ``width`` columns, with states in their colours.

        A last column without room moves to separate lines, so that names stay whole.
        """
        from rich.console import Group

        parts: list[RenderableType] = [prose(line, "bold") for line in self.title]
        if self.head:
            widths = self._widths(width)
            before = sum(widths[:-1]) + GAP * (len(widths) - 1)
            narrow = width - before < min(NARROWEST, widths[-1])
            parts += self._stacked(widths[:-1], width - before) if narrow else [self._grid(widths)]
        return Group(*parts, *(prose(note) for note in self.notes))

    def _grid(self, widths: Sequence[int]) -> "RichTable":
        from rich.table import Table as RichTable
        from rich.text import Text

        grid = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
        for place, name in enumerate(self.head):
            last = place == len(self.head) - 1
            grid.add_column(
                name,
                no_wrap=not last and place not in self.folded,
                overflow="fold",
                width=None if last else widths[place],
                justify="right" if place in self.right else "left",
            )
        for row in self._cells:
            grid.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in row))
        return grid

    def _stacked(self, widths: Sequence[int], room: int) -> "list[RenderableType]":
        """Put the last cell of a row below the others if it is longer than ``room``."""
        from rich.padding import Padding
        from rich.text import Text

        head = Text(self._padded(self.head[:-1], widths), "bold", overflow="fold")
        parts: list[RenderableType] = [head]
        for *cells, last in self._cells:
            line = Text(overflow="fold")
            for cell, width in zip(cells, widths, strict=True):
                line.append(cell, STYLES.get(cell, ""))
                line.append(" " * (width - len(cell) + GAP))
            if len(last) <= room:
                line.append(last, STYLES.get(last, ""))
            line.rstrip()
            parts.append(line)
            if len(last) > room:
                parts.append(Padding(Text(last, STYLES.get(last, "")), (0, 0, 0, INDENT)))
        return parts


def prose(text: str, style: str = "") -> "RenderableType":
    """Return a line for a terminal, wrapped between words with its indentation kept."""
    from rich.padding import Padding
    from rich.text import Text

    indent = len(text) - len(text.lstrip(" "))
    return Padding(Text(printable(text.lstrip(" ")), style), (0, 0, 0, indent))


def plain(parts: Sequence[Table | str]) -> str:
    """Return ``parts`` as plain text, for pipes and files."""
    return "\n".join(str(part) if isinstance(part, Table) else printable(part) for part in parts)


def show(*parts: Table | str) -> None:
    """Print tables, and lines that are never wrapped so that they can be copied, as standard output takes them."""
    if not is_terminal():
        print(plain(parts), flush=True)
        return
    from rich.text import Text

    out = console()
    for part in parts:
        if isinstance(part, Table):
            out.print(part.rich(out.width))
        else:
            out.print(Text(printable(part)), soft_wrap=True)


def show_file(text: str | bytes) -> None:
    """Write the text of a file to standard output: unchanged, except for what a terminal would obey."""
    if isinstance(text, str):
        text = text.encode()
    if is_terminal():
        lines = text.decode(errors="replace").expandtabs().replace("\r", "\n")
        sys.stdout.write(printable(lines))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
    sys.stdout.flush()


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)
