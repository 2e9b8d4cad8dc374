"""The index: an SQLite file that lists the entries, counts their use and orders their eviction.

The blobs are the truth, so there is one way of repair: a file that is damaged, or whose schema is
not ours, is deleted, and rows that differ from the blobs are made anew from them (`Index.align`).
Where the index cannot be used, the cache does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar

from snaprt_cache.blobs import BlobFolder
from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder, try_lock
from snaprt_cache.frame import BlobHeader
from snaprt_cache.key import Key, KeyPart

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

#: An entry not used for so long is worth half of one used just now that saves as much per byte.
HALF_LIFE_SECONDS: Final = 7 * 86400.0
# What an entry saves at least, so that one of unknown cost is worth something.
_LEAST_SECONDS: Final = 0.001
# An entry that was hit so short a time ago is likely to be needed at the next start.
_IN_USE_SECONDS: Final = 600.0
# Clocks of machines that share a directory may differ by less.
_CLOCKS_DIFFER_SECONDS: Final = 3600.0

# Pending events are written with every put and at the end of the process, and in between when one
# of these is reached: writing each would cost more than the hit.
_DUE_EVENTS: Final = 256
_DUE_SECONDS: Final = 10.0

# What the file system or other processes do to an index that is itself sound; all else that SQLite
# reports means that the file is not, or no longer, our index.
_NOT_THE_INDEXS_FAULT: Final = {
    sqlite3.SQLITE_BUSY: "it is locked by another process",
    sqlite3.SQLITE_LOCKED: "it is locked by this process",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_INTERRUPT: "it was interrupted",
    sqlite3.SQLITE_IOERR: "it cannot be read or written",
    sqlite3.SQLITE_NOMEM: "out of memory",
    sqlite3.SQLITE_PERM: "no permission to open its file",
    sqlite3.SQLITE_PROTOCOL: "its file cannot be locked",
    sqlite3.SQLITE_READONLY: "no permission to write it",
}

_Result = TypeVar("_Result")


class IndexUnavailable(Exception):  # noqa: N818 (a state the store lives with, not a failure)
    """The index cannot be used now; the blobs can."""


# Rows.


@dataclass(frozen=True)
class EntryRow:
    """One row of the table ``entries``, and whether the entry is pinned.

    Attributes:
        key: The key's digest, 64 hexadecimal digits.
        name: The program, as its maker called it.
        kind: What the payload is, such as ``compiled``.
        platform: Such as ``cpu``.
        device_kind: Such as ``TPU v5e``.
        jax_version: Of the process that made it.
        jaxlib_version: Of the process that made it.
        compile_seconds: What making it cost.
        payload_bytes: Its size before compression.
        stored_bytes: The size of its blob file.
        created: Unix time in seconds.
        last_used: Unix time in seconds; 0 if it was never hit.
        hits: How often it was hit.
        saved_seconds: What its hits saved together.
        worth: What keeping it is worth; the one with the least is evicted first.
        pinned: Whether it is never evicted, which no column says but a file.

    Examples:
        >>> from snaprt.cache import Cache, Key, KeyPart
        >>> cache = Cache.open("rows")
        >>> stored = cache.put(Key((KeyPart("module", "5e6f"),)), b"bytes", {"name": "train_step"})
        >>> [(row.name, row.payload_bytes) for row in cache.entries()]
        [('train_step', 5)]
    """

    key: str
    name: str = ""
    kind: str = ""
    platform: str = ""
    device_kind: str = ""
    jax_version: str = ""
    jaxlib_version: str = ""
    compile_seconds: float = 0.0
    payload_bytes: int = 0
    stored_bytes: int = 0
    created: float = 0.0
    last_used: float = 0.0
    hits: int = 0
    saved_seconds: float = 0.0
    worth: float = 0.0
    pinned: bool = False


# A key names a file, so one that came out of a damaged or foreign index is never taken as it is.
KEY_NAME: Final = re.compile(r"[0-9a-f]{64}")
_COLUMN_TYPES: Final[Mapping[str, Callable[[Any], Any]]] = {
    field.name: str if field.name == "key" else type(field.default)
    for field in dataclasses.fields(EntryRow)
    if field.name != "pinned"
}
_OF_METADATA: Final = ("name", "kind", "platform", "device_kind", "jax_version", "jaxlib_version")
# The columns that a blob alone decides.
_COLUMNS: Final = (
    *("key", *_OF_METADATA, "compile_seconds", "payload_bytes", "stored_bytes", "created"),
)


def row_of_blob(header: BlobHeader) -> EntryRow:
    """Return the row of a blob that was not used yet."""
    of_metadata: dict[str, Any] = {
        name: _text(header.metadata.get(name, "")) for name in _OF_METADATA
    }
    return EntryRow(
        key=header.key.digest,
        **of_metadata,
        compile_seconds=compile_seconds(header),
        payload_bytes=header.payload_bytes,
        stored_bytes=header.file_bytes,
        created=_number(header.created),
    )


def compile_seconds(header: BlobHeader) -> float:
    """Return what making a blob's payload cost, as its maker said; 0 if that is no number."""
    return _number(header.metadata.get("compile_seconds", 0.0))


