"""What the index tells beside its entries: what happened on which day, and the keys of all entries.

Reads the index and never writes it; where it cannot be used, the blobs answer, or nobody does.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from snaprt_cache.key import Key, KeyPart
from snaprt_cache.store import Cache

_WAIT_SECONDS: Final = 2.0


def events_by_day(cache: Cache) -> dict[str, dict[str, float]]:
    """Return what happened by day (UTC, ``YYYY-MM-DD``) and event, the oldest day first."""
    days: dict[str, dict[str, float]] = {}
    with contextlib.suppress(sqlite3.Error, ValueError, TypeError), _open(cache) as connection:
        rows = connection.execute("SELECT day, event, value FROM totals ORDER BY day")
        for day, event, value in rows:
            days.setdefault(str(day), {})[str(event)] = float(value)
    return days


def keys_of_entries(cache: Cache, digests: Mapping[str, object]) -> dict[str, Key]:
    """Return the key with its parts of each of these entries, by digest."""
    parts: dict[str, list[KeyPart]] = {}
    with contextlib.suppress(sqlite3.Error), _open(cache) as connection:
        rows = connection.execute("SELECT key, name, value FROM key_parts ORDER BY key, position")
        for digest, name, value in rows:
            parts.setdefault(str(digest), []).append(KeyPart(str(name), str(value)))
    keys = {digest: Key(tuple(parts[digest])) for digest in digests if digest in parts}
    for digest in digests:
        if digest not in keys and (header := cache.header(digest)) is not None:
            keys[digest] = header.key
    return keys


@contextlib.contextmanager
def _open(cache: Cache) -> Iterator[sqlite3.Connection]:
    path: Path = cache.index_path
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=ro", uri=True, timeout=_WAIT_SECONDS, isolation_level=None
    )
    try:
        yield connection
    finally:
        connection.close()
