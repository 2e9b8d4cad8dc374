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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from snaprt_cache import frame
from snaprt_cache.folder import PRIVATE, Access, make_folders
from snaprt_cache.frame import BlobDamaged, BlobHeader, BlobRefused
from snaprt_cache.signing import Signing

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: there, a file that is open cannot be removed anyway.
    fcntl = None

_BLOB_NAME: Final = re.compile(r"[0-9a-f]{64}\.blob")
_FAN_NAME: Final = re.compile(r"[0-9a-f]{2}")
_TEMPORARY_NAME: Final = re.compile(r"[0-9a-f]{12}-[0-9a-f]{16}\.tmp")
# A damaged blob, or a garbled index with its journal; the first number is when, in nanoseconds.
_SET_ASIDE_NAME: Final = re.compile(
    r"(?:[0-9a-f]{64}|index)-([0-9]+)-[0-9]+\.(?:bad|sqlite)(?:-[a-z]+)?"
)
# A temporary file younger than this is left alone even if nobody seems to hold it: its writer may
# stand between making it and locking it, or be on another machine of a network file system.
_STALE_SECONDS: Final = 900.0
# Damaged blobs are kept for whoever wants to look into them; more than a few tell nothing new.
_KEPT_ASIDE: Final = 32
_UNSIGNED: Final = Signing()


@dataclass(frozen=True)
class Found:
    """A blob that was read and verified."""

    header: BlobHeader
    payload: bytes