def worth_of(seconds: float, stored_bytes: float, last_used: float) -> float:
    """Return what keeping an entry is worth, comparable with that of others only.

    It halves with every half-life since the last use for all entries alike, so it needs no
    renewing. (The idea is that of Cao and Irani's GreedyDual-Size, 1997.)

    Args:
        seconds: What making it cost, and what its hits have saved so far.
        stored_bytes: The size of its file.
        last_used: When it was made or last hit, Unix time in seconds.
    """
    per_byte = max(seconds, _LEAST_SECONDS) / max(stored_bytes, 1.0)
    return math.log2(per_byte) + last_used / HALF_LIFE_SECONDS


def _number(value: str | float) -> float:
    """Return a number that a column can hold; what is none counts as 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _text(value: object) -> str:
    """Return text that a column can hold: halves of surrogate pairs cannot be stored."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Usage:
    """How often an entry was hit, when last (Unix time in seconds), and what that saved."""

    hits: int = 0
    last_used: float = 0.0
    saved_seconds: float = 0.0


class Index:
    """The index of one cache; safe for threads, processes and forks.

    Args:
        folder: The folder that holds it.
        blobs: What it lists.
    """

    def __init__(self, folder: Folder, blobs: BlobFolder) -> None:
        self.path: Final = folder.path / FILE_NAME
        #: Why this object last deleted the file; empty where it has not.
        self.deleted_because = ""
        self._folder = folder
        self._blobs = blobs
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None
        self._schema_version = -1

    def align(self) -> bool:
        """Give each blob a row and remove all others; return whether that was so before."""

        def operation(connection: sqlite3.Connection) -> bool:
            if dict(connection.execute(_SIZES)) == self._blobs.sizes():
                return True
            with _transaction(connection):
                _align(connection, self._blobs)
            return False

        return self.run(operation)

    def record(
        self,
        headers: Iterable[BlobHeader],
        used: Mapping[str, Usage],
        totals: Mapping[tuple[str, str], float],
    ) -> tuple[set[str], int]:
        """Add what happened.

        Args:
            headers: Of the blobs that were stored; usage figures that are there stay.
            used: The hits, by key.
            totals: What was counted, by day and event.

        Returns:
            The keys that have no row, whose figures were not added; and the bytes of all files,
            0 where no blob was stored.
        """
        stored = list(headers)

        def operation(connection: sqlite3.Connection) -> tuple[set[str], int]:
            _put(connection, stored)
            connection.executemany(
                "INSERT INTO totals (day, event, value) VALUES (?, ?, ?) "
                "ON CONFLICT (day, event) DO UPDATE SET value = value + excluded.value",
                [(day, event, value) for (day, event), value in totals.items()],
            )
            unknown = {
                key
                for key, usage in used.items()
                if not connection.execute(_ADD_USAGE, {"key": key, **vars(usage)}).rowcount
            }
            total = connection.execute(_TOTAL).fetchone()[0] if stored else 0
            return unknown, int(total)

        return self._write(operation, PATIENT_SECONDS if stored else HASTY_SECONDS)

    def forget(self, key: str) -> None:
        """Remove the row of an entry that was set aside."""
        self._write(lambda connection: _remove(connection, [key]))

    def evict(
        self, target_bytes: int, *, at_most: int, limit_bytes: int, keep: Collection[str]
    ) -> tuple[list[EntryRow], int]:
        """Remove the entries least worth keeping until the others are no larger than a target.

        Those that were hit in the last ten minutes go after all others. Nothing is evicted on the
        word of a damaged row, and no other process can write rows meanwhile, so that an entry that
        is put at the same time has a blob when it has its row.

        Args:
            target_bytes: How large the others may be together.
            at_most: Stop after so many once they are no larger than ``limit_bytes``.
            limit_bytes: How large they may be together if ``at_most`` is reached.
            keep: Entries to leave, such as the one that was just put and those that are pinned.

        Returns:
            The rows removed, and the bytes of the files that are left.
        """

        def operation(connection: sqlite3.Connection) -> tuple[list[EntryRow], int]:
            now = time.time()
            sizes = _align(connection, self._blobs)
            _forget_the_future(connection, now)
            removed: list[EntryRow] = []
            remaining = sum(sizes.values())
            for row in _rows(
                connection, "ORDER BY last_used > ?, worth, key", now - _IN_USE_SECONDS
            ):
                if remaining <= (limit_bytes if len(removed) >= at_most else target_bytes):
                    break
                if row.key not in sizes or row.key in keep:
                    continue
                with contextlib.suppress(OSError):
                    self._blobs.remove(row.key)
                    removed.append(row)
                    remaining -= sizes[row.key]
            _remove(connection, [row.key for row in removed])
            return removed, remaining

        return self._write(operation)

    def entries(self, prefix: str = "") -> list[EntryRow]:
        """Return the rows whose keys start with ``prefix`` (hexadecimal), newest first."""
        query = "WHERE key GLOB ? ORDER BY created DESC"
        return self.run(lambda connection: list(_rows(connection, query, f"{prefix}*")))

    def keys(self) -> dict[str, Key]:
        """Return the key of each entry, by its digest."""
        query = "SELECT key, name, value FROM key_parts ORDER BY key, position"
        parts: dict[str, list[KeyPart]] = {}
        for key, name, value in self.run(lambda c: c.execute(query).fetchall()):
            parts.setdefault(str(key), []).append(KeyPart(str(name), str(value)))
        return {key: Key(tuple(listed)) for key, listed in parts.items()}

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
        if isinstance(error, OSError | CacheError):
            return str(error)
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # the file was cut
            return ""
        # SQLite writes no file whose header names a newer format, as one flipped bit makes it do.
        if code == sqlite3.SQLITE_READONLY and all(
            os.access(path, os.W_OK) for path in (self.path, self._folder.path)
        ):
            return ""
        return _NOT_THE_INDEXS_FAULT.get(code & 0xFF, "")

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
        if _number_of(connection, "schema_version") != self._schema_version:
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
                raise ValueError(f"{FILE_NAME}{suffix} is not a regular file with a single link")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Between the look at the file and its opening, somebody may have put a link there.
        connection.text_factory = os.fsdecode  # not every path is UTF-8
        opened = connection.execute("PRAGMA database_list").fetchone()[2]
        connection.text_factory = str
        folder = self._folder
        if os.path.realpath(opened) != os.path.join(
            os.path.realpath(folder.root), *folder.below, FILE_NAME
        ):
            raise ValueError(f"a link from it leads to {opened}")
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
        mode = journal_mode(folder.path)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != mode:
            # Fails while others use the file in another mode, and in a read-only directory.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute(f"PRAGMA journal_mode = {mode}")
        # A power cut may lose or damage this file, and it is then made again from the blobs; the
        # blobs themselves are synced.
        connection.execute("PRAGMA synchronous = OFF")

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        with _transaction(connection):
            if _schema(connection):  # Another process was first.
                return
            for statement in _schema_statements():
                connection.execute(statement)
            _align(connection, self._blobs)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        self._schema_version = _number_of(connection, "schema_version")
        version = _number_of(connection, "user_version")
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
                    raise TimeoutError("another process is using it")
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


