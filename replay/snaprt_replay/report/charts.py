"""Draw the contents of a report as SVG: histograms, maps of an array, bars of errors, a program.

Errors are drawn on logarithmic scales, since they range over many orders of magnitude. All text is
escaped. Colors come only from classes, because the page's content policy allows no style attribute,
and its two color schemes share one drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup, escape

from snaprt import shown
from snaprt.pages import Sizes, lay_out, wrap
from snaprt_replay.compare.results import OutputComparison
from snaprt_replay.localize.findings import RegionError
from snaprt_replay.report.model import SPECIALS, ErrorGrid, GraphNode, Neighborhood

SHADES: Final = 8
_MARKS: Final = ("", "special-same", "special-inf", "special-expected", "special-actual")


Attribute = str | float | int


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """Return an element; ``class_`` is the attribute class, ``text_anchor`` is text-anchor."""
    attribute_text = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _value(value))
        for name, value in attributes.items()
    )
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), attribute_text, inside)


def _value(value: Attribute) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def picture(
    identity: str, width: int, height: int, title: str, description: str, parts: Sequence[str]
) -> Markup:
    """Return a complete drawing with a title and a description for users who cannot see it.

    Args:
        identity: Unique in the page; the ids of title and description are derived from it.
        width: In units of the drawing; it shrinks to the width of the page.
        height: In the same units.
        title: What it is.
        description: What it shows, in sentences.
        parts: Elements, in painting order.
    """
    title_id, description_id = f"{identity}-title", f"{identity}-description"
    return element(
        "svg",
        element("title", shown.sentence(title), id=title_id),
        element("desc", shown.sentence(description), id=description_id),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{title_id} {description_id}",
    )


def octave_text(octave: int) -> str:
    """Return the distances in ULP that an octave stands for: "0", "1", "2-3", "4-7", "2^10"."""
    if octave < 2:
        return str(octave)
    low = 1 << (octave - 1)
    return f"{low}-{2 * low - 1}" if octave < 8 else f"≥2^{octave - 1}"


def ulp_histogram(identity: str, output: OutputComparison) -> Markup:
    """Return a histogram of the elements by their distance in ULP."""
    counts = output.ulp_octaves
    step, left, top, tall = max(16, min(44, 460 // len(counts))), 8, 36, 110
    width, base = left + step * len(counts) + 10, top + tall
    most = math.log10(max(counts) + 1) or 1.0
    every = math.ceil(46 / step) if len(counts) > 8 else 1
    parts = [
        element("line", x1=left, x2=width - 6, y1=base, y2=base, class_="axis"),
        element("text", "elements", x=2, y=12, class_="label"),
    ]
    for octave, count in enumerate(counts):
        x = left + step * octave
        size = tall * math.log10(count + 1) / most
        if count:
            height = max(size, 2.0)
            bar = "bar" if octave else "bar same"
            parts.append(
                element(
                    "rect",
                    element("title", f"{octave_text(octave)} ULP: {count:,} elements"),
                    x=x + 2,
                    y=base - height,
                    width=step - 4,
                    height=height,
                    class_=bar,
                )
            )
            if step >= 30:
                label = _short(count)
                parts.append(_middle(label, x + step / 2, base - height - 4, "value"))
        if octave % every == 0:
            parts.append(_middle(octave_text(octave), x + step / 2, base + 14, "label"))
    parts.append(element("text", "ULP apart", x=left, y=base + 32, class_="label"))
    listed = ", ".join(
        f"{octave_text(octave)}: {count:,}" for octave, count in enumerate(counts) if count
    )
    return picture(
        identity,
        max(width, 200),
        base + 40,
        f"ULP distances of {output.name}",
        f"Elements by ULP distance. {listed}.",
        parts,
    )


def error_map(identity: str, name: str, grid: ErrorGrid) -> Markup:
    """Return the grid with darker cells for larger errors."""
    shades = [_shade(error, shade_range(grid.errors)) for error in grid.errors]
    classes = ["" if shade is None else f"shade{shade}" for shade in shades]
    cells = sum(shade is not None for shade in shades)
    return _map(
        identity,
        grid,
        classes,
        f"Where {name} differs",
        f"{cells} of {len(shades)} cells have an error, the largest {max(grid.errors):.3g}. "
        + box_text(grid),
    )


def special_map(identity: str, name: str, grid: ErrorGrid) -> Markup:
    """Return the grid with a mark for each cell that has a NaN or an infinity."""
    counts = [
        f"{grid.specials.count(mark)} cells: {words}"
        for mark, words in enumerate(SPECIALS)
        if mark in grid.specials
    ]
    return _map(
        identity,
        grid,
        [_MARKS[mark] for mark in grid.specials],
        f"NaN and Inf in {name}",
        "; ".join(counts),
    )


def special_legend(grid: ErrorGrid) -> list[tuple[str, str]]:
    """Return the class and the words of each mark that occurs."""
    return [(_MARKS[mark], words) for mark, words in special_words(grid)]


def special_words(grid: ErrorGrid) -> list[tuple[int, str]]:
    """Return the number and the words of each mark that occurs."""
    return [(mark, SPECIALS[mark]) for mark in sorted(set(grid.specials)) if mark]


def shade_legend(grid: ErrorGrid) -> list[tuple[str, str]]:
    """Return the class and the words of the lightest and the darkest shade."""
    low, high = shade_range(grid.errors)
    if not high:
        return []
    return [("shade0", f"{low:.3g}"), (f"shade{SHADES - 1}", f"{high:.3g}")]


def box_text(grid: ErrorGrid) -> str:
    """Return in words the part of the array that contains all differing elements."""
    if not grid.box:
        return ""
    axes = ", ".join(
        f"{first}" if first == last else f"{first}:{last + 1}" for first, last in grid.box
    )
    return f"All differences are within [{axes}]."


def _map(
    identity: str, grid: ErrorGrid, classes: Sequence[str], title: str, description: str
) -> Markup:
    side = max(4, min(16, 440 // grid.columns))
    tall = max(6, min(16, 260 // grid.rows))
    left, top = 2, 2
    wide, high = side * grid.columns, tall * grid.rows
    parts = [element("rect", x=left, y=top, width=wide, height=high, class_="ground")]
    for row in range(grid.rows):
        line = classes[row * grid.columns : (row + 1) * grid.columns]
        start = 0
        while start < len(line):  # equal neighbors form one rectangle
            stop = start + 1
            while stop < len(line) and line[stop] == line[start]:
                stop += 1
            if line[start]:
                parts.append(
                    element(
                        "rect",
                        x=left + side * start,
                        y=top + tall * row,
                        width=side * (stop - start),
                        height=tall,
                        class_=line[start],
                    )
                )
            start = stop
    parts.append(element("rect", x=left, y=top, width=wide, height=high, class_="frame"))
    return picture(identity, wide + 4, high + 4, title, description, parts)


def shade_range(errors: Sequence[float]) -> tuple[float, float]:
    """Return the errors of the lightest and the darkest shade, at least a factor of ten apart."""
    positive = [error for error in errors if error > 0]
    if not positive:
        return (0.0, 0.0)
    # A tenth of the smallest number is 0, whose logarithm nobody can take.
    return (min(*positive, max(positive) / 10 or math.ulp(0.0)), max(positive))


def share_of_range(error: float, limits: tuple[float, float]) -> float:
    """Return where an error lies between those of the two shades: 0 lightest, 1 darkest."""
    low, high = map(math.log, limits)
    return (math.log(error) - low) / (high - low) if low < high else 1.0


def _shade(error: float, limits: tuple[float, float]) -> int | None:
    if error <= 0:
        return None
    return min(SHADES - 1, int(share_of_range(error, limits) * SHADES))


class ErrorScale:
    """Bars of errors in multiples of the tolerance, on the same scale for a whole path.

    Args:
        path: The regions whose errors are drawn.
    """

    _WIDTH, _HEIGHT = 200, 22

    def __init__(self, path: Sequence[RegionError]) -> None:
        errors = [error for region in path for error in (region.made, region.carried_out)]
        finite = [error for error in errors if math.isfinite(error) and error > 0]
        self._low = math.log10(min([0.1, *finite]))
        self._high = math.log10(max([10.0, *finite]))
        # Infinite errors extend beyond the finite ones.
        self._high += 0.5 if any(map(math.isinf, errors)) else 0.0

    def bars(self, region: RegionError) -> Markup:
        """Return two bars, for the error made and the error carried out; words are next to them."""
        limit = self._place(1.0)
        parts = [
            element("rect", x=0, y=0, width=self._WIDTH, height=self._HEIGHT, class_="ground"),
            element("rect", x=0, y=3, width=self._place(region.made), height=7, class_="made"),
            element(
                "rect", x=0, y=12, width=self._place(region.carried_out), height=7, class_="kept"
            ),
            element("line", x1=limit, x2=limit, y1=0, y2=self._HEIGHT, class_="limit"),
        ]
        return element(
            "svg",
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {self._WIDTH} {self._HEIGHT}",
            width=self._WIDTH,
            height=self._HEIGHT,
            aria_hidden="true",
            focusable="false",
        )

    def _place(self, error: float) -> float:
        share = self.share(error)
        return max(1.0, share * self._WIDTH) if share else 0.0

    def share(self, error: float) -> float:
        """Return the length of an error's bar, from 0 to 1."""
        if math.isinf(error):
            return 1.0
        if math.isnan(error) or error <= 0:
            return 0.0
        return max(1e-3, (math.log10(error) - self._low) / (self._high - self._low))


def _middle(text: str, x: float, y: float, kind: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor="middle", class_=kind)


def _short(count: int) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)


# --- the program around an instruction ---

_SIZES = Sizes(width=168, height=46, row=84)
_TEXT = 22  # characters that fit in a box
_ARROW: Mapping[str, Attribute] = {
    "viewBox": "0 0 8 8",
    "refX": 8,
    "refY": 4,
    "markerWidth": 7,
    "markerHeight": 7,
}


#: How many boxes fit next to each other on a wide page, and on a narrow one.
WIDE, NARROW = 5, 2


def neighborhood(identity: str, around: Neighborhood, most_in_row: int = WIDE) -> Markup:
    """Return boxes for instructions, with arrows from each operand to the instructions using it."""
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
        "The program around the fault",
        f"{len(around.nodes)} instructions and {len(around.edges)} edges around {at_fault}; the "
        "table below lists them.",
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
