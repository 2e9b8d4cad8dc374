"""What a cache tells about itself: events, figures, what a check of it found, the last misses.

Misses, with the parts of their keys, are a file of JSON lines beside the index. Nothing depends on
it: every trouble with it is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder
from snaprt_cache.key import Key, KeyPart

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


MISSES_NAME: Final = "misses.jsonl"
#: How many misses are told of; a few more may be in the file.
KEPT_MISSES: Final = 200
MISSES_VERSION: Final = 1
# The file may grow this large before it is cut to the last misses.
_LARGEST_BYTES: Final = 1 << 20
# One line is appended with one write, which other processes' lines do not come into.
_LARGEST_LINE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Miss:
    """One program that was not in the cache and had to be compiled."""

    key: Key  # its key with the parts
    name: str  # the program, as its maker called it
    script: str  # the Python program that asked, such as ``train.py``
    process: int  # the number of its process
    time: float  # Unix time in seconds
    mode: str  # the mode in which the cache was asked; empty where it is not known
    obstacle: str = ""  # why the entry that was there could not be used; empty where there was none


def append_miss(folder: Folder, key: Key, name: str, mode: str, obstacle: str) -> None:
    """Append a miss of this process to the file in a cache's folder, if both are there."""
    content = {
        "version": MISSES_VERSION,
        "time": time.time(),
        "process": os.getpid(),
        "name": name,
        "script": script_name(),
        "mode": mode,
        "obstacle": obstacle,
        "parts": key.listed(),
    }
    line = f"{json.dumps(content, separators=(',', ':'))}\n".encode("ascii")
    if len(line) > _LARGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError, CacheError):
        descriptor = folder.open(MISSES_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _LARGEST_BYTES:
            # One that is appended at this very moment may be lost.
            folder.replace(MISSES_NAME, _lines(folder)[-KEPT_MISSES:])


def script_name() -> str:
    """Return the file name of the Python program that runs; empty where there is none."""
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def read_misses(folder: Folder) -> list[Miss]:
    """Return the last misses, oldest first; lines that cannot be read are left out."""
    misses = (_parse(line) for line in _lines(folder)[-KEPT_MISSES:])
    return [miss for miss in misses if miss is not None]


def forget_misses(folder: Folder) -> None:
    """Remove the file."""
    with contextlib.suppress(OSError):
        folder.remove(MISSES_NAME)


def _lines(folder: Folder) -> list[bytes]:
    """Return the lines at the end of the file, as many as there should be."""
    try:
        descriptor = folder.open(MISSES_NAME, os.O_RDONLY)
    except (OSError, CacheError):
        return []
    with open(descriptor, "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - 2 * _LARGEST_BYTES)
        file.seek(start)
        return file.read(2 * _LARGEST_BYTES).splitlines(keepends=True)[start > 0 :]


def _parse(line: bytes) -> Miss | None:
    try:
        content = json.loads(line)
        if content["version"] != MISSES_VERSION:
            return None
        parts = tuple(KeyPart(str(name), str(value)) for name, value in content["parts"])
        return Miss(
            key=Key(parts),
            name=str(content["name"]),
            script=str(content["script"]),
            process=int(content["process"]),
            time=float(content["time"]),
            mode=str(content.get("mode", "")),
            obstacle=str(content.get("obstacle", "")),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
