"""The blobs: one file per entry, named by the key's digest, whole or absent.

A hit needs nothing but this folder. What is damaged is set aside; whoever comes across a blob that
others may write to, in a private cache, gets a CacheError.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from snaprt_cache import frame
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder, NotAFileError, is_unlocked
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused, Signing
from snaprt_cache.key import Key

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


class BlobFolder:
    """The blobs of one cache, and the temporary and damaged files beside them.

    Args:
        folder: The folder in the cache directory that belongs to this format.
        signing: Which signature a blob needs to be read.
    """

    def __init__(self, folder: Folder, signing: Signing) -> None:
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
        """Return whether something has the name of a key's blob, where it is safe to look."""
        with contextlib.suppress(CacheError):
            return self._fan(digest).status(_name(digest)) is not None
        return False

    def read(self, key: Key, *, set_aside: bool) -> tuple[BlobHeader, bytes] | None:
        """Read and verify the blob of a key; None where there is none.

        Args:
            key: The key.
            set_aside: Whether to move the blob to the quarantine if it is damaged.

        Raises:
            BlobDamaged: It was damaged, and has been set aside if the folder can be written.
            BlobRefused: It is not signed as it has to be; it stays where it is.
            OSError: It cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), self._open(key.digest, set_aside) as file:
            return frame.read_blob(key.digest, file, self._signing, key)
        return None

    def check(self, digest: str, *, set_aside: bool) -> None:
        """Verify the blob of a key, whatever its size, in little memory; as ``read`` otherwise."""
        with contextlib.suppress(FileNotFoundError), self._open(digest, set_aside) as file:
            frame.check_blob(digest, file, self._signing)

    def header(self, digest: str, *, set_aside: bool = True) -> BlobHeader | None:
        """Read the header of a key's blob; None where there is no blob that is whole and ours."""
        try:
            with self._open(digest, set_aside) as file:
                return frame.read_header(digest, file, self._signing)
        except (OSError, BlobDamaged, BlobRefused):
            return None

    def open(self, digest: str) -> BinaryIO:
        """Open the file of a key's blob, as it is.

        Raises:
            OSError: There is none, or it cannot be read.
        """
        return io.FileIO(self._fan(digest).open(_name(digest), os.O_RDONLY))

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

    def write(self, digest: str, contents: Callable[[], Iterable[bytes]]) -> None:
        """Put a blob in place of whatever was there: readers see the old one or the whole new one.

        Args:
            digest: The key's digest.
            contents: Gives the blob's bytes, in pieces; called again where it has to be tried anew.

        Raises:
            OSError: It cannot be written; nothing is left behind.
        """
        with self._sweep_lock:
            is_first, self._swept = not self._swept, True
        if is_first:
            self.sweep()
        # The folder is not synced: a power cut may take the new name away, which is a miss.
        try:
            self._fan(digest).replace(_name(digest), contents(), synced_in=self._temporary)
        except FileNotFoundError:
            # Somebody removed the folders, or the whole cache, since they were made.
            self._fan(digest).replace(_name(digest), contents(), synced_in=self._temporary)

    def remove(self, digest: str) -> None:
        """Remove the blob of a key, if there is one; who has it open reads on.

        Raises:
            OSError: It cannot be removed.
        """
        self._fan(digest).remove(_name(digest))

    def set_aside(self, digest: str) -> bool:
        """Move a key's blob to the quarantine; return whether there was one and it was moved."""
        name = f"{digest}-{time.time_ns()}-{os.getpid()}.bad"
        try:
            self._fan(digest).move(_name(digest), self._quarantine, name)
        except (OSError, CacheError):
            return False
        names = self._quarantine.names(_SET_ASIDE_NAME)
        by_age = sorted(names, key=lambda name: int(name.split("-")[1]))
        for name in by_age[:-_KEPT_ASIDE]:
            with contextlib.suppress(OSError):
                self._quarantine.remove(name)
        return True

    def set_aside_files(self) -> list[Path]:
        """Return the files in the quarantine, but for journals, in no particular order."""
        path = self._quarantine.path
        names = self._quarantine.names(_SET_ASIDE_NAME)
        return [path / name for name in names if name.endswith((".bad", ".sqlite"))]

    def sizes(self) -> dict[str, int]:
        """Return the size of each blob's file, by the digest of its key, in the digests' order."""
        sizes = {}
        for fan in sorted(self._blobs.names(_FAN_NAME)):
            with contextlib.suppress(OSError), self._blobs.folder(fan).opened() as folder:
                for name in sorted(filter(_BLOB_NAME.fullmatch, os.listdir(folder))):
                    with contextlib.suppress(OSError):
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        sizes[name.removesuffix(".blob")] = status.st_size
        return sizes

    def headers(self, *, set_aside: bool = True) -> Iterator[BlobHeader]:
        """Return the headers of all blobs that are whole; set the others aside if told to."""
        headers = (self.header(digest, set_aside=set_aside) for digest in self.sizes())
        return (header for header in headers if header is not None)

    def clear(self) -> int:
        """Remove every blob and all that was set aside; return how many blobs there were.

        Files that are not the cache's stay, and so do the folders that hold them.

        Raises:
            OSError: A file cannot be removed.
        """
        digests = list(self.sizes())
        for digest in digests:
            self.remove(digest)
        for name in self._quarantine.names(_SET_ASIDE_NAME):
            self._quarantine.remove(name)
        for fan in self._blobs.names(_FAN_NAME):
            with contextlib.suppress(OSError), self._blobs.opened() as folder:
                os.rmdir(fan, dir_fd=folder)
        return len(digests)

    def sweep(self, *, really: bool = True) -> list[Path]:
        """Remove what killed writers left behind, or only look for it; return the files."""
        return [
            folder.path / name
            for folder in (self._temporary, self._folder)
            for name in folder.names(_TEMPORARY_NAME)
            if _is_stale(folder, name, remove=really)
        ]

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._sweep_lock = threading.Lock()


def _name(digest: str) -> str:
    return f"{digest}.blob"


def _is_stale(folder: Folder, name: str, *, remove: bool) -> bool:
    """Return whether a temporary file is old and no living process holds its lock.

    The clock may have been set back: a file from far in the future counts as old, too.
    """
    status = folder.status(name)
    if status is None or abs(time.time() - status.st_mtime) <= _STALE_SECONDS:
        return False
    with contextlib.suppress(OSError, CacheError):
        # Open for writing: a network file system locks nothing exclusively otherwise.
        with contextlib.suppress(NotAFileError):  # No writer of ours makes such a thing.
            descriptor = folder.open(name, os.O_RDWR)
            try:
                if not is_unlocked(descriptor):
                    return False
            finally:
                os.close(descriptor)
        if remove:
            folder.remove(name)
        return True
    return False
