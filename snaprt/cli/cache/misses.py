"""Why programs were not in the cache: each recorded miss beside the entry it is most like.

Knows keys, entries and the summaries of programs; prints nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from snaprt_cache import Cache, EntryRow, Key, modes
from snaprt_cache.miss.difference import (
    MODULE,
    OTHER_MODULE,
    PartDifference,
    explain,
    nearest,
    reason,
)
from snaprt_cache.miss.journal import Miss

from snaprt.compile.summaries import Profile, likeness, profile, summary_text

NEW_PROGRAM: Final = "new program"
CHANGED_SHAPE: Final = "changed shape or constant"
CHANGED_CODE: Final = "changed code"
DAMAGED: Final = "damaged, set aside"
REFRESHED: Final = "made anew, in mode refresh"
REMOVED: Final = "was there, removed since"
AT_THE_SAME_TIME: Final = "another process compiled it"
# Programs with less in common than this are not versions of one another.
_LEAST_LIKENESS: Final = 0.5
# So many of the newest entries with the same module or name are compared by their keys.
_CANDIDATES: Final = 150
# So many of the newest entries, equally near by their keys, are compared by their operations.
_COMPARED: Final = 24
# What a process needs at least between a miss and the entry that it makes.
_LEAST_COMPILE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Explained:
    """A miss, or an entry, with what it is most like and how they differ.

    Attributes:
        key: Its key.
        name: The program.
        reason: Why it missed, in a few words.
        neighbor: The entry that is most like it; None where nothing is.
        differences: The parts of the key in which they differ.
    """

    key: Key
    name: str
    reason: str
    neighbor: EntryRow | None
    differences: tuple[PartDifference, ...]


class Neighbors:
    """The entries of a cache as they are now, to compare misses with.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: Cache) -> None:
        rows = {row.key: row for row in cache.entries()}
        self.rows: Final[Mapping[str, EntryRow]] = rows
        self._keys: Final = cache.keys(rows)
        self._damaged: Final = _set_aside(cache)
        self.misses: Final[Sequence[Miss]] = cache.misses()
        self._by_module: Final[dict[str, list[EntryRow]]] = {}
        self._by_name: Final[dict[str, list[EntryRow]]] = {}
        for row in rows.values():
            self._by_name.setdefault(row.name, []).append(row)
            if row.key in self._keys:
                self._by_module.setdefault(_module(self._keys[row.key]), []).append(row)
        self._cache: Final = cache
        self._profiles: Final[dict[str, Profile]] = {}

    def summary(self, digest: str) -> str:
        """Return the text of an entry's summary; empty where it has none."""
        header = self._cache.header(digest)
        return summary_text(header.metadata.get("summary")) if header is not None else ""

    def _profile(self, digest: str) -> Profile:
        if digest not in self._profiles:
            self._profiles[digest] = profile(self.summary(digest))
        return self._profiles[digest]

    def explain_miss(self, miss: Miss) -> Explained:
        """Return why a miss missed."""
        digest = miss.key.digest
        if (digest, miss.process) in self._damaged:
            return Explained(miss.key, miss.name, DAMAGED, None, ())
        before = [
            one.time for one in self.misses if one.key.digest == digest and one.time < miss.time
        ]
        if miss.obstacle:
            return Explained(miss.key, miss.name, miss.obstacle, None, ())
        if miss.mode == modes.REFRESH.name:
            return Explained(miss.key, miss.name, REFRESHED, None, ())
        if before:
            row = self.rows.get(digest)
            seconds = max(_LEAST_COMPILE_SECONDS, 2 * row.compile_seconds if row else 0.0)
            words = AT_THE_SAME_TIME if miss.time - max(before) < seconds else REMOVED
            return Explained(miss.key, miss.name, words, None, ())
        return self.explain_key(miss.key, miss.name, miss.time)

    def explain_key(self, key: Key, name: str, moment: float) -> Explained:
        """Return how a key differs from that of the nearest entry made before ``moment``."""
        likely = {
            row.key: row
            for place in (self._by_module.get(_module(key), []), self._by_name.get(name, []))
            for row in place
        }
        before = (
            row
            for row in likely.values() or self.rows.values()
            if row.key in self._keys and row.created < moment and row.key != key.digest
        )
        newest = itertools.islice(before, _CANDIDATES)
        best = nearest(key, name, [(row, self._keys[row.key], row.name) for row in newest])
        if not best:
            return Explained(key, name, NEW_PROGRAM, None, ())
        mine = self._profile(key.digest)
        alike = functools.partial(self._likeness, mine)
        neighbor = max(best[:_COMPARED], key=alike) if len(best) > 1 else best[0]
        differences = tuple(explain(self._keys[neighbor.key], key))
        words = reason(differences)
        if any(difference.part == MODULE for difference in differences):
            words = self._about_modules(words, mine, neighbor, same_name=neighbor.name == name)
        return Explained(key, name, words, neighbor, differences)

    def _likeness(self, mine: Profile, row: EntryRow) -> tuple[float, float]:
        return likeness(self._profile(row.key), mine)

    def _about_modules(
        self, words: str, mine: Profile, neighbor: EntryRow, *, same_name: bool
    ) -> str:
        """Return the reason where the modules differ, whatever else does."""
        other = self._profile(neighbor.key)
        if not (mine.kinds and other.kinds):
            return words if same_name else NEW_PROGRAM
        if likeness(other, mine)[0] < _LEAST_LIKENESS:
            return NEW_PROGRAM
        if words != OTHER_MODULE:
            return words
        return CHANGED_SHAPE if other.kinds == mine.kinds else CHANGED_CODE


def _module(key: Key) -> str:
    return next((part.value for part in key.parts if part.name == MODULE), "")


def _set_aside(cache: Cache) -> set[tuple[str, int]]:
    """Return the key and the process of each damaged blob in the quarantine, from its name."""
    found = set()
    try:
        names = [path.stem for path in (cache.folder / "quarantine").glob("*.bad")]
    except OSError:
        return set()
    for name in names:
        digest, _, rest = name.partition("-")
        process = rest.rpartition("-")[2]
        if process.isdecimal():
            found.add((digest, int(process)))
    return found
