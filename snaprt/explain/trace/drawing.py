"""Draws a graph as SVG, row by row, and fills the templates of the trace.

Inputs stand right above what first reads them. An arrow that would pass many rows is left out, and
the reader of it says what it reads instead: a long graph stays as readable as a short one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import jinja2
from markupsafe import Markup

from snaprt import pages, shown
from snaprt.explain.nodes import CONSTANT_NAME, INPUT_NAME, ShownNode, node_text, operand_text
from snaprt.layers import Layout, Sizes, lay_out

_PACKAGE: Final = "snaprt.explain.trace"


def render(template: str, **values: Any) -> str:
    """Return a template filled with values."""
    return _environment().get_template(template).render(**values)


@functools.cache
def style(name: str) -> Markup:
    """Return one of our style sheets, in which there is no markup."""
    return Markup(resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = pages.environment(_PACKAGE, shown.lines)
    environment.globals.update(style=style, digest=pages.style_digest)
    return environment


#: More nodes than this are not drawn: a browser would not show them in useful time.
MOST_NODES: Final = 1000

_SIZES: Final = Sizes(width=196, height=76, row=116)
_TEXT: Final = 26  # characters that fit in a box
_FARTHEST: Final = 5  # an arrow reaches over so many rows
_WIDEST: Final = 16  # boxes that stand in one row
_FAR_READS: Final = 3  # what is read from far away and named


@dataclass(frozen=True)
class _Box:
    """What the template shows of a node."""

    x: float
    y: float
    kind: str
    lines: tuple[tuple[str, str], ...]
    whole: str


def draw(nodes: Sequence[ShownNode], name: str, identity: str = "") -> str:
    """Return the drawing of a graph.

    Args:
        nodes: The graph, each node after its operands.
        name: What the drawing is called.
        identity: Unique in the page that the drawing becomes a part of, whose style sheet it then
            has; empty for a drawing in a file of its own.
    """
    drawn = nodes[:MOST_NODES]
    levels = _levels(drawn)
    edges = list(
        dict.fromkeys(
            (operand, number)
            for number, node in enumerate(drawn)
            for operand, _ in node.operands
            if levels[number] - levels[operand] <= _FARTHEST
        )
    )
    layout = lay_out(levels, edges, _SIZES)
    return render(
        "graph.svg.j2",
        name=name,
        identity=identity,
        width=round(layout.width),
        height=round(layout.height),
        sizes=_SIZES,
        paths=[layout.path(way) for way in layout.ways],
        boxes=[_box(number, nodes, layout) for number in range(len(drawn))],
        drawn=len(drawn),
        all=len(nodes),
    )


def _levels(nodes: Sequence[ShownNode]) -> list[int]:
    """Return the row of each node: below all that it reads, and where there is room."""
    rows: dict[int, int] = {}
    taken: dict[int, int] = {}
    first_reader: dict[int, int] = {}
    for number, node in enumerate(nodes):
        if not node.operands:
            continue
        above = [rows[one] for one, _ in node.operands if one in rows]
        level = max(above, default=0) + 1
        while taken.get(level, 0) >= _WIDEST:
            level += 1
        rows[number] = level
        taken[level] = taken.get(level, 0) + 1
        for operand, _ in node.operands:
            first_reader.setdefault(operand, level)
    for number, node in enumerate(nodes):
        if node.operands:
            continue
        level = first_reader.get(number, 1) - 1
        while taken.get(level, 0) >= _WIDEST:
            level -= 1
        rows[number] = level
        taken[level] = taken.get(level, 0) + 1
    highest = min(rows.values())
    return [rows[number] - highest for number in range(len(nodes))]


def _box(number: int, nodes: Sequence[ShownNode], layout: Layout) -> _Box:
    node = nodes[number]
    level = layout.levels[number]
    far = [operand for operand in node.operands if level - layout.levels[operand[0]] > _FARTHEST]
    named = ", ".join(operand_text(one, nodes) for one in far[:_FAR_READS])
    more = f", {len(far) - _FAR_READS} more" if len(far) > _FAR_READS else ""
    told = dict(node.attributes)
    what = told.get("name", node.name.partition("::")[2])
    if node.name == CONSTANT_NAME:
        what = told["value"]
    last = f"output {', '.join(map(str, node.roots))}" if node.roots else node.location
    return _Box(
        x=round(layout.middles[number] - _SIZES.width / 2, 1),
        y=_SIZES.top(level),
        kind=_KINDS.get(node.name, "output" if node.roots else "operation"),
        lines=(
            ("name", _short(f"%{number} {what}")),
            ("type", _short(node.type)),
            ("place", _short(last)),
            ("reads", _short(f"reads {named}{more}") if far else ""),
        ),
        whole=node_text(number, node, nodes),
    )


_KINDS: Final = {INPUT_NAME: "input", CONSTANT_NAME: "constant"}


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]}…{text[-(_TEXT // 2 - 1) :]}"
