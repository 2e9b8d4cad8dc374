"""The compile cache as a library, ``snaprt.cache``: open one and look into it.

It only chooses the cache that the runtime uses; it knows no graphs.
"""

from __future__ import annotations

import os
from pathlib import Path

from snaprt_cache import (
    Cache,
    CacheError,
    CacheStats,
    Entry,
    EntryRow,
    Key,
    KeyPart,
    default_path,
)

from snaprt.execute.store import persistent_cache

__all__ = [
    "Cache",
    "CacheError",
    "CacheStats",
    "Entry",
    "EntryRow",
    "Key",
    "KeyPart",
    "default_path",
    "open",
]


def open(path: str | Path | None = None) -> Cache:  # noqa: A001 (read as `snaprt.cache.open`)
    """Open a compile cache, and have this process and those it starts compile through it.

    Args:
        path: Its directory, made when the first entry is stored; by default ``SNAPRT_CACHE_DIR``,
            else snaprt's in the user's cache directory.

    Returns:
        The cache that compiled programs go through. What happens in it is counted in
        ``snaprt.metrics``; with ``SNAPRT_CACHE=off`` nothing but the caller uses it.

    Raises:
        CacheError: The directory belongs to another user, or others may write into it.
    """
    cache = Cache.open(path)
    os.environ["SNAPRT_CACHE_DIR"] = str(cache.path)
    return persistent_cache() or cache
