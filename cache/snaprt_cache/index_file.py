"""The SQLite file of the index, which may be deleted or garbled at any moment; knows no rows.

Every operation works on a healthy file, heals a bad one, or raises IndexUnavailable, and then the
cache does without.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

from snaprt_cache.folder import Access, make_folders
from snaprt_cache.journal import journal_mode

SCHEMA_VERSION: Final = 2
FILE_NAME: Final = f"index-{SCHEMA_VERSION}.sqlite"
#: How long a listing or a put waits for another process's transaction.
PATIENT_SECONDS: Final = 2.0
#: How long usage figures, which can be written later, wait for it.
HASTY_SECONDS: Final = 0.1

TABLES: Final = frozenset({"entries", "key_parts", "sizes", "totals"})
_COMPANION_SUFFIXES: Final = ("-journal", "-wal", "-shm")
_LOCK_SECONDS: Final = 10.0

# What the file system or other processes do to an index that is itself sound; all else that SQLite
# reports means that the file is not, or no longer, our index.
_NOT_THE_INDEXS_FAULT: Final = {
    sqlite3.SQLITE_BUSY: "it stayed locked by another process",
    sqlite3.SQLITE_LOCKED: "it stayed locked by this process",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_INTERRUPT: "it was interrupted",
    sqlite3.SQLITE_IOERR: "it cannot be read or written",
    sqlite3.SQLITE_NOMEM: "memory is used up",
    sqlite3.SQLITE_PERM: "its file may not be opened",
    sqlite3.SQLITE_PROTOCOL: "its file cannot be locked",
    sqlite3.SQLITE_READONLY: "it may not be written",
}

_Result = TypeVar("_Result")


class IndexUnavailable(Exception):  # noqa: N818 (a state the store lives with, not a failure)
    """The index cannot be used now; the blobs can."""


class IndexFile:
    """The file of one index; safe for threads, processes and forks.

    Args:
        root: The cache directory.
        folder: The folder in it that holds the file.
        quarantine: Where a garbled file is moved to.
        access: The permissions of what it makes.
        fill: Gives a new file's tables what they start with.
        functions: What SQL may call, by name and number of arguments.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        quarantine: Path,
        access: Access,
        fill: Callable[[sqlite3.Connection], None],
        functions: Mapping[tuple[str, int], Callable[..., float]],
    ) -> None:
        self.path: Final = folder / FILE_NAME
        self._root = root
        self._folder = folder
        self._quarantine = quarantine
        self._access = access
        self._fill = fill
        self._functions = functions
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None

    def run(
        self, operation: Callable[[sqlite3.Connection], _Result], timeout: float = PATIENT_SECONDS
    ) -> _Result:
        """Do something with a healthy file; it may be done again on one that was made anew.

        Args:
            operation: What to do. What it raises as ValueError says that the file is garbled.
            timeout: How long to wait for other processes, in seconds.

        Raises:
            IndexUnavailable: It cannot be used now.
        """
        with self._lock:
            for attempt in (1, 2, 3):
                try:
                    return operation(self._connected(timeout))
                except (sqlite3.Error, OSError, ValueError, TypeError) as error:
                    moved = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED
                    reason = "" if moved else self._not_its_fault(error)
                    broken = self._file_id
                    self._disconnect()
                    if reason or attempt == 3:
                        raise IndexUnavailable(f"{self.path}: {reason or error}") from error
                    if not moved:
                        self._move_aside(broken)
        raise AssertionError("unreachable")

    def _not_its_fault(self, error: Exception) -> str:
        """Return what keeps a sound file from being used; empty if the file itself is at fault."""
        # SQLite writes no file whose header names a newer format, as one flipped bit makes it do.
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY and all(
            os.access(path, os.W_OK) for path in (self.path, self._folder)
        ):
            return ""
        return _not_the_indexs_fault(error)

    def _connected(self, timeout: float) -> sqlite3.Connection:
        # Another process may have moved a garbled index aside, or a person removed it.
        if self._connection is not None and self._id_on_disk() != self._file_id:
            self._disconnect()
        if self._connection is None:
            self._create_file()
            self._file_id = self._id_on_disk()
            self._connection = sqlite3.connect(
                self.path, timeout=timeout, isolation_level=None, check_same_thread=False
            )
            self._prepare(self._connection)
        self._connection.execute(f"PRAGMA busy_timeout = {int(timeout * 1000)}")
        return self._connection

    def _create_file(self) -> None:
        """Make the file with the right permissions, which SQLite does not know."""
        if self.path.exists():
            return
        make_folders(self._access, self._root, self._folder)
        # Only a file that is new may be opened and closed here: closing any descriptor of a
        # database drops the locks that this process's connections hold on it.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            if not self._access.is_private:
                os.chmod(self.path, self._access.file_mode)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # What a foreign file defines, such as a view, may call no function of ours.
        connection.execute("PRAGMA trusted_schema = OFF")
        for (name, arguments), function in self._functions.items():
            connection.create_function(name, arguments, function, deterministic=True)
        if not self._is_ready(connection):
            self._start_anew(connection)
        wanted = journal_mode(self._folder)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
            # Fails while others use the file in another mode, and in a read-only directory.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute(f"PRAGMA journal_mode = {wanted}")
        # A power cut may lose or damage this file, and it is then made again from the blobs; the
        # blobs themselves are synced.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cell_size_check = ON")

    def _is_ready(self, connection: sqlite3.Connection) -> bool:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        return version == SCHEMA_VERSION and _tables(connection) >= TABLES

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            # Another process may have been first, so nothing that was seen before counts.
            if self._is_ready(connection):
                return
            if _tables(connection):
                raise ValueError("it has other tables than an index")
            for statement in _schema_statements():
                connection.execute(statement)
            self._fill(connection)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _move_aside(self, broken: tuple[int, int] | None) -> None:
        """Move a garbled index to the quarantine, unless another process already did."""
        import filelock  # here alone: importing it costs more than a hit does

        stamp = f"index-{time.time_ns()}-{os.getpid()}.sqlite"
        try:
            make_folders(self._access, self._root, self._folder, self._quarantine)
            with filelock.FileLock(
                self._folder / "index.lock", timeout=_LOCK_SECONDS, mode=self._access.file_mode
            ):
                if self._id_on_disk() != broken:
                    return
                # The journal goes first: SQLite would roll it back into a new index.
                for suffix in (*_COMPANION_SUFFIXES, ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{suffix}", f"{self._quarantine / stamp}{suffix}")
        except (OSError, filelock.Timeout) as error:
            raise IndexUnavailable(
                f"{self.path}: it is damaged and cannot be replaced: {error}"
            ) from error

    def _id_on_disk(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _disconnect(self) -> None:
        connection, self._connection, self._file_id = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def set_aside(self) -> None:
        """Move the file to the quarantine; the next operation makes it anew.

        Raises:
            IndexUnavailable: It cannot be moved.
        """
        with self._lock:
            broken = self._id_on_disk()
            self._disconnect()
            self._move_aside(broken)

    def close(self) -> None:
        """Close the connection; the next operation opens another."""
        with self._lock:
            self._disconnect()

    def before_fork(self) -> None:
        """Wait for the operation in progress: a child would inherit SQLite's own locks, held."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Leave the parent's connection alone, which SQLite forbids a child even to close."""
        if self._connection is not None:
            _connections_of_parents.append(self._connection)
            self._connection = None
        self._lock.release()


# Kept from being collected, and thereby closed, in a child.
_connections_of_parents: list[sqlite3.Connection] = []


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write, as the only one, all of what is done inside or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(name) for (name,) in rows}


@functools.cache
def _schema_statements() -> tuple[str, ...]:
    text = resources.files("snaprt_cache").joinpath("schema.sql").read_text(encoding="utf-8")
    statements, pending = [], ""
    for line in text.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return tuple(statements)


def _not_the_indexs_fault(error: Exception) -> str:
    """Return what keeps a sound index from being used; empty if the index itself is at fault."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # the file was cut
        return ""
    return _NOT_THE_INDEXS_FAULT.get((code or 0) & 0xFF, "")
