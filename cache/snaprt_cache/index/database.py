"""The index: an SQLite file that lists the entries, counts their use and orders their eviction.

It is made from the blobs, and so it is never mended: a file that is damaged, or whose schema is not
ours, is deleted and made anew. Where it cannot be used, the cache does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, Final, TypeVar

from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder, try_lock
from snaprt_cache.index.journal import journal_mode
from snaprt_cache.index.rows import USAGE_COLUMNS, EntryRow, IndexedEntry, Usage, entry_row
from snaprt_cache.index.worth import worth_of

SCHEMA_VERSION: Final = 3
FILE_NAME: Final = f"index-{SCHEMA_VERSION}.sqlite"
#: How long a listing or a put waits for another process's transaction.
PATIENT_SECONDS: Final = 2.0
#: How long usage figures, which can be written later, wait for it.
HASTY_SECONDS: Final = 0.1

_COMPANION_SUFFIXES: Final = ("-journal", "-wal", "-shm")
_LOCK_NAME: Final = "index.lock"
_LOCK_SECONDS: Final = 10.0
# Checking takes 3 ms for so many bytes, about 400 entries. A larger file is checked when
# nobody has done so for an hour: its size may be read over a network.
_ALWAYS_CHECKED_BYTES: Final = 1 << 20
_CHECKED_NAME: Final = "index.checked"
_CHECKED_SECONDS: Final = 3600.0
# What a file that others may write can have SQLite allocate or run.
_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: 16 << 20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}

# An entry that was hit so short a time ago is likely to be needed at the next start.
_IN_USE_SECONDS: Final = 600.0
# Clocks of machines that share a directory may differ by less.
_CLOCKS_DIFFER_SECONDS: Final = 3600.0

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
        folder: The folder that holds it.
        blob_rows: Gives the rows of all blobs, for an index that starts anew.
    """

    def __init__(self, folder: Folder, blob_rows: Callable[[], Iterable[IndexedEntry]]) -> None:
        self.path: Final = folder.path / FILE_NAME
        #: Why this object last deleted the file; empty where it has not.
        self.deleted_because = ""
        self._folder = folder
        self._blob_rows = blob_rows
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None
        self._schema_version = -1

    # Rows.

    def put(self, entries: Iterable[IndexedEntry]) -> int:
        """Insert entries, or bring them up to date; usage figures that are there stay.

        Returns:
            The bytes of all entries' files.
        """
        listed = list(entries)

        def operation(connection: sqlite3.Connection) -> int:
            _put(connection, listed)
            return int(connection.execute("SELECT total(stored_bytes) FROM entries").fetchone()[0])

        return self._write(operation)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the entries of these keys."""
        listed = list(keys)
        self._write(lambda connection: _remove(connection, listed))

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

        def operation(connection: sqlite3.Connection) -> set[str]:
            connection.executemany(
                "INSERT INTO totals (day, event, value) VALUES (?, ?, ?) "
                "ON CONFLICT (day, event) DO UPDATE SET value = value + excluded.value",
                [(day, event, value) for (day, event), value in totals.items()],
            )
            return {
                key
                for key, usage in used.items()
                if not connection.execute(
                    _ADD_USAGE, {"key": key, **dataclasses.asdict(usage)}
                ).rowcount
            }

        return self._write(operation, timeout)

    def evict(
        self,
        target_bytes: int,
        sizes: Callable[[], Mapping[str, int]],
        remove: Callable[[str], None],
        *,
        at_most: int,
        limit_bytes: int,
        keep: Collection[str],
    ) -> tuple[list[EntryRow], int]:
        """Remove the entries least worth keeping until the others are no larger than a target.

        Those that were hit in the last ten minutes go after all others.

        Args:
            target_bytes: How large the others may be together.
            sizes: Gives the sizes of the blobs' files by key: nothing is evicted on the word of a
                damaged row.
            remove: Removes an entry's blob. It is called while no other process can write rows, so
                that an entry that is put at the same time has a blob when it has its row.
            at_most: Stop after so many once they are no larger than ``limit_bytes``.
            limit_bytes: How large they may be together if ``at_most`` is reached.
            keep: Entries to leave, such as the one that was just put and those that are pinned.

        Returns:
            The rows removed, and the bytes of the files that are left.
        """

        def operation(connection: sqlite3.Connection) -> tuple[list[EntryRow], int]:
            now = time.time()
            _forget_the_future(connection, now)
            there = sizes()
            connection.executemany(
                "UPDATE entries SET stored_bytes = ? WHERE key = ? AND stored_bytes != ?",
                [(size, key, size) for key, size in there.items()],
            )
            gone: list[EntryRow] = []
            left = sum(there.values())
            for row in _rows(
                connection, "ORDER BY last_used > ?, worth, key", now - _IN_USE_SECONDS
            ):
                if left <= (limit_bytes if len(gone) >= at_most else target_bytes):
                    break
                if row.key not in there or row.key in keep:
                    continue
                with contextlib.suppress(OSError):
                    remove(row.key)
                    gone.append(row)
                    left -= there[row.key]
            _remove(connection, [row.key for row in gone])
            return gone, left

        return self._write(operation)

    def entries(self, prefix: str = "") -> list[EntryRow]:
        """Return the rows whose keys start with ``prefix`` (hexadecimal), newest first."""
        query = "WHERE key GLOB ? ORDER BY created DESC"
        return self.run(lambda connection: list(_rows(connection, query, f"{prefix}*")))

    def sizes(self) -> dict[str, int]:
        """Return the size of the blob's file that each row gives, by key."""
        query = "SELECT key, stored_bytes FROM entries"
        return self.run(lambda c: {str(key): int(size) for key, size in c.execute(query)})

    def key_parts(self) -> list[tuple[str, str, str]]:
        """Return the digest of the key, the name and the value of each part, in their order."""
        query = "SELECT key, name, value FROM key_parts ORDER BY key, position"
        return self.run(lambda c: [(str(k), str(n), str(v)) for k, n, v in c.execute(query)])

    def totals(self) -> list[tuple[str, str, float]]:
        """Return the day, the event and its value, for each of what was counted by day."""
        query = "SELECT day, event, value FROM totals ORDER BY day"
        return self.run(lambda c: [(str(d), str(e), float(v)) for d, e, v in c.execute(query)])

    def clear(self) -> None:
        """Remove every row, the usage figures included."""

        def operation(connection: sqlite3.Connection) -> None:
            for table in ("entries", "key_parts", "totals"):
                connection.execute(f"DELETE FROM {table}")

        self._write(operation)

    def rebuild(self) -> None:
        """Make the rows anew from the blobs; usage figures of entries that are there stay."""

        def operation(connection: sqlite3.Connection) -> None:
            fresh = list(self._blob_rows())
            kept = {entry.row.key for entry in fresh}
            there = connection.execute("SELECT key FROM entries").fetchall()
            _remove(connection, [key for (key,) in there if key not in kept])
            _put(connection, fresh)

        self._write(operation)

    def check(self) -> str:
        """Check all of the file; return why it had to be made anew, empty where it was sound."""
        self.run(_check)
        reason, self.deleted_because = self.deleted_because, ""
        return reason

    def journal_mode(self) -> str:
        """Return the journal mode in use."""
        return self.run(lambda c: str(c.execute("PRAGMA journal_mode").fetchone()[0]))

    # The file.

    def _write(
        self, operation: Callable[[sqlite3.Connection], _Result], timeout: float = PATIENT_SECONDS
    ) -> _Result:
        def in_transaction(connection: sqlite3.Connection) -> _Result:
            with _transaction(connection):
                return operation(connection)

        return self.run(in_transaction, timeout)

    def run(
        self, operation: Callable[[sqlite3.Connection], _Result], timeout: float = PATIENT_SECONDS
    ) -> _Result:
        """Do something with a sound file; it may be done again on one that was made anew.

        Args:
            operation: What to do. What it raises as ValueError says that the file is damaged.
            timeout: How long to wait for other processes, in seconds.

        Raises:
            IndexUnavailable: It cannot be used now.
        """
        with self._lock:
            for attempt in (1, 2, 3):
                try:
                    return operation(self._connected(timeout))
                except (sqlite3.Error, CacheError, OSError, ValueError, TypeError) as error:
                    moved = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED
                    reason = "" if moved else self._not_its_fault(error)
                    broken = self._file_id
                    self._disconnect()
                    if reason or attempt == 3:
                        raise IndexUnavailable(f"{self.path}: {reason or error}") from error
                    if not moved:
                        self._delete(broken, str(error))
        raise AssertionError("unreachable")

    def _not_its_fault(self, error: Exception) -> str:
        """Return what keeps a sound file from being used; empty if the file itself is at fault."""
        # SQLite writes no file whose header names a newer format, as one flipped bit makes it do.
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY and all(
            os.access(path, os.W_OK) for path in (self.path, self._folder.path)
        ):
            return ""
        return _not_the_indexs_fault(error)

    def _connected(self, timeout: float) -> sqlite3.Connection:
        # Another process may have deleted a damaged index, or a person.
        if self._connection is not None and self._id_on_disk() != self._file_id:
            self._disconnect()
        if self._connection is None:
            # Only a file that is new may be opened and closed here: closing any descriptor of a
            # database drops the locks that this process's connections hold on it.
            if self._folder.status(FILE_NAME) is None:
                with contextlib.suppress(FileExistsError):
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                    os.close(self._folder.open(FILE_NAME, flags, make=True))
            self._file_id = self._id_on_disk()
            self._refuse_what_is_no_file()
            self._connection = sqlite3.connect(
                self.path, timeout=timeout, isolation_level=None, check_same_thread=False
            )
            self._prepare(self._connection)
        connection = self._connection
        connection.execute(f"PRAGMA busy_timeout = {int(timeout * 1000)}")
        # Whoever can write the file can change its schema while we have it open.
        if _number(connection, "schema_version") != self._schema_version:
            self._check_schema(connection)
        return connection

    def _refuse_what_is_no_file(self) -> None:
        """Let SQLite open no link, no FIFO and no user's own file under the index's names."""
        for suffix in ("", *_COMPANION_SUFFIXES):
            status = self._folder.status(FILE_NAME + suffix)
            if status is None:
                continue
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(f"{self.path}{suffix} is a directory")
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise ValueError(f"{FILE_NAME}{suffix} is no regular file of its own")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Between the look at the file and its opening, somebody may have put a link there.
        opened = connection.execute("PRAGMA database_list").fetchone()[2]
        folder = self._folder
        if os.path.realpath(opened) != os.path.join(
            os.path.realpath(folder.root), *folder.below, FILE_NAME
        ):
            raise ValueError(f"a link leads from it to {opened}")
        for limit, most in _LIMITS.items():
            connection.setlimit(limit, most)
        # What a foreign file defines, such as a view, may call no function of ours.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.create_function("worth_of", 3, worth_of, deterministic=True)
        if not _schema(connection):
            self._start_anew(connection)
        self._check_schema(connection)
        if self._is_to_be_checked():
            _check(connection)
            self._note_the_check()
        wanted = journal_mode(folder.path)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
            # Fails while others use the file in another mode, and in a read-only directory.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute(f"PRAGMA journal_mode = {wanted}")
        # A power cut may lose or damage this file, and it is then made again from the blobs; the
        # blobs themselves are synced.
        connection.execute("PRAGMA synchronous = OFF")

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        with _transaction(connection):
            if _schema(connection):  # Another process was first.
                return
            for statement in _schema_statements():
                connection.execute(statement)
            _put(connection, self._blob_rows())
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        self._schema_version = _number(connection, "schema_version")
        version = _number(connection, "user_version")
        if version != SCHEMA_VERSION or _schema(connection) != _our_schema():
            raise ValueError("its schema is not that of an index")

    def _is_to_be_checked(self) -> bool:
        index = self._folder.status(FILE_NAME)
        checked = self._folder.status(_CHECKED_NAME)
        return (
            index is None
            or index.st_size <= _ALWAYS_CHECKED_BYTES
            or checked is None
            or abs(time.time() - checked.st_mtime) > _CHECKED_SECONDS
        )

    def _note_the_check(self) -> None:
        index = self._folder.status(FILE_NAME)
        if index is not None and index.st_size > _ALWAYS_CHECKED_BYTES:
            with contextlib.suppress(OSError, CacheError):
                descriptor = self._folder.open(_CHECKED_NAME, os.O_WRONLY | os.O_CREAT)
                try:
                    os.utime(descriptor)
                finally:
                    os.close(descriptor)

    def _delete(self, broken: tuple[int, int] | None, reason: str) -> None:
        """Delete a damaged index, unless another process already did."""
        try:
            with self._deleting_alone():
                if self._id_on_disk() != broken:
                    return
                # The journal goes first: SQLite would roll it back into a new index.
                for suffix in (*_COMPANION_SUFFIXES, ""):
                    self._folder.remove(FILE_NAME + suffix)
        except (OSError, CacheError) as error:
            raise IndexUnavailable(
                f"{self.path}: it is damaged ({reason}) and cannot be deleted: {error}"
            ) from error
        self.deleted_because = reason

    @contextlib.contextmanager
    def _deleting_alone(self) -> Iterator[None]:
        descriptor = self._folder.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT, make=True)
        try:
            end = time.monotonic() + _LOCK_SECONDS
            while not try_lock(descriptor):
                if time.monotonic() > end:
                    raise TimeoutError("another process is at it")
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def _id_on_disk(self) -> tuple[int, int] | None:
        try:
            status = os.lstat(self.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _disconnect(self) -> None:
        connection, self._connection, self._file_id = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

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


_COLUMNS: Final = tuple(
    field.name
    for field in dataclasses.fields(EntryRow)
    if field.name not in USAGE_COLUMNS and field.name not in ("worth", "pinned")
)
_PUT: Final = (
    f"INSERT INTO entries ({', '.join(_COLUMNS)}, worth) "
    f"VALUES ({', '.join(f':{name}' for name in _COLUMNS)}, "
    "worth_of(:compile_seconds, :stored_bytes, :created)) "
    "ON CONFLICT (key) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name != "key")
    + ", worth = worth_of(excluded.compile_seconds + saved_seconds, excluded.stored_bytes, "
    "max(excluded.created, last_used))"
)
_ADD_USAGE: Final = (
    "UPDATE entries SET hits = hits + :hits, last_used = max(last_used, :last_used), "
    "saved_seconds = saved_seconds + :saved_seconds, "
    "worth = worth_of(compile_seconds + saved_seconds + :saved_seconds, stored_bytes, "
    "max(created, last_used, :last_used)) WHERE key = :key"
)


def _put(connection: sqlite3.Connection, entries: Iterable[IndexedEntry]) -> None:
    for entry in entries:
        connection.execute(_PUT, {name: getattr(entry.row, name) for name in _COLUMNS})
        connection.execute("DELETE FROM key_parts WHERE key = ?", (entry.row.key,))
        connection.executemany(
            "INSERT INTO key_parts (key, position, name, value) VALUES (?, ?, ?, ?)",
            [
                (entry.row.key, position, name, value)
                for position, (name, value) in enumerate(entry.parts)
            ],
        )


def _remove(connection: sqlite3.Connection, keys: Iterable[str]) -> None:
    listed = [(key,) for key in keys]
    connection.executemany("DELETE FROM entries WHERE key = ?", listed)
    connection.executemany("DELETE FROM key_parts WHERE key = ?", listed)


def _rows(connection: sqlite3.Connection, clauses: str, *values: object) -> Iterator[EntryRow]:
    rows = connection.execute(f"SELECT * FROM entries {clauses}", values)
    names = [column[0] for column in rows.description]
    for row in rows.fetchall():
        yield entry_row(dict(zip(names, row, strict=True)))


def _forget_the_future(connection: sqlite3.Connection, now: float) -> None:
    """Let what was used at a time that is still to come count as made now: a clock was wrong."""
    connection.execute(
        "UPDATE entries SET created = min(created, :now), last_used = min(last_used, :not_in_use), "
        "worth = worth_of(compile_seconds + saved_seconds, stored_bytes, :now) "
        "WHERE max(created, last_used) > :latest",
        {
            "now": now,
            "not_in_use": now - _IN_USE_SECONDS,
            "latest": now + _CLOCKS_DIFFER_SECONDS,
        },
    )


def _check(connection: sqlite3.Connection) -> None:
    lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(1)")]
    if lines != ["ok"]:
        raise ValueError("; ".join(lines))


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _schema(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Return all that a database defines: tables, indexes, views and triggers."""
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    ).fetchall()


@functools.cache
def _our_schema() -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in _schema_statements():
            connection.execute(statement)
        return _schema(connection)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
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


@functools.cache
def _schema_statements() -> tuple[str, ...]:
    text = resources.files("snaprt_cache.index").joinpath("schema.sql").read_text(encoding="utf-8")
    statements, pending = [], ""
    for line in text.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return tuple(statements)


def _not_the_indexs_fault(error: Exception) -> str:
    """Return what keeps a sound index from being used; empty if the index itself is at fault."""
    if isinstance(error, OSError | CacheError):
        return str(error)
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # the file was cut
        return ""
    return _NOT_THE_INDEXS_FAULT.get((code or 0) & 0xFF, "")
