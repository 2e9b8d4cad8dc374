"""The process's persistent compile cache: opened at first use, and its events counted.

It knows the settings and the metrics; what is stored, and under which key, is not its business.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from snaprt_cache.errors import CacheError
from snaprt_cache.store import Cache

from snaprt import metrics, settings

_log = logging.getLogger("snaprt.cache")
_lock = threading.Lock()
_open: dict[Path | None, Cache | None] = {}

#: Events of the cache that carry an amount rather than a count.
_AMOUNTS = frozenset({"PersistentCacheSavedSeconds"})


def persistent_cache() -> Cache | None:
    """Return the cache that the settings name, or ``None`` where there is none to use.

    ``SNAPRT_CACHE=0`` means none. A folder that cannot be used is reported once, and the program
    goes on without a cache.
    """
    if not settings.get("SNAPRT_CACHE"):
        return None
    folder = settings.get("SNAPRT_CACHE_DIR")
    with _lock:
        if folder not in _open:
            try:
                _open[folder] = Cache.open(folder, on_event=_count)
            except CacheError as error:
                _log.warning("compiling without a persistent cache: %s", error)
                _open[folder] = None
        return _open[folder]


def _count(event: str, value: float) -> None:
    if event in _AMOUNTS:
        metrics.metric_add(event, value)
    else:
        metrics.counter_add(event, int(value))
