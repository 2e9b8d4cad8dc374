"""The compile cache itself: get and put verified bytes by key, whatever happens to the disk.

Knows bytes and keys, not programs. The blobs alone decide what is in the cache; the index counts
and lists. No trouble with files is raised: the caller compiles, and the program goes on.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from snaprt_cache import forks, frame
from snaprt_cache.blobs import BlobFolder
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import refuse_if_unsafe
from snaprt_cache.frame import BlobDamaged, BlobHeader
from snaprt_cache.index import Index, IndexUnavailable
from snaprt_cache.key import Key
from snaprt_cache.rows import EntryRow, IndexedEntry, compile_seconds, indexed_entry
from snaprt_cache.trouble import LOGGER, Warnings
from snaprt_cache.usage import PendingUsage

#: The folder of this format in the cache directory; another format gets another one.
FORMAT_FOLDER: Final = "v1"

HIT: Final = "PersistentCacheHit"
MISS: Final = "PersistentCacheMiss"
CORRUPT: Final = "PersistentCacheCorrupt"
PUT: Final = "PersistentCachePut"
ERROR: Final = "PersistentCacheError"
SAVED_SECONDS: Final = "PersistentCacheSavedSeconds"

# After the index could not be used, it is left alone this long: waiting for its lock at every
# entry would slow the program down.
_INDEX_PAUSE_SECONDS: Final = 30.0

OnEvent = Callable[[str, float], None]


@dataclass(frozen=True)
class Entry:
    """What a hit gives.

    Attributes:
        payload: The bytes that were put, verified.
        metadata: What was said about them when they were put.
        read_seconds: What reading and verifying took.
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
        misses: How often none was, the damaged ones included.
        corrupt: How often an entry was damaged.
        puts: How often an entry was stored.
        errors: How often the file system failed.
        saved_seconds: Compile time that the hits saved, less the time of reading.
        set_aside: How many damaged files are in the quarantine.
        journal_mode: SQLite's, for the index; ``none`` where the index cannot be used.
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


def default_path() -> Path:
    """Return the cache directory: ``SNAPRT_CACHE_DIR``, else one in the user's cache directory."""
    chosen = os.environ.get("SNAPRT_CACHE_DIR", "").strip()
    return Path(chosen or platformdirs.user_cache_dir("snaprt", appauthor=False))


