"""Fills the templates of the trace, escaping all they show; it must not know what that is."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Any, Final

import jinja2
from markupsafe import Markup

_PACKAGE: Final = "snaprt.explain.trace"


def render(template: str, **values: Any) -> str:
    """Return a template filled with values."""
    return _environment().get_template(template).render(**values)


@functools.cache
def style(name: str) -> Markup:
    """Return one of our style sheets, in which there is no markup."""
    return Markup(resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8"))


def _digest(style: str) -> str:
    """Return what a content policy says to let a style sheet through."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(style=style, digest=_digest)
    return environment


def _harmless(value: Any) -> Any:
    """Spell out what a browser would obey, or XML does not allow, in what is shown."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in value
    )
