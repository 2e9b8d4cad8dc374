"""The error that the cache raises on purpose; it must know nothing of the rest of the package."""

from __future__ import annotations


class CacheError(Exception):
    """A cache directory that must not be used, or a request that makes no sense.

    Trouble with files, such as a full disk, is never raised: the program goes on without the entry.

    Args:
        message: What happened, in one sentence that names the directory or the key.
        hint: What the user can do about it; empty where there is nothing to do.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message