class BlobFolder:
    """The blobs of one cache, and the temporary and damaged files beside them.

    Args:
        root: The cache directory.
        folder: The folder in it that belongs to this format.
        access: The permissions of what it makes.
        signing: Which signature a blob needs to be read.
    """

    def __init__(
        self, root: Path, folder: Path, access: Access = PRIVATE, signing: Signing = _UNSIGNED
    ) -> None:
        self._root = root
        self._folder = folder
        self._access = access
        self._signing = signing
        self._blobs = folder / "blobs"
        self._temporary = folder / "temporary"
        self.quarantine = folder / "quarantine"
        self._sweep_lock = threading.Lock()
        self._swept = False

    def path(self, digest: str) -> Path:
        """Return where the blob of a key is, or would be."""
        return self._blobs / digest[:2] / f"{digest}.blob"

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
        """
        try:
            file = _open(self.path(digest))
        except FileNotFoundError:
            return None
        with file, self._setting_aside_if_damaged(digest, file, set_aside):
            header = _read_header_of(digest, file, self._signing)
            return Found(header, frame.read_payload(file, header))

    def header(self, digest: str, *, set_aside: bool = True) -> BlobHeader | None:
        """Read the header of a key's blob.

        Args:
            digest: The key's digest.
            set_aside: Whether to move the blob to the quarantine if the header is damaged.

        Returns:
            None where there is no blob, or a damaged or a refused one, or it cannot be read.
        """
        try:
            file = _open(self.path(digest))
            with file, self._setting_aside_if_damaged(digest, file, set_aside):
                return _read_header_of(digest, file, self._signing)
        except (OSError, BlobDamaged, BlobRefused):
            return None

    def write(self, digest: str, *contents: bytes) -> None:
        """Put a blob in place of whatever was there: readers see the old one or the whole new one.

        Args:
            digest: The key's digest.
            contents: The blob's bytes, in pieces.

        Raises:
            OSError: It cannot be written; nothing is left behind.
        """
        try:
            self._write(digest, contents)
        except FileNotFoundError:
            # Somebody removed the folders, or the whole cache, since they were made.
            self._write(digest, contents)

    def remove(self, digest: str) -> None:
        """Remove the blob of a key, if there is one; who has it open reads on.

        Raises:
            OSError: It cannot be removed.
        """
        self.path(digest).unlink(missing_ok=True)

    def _write(self, digest: str, contents: Iterable[bytes]) -> None:
        destination = self.path(digest)
        make_folders(
            self._access,
            self._root,
            self._folder,
            self._temporary,
            self._blobs,
            destination.parent,
        )
        self._sweep_once()
        temporary = self._temporary / f"{digest[:12]}-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o600)  # until it is whole, it is its writer's
        try:
            with open(descriptor, "wb", buffering=0) as file:
                # The lock tells a sweep that the writer lives. It ends with the process.
                _try_lock(descriptor)
                for content in contents:
                    _write_all(file, content)
                if not self._access.is_private:
                    os.chmod(temporary, self._access.file_mode)
                os.fsync(descriptor)
                os.replace(temporary, destination)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        # The folder is not synced: a power cut may take the new name away, which is a miss.

    def set_aside(self, digest: str) -> bool:
        """Move a key's blob to the quarantine; return whether there was one and it was moved."""
        name = f"{digest}-{time.time_ns()}-{os.getpid()}.bad"
        try:
            make_folders(self._access, self._root, self._folder, self.quarantine)
            os.replace(self.path(digest), self.quarantine / name)
        except OSError:
            return False
        self._forget_oldest_set_aside()
        return True

    @contextlib.contextmanager
    def _setting_aside_if_damaged(
        self, digest: str, file: io.FileIO, set_aside: bool = True
    ) -> Iterator[None]:
        try:
            yield
        except BlobDamaged:
            if not set_aside:
                raise
            # Between our read and now, another process may have put a good blob there.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(self.path(digest)), os.fstat(file.fileno())):
                    self.set_aside(digest)
            raise

    def _forget_oldest_set_aside(self) -> None:
        with contextlib.suppress(OSError):
            matches = filter(None, map(_SET_ASIDE_NAME.fullmatch, os.listdir(self.quarantine)))
            by_age = sorted(matches, key=lambda match: int(match[1]))
            for match in by_age[:-_KEPT_ASIDE]:
                os.unlink(self.quarantine / match[0])

    def digests(self, prefix: str = "") -> Iterator[str]:
        """Return the digests of the keys that have a blob and start with ``prefix``."""
        for fan in sorted(_names(self._blobs, _FAN_NAME)):
            if fan.startswith(prefix[:2]):
                for name in sorted(_names(self._blobs / fan, _BLOB_NAME)):
                    if name.startswith(prefix):
                        yield name.removesuffix(".blob")

    def headers(self, *, set_aside: bool = True) -> Iterator[BlobHeader]:
        """Return the headers of all blobs that are whole; set the others aside if told to."""
        headers = (self.header(digest, set_aside=set_aside) for digest in self.digests())
        return (header for header in headers if header is not None)

    def set_aside_files(self) -> list[Path]:
        """Return the files in the quarantine, but for journals, in no particular order."""
        names = _names(self.quarantine, _SET_ASIDE_NAME)
        return [self.quarantine / name for name in names if name.endswith((".bad", ".sqlite"))]

    def clear(self) -> int:
        """Remove every blob and all that was set aside; return how many blobs there were.

        Files that are not the cache's stay, and so do the folders that hold them.

        Raises:
            OSError: A file cannot be removed.
        """
        removed = 0
        for digest in list(self.digests()):
            self.path(digest).unlink(missing_ok=True)
            removed += 1
        for name in _names(self.quarantine, _SET_ASIDE_NAME):
            (self.quarantine / name).unlink(missing_ok=True)
        for fan in _names(self._blobs, _FAN_NAME):
            with contextlib.suppress(OSError):
                (self._blobs / fan).rmdir()
        return removed

    def _sweep_once(self) -> None:
        with self._sweep_lock:
            if self._swept:
                return
            self._swept = True
        self.sweep()

    def sweep(self) -> int:
        """Remove what killed writers left behind; return how many files that were."""
        return sum(self._remove_stale(path) for path in self.temporary_files())

    def stale_files(self) -> list[Path]:
        """Return what killed writers left behind."""
        return [path for path in self.temporary_files() if self._remove_stale(path, really=False)]

    def temporary_files(self) -> list[Path]:
        """Return the files of writers, those at work and those that were killed."""
        return [self._temporary / name for name in _names(self._temporary, _TEMPORARY_NAME)]

    def _remove_stale(self, path: Path, *, really: bool = True) -> bool:
        """Remove a temporary file if it is stale; return whether it is.

        A file is stale when it is old and no living process holds its lock. The clock may have
        been set back: a file from far in the future counts as old, too.
        """
        # Open for writing: a network file system locks nothing exclusively otherwise.
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
            age = abs(time.time() - os.fstat(file.fileno()).st_mtime)
            if age > _STALE_SECONDS and _try_lock(file.fileno()):
                if really:
                    os.unlink(path)
                return True
        return False

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._sweep_lock = threading.Lock()


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if pattern.fullmatch(name)]
    except OSError:
        return []


def read_content(digest: str, content: bytes, signing: Signing) -> Found:
    """Read and verify the whole content of a blob file that came from elsewhere.

    Raises:
        BlobDamaged: It is no whole blob of this key.
        BlobRefused: It is not signed as ``signing`` asks.
    """
    file = io.BytesIO(content)
    header = frame.read_header(file, len(content), signing)
    return Found(_of_key(digest, header), frame.read_payload(file, header))


def _read_header_of(digest: str, file: io.FileIO, signing: Signing) -> BlobHeader:
    size = os.fstat(file.fileno()).st_size
    return _of_key(digest, frame.read_header(file, size, signing))


def _of_key(digest: str, header: BlobHeader) -> BlobHeader:
    if header.key.digest != digest:
        raise BlobDamaged("it belongs to another key")
    return header


def _open(path: Path) -> io.FileIO:
    return io.FileIO(path, "rb")


def _write_all(file: io.FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) or 0 :]


def _try_lock(descriptor: int) -> bool:
    """Take the file's lock without waiting; True also where there are no such locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: age alone decides.
        return True
    return True
