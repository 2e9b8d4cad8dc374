"""The folder of blob files: one file an entry, found by the key's digest, whole or absent.

Knows files and frames, not the index. A hit needs nothing but this folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from snaprt_cache import frame
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder, NotAFileError, try_lock
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused
from snaprt_cache.signing import Signing

_BLOB_NAME: Final = re.compile(r"[0-9a-f]{64}\.blob")
_FAN_NAME: Final = re.compile(r"[0-9a-f]{2}")
_TEMPORARY_NAME: Final = re.compile(
    r"[0-9a-f]{12}-[0-9a-f]{16}\.tmp|\.(?:misses\.jsonl|file-digests\.json)\.\w+(?:\.tmp)?"
)
# A damaged blob; the first number is when, in nanoseconds. Older versions kept indexes, too.
_SET_ASIDE_NAME: Final = re.compile(
    r"(?:[0-9a-f]{64}|index)-([0-9]+)-[0-9]+\.(?:bad|sqlite)(?:-[a-z]+)?"
)
# A temporary file younger than this is left alone even if nobody seems to hold it: its writer may
# stand between making it and locking it, or be on another machine of a network file system.
_STALE_SECONDS: Final = 900.0
# Damaged blobs are kept for whoever wants to look into them; more than a few tell nothing new.
_KEPT_ASIDE: Final = 32
_UNSIGNED: Final = Signing()
_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Found:
    """A blob that was read and verified."""

    header: BlobHeader
    payload: bytes


class BlobFolder:
    """The blobs of one cache, and the temporary and damaged files beside them.

    Args:
        folder: The folder in the cache directory that belongs to this format.
        signing: Which signature a blob needs to be read.
    """

    def __init__(self, folder: Folder, signing: Signing = _UNSIGNED) -> None:
        self._signing = signing
        self._folder = folder
        self._blobs = folder.folder("blobs")
        self._temporary = folder.folder("temporary")
        self._quarantine = folder.folder("quarantine")
        self._sweep_lock = threading.Lock()
        self._swept = False

    def path(self, digest: str) -> Path:
        """Return where the blob of a key is, or would be."""
        return self._fan(digest).path / _name(digest)

    def _fan(self, digest: str) -> Folder:
        return self._blobs.folder(digest[:2])

    def exists(self, digest: str) -> bool:
        """Return whether something has the name of a key's blob."""
        return self._fan(digest).status(_name(digest)) is not None

    def read(self, digest: str, *, set_aside: bool = True) -> Found | None:
        """Read and verify the blob of a key.

        Args:
            digest: The key's digest.
            set_aside: Whether to move the blob to the quarantine if it is damaged.

        Returns:
            None where there is no blob.

        Raises:
            BlobDamaged: It was damaged, and has been set aside if the folder can be written.
            BlobRefused: It is not signed as it has to be; it stays where it is.
            OSError: It cannot be read.
            CacheError: Others may write to it, and the cache is private.
        """
        with contextlib.suppress(FileNotFoundError), self._open(digest, set_aside) as file:
            header = _read_header_of(digest, file, self._signing)
            return Found(header, frame.read_payload(file, header))
        return None

    def check(self, digest: str, *, set_aside: bool) -> None:
        """Verify the blob of a key, whatever its size, in little memory; as ``read`` otherwise."""
        with contextlib.suppress(FileNotFoundError), self._open(digest, set_aside) as file:
            frame.check_payload(file, _read_header_of(digest, file, self._signing))

    def header(self, digest: str, *, set_aside: bool = True) -> BlobHeader | None:
        """Read the header of a key's blob.

        Args:
            digest: The key's digest.
            set_aside: Whether to move the blob to the quarantine if the header is damaged.

        Returns:
            None where there is no blob, or a damaged or a refused one, or it cannot be read.

        Raises:
            CacheError: Others may write to it, and the cache is private.
        """
        try:
            with self._open(digest, set_aside) as file:
                return _read_header_of(digest, file, self._signing)
        except (OSError, BlobDamaged, BlobRefused):
            return None

    def open(self, digest: str) -> BinaryIO:
        """Open the file of a key's blob, as it is.

        Raises:
            OSError: There is none, or it cannot be read.
            CacheError: Others may write to it, and the cache is private.
        """
        return io.FileIO(self._fan(digest).open(_name(digest), os.O_RDONLY))

    def write(self, digest: str, contents: Callable[[], Iterable[bytes]]) -> None:
        """Put a blob in place of whatever was there: readers see the old one or the whole new one.

        Args:
            digest: The key's digest.
            contents: Gives the blob's bytes, in pieces; called again where it has to be tried anew.

        Raises:
            OSError: It cannot be written; nothing is left behind.
            CacheError: Others may write to it, and the cache is private.
        """
        self._sweep_once()
        try:
            self._write(digest, contents())
        except FileNotFoundError:
            # Somebody removed the folders, or the whole cache, since they were made.
            self._write(digest, contents())

    def remove(self, digest: str) -> None:
        """Remove the blob of a key, if there is one; who has it open reads on.

        Raises:
            OSError: It cannot be removed.
            CacheError: Others may write to it, and the cache is private.
        """
        self._fan(digest).remove(_name(digest))

    def _write(self, digest: str, contents: Iterable[bytes]) -> None:
        temporary = f"{digest[:12]}-{secrets.token_hex(8)}.tmp"
        descriptor = self._temporary.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True
        )
        try:
            with io.FileIO(descriptor, "wb") as file:
                # The lock tells a sweep that the writer lives. It ends with the process.
                _is_unlocked(descriptor)
                for content in contents:
                    _write_all(file, content)
                os.fsync(descriptor)
                self._temporary.move(temporary, self._fan(digest), _name(digest))
        except BaseException:
            with contextlib.suppress(OSError, CacheError):
                self._temporary.remove(temporary)
            raise
        # The folder is not synced: a power cut may take the new name away, which is a miss.

    def set_aside(self, digest: str) -> bool:
        """Move a key's blob to the quarantine; return whether there was one and it was moved."""
        name = f"{digest}-{time.time_ns()}-{os.getpid()}.bad"
        try:
            self._fan(digest).move(_name(digest), self._quarantine, name)
        except (OSError, CacheError):
            return False
        self._forget_oldest_set_aside()
        return True

    @contextlib.contextmanager
    def _open(self, digest: str, set_aside: bool) -> Iterator[BinaryIO]:
        """Open a key's blob, and set it aside if it turns out to be damaged and that is wanted."""
        try:
            file = self.open(digest)
        except NotAFileError as error:
            if set_aside:
                self.set_aside(digest)
            raise BlobDamaged(str(error.strerror)) from error
        with file:
            try:
                yield file
            except BlobDamaged:
                # Between our read and now, another process may have put a good blob there.
                now = self._fan(digest).status(_name(digest)) if set_aside else None
                if now is not None and os.path.samestat(now, os.fstat(file.fileno())):
                    self.set_aside(digest)
                raise

    def _forget_oldest_set_aside(self) -> None:
        names = self._quarantine.names(_SET_ASIDE_NAME)
        by_age = sorted(names, key=lambda name: int(name.split("-")[1]))
        for name in by_age[:-_KEPT_ASIDE]:
            with contextlib.suppress(OSError):
                self._quarantine.remove(name)

    def digests(self, prefix: str = "") -> Iterator[str]:
        """Return the digests of the keys that have a blob and start with ``prefix``."""
        for fan in sorted(self._blobs.names(_FAN_NAME)):
            if fan.startswith(prefix[:2]):
                for name in sorted(self._blobs.folder(fan).names(_BLOB_NAME)):
                    if name.startswith(prefix):
                        yield name.removesuffix(".blob")

    def sizes(self) -> dict[str, int]:
        """Return the size of each blob's file, by the digest of its key."""
        sizes = {}
        for fan in self._blobs.names(_FAN_NAME):
            with contextlib.suppress(OSError), self._blobs.folder(fan).opened() as folder:
                for name in filter(_BLOB_NAME.fullmatch, os.listdir(folder)):
                    with contextlib.suppress(OSError):
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        sizes[name.removesuffix(".blob")] = status.st_size
        return sizes

    def headers(self, *, set_aside: bool = True) -> Iterator[BlobHeader]:
        """Return the headers of all blobs that are whole; set the others aside if told to."""
        headers = (self.header(digest, set_aside=set_aside) for digest in self.digests())
        return (header for header in headers if header is not None)

    def set_aside_files(self) -> list[Path]:
        """Return the files in the quarantine, but for journals, in no particular order."""
        path = self._quarantine.path
        names = self._quarantine.names(_SET_ASIDE_NAME)
        return [path / name for name in names if name.endswith((".bad", ".sqlite"))]

    def clear(self) -> int:
        """Remove every blob and all that was set aside; return how many blobs there were.

        Files that are not the cache's stay, and so do the folders that hold them.

        Raises:
            OSError: A file cannot be removed.
        """
        removed = 0
        for digest in list(self.digests()):
            self.remove(digest)
            removed += 1
        for name in self._quarantine.names(_SET_ASIDE_NAME):
            self._quarantine.remove(name)
        for fan in self._blobs.names(_FAN_NAME):
            with contextlib.suppress(OSError), self._blobs.opened() as folder:
                os.rmdir(fan, dir_fd=folder)
        return removed

    def _sweep_once(self) -> None:
        with self._sweep_lock:
            if self._swept:
                return
            self._swept = True
        self.sweep()

    def sweep(self) -> int:
        """Remove what killed writers left behind; return how many files that were."""
        return sum(self._remove_stale(folder, name) for folder, name in self._temporary_files())

    def stale_files(self) -> list[Path]:
        """Return what killed writers left behind."""
        return [
            folder.path / name
            for folder, name in self._temporary_files()
            if self._remove_stale(folder, name, really=False)
        ]

    def _temporary_files(self) -> list[tuple[Folder, str]]:
        return [
            (folder, name)
            for folder in (self._temporary, self._folder)
            for name in folder.names(_TEMPORARY_NAME)
        ]

    def _remove_stale(self, folder: Folder, name: str, *, really: bool = True) -> bool:
        """Remove a temporary file if it is stale; return whether it is.

        A file is stale when it is old and no living process holds its lock. The clock may have
        been set back: a file from far in the future counts as old, too.
        """
        status = folder.status(name)
        if status is None or abs(time.time() - status.st_mtime) <= _STALE_SECONDS:
            return False
        with contextlib.suppress(OSError, CacheError):
            # Open for writing: a network file system locks nothing exclusively otherwise.
            with contextlib.suppress(NotAFileError):  # No writer of ours makes such a thing.
                descriptor = folder.open(name, os.O_RDWR)
                try:
                    if not _is_unlocked(descriptor):
                        return False
                finally:
                    os.close(descriptor)
            if really:
                folder.remove(name)
            return True
        return False

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._sweep_lock = threading.Lock()


