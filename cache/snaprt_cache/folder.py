"""Folders and files of a cache: private, or shared on purpose; safe to run from, safe to write to.

Executables are code: whoever can write into a private cache can run code as its user. And whoever
can write into a shared one can put links there, which must not lead our writes out of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from snaprt_cache.errors import CacheError

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER: Final = 0
_MODE_BITS: Final = 0o3777
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Opening a FIFO or a device must not wait, and no link may lead out of the cache.
_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITING: Final = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Access:
    """The permissions of the directories and files that a cache makes."""

    folder_mode: int
    file_mode: int

    @property
    def is_private(self) -> bool:
        """Whether they are for their user alone."""
        return not self.folder_mode & 0o077


PRIVATE: Final = Access(0o700, 0o600)
#: For a shared directory that is not there yet: for its group.
_FOR_THE_GROUP: Final = Access(0o2770, 0o660)


def shared_access(root: Path) -> Access:
    """Return the permissions in a directory that users share: those of the directory itself."""
    try:
        mode = stat.S_IMODE(os.stat(root).st_mode) & _MODE_BITS
    except OSError:
        return _FOR_THE_GROUP
    return Access(mode, mode & 0o666)


def default_path() -> Path:
    """Return the cache directory: ``SNAPRT_CACHE_DIR``, else one in the user's cache directory.

    Raises:
        CacheError: The variable is not set, and the user has no home directory.

    Examples:
        >>> snaprt.cache.open().path == snaprt.cache.default_path()
        True
    """
    chosen = os.environ.get("SNAPRT_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen)
    chosen = "~"
    with contextlib.suppress(RuntimeError, KeyError):
        chosen = platformdirs.user_cache_dir("snaprt", appauthor=False)
    if chosen.startswith("~"):
        raise CacheError(
            "no home directory for the compile cache",
            hint="Set SNAPRT_CACHE_DIR to a directory, or SNAPRT_CACHE=off.",
        )
    return Path(chosen)


def refuse_if_unsafe(folder: Path) -> None:
    """Check that nobody else can write executables into a cache directory, if it is there.

    Raises:
        CacheError: It belongs to another user, or others may write into it.
        OSError: It cannot be looked at.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = os.stat(folder)
        if stat.S_ISDIR(status.st_mode):
            _refuse_if_others_write(folder, (), status)