class Pending:
    """What this process has stored, hit and counted, until the index has it; safe for threads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._stored: dict[str, BlobHeader] = {}
        self._used: dict[str, Usage] = {}
        self._totals: dict[tuple[str, str], float] = {}
        self._events = 0
        self._since = time.monotonic()

    def add_event(self, name: str, value: float) -> None:
        """Count an event, under today's date."""
        day = time.strftime("%Y-%m-%d", time.gmtime())
        with self._lock:
            self._events += 1
            self._totals[day, name] = self._totals.get((day, name), 0.0) + value

    def add_hit(self, key: str, saved_seconds: float) -> None:
        """Count a hit of an entry, now."""
        with self._lock:
            self._add(key, Usage(1, time.time(), saved_seconds))

    def _add(self, key: str, more: Usage) -> None:
        so_far = self._used.get(key, Usage())
        self._used[key] = Usage(
            so_far.hits + more.hits,
            max(so_far.last_used, more.last_used),
            so_far.saved_seconds + more.saved_seconds,
        )

    def add_blob(self, header: BlobHeader) -> None:
        """Note a blob that was stored."""
        with self._lock:
            self._stored[header.key.digest] = header

    def is_due(self) -> bool:
        """Return whether so much is pending, or for so long, that it should be written."""
        late = time.monotonic() - self._since > _DUE_SECONDS
        return self._events >= _DUE_EVENTS or (self._events > 0 and late)

    def write(self) -> tuple[set[str], int]:
        """Write what is pending to the index; keep it pending where that fails.

        Returns:
            The keys of the blobs whose rows were written; and the bytes of all files, 0 where there
            were none.

        Raises:
            IndexUnavailable: The index cannot be used now.
        """
        keys, total, unknown = self._write()
        if unknown:
            # Blobs whose row was lost with the process that put them, or with a damaged index.
            self._index.align()
            _, _, missing = self._write()
            with self._lock:
                for key in missing:
                    self._used.pop(key, None)
        return keys, total

    def _write(self) -> tuple[set[str], int, set[str]]:
        with self._lock:
            stored, used, totals, events = self._stored, self._used, self._totals, self._events
            # Having looked in vain is no reason to make a cache directory.
            has_folder = os.path.isdir(self._index.path.parent)
            if not (stored or used or totals) or not has_folder:
                return set(), 0, set()
            self.clear()
        unknown = set(used)
        try:
            unknown, total = self._index.record(stored.values(), used, totals)
            keys, stored, totals, events = set(stored), {}, {}, 0
        finally:
            with self._lock:
                self._stored = {**stored, **self._stored}
                for key in unknown:
                    self._add(key, used[key])
                for name, value in totals.items():
                    self._totals[name] = self._totals.get(name, 0.0) + value
                self._events += events
        return keys, total, unknown

    def write_at_exit(self) -> None:
        """Write what is pending as the process ends, if the index lets us."""
        with contextlib.suppress(IndexUnavailable):
            self.write()
        self._index.close()

    def after_fork_in_child(self) -> None:
        """Start from nothing: the parent writes its own events."""
        self._lock = threading.Lock()
        self.clear()


