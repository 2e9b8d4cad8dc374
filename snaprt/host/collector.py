"""Keeps Python's garbage collector from visiting, again and again, objects that are to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: New objects that a collection waits for in `collecting_seldom`; Python's default is 700, or 2,000
#: from 3.13 on. Tracing a transformer makes half a million, nearly all of which stay.
_OBJECTS: Final = 50_000


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing meanwhile. Only for work whose length does not depend on the program."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_Thresholds = tuple[int, int, int]


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect less often meanwhile, in all threads: garbage in cycles is still freed."""
    before = _become_seldom()
    try:
        yield
    finally:
        _restore(before)


#: The program's own thresholds, while `collect_seldom` has put others in their place.
_before: _Thresholds | None = None


def collect_seldom() -> None:
    """Collect less often from here on, in all threads, until any of them calls `collect_again`."""
    global _before
    if _before is None:
        _before = _become_seldom()


def collect_again() -> None:
    """Collect as often as before `collect_seldom`."""
    global _before
    before, _before = _before, None
    _restore(before)


def _become_seldom() -> _Thresholds | None:
    """Put other thresholds in the place of the program's; return those, None if they stay."""
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS:  # 0: the program has switched the collector off
        return None
    gc.set_threshold(_OBJECTS, *before[1:])
    return before


def _restore(before: _Thresholds | None) -> None:
    # Other ones are there where the program has chosen its own meanwhile.
    if before is not None and gc.get_threshold() == (_OBJECTS, *before[1:]):
        gc.set_threshold(*before)
