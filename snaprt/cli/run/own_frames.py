"""Keeps what stands between the command line and a program out of that program's stacks.

A snapshot says which lines made a module. Of the frames below the program's first one, the user
wrote none: the script ``snaprt`` (or runpy), click, and this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from snaprt import after_import


def hider() -> Callable[[], None]:
    """Return what hides those frames, to be called when JAX is there.

    To be called itself while ``__main__`` is still the command line's.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    hidden = [Path(__file__).parents[1], Path(after_import.__file__), Path(click.__file__).parent]
    hidden += [Path("<frozen runpy>")]
    hidden += [Path(script)] if script else []

    def hide() -> None:
        from snaprt import jaxapi

        for path in hidden:
            jaxapi.hide_frames_below(path)

    return hide
