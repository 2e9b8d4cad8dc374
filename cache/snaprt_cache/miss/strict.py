"""What to say where nothing may compile and an entry is missing: how the nearest one differs.

Knows keys and what blobs say about themselves, not programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from snaprt_cache.errors import CacheError
from snaprt_cache.frame import BlobHeader
from snaprt_cache.key import Key
from snaprt_cache.miss.difference import explain, nearest

# How many entries are looked into, and how many differing parts are named.
_CANDIDATES: Final = 2000
_NAMED_PARTS: Final = 4


def missing(path: Path, headers: Iterable[BlobHeader], key: Key, name: str) -> CacheError:
    """Return the error that says that there is no entry, and what the nearest one has otherwise.

    Args:
        path: The cache directory.
        headers: What the entries say about themselves.
        key: What was looked for.
        name: The program, as its maker calls it.
    """
    program = f"the program {name!r}" if name else "a program"
    return CacheError(
        f"{program} ({key.digest[:12]}) is not in the compile cache in {path}, and "
        f"SNAPRT_CACHE_MODE does not allow to compile it; {_compared(headers, key, name)}",
        hint="Fill the cache with the same program, versions and flags, or set "
        "SNAPRT_CACHE_MODE=read-write to compile it here.",
    )


def _compared(headers: Iterable[BlobHeader], key: Key, name: str) -> str:
    candidates = [
        (header, header.key, str(header.metadata.get("name", "")))
        for header in itertools.islice(headers, _CANDIDATES)
    ]
    found = nearest(key, name, candidates)
    if not found:
        return "there is no entry to compare with"
    newest = max(found, key=lambda header: header.created)
    differences = explain(newest.key, key)
    named = ", ".join(
        f"{difference.part} ({'; '.join(difference.words)})"
        for difference in differences[:_NAMED_PARTS]
    )
    more = len(differences) - _NAMED_PARTS
    return (
        f"the nearest entry, {newest.metadata.get('name', '')!r} ({newest.key.digest[:12]}), "
        f"differs in {named}{f' and {more} more' if more > 0 else ''}"
    )