# Statements.

_SIZES: Final = "SELECT key, stored_bytes FROM entries"
_TOTAL: Final = "SELECT total(stored_bytes) FROM entries"
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


def _align(connection: sqlite3.Connection, blobs: BlobFolder) -> dict[str, int]:
    """Make the rows those of the blobs; return the size of each blob's file.

    A process may die between a blob and its row, and a row may be damaged.
    """
    row_sizes = dict(connection.execute(_SIZES))
    sizes = blobs.sizes()
    headers = (blobs.header(key) for key, size in sizes.items() if row_sizes.get(key) != size)
    _put(connection, (header for header in headers if header is not None))
    _remove(connection, row_sizes.keys() - sizes.keys())
    return sizes


def _put(connection: sqlite3.Connection, headers: Iterable[BlobHeader]) -> None:
    for header in headers:
        row = row_of_blob(header)
        connection.execute(_PUT, {name: getattr(row, name) for name in _COLUMNS})
        connection.execute("DELETE FROM key_parts WHERE key = ?", (row.key,))
        connection.executemany(
            "INSERT INTO key_parts (key, position, name, value) VALUES (?, ?, ?, ?)",
            [
                (row.key, position, _text(part.name), _text(part.value))
                for position, part in enumerate(header.key.parts)
            ],
        )


