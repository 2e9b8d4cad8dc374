"""Draw the instructions around the one at fault, row by row; it must not know modules or pages."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from snaprt.layers import Sizes, lay_out, wrap
from snaprt_replay.report import shown
from snaprt_replay.report.model import GraphNode, Neighborhood
from snaprt_replay.report.svg import Attribute, element, picture

_SIZES = Sizes(width=168, height=46, row=84)
_TEXT = 22  # characters that fit in a box
_ARROW: Mapping[str, Attribute] = {
    "viewBox": "0 0 8 8",
    "refX": 8,
    "refY": 4,
    "markerWidth": 7,
    "markerHeight": 7,
}


#: How many boxes fit beside each other on a wide page, and on a narrow one.
WIDE, NARROW = 5, 2


def neighborhood(identity: str, around: Neighborhood, most_in_row: int = WIDE) -> Markup:
    """Return boxes for instructions, with arrows from what is read to what reads it."""
    rows = wrap([node.level for node in around.nodes], most_in_row)
    layout = lay_out(rows, around.edges, _SIZES)
    arrow = f"{identity}-arrow"
    tip = element("path", d="M0 0 L8 4 L0 8 z", class_="arrow")
    parts = [
        element("defs", element("marker", tip, id=arrow, orient="auto", **_ARROW)),
        *(
            element("path", d=layout.path(way), class_="edge", marker_end=f"url(#{arrow})")
            for way in layout.ways
        ),
        *(
            _box(node, layout.middles[number] - _SIZES.width / 2, _SIZES.top(rows[number]))
            for number, node in enumerate(around.nodes)
        ),
    ]
    at_fault = ", ".join(node.name for node in around.nodes if node.at_fault)
    return picture(
        identity,
        round(layout.width),
        round(layout.height),
        "The program around what is at fault",
        f"{len(around.nodes)} instructions and {len(around.edges)} edges around {at_fault}; the "
        "table below has the same in words.",
        parts,
    )


def _box(node: GraphNode, x: float, y: float) -> Markup:
    middle = x + _SIZES.width / 2
    lines = [
        element("title", shown.name(f"{node.name} {node.opcode} {node.shape} {node.source}", 400)),
        element("rect", x=x, y=y, width=_SIZES.width, height=_SIZES.height, rx=6),
        _line(node.name, middle, y + 19, "name"),
        _line(f"{node.opcode} {node.shape}", middle, y + 36, "kind"),
    ]
    return element("g", *lines, class_="node fault" if node.at_fault else "node")


def _line(text: str, x: float, y: float, kind: str) -> Markup:
    return element("text", shown.name(text, _TEXT), x=x, y=y, text_anchor="middle", class_=kind)