def _name(digest: str) -> str:
    return f"{digest}.blob"


def read_content(digest: str, content: bytes, signing: Signing) -> Found:
    """Read and verify the whole content of a blob file that came from elsewhere.

    Raises:
        BlobDamaged: It is no whole blob of this key.
        BlobRefused: It is not signed as ``signing`` asks.
    """
    file = io.BytesIO(content)
    header = _read_header_of(digest, file, signing)
    return Found(header, frame.read_payload(file, header))


def check_content(digest: str, file: BinaryIO, signing: Signing) -> BlobHeader:
    """Verify a blob that came from elsewhere, whatever its size, in little memory.

    Args:
        digest: The digest of the key whose blob it should be.
        file: Holds the blob and nothing else, and stands at its start.
        signing: Which signature it needs.

    Raises:
        BlobDamaged: It is no whole blob of this key.
        BlobRefused: It is not signed as ``signing`` asks.
        OSError: It cannot be read.
    """
    header = _read_header_of(digest, file, signing)
    frame.check_payload(file, header)
    return header


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Return what is left of a file, a megabyte at a time."""
    return iter(lambda: file.read(_PIECE_BYTES), b"")


def _read_header_of(digest: str, file: BinaryIO, signing: Signing) -> BlobHeader:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    header = frame.read_header(file, size, signing)
    if header.key.digest != digest:
        raise BlobDamaged("it belongs to another key")
    return header


def _write_all(file: io.FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) or 0 :]


def _is_unlocked(descriptor: int) -> bool:
    """Lock a file; say whether nobody else has. Without locks, the age of a file alone decides."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True
