"""Hits and other events that this process has not written to the index yet.

A hit costs one read of a file; writing its row at once would cost more than the hit. Knows the
index, no blobs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Final

from snaprt_cache.index.database import Index, IndexUnavailable
from snaprt_cache.index.rows import Usage

# Written at every put and at the end of the process, and in between when one of these is reached.
_DUE_EVENTS: Final = 256
_DUE_SECONDS: Final = 10.0


class PendingUsage:
    """Adds up events until they are written; safe for threads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._used: dict[str, Usage] = {}
        self._totals: dict[tuple[str, str], float] = {}
        self._events = 0
        self._since = time.monotonic()

    def add_event(self, name: str, value: float) -> None:
        """Count an event, under today's date."""
        day = time.strftime("%Y-%m-%d", time.gmtime())
        with self._lock:
            self._events += 1
            self._totals[day, name] = self._totals.get((day, name), 0.0) + value

    def add_hit(self, key: str, saved_seconds: float) -> None:
        """Count a hit of an entry, now."""
        with self._lock:
            self._add(key, Usage(1, time.time(), saved_seconds))

    def _add(self, key: str, more: Usage) -> None:
        so_far = self._used.get(key, Usage(0, 0.0, 0.0))
        self._used[key] = Usage(
            so_far.hits + more.hits,
            max(so_far.last_used, more.last_used),
            so_far.saved_seconds + more.saved_seconds,
        )

    def is_due(self) -> bool:
        """Return whether so much is pending, or for so long, that it should be written."""
        with self._lock:
            late = time.monotonic() - self._since > _DUE_SECONDS
            return self._events >= _DUE_EVENTS or (self._events > 0 and late)

    def write(self) -> set[str]:
        """Write what is pending to the index; keep it pending where that fails.

        Returns:
            The keys that the index does not know; their hits stay pending.

        Raises:
            IndexUnavailable: The index cannot be used now.
        """
        with self._lock:
            used, totals, events = self._used, self._totals, self._events
            self._forget()
        # Having looked in vain is no reason to make a cache directory.
        if not (used or totals) or not self._index.path.parent.is_dir():
            return set()
        unknown: set[str] = set(used)
        try:
            unknown = self._index.add_usage(used, totals)
            totals, events = {}, 0
        finally:
            with self._lock:
                for key in unknown:
                    self._add(key, used[key])
                for name, value in totals.items():
                    self._totals[name] = self._totals.get(name, 0.0) + value
                self._events += events
        return unknown

    def drop(self, keys: Iterable[str]) -> None:
        """Forget the pending hits of entries that are no longer there."""
        with self._lock:
            for key in keys:
                self._used.pop(key, None)

    def clear(self) -> None:
        """Forget everything that is pending."""
        with self._lock:
            self._forget()

    def write_at_exit(self) -> None:
        """Write what is pending as the process ends, if the index lets us."""
        with contextlib.suppress(IndexUnavailable):
            self.write()
        self._index.close()

    def after_fork_in_child(self) -> None:
        """Start from nothing: the parent writes its own events."""
        self._lock = threading.Lock()
        self._forget()
