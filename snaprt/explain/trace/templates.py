"""Fills the templates of the trace, escaping all they show; it must not know what that is."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Final

import jinja2
from markupsafe import Markup

from snaprt import pages

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
    environment = pages.environment(_PACKAGE, _visible)
    environment.globals.update(style=style, digest=pages.style_digest)
    return environment


def _visible(text: str) -> str:
    """Spell out what a browser would obey, or XML does not allow."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )
