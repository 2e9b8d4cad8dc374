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


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect less often meanwhile, in all threads: garbage in cycles is still freed."""
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS:  # 0: the program has switched the collector off
        yield
        return
    seldom = (_OBJECTS, *before[1:])
    gc.set_threshold(*seldom)
    try:
        yield
    finally:
        if gc.get_threshold() == seldom:  # else the program has chosen its own meanwhile
            gc.set_threshold(*before)
