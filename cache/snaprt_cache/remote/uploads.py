"""Blobs on their way to a remote tier: a bounded queue and the one thread that empties it.

Knows names and bytes; what storing one means is handed in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

# What may wait in memory: a program compiles faster than a slow link takes its blobs.
MAX_WAITING_BLOBS: Final = 1_000
MAX_WAITING_BYTES: Final = 256 << 20


class Uploads:
    """Stores blobs one after the other, in the order they came, in a thread of its own.

    Args:
        store: Stores one blob, however long that takes; it must not raise.
        dropped: Told how many blobs will not be stored: no room was left, or no time.
    """

    def __init__(self, store: Callable[[str, bytes], None], dropped: Callable[[int], None]) -> None:
        self._store = store
        self._dropped = dropped
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._waiting_bytes = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        #: Set when there is no more time: whoever sleeps between two tries wakes up.
        self.closing: Final = threading.Event()

    def add(self, name: str, content: bytes) -> None:
        """Have a blob stored; one that finds no room is dropped."""
        with self._changed:
            self._waiting_bytes -= len(self._waiting.pop(name, b""))
            fits = (
                len(self._waiting) < MAX_WAITING_BLOBS
                and self._waiting_bytes + len(content) <= MAX_WAITING_BYTES
            )
            if fits and not self.closing.is_set() and self._is_started():
                self._waiting[name] = content
                self._waiting_bytes += len(content)
                self._changed.notify_all()
                return
        self._dropped(1)

    def close(self, timeout: float) -> None:
        """Let at most ``timeout`` seconds pass for what is waiting; drop the rest, and stop."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)
            left = len(self._waiting) + self._busy
            self._waiting.clear()
            self._waiting_bytes = 0
        if left:
            self._dropped(left)

    def _is_started(self) -> bool:
        if self._thread is None:
            # A daemon: Python would wait without end for any other before it leaves.
            thread = threading.Thread(target=self._run, name="snaprt-cache-uploads", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads, or Python is leaving
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self.closing.is_set())
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                content = self._waiting.pop(name)
                self._waiting_bytes -= len(content)
                self._busy = True
            self._store(name, content)
