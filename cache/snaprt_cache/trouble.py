"""What to tell the user, once, when the cache cannot do its work and the program goes on.

Knows error numbers and words only.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOGGER: Final = logging.getLogger("snaprt.cache")


@dataclass(frozen=True)
class _Advice:
    kind: str
    hint: str


_ELSEWHERE: Final = "set SNAPRT_CACHE_DIR to another directory"
_SPACE: Final = _Advice("space", f"Free space there, or {_ELSEWHERE}.")
_ACCESS: Final = _Advice(
    "access",
    f"Make it writable for you, or {_ELSEWHERE}; or only read it with "
    "SNAPRT_CACHE_MODE=read-only, or turn it off with SNAPRT_CACHE=off.",
)
_NO_FOLDER: Final = _Advice(
    "folder", f"Something that is no directory is in its place: remove it, or {_ELSEWHERE}."
)
_SIZE: Final = _Advice(
    "size", f"Raise the limit on the size of files (ulimit -f), or {_ELSEWHERE}."
)
_OTHER: Final = _Advice(
    "other", f"If this goes on, {_ELSEWHERE}, or turn the cache off with SNAPRT_CACHE=off."
)
_ADVICE: Final[Mapping[int, _Advice]] = {
    errno.ENOSPC: _SPACE,
    getattr(errno, "EDQUOT", errno.ENOSPC): _SPACE,
    errno.EFBIG: _SIZE,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
}


class Warnings:
    """Gives each kind of trouble with one cache directory one warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._given: set[str] = set()
        self._lock = threading.Lock()

    def files(self, doing: str, error: OSError) -> None:
        """Warn that a file of the cache could not be read or written.

        Args:
            doing: What could not be done, such as ``store a compiled program``.
            error: What the operating system said.
        """
        advice = _ADVICE.get(error.errno or 0, _OTHER)
        # Errors that follow from one cause, such as a full disk, are one trouble.
        where = error.filename2 or error.filename or self._path
        self.once(
            advice.kind,
            f"The compile cache in {self._path} cannot {doing}: {error.strerror or error} "
            f"({where}). The program goes on without it.",
            advice.hint,
        )

    def once(self, kind: str, message: str, hint: str) -> None:
        """Warn, unless there was a warning of this kind before."""
        with self._lock:
            if kind in self._given:
                return
            self._given.add(kind)
        LOGGER.warning("%s %s", message, hint)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()
