"""Make SVG that a screen reader can read, escaped throughout; it must not know what it shows.

Colors come from classes alone, because the page's content policy takes no style attribute, and
its two color schemes share one drawing.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from snaprt_replay.report import shown

Attribute = str | float | int


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """Return an element; ``class_`` is the attribute class, ``text_anchor`` is text-anchor."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _value(value))
        for name, value in attributes.items()
    )
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), written, inside)


def _value(value: Attribute) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def picture(
    identity: str, width: int, height: int, title: str, description: str, parts: Sequence[str]
) -> Markup:
    """Return a whole drawing with a title and a description for who cannot see it.

    Args:
        identity: Unique in the page; the ids of title and description are made of it.
        width: In units of the drawing; it is shrunk to the width of the page.
        height: The same.
        title: What it is.
        description: What it shows, in sentences.
        parts: Elements, in the order to paint.
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
