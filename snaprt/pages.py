"""What the pages that snaprt writes have in common; it must not know what they show.

A page loads nothing and runs nothing: its content policy allows its own style sheet alone, by its
hash. All that is shown is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup


def environment(package: str, visible: Callable[[str], str]) -> jinja2.Environment:
    """Return what fills the templates that lie in a package.

    Args:
        package: Its name.
        visible: Spells out, in text that is shown, what a browser would obey.
    """

    def harmless(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style_digest(style: str) -> str:
    """Return what a content policy says to let a style sheet through: ``sha256-...``."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
