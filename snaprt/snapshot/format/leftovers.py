"""Temporary files: their names, writing them whole, and removing what dead processes left.

A temporary file's name says which process writes it, so that the next one on the same machine can
tell what a process that was killed has left behind.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3

_BEHIND = 4 << 20  # bytes: a piece of this size is worth handing to another thread


class WholeWrites(io.FileIO):
    """A new file without a buffer, whose ``write`` writes everything or raises.

    A large piece is written by another thread while the caller computes the checksums of the next,
    so the memory of the last one must stay as it is; what goes wrong is raised by a later call.

    Without a buffer, and deaf in other processes: in a forked child, Python may close what the
    parent's writer thread had open, and nothing of that may reach the parent's file.
    """

    def __init__(self, path: str | Path) -> None:
        self._pending: Future[None] | None = None
        self._behind: ThreadPoolExecutor | None = None  # until there is a large piece
        self._process = os.getpid()
        super().__init__(path, "w")

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, perhaps after this call."""
        view = memoryview(data).cast("B")
        self._finish_pending()
        if len(view) >= _BEHIND:
            try:
                if self._behind is None:
                    self._behind = ThreadPoolExecutor(1, "snaprt-snapshot-disk")
                self._pending = self._behind.submit(self._write_all, view)
                return len(view)
            except RuntimeError:  # Python is shutting down and gives out no more threads
                pass
        self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view) and os.getpid() == self._process:
            done += super().write(view[done:]) or 0
        if len(view) >= _BEHIND and hasattr(os, "posix_fadvise"):
            # Lets the disk begin with it now, so that `fsync` has less left to wait for.
            with contextlib.suppress(OSError):
                end = super().tell()
                os.posix_fadvise(self.fileno(), end - done, done, os.POSIX_FADV_DONTNEED)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and os.getpid() == self._process:
            pending.result()

    def tell(self) -> int:
        """Write what is pending, and return the position after it."""
        self._finish_pending()
        return super().tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Write what is pending, then move."""
        self._finish_pending()
        return super().seek(offset, whence)

    def close(self) -> None:
        """Write what is pending, then close the file."""
        try:
            self._finish_pending()
        finally:
            super().close()
            if self._behind is not None and os.getpid() == self._process:
                self._behind.shutdown(wait=False)


def temporary_name(name: str) -> str:
    """Return the name under which this thread writes a file that will be called ``name``."""
    return f".{name}.{threading.get_ident():x}.{_process_mark()}-{os.getpid()}.tmp"


@contextlib.contextmanager
def temporary_folder(beside: Path, name: str) -> Iterator[Path]:
    """Make a folder that is removed in the end, or by the next one where this process is killed."""
    folder = beside / temporary_name(name)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ring_name(run: str) -> str:
    """Return the name of the folder in which a process's flight recorder keeps what is too much."""
    return f"ring-{run}.{_process_mark()}-{os.getpid()}"


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files and folders of processes on this machine that ended too early for it.

    Returns:
        How many were removed. A folder that cannot be read has none.
    """
    removed = 0
    ours = re.compile(rf"(?:\..*|ring-\w+)\.{_process_mark()}-(\d+)(?:\.tmp)?")
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError):
        entries = list(os.scandir(folder))
    for entry in entries:
        found = ours.fullmatch(entry.name)
        if found and not _is_alive(int(found[1])):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
                removed += 1
    return removed


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@functools.cache
def _process_mark() -> str:
    """Return 8 hex digits for the set of processes in which a process number means something."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return blake3.blake3(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]
