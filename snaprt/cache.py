"""The compile cache as a library, ``snaprt.cache``: open one and look into it.

It only joins ``snaprt_cache`` to snaprt's metrics and settings; it knows no graphs.
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

from snaprt import metrics

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

# The events of the cache that are amounts, each a sample of a metric; the others are counted.
_AMOUNTS = frozenset({"PersistentCacheSavedSeconds"})


def open(path: str | Path | None = None) -> Cache:  # noqa: A001 (read as `snaprt.cache.open`)
    """Open a compile cache, and have this process and those it starts compile through it.

    Args:
        path: Its directory, made when the first entry is stored; by default ``SNAPRT_CACHE_DIR``,
            else snaprt's in the user's cache directory.

    Returns:
        The cache. What happens in it is counted in ``snaprt.metrics``.

    Raises:
        CacheError: The directory belongs to another user, or others may write into it.
    """
    cache = Cache.open(path, on_event=_count)
    os.environ["SNAPRT_CACHE_DIR"] = str(cache.path)
    return cache


def _count(event: str, value: float) -> None:
    if event in _AMOUNTS:
        metrics.metric_add(event, value)
    else:
        metrics.counter_add(event, int(value))