class Cache:
    """A compile cache in a directory; safe for threads, processes and forks.

    ``Cache.open`` makes one. It touches the disk at the first ``get`` or ``put``.
    """

    def __init__(self, path: Path, on_event: OnEvent | None) -> None:
        self.path: Final = path
        #: Where this format's files are; also a place for ``file_digest`` to remember in.
        self.folder: Final = path / FORMAT_FOLDER
        self._on_event = on_event
        self._blobs = BlobFolder(path, self.folder)
        self._index = Index(path, self.folder, self._blobs.quarantine, self._blob_rows)
        self._usage = PendingUsage(self._index)
        self._warnings = Warnings(path)
        self._checked = False
        self._index_pause_ends = 0.0
        weakref.finalize(self, self._usage.write_at_exit)
        forks.watch(self)

    @classmethod
    def open(cls, path: str | Path | None = None, *, on_event: OnEvent | None = None) -> Cache:
        """Open the cache in a directory, which is made when the first entry is stored.

        Args:
            path: The directory; by default ``SNAPRT_CACHE_DIR``, else snaprt's in the user's
                cache directory.
            on_event: Called with the name and the value of each event, such as
                ``("PersistentCacheHit", 1)``.

        Raises:
            CacheError: The directory belongs to another user, or others may write into it.
        """
        folder = default_path() if path is None else Path(path)
        with contextlib.suppress(RuntimeError):  # no home directory: "~" is then a name like others
            folder = folder.expanduser()
        cache = cls(Path(os.path.abspath(folder)), on_event)
        with contextlib.suppress(OSError):  # get and put will meet it, and warn
            cache._check_owner()
        return cache

    def get(self, key: Key, *, counted: bool = True) -> Entry | None:
        """Return the entry of a key, verified; None where there is none that is whole.

        A damaged entry is set aside and counted, and the next ``put`` replaces it.

        Args:
            key: Its key.
            counted: Whether a hit or a miss counts. It does for programs; not for what only leads
                to them, such as the runtime's notes of which module a graph becomes.
        """
        start = time.perf_counter()
        entry: Entry | None = None
        try:
            self._check_owner()
            found = self._blobs.read(key.digest)
            if found is not None:
                seconds = time.perf_counter() - start
                entry = Entry(found.payload, found.header.metadata, seconds)
                if counted:
                    self._count_hit(found.header, seconds)
        except BlobDamaged as damage:
            self._count_corrupt(key.digest, str(damage))
        except CacheError as error:
            self._refused(error)
        except OSError as error:
            self._failed("read a compiled program", error)
        if entry is None and counted:
            self._event(MISS)
        self._write_usage_if_due()
        return entry

    def put(
        self,
        key: Key,
        payload: bytes,
        metadata: Mapping[str, str | int | float],
        *,
        counted: bool = True,
    ) -> bool:
        """Store an entry in place of what may be there.

        Args:
            key: Its key.
            payload: Its bytes; they are compressed here.
            metadata: What to say about it. The index has columns for ``name``, ``kind``,
                ``compile_seconds``, ``platform``, ``device_kind``, ``jax_version`` and
                ``jaxlib_version``.
            counted: As for ``get``.

        Returns:
            Whether it was stored. If not, the user was told why and what to do.
        """
        try:
            self._check_owner()
            header, head, stored = frame.encode_blob(key, payload, metadata)
            self._blobs.write(key.digest, head, stored)
        except CacheError as error:
            self._refused(error)
            return False
        except OSError as error:
            self._failed("store a compiled program", error)
            return False
        if counted:
            self._event(PUT)
        self._with_index(lambda: self._index.put([indexed_entry(header)]), self._write_usage)
        return True

    def count_hit(self, key: Key, entry: Entry) -> None:
        """Count a hit for an entry that was got uncounted, now that it is used."""
        saved = max(0.0, float(entry.metadata.get("compile_seconds", 0)) - entry.read_seconds)
        self._usage.add_hit(key.digest, saved)
        self._event(HIT)
        if saved:
            self._event(SAVED_SECONDS, saved)

    def discard(self, key: Key, reason: str) -> None:
        """Set an entry aside that was whole and yet of no use to the caller, such as to XLA.

        Args:
            key: Its key.
            reason: What is wrong with it, for the log.
        """
        self._blobs.set_aside(key.digest)
        self._count_corrupt(key.digest, reason)

    def entries(self) -> list[EntryRow]:
        """Return a row for every entry, newest first."""
        return self._rows("")

    def find(self, prefix: str) -> list[EntryRow]:
        """Return the rows of the entries whose key's digest starts with ``prefix``."""
        wanted = prefix.lower()
        return self._rows(wanted) if set(wanted) <= set("0123456789abcdef") else []

    def header(self, digest: str) -> BlobHeader | None:
        """Return what an entry's blob says about itself: its key's parts, metadata and sizes."""
        return self._blobs.header(digest)

    def blob_path(self, digest: str) -> Path:
        """Return where an entry's blob is, or would be."""
        return self._blobs.path(digest)

    @property
    def index_path(self) -> Path:
        """Where the index is, or will be: an SQLite database, described in ``schema.sql``."""
        return self._index.path

    def stats(self) -> CacheStats:
        """Return the cache in numbers."""
        rows = self.entries()
        totals: Mapping[str, float] = {}
        journal = "none"
        if self.folder.is_dir():
            with contextlib.suppress(IndexUnavailable):
                totals = self._index.totals()
                journal = self._index.journal_mode()
        return CacheStats(
            path=self.path,
            entries=len(rows),
            payload_bytes=sum(row.payload_bytes for row in rows),
            stored_bytes=sum(row.stored_bytes for row in rows),
            hits=int(totals.get(HIT, 0)),
            misses=int(totals.get(MISS, 0)),
            corrupt=int(totals.get(CORRUPT, 0)),
            puts=int(totals.get(PUT, 0)),
            errors=int(totals.get(ERROR, 0)),
            saved_seconds=totals.get(SAVED_SECONDS, 0.0),
            set_aside=len(self._blobs.set_aside_files()),
            journal_mode=journal,
        )

    def clear(self) -> int:
        """Remove every entry and all usage figures; return how many entries there were.

        Files in the directory that are not the cache's stay.

        Raises:
            CacheError: An entry cannot be removed.
        """
        try:
            removed = self._blobs.clear()
        except OSError as error:
            raise CacheError(
                f"cannot clear the cache in {self.path}: {error.strerror or error} "
                f"({error.filename})",
                hint="Make the directory writable for you and try again.",
            ) from error
        self._usage.clear()
        if self.folder.is_dir():
            self._with_index(self._index.clear)
        return removed

    def rebuild_index(self) -> None:
        """Make the index's rows anew from the blobs.

        Raises:
            CacheError: The index cannot be written.
        """
        try:
            self._index.rebuild()
        except IndexUnavailable as error:
            raise CacheError(
                f"cannot rebuild the cache's index {error}",
                hint="Make the directory writable for you and try again.",
            ) from error

    def close(self) -> None:
        """Write the usage figures and close the index; the cache stays usable."""
        self._with_index(self._write_usage)
        self._index.close()

    # Reading.

    def _rows(self, prefix: str) -> list[EntryRow]:
        if not self.folder.is_dir():
            return []
        try:
            self._write_usage()
            self._reconcile()
            return self._index.entries(prefix)
        except IndexUnavailable as error:
            LOGGER.info("listing the blobs, for the index cannot be used: %s", error)
        rows = [indexed.row for indexed in self._blob_rows() if indexed.row.key.startswith(prefix)]
        return sorted(rows, key=lambda row: row.created, reverse=True)

    def _reconcile(self) -> None:
        """Give the index a row for each blob, and no other: a process may die between the two."""
        known = self._index.keys()
        there = set(self._blobs.digests())
        self._put_rows(there - known)
        if gone := known - there:
            self._index.remove(gone)

    def _blob_rows(self) -> Iterator[IndexedEntry]:
        return map(indexed_entry, self._blobs.headers())

    # Counting.

    def _event(self, name: str, value: float = 1) -> None:
        self._usage.add_event(name, value)
        if self._on_event is not None:
            self._on_event(name, value)

    def _count_hit(self, header: BlobHeader, seconds: float) -> None:
        saved = max(0.0, compile_seconds(header) - seconds)
        self._usage.add_hit(header.key.digest, saved)
        self._event(HIT)
        if saved:
            self._event(SAVED_SECONDS, saved)

    def _count_corrupt(self, digest: str, reason: str) -> None:
        LOGGER.info("set aside the damaged entry %s: %s", digest[:12], reason)
        self._event(CORRUPT)
        self._with_index(lambda: self._index.remove([digest]))

    def _write_usage_if_due(self) -> None:
        if self._usage.is_due():
            self._with_index(self._write_usage)

    def _write_usage(self) -> None:
        # Blobs whose row was lost with the process that put them, or with a damaged index.
        if unknown := self._usage.write():
            found = self._put_rows(unknown)
            self._usage.drop(unknown - found)
            self._usage.write()

    def _put_rows(self, digests: Iterable[str]) -> set[str]:
        """Give the index a row for each of these blobs; return which there are."""
        headers = map(self._blobs.header, digests)
        rows = [indexed_entry(header) for header in headers if header is not None]
        if rows:
            self._index.put(rows)
        return {indexed.row.key for indexed in rows}

    # Trouble.

    def _check_owner(self) -> None:
        """Refuse a directory that others can write to; it is looked at until it is there."""
        if not self._checked:
            there = refuse_if_unsafe(self.path)
            self._checked = refuse_if_unsafe(self.folder) and there

    def _failed(self, doing: str, error: OSError) -> None:
        self._event(ERROR)
        self._warnings.files(doing, error)

    def _refused(self, error: CacheError) -> None:
        self._event(ERROR)
        self._warnings.once(
            "refused", f"The compile cache is not used: {error.message}.", error.hint
        )

    def _with_index(self, *actions: Callable[[], None]) -> None:
        """Do without the index where it cannot be used; nothing that matters depends on it."""
        if time.monotonic() < self._index_pause_ends:
            return
        try:
            for action in actions:
                action()
        except IndexUnavailable as error:
            self._index_pause_ends = time.monotonic() + _INDEX_PAUSE_SECONDS
            LOGGER.info("the cache's index cannot be used: %s", error)

    def before_fork(self) -> None:
        """Let no other thread be inside SQLite while the process forks."""
        self._index.before_fork()

    def after_fork_in_parent(self) -> None:
        """Go on after a fork."""
        self._index.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Take nothing over from the parent that belongs to it: connections, locks, counts."""
        self._index.after_fork_in_child()
        self._blobs.after_fork_in_child()
        self._warnings.after_fork_in_child()
        self._usage.after_fork_in_child()
