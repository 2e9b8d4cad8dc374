"""Explains one call of a function; it knows the lazy scope, and nothing of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snaprt.explain.cuts import Collector, Event, Explanation
from snaprt.runtime.events import attach, detach
from snaprt.runtime.lazy_scope import lazy
from snaprt.runtime.step import mark_step


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run a function lazily, and return what it did to the lazy runtime.

    A step is marked before, so that what is pending does not count, and one after it.

    Args:
        function: What to call.
        args: With what.
        kwargs: With what, by name.

    Returns:
        How many graphs ran, how many operations each, and for each cut its cause and the user's
        line, in the order they happened; to be printed, or looked at by its attributes. It holds
        what the function returned.
    """
    events: list[Event] = []
    collector = Collector(events.append)
    with lazy():
        mark_step()
        attach(collector)
        try:
            result = function(*args, **kwargs)
            collector.at_steps = "end"
            mark_step()
        finally:
            detach(collector)
    return Explanation(tuple(events), result)