def _remove(connection: sqlite3.Connection, keys: Iterable[str]) -> None:
    listed = [(key,) for key in keys]
    connection.executemany("DELETE FROM entries WHERE key = ?", listed)
    connection.executemany("DELETE FROM key_parts WHERE key = ?", listed)


def _rows(connection: sqlite3.Connection, clauses: str, *values: object) -> Iterator[EntryRow]:
    """Return rows of entries.

    Raises:
        ValueError: A column holds what it should not: SQLite checks no types, and a damaged page
            can hold anything.
    """
    names = ", ".join(_COLUMN_TYPES)
    for row in connection.execute(f"SELECT {names} FROM entries {clauses}", values).fetchall():
        try:
            columns: dict[str, Any] = {
                name: convert(value)
                for (name, convert), value in zip(_COLUMN_TYPES.items(), row, strict=True)
            }
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a row cannot be read: {error!r}") from error
        if not KEY_NAME.fullmatch(columns["key"]):
            raise ValueError("a row has no key")
        yield EntryRow(**columns)


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


def _number_of(connection: sqlite3.Connection, pragma: str) -> int:
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


# The journal: SQLite 3.7.0 to 3.51.2 can corrupt a database in WAL mode when a write and a
# checkpoint meet (https://sqlite.org/wal.html#walresetbug), and WAL needs memory shared between all
# users of the file, which no network file system has.

WAL: Final = "wal"
#: The rollback journal, emptied and not removed after each transaction.
ROLLBACK: Final = "truncate"

_FIXED_SINCE: Final = (3, 51, 3)
# The releases of older lines that have the fix, too: (line, first fixed release of it).
_FIXED_LINES: Final = {(3, 50): 7, (3, 44): 6}

# File systems whose files are only ever open on this machine, as Linux names their types. A type
# that is not listed may be remote, shared with another kernel (9p, virtiofs) or FUSE.
_LOCAL_TYPES: Final = frozenset(
    (
        *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs"),
        *("overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"),
    )
)
_MOUNT_TABLE: Final = Path("/proc/self/mountinfo")


def journal_mode(folder: Path, version: tuple[int, ...] = sqlite3.sqlite_version_info) -> str:
    """Return the journal mode for an index in ``folder``: ``wal`` only where that is safe.

    Args:
        folder: Where the index is.
        version: The version of SQLite in use.
    """
    return WAL if wal_is_fixed(version) and is_local(folder) else ROLLBACK


def wal_is_fixed(version: tuple[int, ...]) -> bool:
    """Return whether this version of SQLite has the fix for WAL."""
    if version[:3] >= _FIXED_SINCE:
        return True
    first_fixed = _FIXED_LINES.get((version[0], version[1]))
    return first_fixed is not None and version[2] >= first_fixed


def is_local(folder: Path, mount_table: Path = _MOUNT_TABLE) -> bool:
    """Return whether ``folder`` is known to be on a file system of this machine alone.

    Where the mount table cannot be read, as on systems other than Linux, it is not known.
    """
    try:
        text = mount_table.read_text(encoding="utf-8", errors="surrogateescape")
        device = os.stat(folder).st_dev
    except OSError:
        return False
    kind = ""
    for line in text.splitlines():  # proc_pid_mountinfo(5): the third field is major:minor
        fields, separator, rest = line.partition(" - ")
        numbers = re.fullmatch(r"\d+ \d+ (\d+):(\d+) .*", fields)
        if separator and numbers and os.makedev(int(numbers[1]), int(numbers[2])) == device:
            kind = rest.split(" ")[0]
    return kind in _LOCAL_TYPES
