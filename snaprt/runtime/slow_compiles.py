"""Tells of a program that takes long to compile, while it does; must not know how that is done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from snaprt import jaxapi, settings
from snaprt.runtime.graph_breaks import count_text, place_text, users_place

_log = logging.getLogger("snaprt.explain")


@contextmanager
def told_when_slow(operations: int, cause: str) -> Iterator[None]:
    """Warn if what is inside takes longer than ``SNAPRT_SLOW_COMPILE`` seconds.

    Args:
        operations: How many operations the program that is compiled has.
        cause: Of the cut that led to it.
    """
    seconds = settings.get("SNAPRT_SLOW_COMPILE")
    if not seconds:
        yield
        return
    place = place_text(users_place(jaxapi.user_frames()))

    def tell() -> None:
        _log.warning(
            "%s (%s): a graph of %s has been compiling for %g s; it goes on",
            place,
            cause,
            count_text(operations, "operation"),
            seconds,
        )

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # from 3.12 on, none starts while the program ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
