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
from pathlib import Path
from typing import BinaryIO, Final

from snaprt_cache import frame, reports
from snaprt_cache.blobs import Found, check_content, pieces, read_content
from snaprt_cache.contents import Contents
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import default_path, refuse_if_unsafe
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused
from snaprt_cache.index.rows import IndexedEntry, compile_seconds, indexed_entry
from snaprt_cache.key import Key
from snaprt_cache.lock import forks
from snaprt_cache.miss.strict import missing
from snaprt_cache.modes import FAIL_ON_MISS, OFF, READ_WRITE, Mode, mode_called
from snaprt_cache.remote.tier import Tier
from snaprt_cache.reports import CacheStats, Entry, Finding, OnEvent
from snaprt_cache.signing import Signing
from snaprt_cache.trouble import LOGGER

__all__ = ["Cache", "CacheStats", "Entry", "Finding", "default_path"]

Obstacle = Callable[[Mapping[str, str | int | float]], str]

#: What the files of a cache are held under together, in bytes, unless it is told otherwise.
DEFAULT_MAX_BYTES: Final = 10 << 30


class Cache(Contents):
    """A compile cache in a directory; safe for threads, processes and forks.

    ``Cache.open`` makes one. It touches the disk at the first ``get`` or ``put``.
    """

    def __init__(
        self,
        path: Path,
        on_event: OnEvent | None = None,
        *,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        mode: Mode = READ_WRITE,
        signing: Signing | None = None,
        tier: Tier | None = None,
    ) -> None:
        super().__init__(
            path, max_bytes=max_bytes, signing=signing or Signing(), writes=mode.writes
        )
        #: What programs may do with it.
        self.mode: Final = mode
        self._tier = tier
        self._on_event = on_event
        # Rows of blobs that are stored, until the index has them.
        self._unwritten: dict[str, IndexedEntry] = {}
        #: Why entries could not be used when they were last got, by their digests.
        self.obstacles: Final[dict[str, str]] = {}
        # What was made anew in a mode that does not use what was there before.
        self._refreshed: set[str] = set()
        if mode.writes:
            weakref.finalize(self, self._usage.write_at_exit)
        forks.watch(self)

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
                is not ``shared``; or it is, and there is no key; or there is no such mode.
        """
        if shared and signing_key is None:
            raise CacheError(
                "a shared cache needs a key with which its entries are signed",
                hint="Set SNAPRT_CACHE_KEY_FILE to a file with the key, the same for all users.",
            )
        folder = default_path() if path is None else Path(path)
        with contextlib.suppress(RuntimeError):  # no home directory: "~" is then a name like others
            folder = folder.expanduser()
        cache = cls(
            Path(os.path.abspath(folder)),
            on_event,
            max_bytes=max_bytes,
            mode=mode_called(mode),
            signing=Signing(signing_key, required=shared),
            tier=tier,
        )
        if not shared:  # There, signatures say who made an entry.
            with contextlib.suppress(OSError):  # get and put will meet it, and warn
                refuse_if_unsafe(cache.path)
                refuse_if_unsafe(cache.folder)
        return cache

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
        found: Found | None = None
        if self._may_read(key.digest):
            found = self._read(key.digest) or self._fetch(key.digest)
        entry: Entry | None = None
        reason = ""
        if found is not None and obstacle is not None:
            reason = self.obstacles[key.digest] = obstacle(found.header.metadata)
        if found is not None and not reason:
            seconds = time.perf_counter() - start
            entry = Entry(found.payload, found.header.metadata, seconds)
            self._count_hit(found.header, seconds, counted)
        elif counted:
            self._count(reports.MISS)
        self._write_usage_if_due()
        if reason:
            LOGGER.info("the entry %s is not used: %s", key.digest[:12], reason)
        if entry is None and counted and not self.mode.misses:
            if reason:
                raise self._useless(key.digest, reason)
            raise missing(self.path, self._blobs.headers(set_aside=False), key, name)
        return entry

    def offers(self, digest: str) -> bool:
        """Say whether there is a file that ``get`` would read; whether it is whole, it finds out.

        One that this process could not use when it was last got is none.

        Args:
            digest: The digest of the entry's key.
        """
        is_usable = self._may_read(digest) and not self.obstacles.get(digest)
        return is_usable and self._blobs.exists(digest)

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
            counted: Whether it is a program, as for ``get``.

        Returns:
            Whether it was stored. If not, the user was told why and what to do, or the mode does
            not store.
        """
        if not self.mode.writes:
            return False
        try:
            header, head, stored = frame.encode_blob(key, payload, metadata, self._signing)
            self._check_size(header)
            self._blobs.write(key.digest, lambda: (head, stored))
        except CacheError as error:
            self._refused(error)
            return False
        except OSError as error:
            self._failed("store a compiled program", error)
            return False
        self._refreshed.add(key.digest)
        if counted:
            self._count(reports.PUT)
        self._note(header)
        if self._tier is not None:
            self._tier.send(key.digest, head + stored)
        return True

    def count_hit(self, entry: Entry) -> None:
        """Count the hit of an entry that was got uncounted, now that it is used."""
        self._count(reports.HIT)
        saved = float(entry.metadata.get("compile_seconds", 0)) - entry.read_seconds
        if saved > 0:
            self._count(reports.SAVED_SECONDS, saved)

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

    def _useless(self, digest: str, reason: str) -> CacheError:
        return CacheError(
            f"the entry {digest[:12]} of the cache in {self.path} is of no use: {reason}",
            hint="Fill the cache again on a machine that may write to it.",
        )

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
            content.seek(0)
            header = check_content(digest, content, self._signing)
        except (BlobDamaged, BlobRefused) as error:
            raise CacheError(
                f"the entry {digest[:12]} cannot be taken into the cache in {self.path}: {error}",
                hint="Have it made anew with this cache's SNAPRT_CACHE_KEY_FILE."
                if isinstance(error, BlobRefused)
                else "Have it made anew.",
            ) from error

        def all_of_it() -> Iterator[bytes]:
            content.seek(0)
            return pieces(content)

        return self._keep(header, all_of_it)

    # Reading.

    def _may_read(self, digest: str) -> bool:
        return self.mode.reads or digest in self._refreshed

    def _read(self, digest: str) -> Found | None:
        try:
            return self._blobs.read(digest, set_aside=self.mode.writes)
        except BlobDamaged as damage:
            self._count_corrupt(digest, str(damage))
        except BlobRefused as refusal:
            self._count_refused(
                digest, f"The entry {digest[:12]} of the cache in {self.path}", refusal
            )
        except CacheError as error:
            self._refused(error)
        except OSError as error:
            self._failed("read a compiled program", error)
        return None

    def _fetch(self, digest: str) -> Found | None:
        """Ask the tier; what it gives is verified, and stored here for the next time."""
        content = None if self._tier is None else self._tier.fetch(digest)
        if content is None:
            return None
        key = self._signing.key
        try:
            found = read_content(digest, content, Signing(key, required=key is not None))
        except BlobDamaged as damage:
            LOGGER.info("the entry %s came damaged from the remote tier: %s", digest[:12], damage)
            self._count(reports.CORRUPT)
            return None
        except BlobRefused as refusal:
            self._count_refused(digest, f"The entry {digest[:12]} of the remote tier", refusal)
            return None
        self._count(reports.REMOTE_HIT)
        if self.mode.writes:
            self._keep(found.header, lambda: (content,))
        return found

    def _keep(self, header: BlobHeader, content: Callable[[], Iterable[bytes]]) -> bool:
        """Store a blob that came from elsewhere and was verified; return whether it was."""
        try:
            self._check_size(header)
            self._blobs.write(header.key.digest, content)
        except CacheError as error:
            self._refused(error)
            return False
        except OSError as error:
            self._failed("store a compiled program", error)
            return False
        self._note(header)
        return True

    # Counting.

    def _count(self, event: str, value: float = 1) -> None:
        if self.mode.writes:
            super()._count(event, value)
        if self._on_event is not None:
            self._on_event(event, value)

    def _count_hit(self, header: BlobHeader, seconds: float, counted: bool) -> None:
        saved = max(0.0, compile_seconds(header) - seconds)
        if self.mode.writes:
            self._usage.add_hit(header.key.digest, saved)
        if not counted:
            return
        self._count(reports.HIT)
        if saved:
            self._count(reports.SAVED_SECONDS, saved)

    def _count_corrupt(self, digest: str, reason: str) -> None:
        LOGGER.info("the entry %s is damaged: %s", digest[:12], reason)
        self._count(reports.CORRUPT)
        if self.mode.writes:
            self._with_index(lambda: self._index.remove([digest]))

    def _count_refused(self, digest: str, which: str, refusal: BlobRefused) -> None:
        self._count(reports.REFUSED)
        self._warnings.once(
            "signature",
            f"{which} is not used: {refusal}.",
            "Give all who write there the same SNAPRT_CACHE_KEY_FILE.",
        )

    def _write_usage_if_due(self) -> None:
        if self._usage.is_due():
            self._with_index(self._write_usage)

    def _note(self, header: BlobHeader) -> None:
        """Tell the index of a new blob, and make room if there is too much now."""
        self._unwritten[header.key.digest] = indexed_entry(header)
        self._with_index(self._write_rows, self._write_usage)

    def _write_rows(self) -> None:
        rows = dict(self._unwritten)
        stored_bytes = self._index.put(rows.values())
        for digest in rows:
            self._unwritten.pop(digest, None)
        if self.max_bytes is not None and stored_bytes > self.max_bytes:
            # What this process has just used is noted first.
            self._write_usage()
            if gone := self._make_room(self.max_bytes, keep=frozenset(rows)):
                self._count(reports.EVICTED, len(gone))

    # Trouble.

    def _check_size(self, header: BlobHeader) -> None:
        size = header.header_bytes + header.stored_bytes
        if self.max_bytes is not None and size > self.max_bytes:
            raise CacheError(
                f"an entry of {size:,} bytes is larger than all of it may be "
                f"({self.max_bytes:,} bytes)",
                hint="Raise SNAPRT_CACHE_MAX_SIZE, such as to 20G; 0 is no limit.",
            )

    def _failed(self, doing: str, error: OSError) -> None:
        self._count(reports.ERROR)
        self._warnings.files(doing, error)

    def _refused(self, error: CacheError) -> None:
        self._count(reports.ERROR)
        self._warnings.once(
            "refused", f"The compile cache is not used: {error.message}.", error.hint
        )

    def after_fork_in_child(self) -> None:
        """Take nothing over from the parent that belongs to it: connections, locks, counts."""
        super().after_fork_in_child()
        self._unwritten.clear()
