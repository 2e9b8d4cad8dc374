"""A table that fits the terminal: where it is too narrow, the least important columns go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

_GAP = 2
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str  # what stands above it
    right: bool = False  # whether its cells are aligned to the right, as numbers are
    rank: int = 0  # when it goes, the highest first; a column of rank 0 stays


#: Columns, and what each shows of an item.
Columns = Sequence[tuple[Column, Callable[[_Item], str | Text]]]


@dataclass(frozen=True)
class FittedTable:
    """Rows of cells under columns, to be printed on a rich console of any width."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    @classmethod
    def of(cls, items: Iterable[_Item], columns: Columns[_Item]) -> FittedTable:
        """Return a table with a row for each item; the columns' functions give its cells."""
        rows = [tuple(cell(item) for _, cell in columns) for item in items]
        return cls([column for column, _ in columns], rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit, and name those that do not."""
        indices = list(range(len(self.columns)))
        widths = [self._width(index) for index in indices]
        while sum(widths[i] + _GAP for i in indices) - _GAP > options.max_width:
            first_to_go = max(indices, key=lambda index: (self.columns[index].rank, index))
            if self.columns[first_to_go].rank == 0:
                break
            indices.remove(first_to_go)
        fits = sum(widths[i] + _GAP for i in indices) - _GAP <= options.max_width
        if fits and all(
            type(cell) is str and "\n" not in cell for row in self.rows for cell in row
        ):
            yield from self._lines(indices, widths)
        else:
            yield self._folded(indices)
        hidden = [column.title for index, column in enumerate(self.columns) if index not in indices]
        if hidden:
            yield Text(
                f"(columns that do not fit: {', '.join(hidden)}; use --json to see them)",
                style="dim",
            )

    def _lines(self, indices: Sequence[int], widths: Sequence[int]) -> Iterator[Segment]:
        """Render what needs no folding: rich's own table takes a millisecond a row."""

        def line(cells: Sequence[str | Text]) -> str:
            padded = []
            for index in indices:
                cell = str(cells[index])
                space = " " * (widths[index] - cell_len(cell))
                padded.append(space + cell if self.columns[index].right else cell + space)
            return (" " * _GAP).join(padded).rstrip()

        yield Segment(line([column.title for column in self.columns]), Style(bold=True))
        yield Segment.line()
        yield Segment("".join(line(row) + "\n" for row in self.rows))

    def _folded(self, indices: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index in indices:
            column = self.columns[index]
            # What is still too wide is folded: nothing is cut off.
            table.add_column(
                column.title, justify="right" if column.right else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*[row[index] for index in indices])
        return table

    def _width(self, index: int) -> int:
        cells = (row[index] for row in self.rows)
        widest = max((cell_len(str(cell)) for cell in cells), default=0)
        return max(cell_len(self.columns[index].title), widest)
