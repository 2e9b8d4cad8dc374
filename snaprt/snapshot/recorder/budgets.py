"""Ends recording where it would take more than the user allows; must not know what is recorded."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Final

from snaprt import metrics, settings

_log = logging.getLogger("snaprt.snapshot")

RATE_SECONDS: Final = 10.0
"""How long a burst may be for which SNAPRT_RECORD_MAX_RATE bytes a second have been saved up."""


class Budget:
    """What this process may still record: files, bytes, bytes a second, disk to leave free.

    What was admitted but is not written yet counts as written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = 0
        self._bytes = 0
        self._waiting = 0  # bytes admitted that are not on disk yet
        self._saved: float | None = None  # bytes that the rate still allows at once
        self._saved_at = 0.0
        self._said: set[str] = set()

    def admits(self, files: int, nbytes: int, folder: Path) -> bool:
        """Return whether an execution may be recorded; past a budget, say so once and count it.

        Args:
            files: How many files it makes.
            nbytes: How many bytes of arrays they hold.
            folder: Where they go.
        """
        with self._lock:
            over = self._over(files, nbytes, folder)
            if over is None:
                self._files += files
                self._bytes += nbytes
                self._waiting += nbytes
                if self._saved is not None:
                    self._saved -= nbytes
                return True
            is_new = over not in self._said
            self._said.add(over)
        metrics.counter_add("SnapshotOverBudget")
        if is_new:
            _log.warning(
                "recording goes past %s; what is not recorded is counted (SnapshotOverBudget)", over
            )
        return False

    def written(self, nbytes: int) -> None:
        """Learn that so many of the admitted bytes are on disk, or given up."""
        with self._lock:
            self._waiting -= nbytes

    def _over(self, files: int, nbytes: int, folder: Path) -> str | None:
        max_files: int = settings.get("SNAPRT_RECORD_MAX_FILES")
        if max_files and self._files + files > max_files:
            return f"SNAPRT_RECORD_MAX_FILES={max_files}"
        max_bytes: int | None = settings.get("SNAPRT_RECORD_MAX_BYTES")
        if max_bytes is not None and self._bytes + nbytes > max_bytes:
            return f"SNAPRT_RECORD_MAX_BYTES={max_bytes}"
        rate: int | None = settings.get("SNAPRT_RECORD_MAX_RATE")
        if rate is not None and not self._within(rate, nbytes):
            return f"SNAPRT_RECORD_MAX_RATE={rate}"
        least: int = settings.get("SNAPRT_RECORD_MIN_FREE")
        if least and _free(folder) - self._waiting - nbytes < least:
            return f"SNAPRT_RECORD_MIN_FREE={least}"
        return None

    def _within(self, rate: int, nbytes: int) -> bool:
        """Return whether ``nbytes`` fit into what the rate has saved, or more than it ever can."""
        now = time.monotonic()
        most = rate * RATE_SECONDS
        if self._saved is None:
            self._saved = most
        else:
            self._saved = min(most, self._saved + rate * (now - self._saved_at))
        self._saved_at = now
        return self._saved >= min(nbytes, most)


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
