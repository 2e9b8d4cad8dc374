"""Which watchers the environment asks for; looked at when a graph is cut.

A row of the table says which variables a kind of watcher depends on, and how it is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from snaprt import settings
from snaprt.explain.watching import Watcher, attached

#: ``(variables, make)``: ``make()`` returns a watcher, or ``None`` where they do not ask for one.
_SWITCHES: Final[tuple[tuple[tuple[str, ...], Callable[[], Watcher | None]], ...]] = ()

_texts: Final = settings.Texts(*{name for names, _ in _SWITCHES for name in names})
_seen: tuple[list[Any], tuple[Watcher, ...]] = ([None], ())


def watchers() -> tuple[Watcher, ...]:
    """Return who is to be told: those that were attached, and those that the environment wants."""
    global _seen
    now = _texts.now()
    if now != _seen[0]:
        made = [make() for _, make in _SWITCHES]
        _seen = now, tuple(one for one in made if one is not None)
    return (*attached(), *_seen[1]) if _seen[1] else attached()
