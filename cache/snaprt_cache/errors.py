"""What the cache raises on purpose, and what it tells the user, once, when the program goes on."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOGGER: Final = logging.getLogger("snaprt.cache")


class CacheError(Exception):
    """A cache directory that must not be used, or a request that makes no sense.

    Trouble with files, such as a full disk, is never raised: the program goes on without the entry.

    Args:
        message: What happened, in one sentence that names the directory or the key.
        hint: What the user can do about it; empty where there is nothing to do.

    Examples:
        >>> snaprt.cache.Cache.open("mine", mode="write-only")
        Traceback (most recent call last):
        ...
        snaprt_cache.errors.CacheError: ...
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


#: A kind of refusal, which is warned of once, and what to do about it but writing elsewhere.
_REMEDIES: Final[Mapping[int, tuple[str, str]]] = {
    errno.ENOSPC: ("space", "free some space"),
    errno.EDQUOT: ("space", "free some space or raise the disk quota"),
    errno.EFBIG: ("size", "raise the file size limit (ulimit -f)"),
}


def remedy(error: OSError, elsewhere: str) -> str:
    """Return what to do about a file that could not be written, as a sentence.

    Args:
        error: How the system refused.
        elsewhere: What helps otherwise, such as ``name another file``.
    """
    row = _REMEDIES.get(error.errno or 0)
    return _sentence(elsewhere if row is None else f"{row[1]}, or {elsewhere}")


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


_ELSEWHERE: Final = "set SNAPRT_CACHE_DIR to another directory"
_ACCESS: Final = (
    "access",
    f"Make it writable, or {_ELSEWHERE}. SNAPRT_CACHE_MODE=read-only reads it without writing; "
    "SNAPRT_CACHE=off disables the cache.",
)
_NO_FOLDER: Final = (
    "folder",
    f"A file is in the way of the directory: remove it, or {_ELSEWHERE}.",
)
_OTHER: Final = (
    "other",
    f"If this continues, {_ELSEWHERE}, or disable the cache with SNAPRT_CACHE=off.",
)
_ADVICE: Final[Mapping[int, tuple[str, str]]] = {
    **{
        number: (kind, _sentence(f"{known}, or {_ELSEWHERE}"))
        for number, (kind, known) in _REMEDIES.items()
    },
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
        """Warn that the cache cannot do something, such as ``store a compiled program``."""
        kind, hint = _ADVICE.get(error.errno or 0, _OTHER)
        where = error.filename2 or error.filename or self._path
        self.once(
            kind,
            f"The compile cache in {self._path} cannot {doing}: {error.strerror or error} "
            f"({where}). Continuing without it.",
            hint,
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
