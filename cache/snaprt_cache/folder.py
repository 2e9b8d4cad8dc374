"""Directories and files as the cache makes them: private, or shared on purpose; safe to run from.

Executables are code: whoever can write into the directory can run code as its user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from snaprt_cache.errors import CacheError

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER: Final = 0
_MODE_BITS: Final = 0o3777


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
    """
    chosen = os.environ.get("SNAPRT_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen)
    found = "~"
    with contextlib.suppress(RuntimeError, KeyError):
        found = platformdirs.user_cache_dir("snaprt", appauthor=False)
    if found.startswith("~"):
        raise CacheError(
            "there is no home directory for a compile cache",
            hint="Set SNAPRT_CACHE_DIR to a directory, or SNAPRT_CACHE=off.",
        )
    return Path(found)


def refuse_if_unsafe(folder: Path) -> bool:
    """Check that nobody else can write executables into ``folder``.

    Returns:
        Whether the folder is there; one that is not there yet is safe.

    Raises:
        CacheError: It belongs to another user, or others may write into it.
    """
    try:
        status = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(status.st_mode) or not hasattr(os, "geteuid"):
        return True
    user = os.geteuid()
    if status.st_uid not in (user, _ROOT_USER):
        raise CacheError(
            f"the cache directory {folder} belongs to user {status.st_uid}, not to you ({user}); "
            "executables in it could be anyone's code",
            hint=f"Set SNAPRT_CACHE_DIR to a directory of your own, or run: chown -R {user} "
            f"'{folder}'",
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise CacheError(
            f"others may write into the cache directory {folder} "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); executables in it could be anyone's code",
            hint=f"Run: chmod go-w '{folder}'   or set SNAPRT_CACHE_DIR to a directory of your "
            "own.",
        )
    return True


def make_private_folders(root: Path, *inner: Path) -> None:
    """Make ``root`` and the folders inside it, each for this user alone; those there stay.

    Raises:
        OSError: One cannot be made.
    """
    make_folders(PRIVATE, root, *inner)


def make_folders(access: Access, root: Path, *inner: Path) -> None:
    """Make ``root`` and the folders inside it, with these permissions; those there stay.

    Raises:
        OSError: One cannot be made.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder in (root, *inner):
        try:
            os.mkdir(folder, access.folder_mode & 0o777)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)
                ) from None
        else:
            if not access.is_private:  # The umask may have taken from them what others need.
                os.chmod(folder, access.folder_mode)
            sync_folder(folder.parent)


def open_or_make(path: Path, flags: int, access: Access) -> int:
    """Open a file, made with these permissions where it is not there; return its descriptor.

    Raises:
        OSError: It cannot be opened or made.
    """
    flags |= os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, access.file_mode)
    if not access.is_private:
        # The umask may have taken from them what others need; who did not make it may not.
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, access.file_mode)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names survive a power cut, where its file system can."""
    # Not every file system lets a folder be opened or synced; the rename is whole all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
