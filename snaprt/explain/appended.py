"""Appends to files that environment variables name; must not know what is appended.

Threads and processes may append to one file at a time: what one of them appends stays in one piece.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from types import ModuleType

from snaprt import settings
from snaprt.errors import UsageError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: there a file is for one process
    fcntl = None

_log = logging.getLogger("snaprt.explain")
_lock = threading.Lock()


class AppendedFile:
    """A file that a variable names, with the process's RANK at the end of its name.

    Once it cannot be written to any more, that is said once, and the program goes on.

    Raises:
        UsageError: It cannot be written to from the start.
    """

    def __init__(self, variable: str, path: Path) -> None:
        self.path = settings.for_rank(path)
        self._variable = variable
        self._has_complained = False
        try:
            os.close(self._open())
        except OSError as error:
            raise UsageError(
                f"cannot write to {self.path}, which {variable} names: {error.strerror or error}",
                hint="Name a file in a directory that exists and is writable.",
            ) from error

    def append(self, text: str) -> None:
        """Append ``text`` in one piece."""
        try:
            with _lock:
                self._append(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                _log.warning("%s: cannot write to %s: %s", self._variable, self.path, error)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def _append(self, content: bytes) -> None:
        file = self._open()
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
