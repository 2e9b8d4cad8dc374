"""What the pages that snaprt writes have in common; it must not know what they show.

A page loads nothing and runs nothing: its content policy allows its own style sheet alone, by its
hash. All that is shown is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup


def environment(
    package: str, visible: Callable[[str], str], folder: str = "."
) -> jinja2.Environment:
    """Return what fills the templates that lie in a package.

    Args:
        package: Its name.
        visible: Spells out, in text that is shown, what a browser would obey.
        folder: Where they are in the package.
    """

    def harmless(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style_digest(style: str) -> str:
    """Return what a content policy says to let a style sheet through: ``sha256-...``."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


_SWEEPS = 4


@dataclass(frozen=True)
class Sizes:
    """How large things are, in units of the drawing."""

    width: int  # of a box
    height: int  # of a box
    row: int  # from the top of a row to that of the next
    gap: int = 16  # between two boxes of a row
    slot: int = 12  # the width that an edge takes where it passes a row
    margin: int = 10  # around the drawing

    def top(self, level: int) -> float:
        """Return where the boxes of a row begin."""
        return float(self.margin + level * self.row)


@dataclass(frozen=True)
class Layout:
    """Where things stand."""

    sizes: Sizes  # how large they are
    # The middle of each box and slot, by its number; slots come after the boxes.
    middles: Mapping[int, float]
    levels: Mapping[int, int]  # the row of each
    ways: Sequence[Sequence[int]]  # each edge: its start, the slots that it passes, its end
    width: float  # of the drawing
    height: float  # of the drawing

    def path(self, way: Sequence[int]) -> str:
        """Return the line of an edge, as SVG's ``d`` has it."""
        height = self.sizes.height
        x = self.middles[way[0]]
        y = self.sizes.top(self.levels[way[0]]) + height
        path = f"M{x:.6g} {y:.6g}"
        for node in way[1:]:
            next_x, next_y = self.middles[node], self.sizes.top(self.levels[node])
            half = (y + next_y) / 2
            path += f" C{x:.6g} {half:.6g} {next_x:.6g} {half:.6g} {next_x:.6g} {next_y - 1:.6g}"
            x, y = next_x, next_y - 1
            if node != way[-1]:
                y = next_y + height
                path += f" L{x:.6g} {y:.6g}"
        return path


def wrap(levels: Sequence[int], most_in_row: int) -> list[int]:
    """Return the row of each box: boxes of one level that are too many for a row take several."""
    rows = [0] * len(levels)
    next_row = 0
    by_level = sorted(range(len(levels)), key=lambda node: levels[node])
    for _, boxes in itertools.groupby(by_level, key=lambda node: levels[node]):
        for place, box in enumerate(level := list(boxes)):
            rows[box] = next_row + place // most_in_row
        next_row += math.ceil(len(level) / most_in_row)
    return rows


def lay_out(levels: Sequence[int], edges: Iterable[tuple[int, int]], sizes: Sizes) -> Layout:
    """Return where boxes stand whose rows are known.

    Args:
        levels: The row of each box, from 0.
        edges: ``(start, end)``, the numbers of two boxes, the end in a lower row of the drawing.
        sizes: How large things are.
    """
    boxes = len(levels)
    level_of = dict(enumerate(levels))
    ways = _ways(level_of, edges)
    near: dict[int, list[int]] = {number: [] for number in level_of}
    for way in ways:
        for start, end in itertools.pairwise(way):
            near[start].append(end)
            near[end].append(start)
    rows: list[list[int]] = [[] for _ in range(max(levels) + 1)]
    for number, level in level_of.items():
        rows[level].append(number)
    middles: dict[int, float] = {}
    for row in rows:
        middles.update(_spread(row, boxes, sizes))
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(
                key=lambda node: _mean(
                    [middles[neighbor] for neighbor in near[node]], middles[node]
                )
            )
            middles.update(_spread(row, boxes, sizes))
    width = 2 * max(sizes.margin + sizes.width / 2 + abs(middle) for middle in middles.values())
    return Layout(
        sizes=sizes,
        middles={node: middle + width / 2 for node, middle in middles.items()},
        levels=level_of,
        ways=ways,
        width=width,
        height=sizes.top(max(levels)) + sizes.height + sizes.margin,
    )


def _ways(levels: dict[int, int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the way of each edge, and add the slots that it passes to ``levels``."""
    ways = []
    for start, end in edges:
        way = [start]
        for level in range(levels[start] + 1, levels[end]):
            slot = len(levels)
            levels[slot] = level
            way.append(slot)
        ways.append([*way, end])
    return ways


def _spread(row: Sequence[int], boxes: int, sizes: Sizes) -> Mapping[int, float]:
    """Return the middle of each in a row that is centred at 0."""
    widths = [sizes.width if node < boxes else sizes.slot for node in row]
    place = -(sum(widths) + sizes.gap * (len(row) - 1)) / 2
    middles = {}
    for node, width in zip(row, widths, strict=True):
        middles[node] = place + width / 2
        place += width + sizes.gap
    return middles


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