def _refuse_if_others_write(root: Path, below: Sequence[str], status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid in (user, _ROOT_USER) and not status.st_mode & _OTHERS_MAY_WRITE:
        return
    what = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    path = root.joinpath(*below)
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise CacheError(
            f"other users can write to the cache {what} {path} (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), so they could plant executables in it",
            hint=f"Run: chmod -R go-w '{root}'   or set SNAPRT_CACHE_DIR to a directory of your "
            "own.",
        )
    raise CacheError(
        f"the cache {what} {path} belongs to user {status.st_uid}, not to you ({user}), who "
        "could plant executables in it",
        hint=f"Set SNAPRT_CACHE_DIR to a directory of your own, or run: chown -R {user} '{root}'",
    )


class NotAFileError(OSError):
    """Something that is no file of its own is in the place of one: a link, a FIFO, a socket."""


@dataclass(frozen=True)
class Folder:
    """A cache directory, or a folder below it, and what is done in it by name.

    Each use opens the folders one in the other, from the root down, and follows no link below the
    root. In a private cache each folder, and each file that is opened, must be safe to run from.
    Every method raises OSError, with the whole path, where the system refuses; and CacheError where
    the cache is private, and others may write to what is opened.
    """

    root: Path  # the cache directory; links may lead to it
    below: tuple[str, ...] = ()  # the names that lead from there to the folder
    access: Access = PRIVATE  # the permissions of what is made

    @property
    def path(self) -> Path:
        """Where it is, to speak of it."""
        return self.root.joinpath(*self.below)

    def folder(self, *names: str) -> Folder:
        """Return a folder inside this one."""
        return Folder(self.root, (*self.below, *names), self.access)

    @contextlib.contextmanager
    def opened(self, *, make: bool = False) -> Iterator[int]:
        """Give a descriptor of the folder, which ``make`` makes where it is not there."""
        descriptor = self._descend(make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _descend(self, make: bool) -> int:
        # Each hit comes this way: no context managers, and paths only for errors.
        outer: int | None = None
        depth = 0
        is_private = self.access.is_private
        names: tuple[str | Path, ...] = (self.root, *self.below)
        try:
            for depth, name in enumerate(names):
                flags = _FOLDER_FLAGS if outer is None else _FOLDER_FLAGS | os.O_NOFOLLOW
                is_new = False
                try:
                    descriptor = os.open(name, flags, dir_fd=outer)
                except FileNotFoundError:
                    if not make:
                        raise
                    is_new = self._make_folder(name, outer)
                    descriptor = os.open(name, flags, dir_fd=outer)
                # In this order: Ctrl-C may come between, and a number is not to be closed twice.
                previous, outer = outer, descriptor
                if previous is not None:
                    os.close(previous)
                if is_private:
                    _refuse_if_others_write(self.root, self.below[:depth], os.fstat(descriptor))
                elif is_new:  # The umask may have taken from them what others need.
                    os.fchmod(descriptor, self.access.folder_mode)
        except BaseException as error:
            if outer is not None:
                os.close(outer)
            if isinstance(error, OSError):
                raise _named(error, self.root.joinpath(*self.below[:depth])) from error
            raise
        assert outer is not None
        return outer

    def _make_folder(self, name: str | Path, outer: int | None) -> bool:
        if outer is None:
            self.root.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(name, self.access.folder_mode & 0o777, dir_fd=outer)
        except FileExistsError:  # Another process was first.
            return False
        # A power cut is not to take the new name away, where the file system can help it.
        with contextlib.suppress(OSError):
            if outer is not None:
                os.fsync(outer)
        return True

    def open(self, name: str, flags: int, *, make: bool = False) -> int:
        """Open a file; return its descriptor.

        Args:
            name: Its name in this folder.
            flags: As for ``os.open``. A file that they make has the permissions of ``access``.
            make: Whether to make the folders that are not there.

        Raises:
            NotAFileError: It is no regular file; or it is to be written, and has a second name.
        """
        folder = self._descend(make)
        descriptor = -1
        try:
            descriptor = self._open_in(folder, name, flags)
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            # With a second name it may be a user's own file, which somebody linked to.
            if not stat.S_ISREG(status.st_mode) or (flags & _WRITING and status.st_nlink > 1):
                raise _not_a_file()
            if self.access.is_private:
                _refuse_if_others_write(self.root, (*self.below, name), status)
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise _named(error, self.path / name) from error
            raise
        finally:
            os.close(folder)
        return descriptor

    def _open_in(self, folder: int, name: str, flags: int) -> int:
        if flags & os.O_CREAT:
            try:
                return self._make_file(name, flags, folder)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
        try:
            return os.open(name, flags & ~os.O_CREAT | _FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            # A link; a FIFO or a socket to be written to; a socket or a device.
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP):
                raise _not_a_file() from error
            raise

    def _make_file(self, name: str, flags: int, folder: int) -> int:
        flags = flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, self.access.file_mode, dir_fd=folder)
        if not self.access.is_private:  # The umask may have taken from them what others need.
            os.fchmod(descriptor, self.access.file_mode)
        return descriptor

    def replace(
        self, name: str, contents: Iterable[bytes], *, synced_in: Folder | None = None
    ) -> None:
        """Put a file in the place of what may be there, whole or not at all.

        Args:
            name: Its name.
            contents: Its bytes, in pieces.
            synced_in: Where it is written and synced before it is moved here; by default it is
                written in this folder, and a power cut may take it away.
        """
        token = secrets.token_hex(8)
        temporary = f".{name}.{token}.tmp" if synced_in is None else f"{name[:12]}-{token}.tmp"
        with (synced_in or self).opened(make=True) as source, _naming(self.path / name):
            try:
                with open(self._make_file(temporary, os.O_WRONLY, source), "wb", 0) as file:
                    # The lock tells a sweep that the writer lives. It ends with the process.
                    is_unlocked(file.fileno())
                    for content in contents:
                        write_all(file.fileno(), content)
                    if synced_in is None:
                        os.replace(temporary, name, src_dir_fd=source, dst_dir_fd=source)
                        return
                    os.fsync(file.fileno())
                    with self.opened(make=True) as target:
                        os.replace(temporary, name, src_dir_fd=source, dst_dir_fd=target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=source)
                raise

    def move(self, name: str, other: Folder, new_name: str) -> None:
        """Move what has a name here, whatever it is, into a folder that is made if need be."""
        with self.opened() as source, other.opened(make=True) as target, _naming(self.path / name):
            os.replace(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def remove(self, name: str) -> None:
        """Remove a file, or what stands in its place and is no folder; none is as good."""
        with (
            contextlib.suppress(FileNotFoundError),
            self.opened() as folder,
            _naming(self.path / name),
        ):
            os.unlink(name, dir_fd=folder)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of what has a name here, a link's own where it is one; None if none."""
        with contextlib.suppress(OSError), self.opened() as folder:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        return None

    def names(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the names here that a pattern matches; none where it cannot be read."""
        with contextlib.suppress(OSError), self.opened() as folder:
            return [name for name in os.listdir(folder) if pattern.fullmatch(name)]
        return []


def try_lock(descriptor: int) -> bool:
    """Take a file's lock without waiting; return whether that went well.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(descriptor: int) -> bool:
    """Lock a file; return whether nobody else has. Where there are no locks, nobody has."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content``: one write may take less, as after a signal."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _not_a_file() -> NotAFileError:
    return NotAFileError(errno.EINVAL, "it is not a regular file with a single link")


def _named(error: OSError, path: Path) -> OSError:
    """Return the same error with the whole path of what was opened by its last name."""
    return type(error)(error.errno, error.strerror, str(path))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _named(error, path) from error
