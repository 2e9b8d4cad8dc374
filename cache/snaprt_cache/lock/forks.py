"""What must happen around ``os.fork``: nothing inside SQLite may be in progress, locks start anew.

A child inherits every lock as it was, also those of threads that it does not have. Knows only that
something watched wants to be told.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, Protocol


class ForkAware(Protocol):
    """What can be watched."""

    def before_fork(self) -> None:
        """Let no other thread be inside anything that a child could not continue."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Take nothing over that belongs to the parent: connections, locks, counts."""


_watched: Final[weakref.WeakSet[ForkAware]] = weakref.WeakSet()
# Those told of the fork in progress: none is collected or added before they are told of its end.
_told: Final[list[ForkAware]] = []
# Two threads may fork at once.
_one_at_a_time: Final = threading.Lock()


def watch(watched: ForkAware) -> None:
    """Tell ``watched`` of every fork for as long as it lives."""
    _watched.add(watched)


def _before() -> None:
    _one_at_a_time.acquire()
    _told.extend(_watched)
    for watched in _told:
        watched.before_fork()


def _after_in_parent() -> None:
    while _told:
        _told.pop().after_fork_in_parent()
    _one_at_a_time.release()


def _after_in_child() -> None:
    while _told:
        _told.pop().after_fork_in_child()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
