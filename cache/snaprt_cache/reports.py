"""What a cache tells about itself: the events it counts, its figures, what a check of it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HIT: Final = "PersistentCacheHit"
MISS: Final = "PersistentCacheMiss"
CORRUPT: Final = "PersistentCacheCorrupt"
REFUSED: Final = "PersistentCacheRefused"
REMOTE_HIT: Final = "PersistentCacheRemoteHit"
PUT: Final = "PersistentCachePut"
EVICTED: Final = "PersistentCacheEvicted"
ERROR: Final = "PersistentCacheError"
SAVED_SECONDS: Final = "PersistentCacheSavedSeconds"

OnEvent = Callable[[str, float], None]


@dataclass(frozen=True)
class Entry:
    """What a hit gives.

    Attributes:
        payload: The bytes that were put, verified.
        metadata: What was said about them when they were put.
        read_seconds: What reading and verifying took.

    Examples:
        >>> from snaprt.cache import Cache, Key, KeyPart
        >>> cache, key = Cache.open("mine"), Key((KeyPart("module", "3c4d"),))
        >>> stored = cache.put(key, b"an executable", {"name": "train_step"})
        >>> cache.get(key).metadata["name"]
        'train_step'
    """

    payload: bytes
    metadata: Mapping[str, str | int | float]
    read_seconds: float


@dataclass(frozen=True)
class CacheStats:
    """One cache in numbers; the counts are over all processes since it was made or cleared.

    Attributes:
        path: The cache directory.
        entries: How many entries there are.
        payload_bytes: Their size before compression.
        stored_bytes: Their size on disk.
        hits: How often an entry was found.
        misses: How often none was, the damaged and the refused ones included.
        corrupt: How often an entry was damaged.
        puts: How often an entry was stored.
        errors: How often the file system failed.
        saved_seconds: Compile time that the hits saved, less the time of reading.
        set_aside: How many damaged files are in the quarantine.
        journal_mode: SQLite's, for the index; ``none`` where the index cannot be used.
        max_bytes: What ``stored_bytes`` is held under by eviction; None for no limit.
        pinned: How many entries are never evicted.
        evicted: How many entries were removed to make room.
        refused: How often an entry was not signed as it had to be.
        remote_hits: How many of the hits were fetched from the tier behind the directory.

    Examples:
        >>> stats = snaprt.cache.Cache.open("empty").stats()
        >>> stats.entries, stats.hits
        (0, 0)
    """

    path: Path
    entries: int
    payload_bytes: int
    stored_bytes: int
    hits: int
    misses: int
    corrupt: int
    puts: int
    errors: int
    saved_seconds: float
    set_aside: int
    journal_mode: str
    max_bytes: int | None = None
    pinned: int = 0
    evicted: int = 0
    refused: int = 0
    remote_hits: int = 0


# The fields of CacheStats that are counts of events.
_COUNTS: Final = {
    "hits": HIT,
    "misses": MISS,
    "corrupt": CORRUPT,
    "puts": PUT,
    "errors": ERROR,
    "evicted": EVICTED,
    "refused": REFUSED,
    "remote_hits": REMOTE_HIT,
}


def counts(totals: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of ``CacheStats`` that come from what was counted, by event."""
    fields: dict[str, Any] = {name: int(totals.get(event, 0)) for name, event in _COUNTS.items()}
    return {**fields, "saved_seconds": totals.get(SAVED_SECONDS, 0.0)}


@dataclass(frozen=True)
class Finding:
    """One thing that ``Cache.verify`` looked at.

    Attributes:
        subject: ``entry``, ``index`` or ``temporary file``.
        key: The digest of the entry's key; empty where it is no entry.
        path: The file.
        problem: What is wrong with it; empty where it is sound.
        healed: Whether the problem was dealt with.
    """

    subject: str
    key: str
    path: Path
    problem: str = ""
    healed: bool = False
