"""A table with a row for each record, that fits the width at hand without breaking a row in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from raysharded.display.plain_text import one_line

Long: TypeAlias = Literal["keep", "shorten", "wrap"]
"""Treatment of a cell that is too wide: a number is kept, a name is cut off with an ellipsis, a sentence is wrapped."""
_GAP = 2
_UNLIMITED = 1 << 16
"""Width of a console that has none."""
_MOST = {"keep": 1 << 16, "shorten": 60, "wrap": 60}
"""Characters up to which a long cell widens its column where the width is unlimited."""
_LEAST = {"shorten": 12, "wrap": 24}
"""Characters that a column needs to be of use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    name: str
    right: bool
    long: Long
    rank: int
    style: str


class RowTable:
    """A table for rich. Where it is too wide, columns of a rank are omitted, and long cells shortened or wrapped.

    A console without limit (output that is not a terminal) shows everything, one line per row. There a long cell widens
    neither its column nor the rule below the heads: it moves the rest of the row.
    """

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._columns: list[_Column] = []
        self._rows: list[list[Text]] = []

    def add_column(
        self, name: str = "", *, right: bool = False, long: Long = "keep", rank: int = 0, style: str = ""
    ) -> None:
        """Add a column. `rank`: columns with the highest are omitted first; 0: never."""
        self._columns.append(_Column(name=name, right=right, long=long, rank=rank, style=style))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; cells of the last columns may be left out. A text's own `no_wrap` has precedence."""
        row = [_on_one_line(cell) for cell in cells]
        self._rows.append(row + [Text() for _ in self._columns[len(row) :]])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if options.max_width >= _UNLIMITED:
            yield from self._unlimited()
            return
        shown = self._fitting(options.max_width)
        table = Table(
            title=self._title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for column in (self._columns[number] for number in shown):
            table.add_column(
                Text(column.name),
                justify="right" if column.right else "left",
                style=column.style,
                no_wrap=column.long == "keep",
                overflow="fold" if column.long == "wrap" else "ellipsis",
            )
        for row in self._rows:
            for number in shown:
                if self._columns[number].long == "shorten" and row[number].no_wrap is None:
                    row[number].no_wrap, row[number].overflow = True, "ellipsis"
            table.add_row(*(row[number] for number in shown))
        yield table

    def _unlimited(self) -> Iterator[Text]:
        """Title, heads, rule and rows, each on one line."""
        if self._title:
            yield Text(self._title)
        widths = [self._width(number) for number in range(len(self._columns))]
        yield self._line([Text(column.name) for column in self._columns], widths)
        yield Text("\u2500" * (sum(widths) + _GAP * (len(widths) - 1)))
        for row in self._rows:
            yield self._line(row, widths)

    def _width(self, number: int) -> int:
        column = self._columns[number]
        cells = [row[number].cell_len for row in self._rows]
        return max([cell_len(column.name), *(cell for cell in cells if cell <= _MOST[column.long])])

    def _line(self, row: list[Text], widths: list[int]) -> Text:
        padded = []
        for column, cell, width in zip(self._columns, row, widths, strict=True):
            whole = Text(" ").join(cell.split("\n"))
            blanks = " " * max(0, width - whole.cell_len)
            padded.append(Text.assemble(blanks, whole) if column.right else Text.assemble(whole, blanks))
        line = Text(" " * _GAP).join(padded)
        line.rstrip()
        return line

    def _fitting(self, width: int) -> list[int]:
        """The columns to show."""
        shown = list(range(len(self._columns)))
        needs = [self._needs(number) for number in shown]
        while sum(needs[number] + _GAP for number in shown) - _GAP > width:
            least = max(shown, key=lambda number: self._columns[number].rank)
            if not self._columns[least].rank:
                break
            shown.remove(least)
        return shown

    def _needs(self, number: int) -> int:
        """Characters that a column needs."""
        column = self._columns[number]
        widest = max((row[number].cell_len for row in self._rows), default=0)
        return max(cell_len(column.name), min(widest, _LEAST.get(column.long, widest)))


def _on_one_line(cell: str | Text) -> Text:
    """A copy of a cell: the line break of a name would look like a row."""
    if isinstance(cell, str):
        return Text(one_line(cell))
    plain = one_line(cell.plain)
    return cell.copy() if plain == cell.plain else Text(plain, style=cell.style)
