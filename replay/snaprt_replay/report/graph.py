"""Draw the instructions around the one at fault, row by row; it must not know modules or pages.

Sugiyama's layout, small: an edge that passes rows gets a slot in each, rows are ordered by where
their neighbours stand, and what stands in a row is centred.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from snaprt_replay.report import shown
from snaprt_replay.report.model import GraphNode, Neighbourhood
from snaprt_replay.report.svg import Attribute, element, picture

_WIDTH, _HEIGHT, _GAP, _LEVEL, _MARGIN = 168, 46, 16, 84, 10
_SLOT = 12  # the width that an edge takes where it passes a row
_TEXT = 22  # characters that fit in a box
_SWEEPS = 4
_ARROW: Mapping[str, Attribute] = {
    "viewBox": "0 0 8 8",
    "refX": 8,
    "refY": 4,
    "markerWidth": 7,
    "markerHeight": 7,
}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where things stand: the middle of each node and slot by number, and the ways of the edges."""

    middles: Mapping[int, float]
    ways: Sequence[Sequence[int]]
    levels: Mapping[int, int]
    width: float


#: How many boxes fit beside each other on a wide page, and on a narrow one.
WIDE, NARROW = 5, 2


def neighbourhood(identity: str, around: Neighbourhood, most_in_row: int = WIDE) -> Markup:
    """Return boxes for instructions, with arrows from what is read to what reads it."""
    layout = _lay_out(around, most_in_row)
    arrow = f"{identity}-arrow"
    tip = element("path", d="M0 0 L8 4 L0 8 z", class_="arrow")
    parts = [
        element("defs", element("marker", tip, id=arrow, orient="auto", **_ARROW)),
        *(_edge(way, layout, arrow) for way in layout.ways),
        *(
            _box(node, layout.middles[number] - _WIDTH / 2, _top(layout.levels[number]))
            for number, node in enumerate(around.nodes)
        ),
    ]
    at_fault = ", ".join(node.name for node in around.nodes if node.at_fault)
    return picture(
        identity,
        round(layout.width),
        max(layout.levels.values()) * _LEVEL + _HEIGHT + 2 * _MARGIN,
        "The program around what is at fault",
        f"{len(around.nodes)} instructions and {len(around.edges)} edges around {at_fault}; the "
        "table below has the same in words.",
        parts,
    )


def _lay_out(around: Neighbourhood, most_in_row: int) -> _Layout:
    levels = _wrapped(around.nodes, most_in_row)
    ways: list[list[int]] = []
    for start, stop in around.edges:
        way = [start]
        for level in range(levels[start] + 1, levels[stop]):
            slot = len(levels)
            levels[slot] = level
            way.append(slot)
        ways.append([*way, stop])
    near: dict[int, list[int]] = {number: [] for number in levels}
    for way in ways:
        for one, other in itertools.pairwise(way):
            near[one].append(other)
            near[other].append(one)
    rows: list[list[int]] = [[] for _ in range(max(levels.values()) + 1)]
    for number, level in levels.items():
        rows[level].append(number)
    nodes = len(around.nodes)
    middles: dict[int, float] = {}
    for row in rows:
        middles.update(_spread(row, nodes))
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(key=lambda one: _mean([middles[other] for other in near[one]], middles[one]))
            middles.update(_spread(row, nodes))
    width = 2 * max(_MARGIN + _WIDTH / 2 + abs(middle) for middle in middles.values())
    return _Layout(
        {one: middle + width / 2 for one, middle in middles.items()}, ways, levels, width
    )


def _wrapped(nodes: Sequence[GraphNode], most_in_row: int) -> dict[int, int]:
    """Return the row of each node: those of one level that are too many take several."""
    rows: dict[int, int] = {}
    next_row = 0
    by_level = sorted(range(len(nodes)), key=lambda one: nodes[one].level)
    for _, level in itertools.groupby(by_level, key=lambda one: nodes[one].level):
        for position, one in enumerate(found := list(level)):
            rows[one] = next_row + position // most_in_row
        next_row += math.ceil(len(found) / most_in_row)
    return rows


def _spread(row: Sequence[int], nodes: int) -> Mapping[int, float]:
    """Return the middle of each in a row that is centred at 0."""
    widths = [_WIDTH if one < nodes else _SLOT for one in row]
    place = -(sum(widths) + _GAP * (len(row) - 1)) / 2
    middles = {}
    for one, width in zip(row, widths, strict=True):
        middles[one] = place + width / 2
        place += width + _GAP
    return middles


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _top(level: int) -> float:
    return float(_MARGIN + level * _LEVEL)


def _edge(way: Sequence[int], layout: _Layout, arrow: str) -> Markup:
    x = layout.middles[way[0]]
    y = _top(layout.levels[way[0]]) + _HEIGHT
    path = f"M{x:.6g} {y:.6g}"
    for one in way[1:]:
        next_x, next_y = layout.middles[one], _top(layout.levels[one])
        half = (y + next_y) / 2
        path += f" C{x:.6g} {half:.6g} {next_x:.6g} {half:.6g} {next_x:.6g} {next_y - 1:.6g}"
        x, y = next_x, next_y - 1
        if one != way[-1]:
            y = next_y + _HEIGHT
            path += f" L{x:.6g} {y:.6g}"
    return element("path", d=path, class_="edge", marker_end=f"url(#{arrow})")


def _box(node: GraphNode, x: float, y: float) -> Markup:
    middle = x + _WIDTH / 2
    lines = [
        element("title", shown.name(f"{node.name} {node.opcode} {node.shape} {node.source}", 400)),
        element("rect", x=x, y=y, width=_WIDTH, height=_HEIGHT, rx=6),
        _line(node.name, middle, y + 19, "name"),
        _line(f"{node.opcode} {node.shape}", middle, y + 36, "kind"),
    ]
    return element("g", *lines, class_="node fault" if node.at_fault else "node")


def _line(text: str, x: float, y: float, kind: str) -> Markup:
    return element("text", shown.name(text, _TEXT), x=x, y=y, text_anchor="middle", class_=kind)
