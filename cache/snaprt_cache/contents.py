"""What is in a cache directory, for those who look after it: list, count, check, pin, evict.

Knows blobs, rows and figures; what programs do with entries is store's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from snaprt_cache import file_digests, reports
from snaprt_cache.blobs import BlobFolder
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import PRIVATE, Folder, shared_access
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused
from snaprt_cache.index.database import Index, IndexUnavailable
from snaprt_cache.index.rows import KEY_NAME, EntryRow, IndexedEntry, indexed_entry, is_key
from snaprt_cache.index.usage import PendingUsage
from snaprt_cache.key import Key, KeyPart
from snaprt_cache.reports import CacheStats, Finding
from snaprt_cache.signing import Signing
from snaprt_cache.trouble import LOGGER, Warnings

#: The folder of this format in the cache directory; another format gets another one.
FORMAT_FOLDER: Final = "v1"

# After the index could not be used, it is left alone this long: waiting for its lock at every
# entry would slow the program down.
_INDEX_PAUSE_SECONDS: Final = 30.0
# How many entries one transaction removes: others wait for it.
_EVICTED_AT_ONCE: Final = 128
# Eviction goes on below the limit, so that it is not the business of every put.
_FILLED_AFTER_EVICTION: Final = 0.9
_ANY_SIZE: Final = 1 << 62


class Contents:
    """The entries of one cache directory; safe for threads, processes and forks."""

    def __init__(
        self, path: Path, *, max_bytes: int | None, signing: Signing, writes: bool = True
    ) -> None:
        self.path: Final = path
        #: Where this format's files are; also a place for ``file_digest`` to remember in.
        self.folder: Final = path / FORMAT_FOLDER
        #: What the entries' files are held under together, in bytes; None for no limit.
        self.max_bytes: Final = max_bytes
        self._signing = signing
        #: The permissions of what is made in the directory.
        self.access = shared_access(path) if signing.required else PRIVATE
        #: As ``folder``, to open what is in it.
        self.inside: Final = Folder(path, (FORMAT_FOLDER,), self.access)
        self._blobs = BlobFolder(self.inside, signing)
        self._index = Index(self.inside, self._blob_rows)
        self._pins = self.inside.folder("pins")
        self._usage = PendingUsage(self._index)
        self._warnings = Warnings(path)
        self._writes = writes
        self._index_pause_ends = 0.0

    # Listing.

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

    def keys(self, digests: Iterable[str]) -> dict[str, Key]:
        """Return the key with its parts of each of these entries, by digest."""
        parts: dict[str, list[KeyPart]] = {}
        with contextlib.suppress(IndexUnavailable):
            for digest, name, value in self._index.key_parts() if self.folder.is_dir() else ():
                parts.setdefault(digest, []).append(KeyPart(name, value))
        keys = {}
        for digest in digests:
            if digest in parts:
                keys[digest] = Key(tuple(parts[digest]))
            elif (header := self.header(digest)) is not None:
                keys[digest] = header.key
        return keys

    def events_by_day(self) -> dict[str, dict[str, float]]:
        """Return what happened by day (UTC, ``YYYY-MM-DD``) and event, the oldest day first."""
        days: dict[str, dict[str, float]] = {}
        with contextlib.suppress(IndexUnavailable):
            for day, event, value in self._index.totals() if self.folder.is_dir() else ():
                days.setdefault(day, {})[event] = value
        return days

    def open_blob(self, digest: str) -> BinaryIO:
        """Open an entry's blob, unverified.

        Raises:
            CacheError: There is none, or it cannot be read.
        """
        try:
            return self._blobs.open(digest)
        except OSError as error:
            raise CacheError(
                f"the entry {digest[:12]} cannot be read: {error.strerror or error} "
                f"({self._blobs.path(digest)})",
                hint="`snaprt cache verify --heal` removes damaged entries; if another process has "
                "just removed this one, try again.",
            ) from error

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
        totals: dict[str, float] = {}
        for events in self.events_by_day().values():
            for event, value in events.items():
                totals[event] = totals.get(event, 0.0) + value
        journal = "none"
        if self.folder.is_dir():
            with contextlib.suppress(IndexUnavailable):
                journal = self._index.journal_mode()
        return CacheStats(
            path=self.path,
            entries=len(rows),
            payload_bytes=sum(row.payload_bytes for row in rows),
            stored_bytes=sum(row.stored_bytes for row in rows),
            set_aside=len(self._blobs.set_aside_files()),
            journal_mode=journal,
            max_bytes=self.max_bytes,
            pinned=sum(row.pinned for row in rows),
            **reports.counts(totals),
        )

    # Looking after it.

    def verify(self, *, heal: bool = False) -> Iterator[Finding]:
        """Check every entry, byte by byte, then the index, then what killed writers left.

        Args:
            heal: Whether to set damaged entries aside, bring the index in line, and remove what
                was left.

        Yields:
            What was looked at, the sound included, as it is looked at.
        """
        sound: set[str] = set()
        there: set[str] = set()
        for digest in self._blobs.digests():
            finding = self._check_blob(digest, heal)
            if not finding.problem:
                sound.add(digest)
            if not finding.healed:
                there.add(digest)
            yield finding
        if self.folder.is_dir():
            yield self._check_index(sound, there, heal)
        if problem := file_digests.problem(self.inside):
            yield Finding(
                "file of digests",
                "",
                self.folder / file_digests.FILE_NAME,
                problem,
                heal and self._is_removed(file_digests.FILE_NAME),
            )
        stale = self._blobs.stale_files()
        if heal:
            self._blobs.sweep()
        for path in stale:
            gone = not path.exists()
            yield Finding("temporary file", "", path, "its writer was killed", gone)

    def gc(self, max_bytes: int | None = None) -> list[EntryRow]:
        """Remove the entries least worth keeping until the others are within a limit.

        Args:
            max_bytes: The limit; by default the cache's own. Pinned entries count, and stay.

        Returns:
            The rows of the entries removed.

        Raises:
            CacheError: The index cannot be used, or an entry cannot be removed.
        """
        self._blobs.sweep()
        limit = self.max_bytes if max_bytes is None else max_bytes
        if limit is None or not self.folder.is_dir():
            return []
        with self._index_needed("collect the garbage of"):
            self._write_usage()
            self._reconcile()
            gone = self._evict_to(limit)
        if gone:
            self._count(reports.EVICTED, len(gone))
            self._with_index(self._write_usage)
        return gone

    def pin(self, digest: str) -> bool:
        """Never evict an entry; return whether there is one of this key.

        Raises:
            CacheError: The directory cannot be written.
        """
        return self._set_pinned(digest, True)

    def unpin(self, digest: str) -> bool:
        """Let an entry be evicted again; return whether there is one of this key.

        Raises:
            CacheError: The directory cannot be written.
        """
        return self._set_pinned(digest, False)

    def clear(self) -> int:
        """Remove every entry, all pins and all usage figures; return how many entries there were.

        Files in the directory that are not the cache's stay.

        Raises:
            CacheError: An entry cannot be removed.
        """
        try:
            removed = self._blobs.clear()
            for digest in self._pinned():
                self._pins.remove(digest)
        except OSError as error:
            raise self._error("clear", error) from error
        self._usage.clear()
        if self.folder.is_dir():
            self._with_index(self._index.clear)
        return removed

    def rebuild_index(self) -> None:
        """Make the index's rows anew from the blobs.

        Raises:
            CacheError: The index cannot be written.
        """
        with self._index_needed("rebuild the index of"):
            self._index.rebuild()

    def close(self) -> None:
        """Write the usage figures and close the index; the cache stays usable."""
        if self._writes:
            self._with_index(self._write_usage)
        self._index.close()

    # Rows.

    def _rows(self, prefix: str) -> list[EntryRow]:
        if not self.folder.is_dir():
            return []
        try:
            self._write_usage()
            self._reconcile()
            rows = self._index.entries(prefix)
        except IndexUnavailable as error:
            LOGGER.info("listing the blobs, for the index cannot be used: %s", error)
            listed = [indexed.row for indexed in self._blob_rows()]
            rows = sorted(
                (row for row in listed if row.key.startswith(prefix)),
                key=lambda row: row.created,
                reverse=True,
            )
        pinned = self._pinned()
        return [dataclasses.replace(row, pinned=row.key in pinned) for row in rows]

    def _reconcile(self) -> None:
        """Give the index a row for each blob, and no other: a process may die between the two."""
        known = self._index.sizes()
        there = self._blobs.sizes()
        self._put_rows(digest for digest, size in there.items() if known.get(digest) != size)
        if gone := known.keys() - there.keys():
            self._index.remove(gone)

    def _blob_rows(self) -> Iterator[IndexedEntry]:
        return map(indexed_entry, self._blobs.headers())

    def _put_rows(self, digests: Iterable[str]) -> set[str]:
        """Give the index a row for each of these blobs; return which there are."""
        headers = map(self._blobs.header, digests)
        rows = [indexed_entry(header) for header in headers if header is not None]
        if rows:
            self._index.put(rows)
        return {indexed.row.key for indexed in rows}

    def _write_usage(self) -> None:
        # Blobs whose row was lost with the process that put them, or with a damaged index.
        if unknown := self._usage.write():
            found = self._put_rows(unknown)
            self._usage.drop(unknown - found)
            self._usage.write()

    def _count(self, event: str, value: float = 1) -> None:
        self._usage.add_event(event, value)

    # Room.

    def _make_room(self, limit: int, keep: frozenset[str]) -> list[EntryRow]:
        """Evict after a put that went over the limit; a few more than need be, and not too many."""
        return self._evict(int(limit * _FILLED_AFTER_EVICTION), limit, keep)[0]

    def _evict_to(self, target: int) -> list[EntryRow]:
        gone: list[EntryRow] = []
        while True:
            more, left = self._evict(target, _ANY_SIZE, frozenset())
            gone += more
            if not more or left <= target:
                return gone

    def _evict(self, target: int, limit: int, keep: frozenset[str]) -> tuple[list[EntryRow], int]:
        return self._index.evict(
            target,
            self._blobs.sizes,
            self._blobs.remove,
            at_most=_EVICTED_AT_ONCE,
            limit_bytes=limit,
            keep=keep | self._pinned(),
        )

    # Pins.

    def _set_pinned(self, digest: str, pinned: bool) -> bool:
        if not is_key(digest) or not self._blobs.exists(digest):
            return False
        try:
            if pinned and self._pins.status(digest) is None:
                os.close(self._pins.open(digest, os.O_WRONLY | os.O_CREAT, make=True))
            elif not pinned:
                self._pins.remove(digest)
        except OSError as error:
            raise self._error(
                "pin an entry of" if pinned else "unpin an entry of", error
            ) from error
        return True

    def _pinned(self) -> frozenset[str]:
        return frozenset(self._pins.names(KEY_NAME))

    # Checking.

    def _check_blob(self, digest: str, heal: bool) -> Finding:
        path = self._blobs.path(digest)
        try:
            self._blobs.check(digest, set_aside=heal)
        except BlobDamaged as damage:
            healed = heal and not path.exists()
            if healed:
                self._count(reports.CORRUPT)
            return Finding("entry", digest, path, str(damage), healed)
        except BlobRefused as refusal:
            return Finding("entry", digest, path, str(refusal))
        except OSError as error:
            return Finding("entry", digest, path, error.strerror or str(error))
        return Finding("entry", digest, path)

    def _check_index(self, sound: set[str], there: set[str], heal: bool) -> Finding:
        try:
            # A damaged index has been made anew by then: it holds nothing that blobs do not.
            if damage := self._index.check():
                return Finding("index", "", self.index_path, damage, True)
            right = sound <= self._index.sizes().keys() <= there
            if heal:
                self._reconcile()
        except IndexUnavailable as error:
            return Finding("index", "", self.index_path, str(error))
        problem = "" if right else "its rows are not those of the entries"
        return Finding("index", "", self.index_path, problem, bool(problem) and heal)

    def _is_removed(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            self.inside.remove(name)
        return self.inside.status(name) is None

    # Trouble.

    @contextlib.contextmanager
    def _index_needed(self, doing: str) -> Iterator[None]:
        try:
            yield
        except IndexUnavailable as error:
            raise CacheError(
                f"cannot {doing} the cache: {error}",
                hint="Make the directory writable for you and try again.",
            ) from error

    def _error(self, doing: str, error: OSError) -> CacheError:
        return CacheError(
            f"cannot {doing} the cache in {self.path}: {error.strerror or error} "
            f"({error.filename})",
            hint="Make the directory writable for you and try again.",
        )

    def _with_index(self, *actions: Callable[[], object]) -> None:
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
