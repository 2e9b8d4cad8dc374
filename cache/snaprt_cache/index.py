"""The SQLite index: rows about entries, in a file that may be deleted or garbled at any moment.

Knows rows, not blobs: what a new index starts with is handed to it. Every operation works on a
healthy index, heals a bad one, or raises IndexUnavailable, and then the cache does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from snaprt_cache.folder import make_private_folders
from snaprt_cache.journal import journal_mode
from snaprt_cache.rows import USAGE_COLUMNS, EntryRow, IndexedEntry, Usage, entry_row

if TYPE_CHECKING:
    import sqlite_utils

SCHEMA_VERSION: Final = 1
FILE_NAME: Final = f"index-{SCHEMA_VERSION}.sqlite"
#: How long a listing or a put waits for another process's transaction.
PATIENT_SECONDS: Final = 2.0
#: How long usage figures, which can be written later, wait for it.
HASTY_SECONDS: Final = 0.1

_TABLES: Final = frozenset({"entries", "key_parts", "totals"})
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


class Index:
    """The index of one cache; safe for threads, processes and forks.

    Args:
        root: The cache directory.
        folder: The folder in it that holds the index.
        quarantine: Where a garbled index is moved to.
        blob_rows: Gives the rows of all blobs, for an index that starts anew.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        quarantine: Path,
        blob_rows: Callable[[], Iterable[IndexedEntry]],
    ) -> None:
        self.path: Final = folder / FILE_NAME
        self._root = root
        self._folder = folder
        self._quarantine = quarantine
        self._blob_rows = blob_rows
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None

    # What the store asks of it.

    def put(self, entries: Iterable[IndexedEntry]) -> None:
        """Insert entries, or bring them up to date; usage figures that are there stay."""
        listed = list(entries)

        def operation(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                _put(connection, listed)

        self._run(operation)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the entries of these keys."""
        listed = [(key,) for key in keys]

        def operation(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                connection.executemany("DELETE FROM entries WHERE key = ?", listed)
                connection.executemany("DELETE FROM key_parts WHERE key = ?", listed)

        self._run(operation)

    def add_usage(
        self,
        used: Mapping[str, Usage],
        totals: Mapping[tuple[str, str], float],
        *,
        timeout: float = HASTY_SECONDS,
    ) -> set[str]:
        """Add to the usage figures.

        Args:
            used: By key.
            totals: By day and event.
            timeout: How long to wait for other processes, in seconds.

        Returns:
            The keys that have no row; their figures were not added.
        """

        # Plain SQL: this runs when a program ends that only had hits, and importing sqlite-utils
        # would cost such a program a tenth of a second.
        def operation(connection: sqlite3.Connection) -> set[str]:
            with _transaction(connection):
                connection.executemany(
                    "INSERT INTO totals (day, event, value) VALUES (?, ?, ?) "
                    "ON CONFLICT (day, event) DO UPDATE SET value = value + excluded.value",
                    [(day, event, value) for (day, event), value in totals.items()],
                )
                return {
                    key
                    for key, usage in used.items()
                    if not connection.execute(
                        "UPDATE entries SET hits = hits + ?, last_used = max(last_used, ?), "
                        "saved_seconds = saved_seconds + ? WHERE key = ?",
                        (usage.hits, usage.last_used, usage.saved_seconds, key),
                    ).rowcount
                }

        return self._run(operation, timeout)

    def entries(self, prefix: str = "") -> list[EntryRow]:
        """Return the rows whose keys start with ``prefix`` (hexadecimal), newest first."""

        def operation(connection: sqlite3.Connection) -> list[EntryRow]:
            table = _database(connection).table("entries")
            rows = table.rows_where("key GLOB ?", [f"{prefix}*"], order_by="created desc")
            return [entry_row(row) for row in rows]

        return self._run(operation)

    def keys(self) -> set[str]:
        """Return the keys that have a row."""
        return self._run(lambda c: {str(key) for (key,) in c.execute("SELECT key FROM entries")})

    def totals(self) -> dict[str, float]:
        """Return what happened over all days, by event."""

        def operation(connection: sqlite3.Connection) -> dict[str, float]:
            rows = _database(connection).query(
                "SELECT event, sum(value) AS value FROM totals GROUP BY event"
            )
            return {str(row["event"]): float(row["value"]) for row in rows}

        return self._run(operation)

    def clear(self) -> None:
        """Remove every row, the usage figures included."""

        def operation(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                for table in sorted(_TABLES):
                    connection.execute(f"DELETE FROM {table}")

        self._run(operation)

    def rebuild(self) -> None:
        """Make the rows anew from the blobs; usage figures of entries that are there stay."""

        def operation(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                fresh = list(self._blob_rows())
                kept = {entry.row.key for entry in fresh}
                gone = [
                    (key,)
                    for (key,) in connection.execute("SELECT key FROM entries")
                    if key not in kept
                ]
                connection.executemany("DELETE FROM entries WHERE key = ?", gone)
                connection.execute("DELETE FROM key_parts")
                _put(connection, fresh)

        self._run(operation)

    def journal_mode(self) -> str:
        """Return the journal mode in use."""
        return self._run(lambda c: str(c.execute("PRAGMA journal_mode").fetchone()[0]))

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

    # How it stays usable.

    def _run(
        self, operation: Callable[[sqlite3.Connection], _Result], timeout: float = PATIENT_SECONDS
    ) -> _Result:
        with self._lock:
            for attempt in (1, 2, 3):
                try:
                    return operation(self._connected(timeout))
                except (sqlite3.Error, OSError, ValueError, TypeError) as error:
                    moved = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED
                    reason = "" if moved else _not_the_indexs_fault(error)
                    broken = self._file_id
                    self._disconnect()
                    if reason or attempt == 3:
                        raise IndexUnavailable(f"{self.path}: {reason or error}") from error
                    if not moved:
                        self._move_aside(broken)
        raise AssertionError("unreachable")

    def _connected(self, timeout: float) -> sqlite3.Connection:
        # Another process may have moved a garbled index aside, or a person removed it.
        if self._connection is not None and self._id_on_disk() != self._file_id:
            self._disconnect()
        if self._connection is None:
            self._create_file_private()
            self._file_id = self._id_on_disk()
            self._connection = sqlite3.connect(
                self.path, timeout=timeout, isolation_level=None, check_same_thread=False
            )
            self._prepare(self._connection)
        self._connection.execute(f"PRAGMA busy_timeout = {int(timeout * 1000)}")
        return self._connection

    def _create_file_private(self) -> None:
        """Make the file for this user alone, as SQLite itself would not."""
        if self.path.exists():
            return
        make_private_folders(self._root, self._folder)
        # Only a file that is new may be opened and closed here: closing any descriptor of a
        # database drops the locks that this process's connections hold on it.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if not self._is_ready(connection):
            if _tables(connection):
                raise ValueError("it has other tables than an index")
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
        return version == SCHEMA_VERSION and _tables(connection) >= _TABLES

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        with _transaction(connection):
            # Another process may have been first.
            if self._is_ready(connection):
                return
            for statement in _schema_statements():
                connection.execute(statement)
            _put(connection, self._blob_rows())
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _move_aside(self, broken: tuple[int, int] | None) -> None:
        """Move a garbled index to the quarantine, unless another process already did."""
        import filelock  # here alone: importing it costs more than a hit does

        stamp = f"index-{time.time_ns()}-{os.getpid()}.sqlite"
        try:
            make_private_folders(self._root, self._folder, self._quarantine)
            with filelock.FileLock(self._folder / "index.lock", timeout=_LOCK_SECONDS, mode=0o600):
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


# Kept from being collected, and thereby closed, in a child.
_connections_of_parents: list[sqlite3.Connection] = []


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _database(connection: sqlite3.Connection) -> sqlite_utils.Database:
    import sqlite_utils  # a tenth of a second, which a program that only has hits need not wait for

    return sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)


def _put(connection: sqlite3.Connection, entries: Iterable[IndexedEntry]) -> None:
    database = _database(connection)
    table = database.table("entries")
    parts_table = database.table("key_parts")
    for entry in entries:
        row = dataclasses.asdict(entry.row)
        table.upsert({n: value for n, value in row.items() if n not in USAGE_COLUMNS}, pk="key")
        parts_table.delete_where("key = ?", [entry.row.key])
        parts_table.insert_all(
            {"key": entry.row.key, "position": position, "name": name, "value": value}
            for position, (name, value) in enumerate(entry.parts)
        )


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
