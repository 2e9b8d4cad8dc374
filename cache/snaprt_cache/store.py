"""The compile cache itself: verified bytes by key, whatever happens to the disk.

The blobs alone decide what is in the cache; the index counts and lists. ``get`` and ``put`` raise
no trouble with files: the caller compiles, and the program goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from snaprt_cache import file_digests, frame, reports
from snaprt_cache.blobs import BlobFolder
from snaprt_cache.errors import LOGGER, CacheError, Warnings, remedy
from snaprt_cache.folder import PRIVATE, Folder, default_path, refuse_if_unsafe, shared_access
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused, Metadata, Signing
from snaprt_cache.index import (
    KEY_NAME,
    EntryRow,
    Index,
    IndexUnavailable,
    Pending,
    compile_seconds,
    row_of_blob,
)
from snaprt_cache.key import Key
from snaprt_cache.lock import watch_forks
from snaprt_cache.modes import FAIL_ON_MISS, OFF, READ_WRITE, Mode, mode_called
from snaprt_cache.reports import CacheStats, Entry, Finding, Miss, OnEvent

if TYPE_CHECKING:
    from snaprt_cache.remote import Tier

__all__ = ["Cache", "CacheStats", "Entry", "Finding", "default_path"]

Obstacle = Callable[[Metadata], str]

#: Maximum total size of a cache in bytes, unless it is told otherwise.
DEFAULT_MAX_BYTES: Final = 10 << 30

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


class Cache:
    """A compile cache in a directory; safe for threads, processes and forks.

    ``Cache.open`` makes one. It touches the disk at the first ``get`` or ``put``.

    Examples:
        >>> from snaprt.cache import Cache, Key, KeyPart
        >>> cache = Cache.open("mine")
        >>> key = Key((KeyPart("module", "1a2b"), KeyPart("jax", jax.__version__)))
        >>> cache.put(key, b"an executable", {"name": "train_step"})
        True
        >>> cache.get(key).payload
        b'an executable'
    """

    def __init__(
        self,
        path: Path,
        on_event: OnEvent | None,
        max_bytes: int | None,
        mode: Mode,
        signing: Signing,
        tier: Tier | None,
    ) -> None:
        self.path: Final = path
        #: Where this format's files are; also a place for ``file_digest`` to remember in.
        self.folder: Final = path / FORMAT_FOLDER
        #: Maximum total size of the entries, in bytes; None for no limit.
        self.max_bytes: Final = max_bytes
        #: What programs may do with it.
        self.mode: Final = mode
        #: The permissions of what is made in the directory.
        self.access: Final = shared_access(path) if signing.required else PRIVATE
        #: Why entries could not be used when they were last got, by their digests.
        self.obstacles: Final[dict[str, str]] = {}
        self._inside: Final = Folder(path, (FORMAT_FOLDER,), self.access)
        self._blobs: Final = BlobFolder(self._inside, signing)
        self._index: Final = Index(self._inside, self._blobs)
        self._pending: Final = Pending(self._index)
        self._pins: Final = self._inside.folder("pins")
        self._warnings: Final = Warnings(path)
        self._index_pause_ends = 0.0
        self._signing: Final = signing
        self._tier: Final = tier
        self._on_event: Final = on_event
        # What was made anew in a mode that does not use what was there before.
        self._refreshed: Final[set[str]] = set()
        if mode.writes:
            weakref.finalize(self, self._pending.write_at_exit)
        watch_forks(self)

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        on_event: OnEvent | None = None,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        mode: str = READ_WRITE.name,
        signing_key: bytes | None = None,
        shared: bool = False,
        tier: Tier | None = None,
    ) -> Cache:
        """Open the cache in a directory, which is made when the first entry is stored.

        Args:
            path: The directory; by default ``SNAPRT_CACHE_DIR``, else snaprt's in the user's
                cache directory.
            on_event: Called with the name and the value of each event, such as
                ``("PersistentCacheHit", 1)``.
            max_bytes: What its files are held under together by eviction; None for no limit.
            mode: What ``get`` and ``put`` may do: a name in ``snaprt_cache.modes``. Listing and
                looking after the entries is not bound by it.
            signing_key: Entries are signed with it, and what ``tier`` gives must be.
            shared: Others may write into the directory; then what is in it must be signed, too.
            tier: A second place for the blobs: asked for what is not in the directory, and sent
                what is put.

        Raises:
            CacheError: The directory belongs to another user, or others may write into it, and it
                is not ``shared``; or it is, and there is no key; or there is no such mode; or it
                is below a working directory that was removed.
        """
        if shared and signing_key is None:
            raise CacheError(
                "a shared cache needs a key to sign its entries",
                hint="Set SNAPRT_CACHE_KEY_FILE to the same key file for all users.",
            )
        path = os.path.expanduser(default_path() if path is None else path)
        try:
            folder = Path(os.path.abspath(path))
        except FileNotFoundError as error:
            raise CacheError(
                f"{path} is below a working directory that was removed",
                hint="Set SNAPRT_CACHE_DIR to an absolute path.",
            ) from error
        signing = Signing(signing_key, required=shared)
        cache = cls(folder, on_event, max_bytes, mode_called(mode), signing, tier)
        if not shared:  # There, signatures say who made an entry.
            with contextlib.suppress(OSError):  # get and put will meet it, and warn
                refuse_if_unsafe(cache.path)
                refuse_if_unsafe(cache.folder)
        return cache

    # For programs.

    def get(
        self, key: Key, *, name: str = "", counted: bool = True, obstacle: Obstacle | None = None
    ) -> Entry | None:
        """Return the entry of a key, verified; None where there is none that is whole.

        A damaged entry is set aside and counted, and the next ``put`` replaces it. One that this
        process cannot use is a miss, and stays.

        Args:
            key: The entry's key.
            name: The program, as the metadata of its entry would call it, to speak of it.
            counted: Whether it is a program. What only helps to find one is neither counted as a
                hit or a miss nor missed in any mode.
            obstacle: Returns why this process cannot use an entry with that metadata; empty where
                it can.

        Raises:
            CacheError: There is none, the mode is ``fail-on-miss``, and it is counted.
        """
        if self.mode is OFF:
            return None
        start = time.perf_counter()
        digest = key.digest
        blob = None
        if self._may_read(digest):
            blob = self._read(key) or self._fetch(key)
        reason = ""
        if blob is not None and obstacle is not None:
            reason = self.obstacles[digest] = obstacle(blob[0].metadata)
        entry: Entry | None = None
        if blob is not None and not reason:
            header, payload = blob
            entry = Entry(payload, header.metadata, time.perf_counter() - start)
            saved = max(0.0, compile_seconds(header) - entry.read_seconds)
            if self.mode.writes:
                self._pending.add_hit(digest, saved)
            if counted:
                self._count_hit(saved)
        elif counted:
            self._count(reports.MISS)
        if self._pending.is_due():
            self._write_pending()
        if reason:
            LOGGER.info("the entry %s is not used: %s", digest[:12], reason)
        if entry is None and counted and not self.mode.misses:
            if reason:
                raise self._useless(digest, reason)
            raise self._missing(key, name)
        return entry

    def offers(self, digest: str) -> bool:
        """Return whether there is a file that ``get`` would read; whether it is whole shows then.

        One that this process could not use when it was last got is none.
        """
        is_usable = self._may_read(digest) and not self.obstacles.get(digest)
        return is_usable and self._blobs.exists(digest)

    def put(self, key: Key, payload: bytes, metadata: Metadata, *, counted: bool = True) -> bool:
        """Store an entry in place of what may be there.

        Args:
            key: Its key.
            payload: Its bytes; they are compressed here.
            metadata: What to say about it. The index has columns for ``name``, ``kind``,
                ``compile_seconds``, ``platform``, ``device_kind``, ``jax_version`` and
                ``jaxlib_version``.
            counted: Whether it is a program, as for ``get``.

        Returns:
            Whether it was stored. If not, the user was told why and what to do, or the mode does
            not store.
        """
        if not self.mode.writes:
            return False
        try:
            header, head, stored = frame.encode_blob(key, payload, metadata, self._signing)
        except CacheError as error:
            self._refused(error)
            return False
        events = [reports.PUT] if counted else []
        if not self._keep(header, lambda: (head, stored), events):
            return False
        self._refreshed.add(key.digest)
        if self._tier is not None:
            self._tier.send(key.digest, head + stored)
        return True

    def count_hit(self, entry: Entry) -> None:
        """Count the hit of an entry that was got uncounted, now that it is used."""
        self._count_hit(float(entry.metadata.get("compile_seconds", 0)) - entry.read_seconds)

    def discard(self, key: Key, reason: str) -> None:
        """Set an entry aside that was whole and yet of no use to the caller, such as to XLA.

        Args:
            key: Its key.
            reason: What is wrong with it, for the log.

        Raises:
            CacheError: The mode is ``fail-on-miss``, and the caller would have to compile.
        """
        if self.mode.writes:
            self._blobs.set_aside(key.digest)
        self._count_corrupt(key.digest, reason)
        if self.mode is FAIL_ON_MISS:
            raise self._useless(key.digest, reason)

    def adopt(self, digest: str, content: BinaryIO) -> bool:
        """Store a blob file that another cache made, as it is, in place of what may be there.

        Args:
            digest: The digest of the entry's key.
            content: Holds the whole file and nothing else; it can seek.

        Returns:
            Whether it was stored. If not, the user was told why and what to do.

        Raises:
            CacheError: It is damaged, or not signed though the directory is shared.
        """
        try:
            header = frame.check_blob(digest, content, self._signing)
        except (BlobDamaged, BlobRefused) as error:
            raise CacheError(
                f"cannot import the entry {digest[:12]} into the cache in {self.path}: {error}",
                hint="Export it again with this cache's SNAPRT_CACHE_KEY_FILE."
                if isinstance(error, BlobRefused)
                else "Export it again.",
            ) from error

        def all_of_it() -> Iterator[bytes]:
            content.seek(0)
            return frame.pieces(content)

        return self._keep(header, all_of_it)

    def record_miss(self, key: Key, name: str) -> None:
        """Remember that an entry was missing, for ``misses``; where the mode writes.

        Args:
            key: What was asked for.
            name: The program, as its maker calls it.
        """
        if self.mode.writes:
            obstacle = self.obstacles.get(key.digest, "")
            reports.append_miss(self._inside, key, name, self.mode.name, obstacle)

    def misses(self) -> list[Miss]:
        """Return the last misses, oldest first; at most `KEPT_MISSES`."""
        return reports.read_misses(self._inside)

    # For those who look after it.

    def entries(self) -> list[EntryRow]:
        """Return a row for every entry, newest first."""
        return self.find("")

    def find(self, prefix: str) -> list[EntryRow]:
        """Return the rows of the entries whose key's digest starts with ``prefix``."""
        prefix = prefix.lower()
        if not self.folder.is_dir() or not set(prefix) <= set("0123456789abcdef"):
            return []
        try:
            self._pending.write()
            self._index.align()
            rows = self._index.entries(prefix)
        except IndexUnavailable as error:
            LOGGER.info("listing the blobs because the index cannot be used: %s", error)
            listed = map(row_of_blob, self._blobs.headers())
            rows = [row for row in listed if row.key.startswith(prefix)]
            rows.sort(key=lambda row: row.created, reverse=True)
        pinned = self._pinned()
        return [dataclasses.replace(row, pinned=True) if row.key in pinned else row for row in rows]

    def header(self, digest: str) -> BlobHeader | None:
        """Return what an entry's blob says about itself: its key's parts, metadata and sizes."""
        return self._blobs.header(digest)

    def keys(self, digests: Iterable[str]) -> dict[str, Key]:
        """Return the key with its parts of each of these entries, by digest."""
        indexed: dict[str, Key] = {}
        if self.folder.is_dir():
            with contextlib.suppress(IndexUnavailable):
                indexed = self._index.keys()
        keys = {}
        for digest in digests:
            if digest in indexed:
                keys[digest] = indexed[digest]
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
                f"cannot read the entry {digest[:12]}: {error.strerror or error} "
                f"({self._blobs.path(digest)})",
                hint="`snaprt cache verify --heal` quarantines damaged entries. If another "
                "process just removed this one, try again.",
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

    def verify(self, *, heal: bool = False) -> Iterator[Finding]:
        """Check every entry, byte by byte, then the index, then what killed writers left.

        Args:
            heal: Whether to set damaged entries aside, bring the index in line, and remove what
                was left.

        Yields:
            What was looked at, the sound included, as it is looked at.
        """
        sound: set[str] = set()
        present: set[str] = set()
        for digest in self._blobs.sizes():
            finding = self._check_blob(digest, heal)
            if not finding.problem:
                sound.add(digest)
            if not finding.healed:
                present.add(digest)
            yield finding
        if self.folder.is_dir():
            yield self._check_index(sound, present, heal)
        if problem := file_digests.problem(self._inside):
            path = self.folder / file_digests.FILE_NAME
            if heal:
                with contextlib.suppress(OSError):
                    self._inside.remove(path.name)
            yield Finding("file of digests", "", path, problem, heal and not path.exists())
        stale = self._blobs.sweep(really=False)
        if heal:
            self._blobs.sweep()
        for path in stale:
            yield Finding("temporary file", "", path, "its writer was killed", not path.exists())

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
        removed: list[EntryRow] = []
        if limit is None or not self.folder.is_dir():
            return removed
        try:
            self._pending.write()
            more, remaining = self._evict(limit, _ANY_SIZE)
            removed += more
            while more and remaining > limit:
                more, remaining = self._evict(limit, _ANY_SIZE)
                removed += more
        except IndexUnavailable as error:
            raise CacheError(
                f"cannot clean up the cache: {error}",
                hint="Make the directory writable and try again.",
            ) from error
        if removed:
            self._count(reports.EVICTED, len(removed))
            self._write_pending()
        return removed

    def pin(self, digest: str, *, pinned: bool = True) -> bool:
        """Never evict an entry, or let it be evicted again; return whether there is one.

        Raises:
            CacheError: The directory cannot be written.
        """
        if not KEY_NAME.fullmatch(digest) or not self._blobs.exists(digest):
            return False
        try:
            if pinned and self._pins.status(digest) is None:
                os.close(self._pins.open(digest, os.O_WRONLY | os.O_CREAT, make=True))
            elif not pinned:
                self._pins.remove(digest)
        except OSError as error:
            doing = "pin an entry of" if pinned else "unpin an entry of"
            raise self._cannot(doing, error) from error
        return True

    def unpin(self, digest: str) -> bool:
        """Let an entry be evicted again; as ``pin``."""
        return self.pin(digest, pinned=False)

    def clear(self) -> int:
        """Remove entries, pins, usage figures and misses; return how many entries there were.

        Files in the directory that are not the cache's stay.

        Raises:
            CacheError: An entry cannot be removed.
        """
        try:
            removed = self._blobs.clear()
            for digest in self._pinned():
                self._pins.remove(digest)
        except OSError as error:
            raise self._cannot("clear", error) from error
        self._pending.clear()
        reports.forget_misses(self._inside)
        if self.folder.is_dir():
            self._with_index(self._index.clear)
        return removed

    def close(self) -> None:
        """Write the usage figures and close the index; the cache stays usable."""
        if self.mode.writes:
            self._write_pending()
        self._index.close()

    # Reading and storing.

    def _may_read(self, digest: str) -> bool:
        return self.mode.reads or digest in self._refreshed

    def _read(self, key: Key) -> tuple[BlobHeader, bytes] | None:
        digest = key.digest
        try:
            return self._blobs.read(key, set_aside=self.mode.writes)
        except BlobDamaged as damage:
            self._count_corrupt(digest, str(damage))
        except BlobRefused as refusal:
            self._count_refused(f"The entry {digest[:12]} of the cache in {self.path}", refusal)
        except CacheError as error:
            self._refused(error)
        except OSError as error:
            self._failed("read a compiled program", error)
        return None

    def _fetch(self, key: Key) -> tuple[BlobHeader, bytes] | None:
        """Ask the tier; what it gives is verified, and stored here for the next time."""
        digest = key.digest
        content = None if self._tier is None else self._tier.fetch(digest)
        if content is None:
            return None
        signing = Signing(self._signing.key, required=self._signing.key is not None)
        try:
            blob = frame.read_blob(digest, io.BytesIO(content), signing, key)
        except BlobDamaged as damage:
            LOGGER.info("the entry %s from the remote cache is damaged: %s", digest[:12], damage)
            self._count(reports.CORRUPT)
            return None
        except BlobRefused as refusal:
            self._count_refused(f"The entry {digest[:12]} of the remote cache", refusal)
            return None
        self._count(reports.REMOTE_HIT)
        if self.mode.writes:
            self._keep(blob[0], lambda: (content,))
        return blob

    def _keep(
        self,
        header: BlobHeader,
        content: Callable[[], Iterable[bytes]],
        events: Iterable[str] = (),
    ) -> bool:
        """Store a verified blob, and make room if there is too much now; return whether it was."""
        limit = self.max_bytes
        try:
            if limit is not None and header.file_bytes > limit:
                raise CacheError(
                    f"an entry of {header.file_bytes:,} bytes exceeds the maximum size of the "
                    f"cache ({limit:,} bytes)",
                    hint="Raise SNAPRT_CACHE_MAX_SIZE, for example to 20G; 0 means no limit.",
                )
            self._blobs.write(header.key.digest, content)
        except CacheError as error:
            self._refused(error)
            return False
        except OSError as error:
            self._failed("store a compiled program", error)
            return False
        for event in events:
            self._count(event)
        self._pending.add_blob(header)
        self._write_pending()
        return True

    # Counting.

    def _count(self, event: str, value: float = 1) -> None:
        if self.mode.writes:
            self._pending.add_event(event, value)
        if self._on_event is not None:
            self._on_event(event, value)

    def _count_hit(self, saved_seconds: float) -> None:
        self._count(reports.HIT)
        if saved_seconds > 0:
            self._count(reports.SAVED_SECONDS, saved_seconds)

    def _count_corrupt(self, digest: str, reason: str) -> None:
        LOGGER.info("the entry %s is damaged: %s", digest[:12], reason)
        self._count(reports.CORRUPT)
        if self.mode.writes:
            self._with_index(lambda: self._index.forget(digest))

    def _count_refused(self, name: str, refusal: BlobRefused) -> None:
        self._count(reports.REFUSED)
        self._warnings.once(
            "signature",
            f"{name} is not used: {refusal}.",
            "Use the same SNAPRT_CACHE_KEY_FILE for everyone who writes to this cache.",
        )

    # The index, room and pins.

    def _write_pending(self) -> None:
        def write() -> None:
            written, stored_bytes = self._pending.write()
            if self.max_bytes is not None and stored_bytes > self.max_bytes:
                # A few more than need be, and not too many at once.
                target = int(self.max_bytes * _FILLED_AFTER_EVICTION)
                removed, _ = self._evict(target, self.max_bytes, keep=written)
                if removed:
                    self._count(reports.EVICTED, len(removed))
                    self._pending.write()

        self._with_index(write)

    def _with_index(self, action: Callable[[], object]) -> None:
        """Do without the index where it cannot be used; nothing that matters depends on it."""
        if time.monotonic() < self._index_pause_ends:
            return
        try:
            action()
        except (IndexUnavailable, CacheError) as error:
            self._index_pause_ends = time.monotonic() + _INDEX_PAUSE_SECONDS
            LOGGER.info("cannot use the index of the cache: %s", error)

    def _evict(
        self, target: int, limit: int, keep: Iterable[str] = ()
    ) -> tuple[list[EntryRow], int]:
        protected = self._pinned().union(keep)
        return self._index.evict(
            target, at_most=_EVICTED_AT_ONCE, limit_bytes=limit, keep=protected
        )

    def _pinned(self) -> frozenset[str]:
        return frozenset(self._pins.names(KEY_NAME))

    # Checking.

    def _check_blob(self, digest: str, heal: bool) -> Finding:
        path = self._blobs.path(digest)
        problem, healed = "", False
        try:
            self._blobs.check(digest, set_aside=heal)
        except BlobDamaged as damage:
            problem, healed = str(damage), heal and not path.exists()
            if healed:
                self._count(reports.CORRUPT)
        except BlobRefused as refusal:
            problem = str(refusal)
        except OSError as error:
            problem = error.strerror or str(error)
        return Finding("entry", digest, path, problem, healed)

    def _check_index(self, sound: set[str], present: set[str], heal: bool) -> Finding:
        try:
            # A damaged index has been made anew by then: it holds nothing that blobs do not.
            if damage := self._index.check():
                return Finding("index", "", self.index_path, damage, True)
            keys = {row.key for row in self._index.entries()}
            if heal:
                self._index.align()
        except IndexUnavailable as error:
            return Finding("index", "", self.index_path, str(error))
        if sound <= keys <= present:
            return Finding("index", "", self.index_path)
        return Finding("index", "", self.index_path, "its rows do not match the entries", heal)

    # Trouble.

    def _cannot(self, doing: str, error: OSError) -> CacheError:
        return CacheError(
            f"cannot {doing} the cache in {self.path}: {error.strerror or error} "
            f"({error.filename})",
            hint=remedy(error, "make the directory writable and try again"),
        )

    def _useless(self, digest: str, reason: str) -> CacheError:
        return CacheError(
            f"cannot use the entry {digest[:12]} of the cache in {self.path}: {reason}",
            hint="Fill the cache again on a machine with write access to it.",
        )

    def _missing(self, key: Key, name: str) -> CacheError:
        from snaprt_cache import why  # here alone: few processes may not miss

        return why.missing(self.path, self._blobs.headers(set_aside=False), key, name)

    def _failed(self, doing: str, error: OSError) -> None:
        self._count(reports.ERROR)
        self._warnings.files(doing, error)

    def _refused(self, error: CacheError) -> None:
        self._count(reports.ERROR)
        self._warnings.once(
            "refused", f"The compile cache is not used: {error.message}.", error.hint
        )

    # Forks.

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
        self._pending.after_fork_in_child()
