"""A new file that is written without a buffer, and each large piece by another thread."""

from __future__ import annotations

import contextlib
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BEHIND = 4 << 20  # bytes: a piece of this size is worth handing to another thread


class WholeWrites(io.FileIO):
    """A new file without a buffer, whose ``write`` writes everything or raises.

    A large piece is written by another thread while the caller computes the checksums of the next,
    so the memory of the last one must stay as it is; what goes wrong is raised by a later call.

    Without a buffer, and deaf in other processes: in a forked child, Python may close what the
    parent's writer thread had open, and nothing of that may reach the parent's file.
    """

    def __init__(self, path: str | Path) -> None:
        self._pending: Future[None] | None = None
        self._behind: ThreadPoolExecutor | None = None  # until there is a large piece
        self._process = os.getpid()
        super().__init__(path, "w")

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, perhaps after this call."""
        view = memoryview(data).cast("B")
        self._finish_pending()
        if len(view) >= _BEHIND:
            try:
                if self._behind is None:
                    self._behind = ThreadPoolExecutor(1, "snaprt-snapshot-disk")
                self._pending = self._behind.submit(self._write_all, view)
                return len(view)
            except RuntimeError:  # Python is shutting down and gives out no more threads
                pass
        self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        count = 0
        while count < len(view) and os.getpid() == self._process:
            count += super().write(view[count:]) or 0
        if len(view) >= _BEHIND and hasattr(os, "posix_fadvise"):
            # Lets the disk begin with it now, so that `fsync` has less left to wait for.
            with contextlib.suppress(OSError):
                end = super().tell()
                os.posix_fadvise(self.fileno(), end - count, count, os.POSIX_FADV_DONTNEED)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and os.getpid() == self._process:
            pending.result()

    def tell(self) -> int:
        """Write what is pending, and return the position after it."""
        self._finish_pending()
        return super().tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Write what is pending, then move."""
        self._finish_pending()
        return super().seek(offset, whence)

    def close(self) -> None:
        """Write what is pending, then close the file."""
        try:
            self._finish_pending()
        finally:
            super().close()
            if self._behind is not None and os.getpid() == self._process:
                self._behind.shutdown(wait=False)
