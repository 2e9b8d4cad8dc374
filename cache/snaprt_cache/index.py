"""The index: rows about entries, how often they were used, and which are to be evicted next.

Knows rows and SQL, not blobs: what a new index starts with is handed to it.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snaprt_cache.folder import PRIVATE, Access
from snaprt_cache.index_file import (
    HASTY_SECONDS,
    TABLES,
    IndexFile,
    transaction,
)
from snaprt_cache.rows import (
    USAGE_COLUMNS,
    EntryRow,
    IndexedEntry,
    Sizes,
    Usage,
    entry_row,
    sizes_row,
)
from snaprt_cache.worth import worth_of

if TYPE_CHECKING:
    import sqlite_utils

# An entry that was hit so short a time ago is likely to be needed at the next start.
_IN_USE_SECONDS: Final = 600.0
_LOOK_AT_ALL_SECONDS: Final = 600.0
# Clocks of machines that share a directory may differ by less.
_CLOCKS_DIFFER_SECONDS: Final = 3600.0


class Index(IndexFile):
    """The index of one cache; safe for threads, processes and forks.

    Args:
        root: The cache directory.
        folder: The folder in it that holds the index.
        quarantine: Where a garbled index is moved to.
        blob_rows: Gives the rows of all blobs, for an index that starts anew.
        access: The permissions of what it makes.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        quarantine: Path,
        blob_rows: Callable[[], Iterable[IndexedEntry]],
        access: Access = PRIVATE,
    ) -> None:
        self._blob_rows = blob_rows
        self._looked_at_all_until = time.monotonic()
        super().__init__(
            root,
            folder,
            quarantine,
            access,
            fill=lambda connection: _put(connection, blob_rows()),
            functions={("worth_of", 3): worth_of},
        )

    def put(self, entries: Iterable[IndexedEntry]) -> Sizes:
        """Insert entries, or bring them up to date; usage figures that are there stay.

        Returns:
            The sums over all entries.
        """
        listed = list(entries)

        def operation(connection: sqlite3.Connection) -> Sizes:
            with transaction(connection):
                _put(connection, listed)
                return _sizes(connection)

        return self.run(operation)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the entries of these keys."""
        listed = list(keys)

        def operation(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                _remove(connection, listed)

        self.run(operation)

    def set_pinned(self, key: str, pinned: bool) -> None:
        """Note whether an entry may be evicted."""

        def operation(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE entries SET pinned = ? WHERE key = ?", (int(pinned), key)
            ).close()

        self.run(operation)

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
            with transaction(connection):
                connection.executemany(
                    "INSERT INTO totals (day, event, value) VALUES (?, ?, ?) "
                    "ON CONFLICT (day, event) DO UPDATE SET value = value + excluded.value",
                    [(day, event, value) for (day, event), value in totals.items()],
                )
                return {
                    key
                    for key, usage in used.items()
                    if not connection.execute(
                        _ADD_USAGE,
                        {
                            "key": key,
                            "hits": usage.hits,
                            "last_used": usage.last_used,
                            "saved_seconds": usage.saved_seconds,
                        },
                    ).rowcount
                }

        return self.run(operation, timeout)

    def evict(
        self,
        target_bytes: int,
        remove: Callable[[str], None],
        *,
        at_most: int,
        limit_bytes: int,
        keep: frozenset[str] = frozenset(),
    ) -> tuple[list[EntryRow], Sizes]:
        """Remove the entries least worth keeping until the others are no larger than a target.

        Those that were hit in the last ten minutes go after all others; pinned ones stay.

        Args:
            target_bytes: How large the others may be together.
            remove: Removes an entry's blob. It is called while no other process can write rows, so
                that an entry that is put at the same time has a blob when it has its row.
            at_most: Stop after so many once they are no larger than ``limit_bytes``.
            limit_bytes: How large they may be together if ``at_most`` is reached.
            keep: Entries to leave, such as the one that was just put.

        Returns:
            The rows removed, and the sums over those that are left.
        """

        def enough(removed: int, left: Sizes) -> bool:
            limit = limit_bytes if removed >= at_most else target_bytes
            return left.stored_bytes <= limit

        def operation(connection: sqlite3.Connection) -> tuple[list[EntryRow], Sizes]:
            gone: list[EntryRow] = []
            now = time.time()
            with transaction(connection):
                # All rows are looked at now and then, not at every eviction: nothing is to be
                # evicted for long on the word of a sum that a damaged page gave.
                if time.monotonic() >= self._looked_at_all_until:
                    _forget_the_future(connection, now)
                    _settle_sizes(connection)
                    self._looked_at_all_until = time.monotonic() + _LOOK_AT_ALL_SECONDS
                sizes = _sizes(connection)
                rows = _by_worth(connection, now)
                while not enough(len(gone), sizes) and (row := next(rows, None)) is not None:
                    if row.key in keep:
                        continue
                    try:
                        remove(row.key)
                    except OSError:
                        continue
                    gone.append(row)
                    sizes = sizes.without(row)
                rows.close()
                _remove(connection, [row.key for row in gone])
                return gone, _sizes(connection)

        return self.run(operation)

    def settle_sizes(self) -> bool:
        """Make the sums over the entries anew; return whether they were right."""

        def operation(connection: sqlite3.Connection) -> bool:
            with transaction(connection):
                return _sizes(connection) == _settle_sizes(connection)

        return self.run(operation)

    def sizes(self) -> Sizes:
        """Return the sums over all entries."""
        return self.run(_sizes)

    def entries(self, prefix: str = "") -> list[EntryRow]:
        """Return the rows whose keys start with ``prefix`` (hexadecimal), newest first."""

        def operation(connection: sqlite3.Connection) -> list[EntryRow]:
            table = _database(connection).table("entries")
            rows = table.rows_where("key GLOB ?", [f"{prefix}*"], order_by="created desc")
            return [entry_row(row) for row in rows]

        return self.run(operation)

    def keys(self) -> set[str]:
        """Return the keys that have a row."""
        return self.run(lambda c: {str(key) for (key,) in c.execute("SELECT key FROM entries")})

    def pinned(self) -> set[str]:
        """Return the keys of the entries that have a row which says that they are pinned."""
        query = "SELECT key FROM entries WHERE pinned"
        return self.run(lambda c: {str(key) for (key,) in c.execute(query)})

    def totals(self) -> dict[str, float]:
        """Return what happened over all days, by event."""

        def operation(connection: sqlite3.Connection) -> dict[str, float]:
            rows = _database(connection).query(
                "SELECT event, sum(value) AS value FROM totals GROUP BY event"
            )
            return {str(row["event"]): float(row["value"]) for row in rows}

        return self.run(operation)

    def clear(self) -> None:
        """Remove every row, the usage figures included."""

        def operation(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                for table in sorted(TABLES - {"sizes"}):
                    connection.execute(f"DELETE FROM {table}")
                _settle_sizes(connection)

        self.run(operation)

    def rebuild(self) -> None:
        """Make the rows anew from the blobs; usage figures of entries that are there stay."""

        def operation(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                fresh = list(self._blob_rows())
                kept = {entry.row.key for entry in fresh}
                there = connection.execute("SELECT key FROM entries").fetchall()
                _remove(connection, [key for (key,) in there if key not in kept])
                connection.execute("DELETE FROM key_parts")
                _put(connection, fresh)
                _settle_sizes(connection)

        self.run(operation)

    def problem(self) -> str:
        """Return what SQLite finds wrong with the file; empty if it is sound."""

        def operation(connection: sqlite3.Connection) -> str:
            lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(3)")]
            return "" if lines == ["ok"] else "; ".join(lines)

        return self.run(operation)

    def journal_mode(self) -> str:
        """Return the journal mode in use."""
        return self.run(lambda c: str(c.execute("PRAGMA journal_mode").fetchone()[0]))


# Plain SQL where programs run it: importing sqlite-utils costs a tenth of a second, and its inserts
# look up the table's columns each time.
_COLUMNS: Final = tuple(
    field.name
    for field in dataclasses.fields(EntryRow)
    if field.name not in USAGE_COLUMNS and field.name != "worth"
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


def _by_worth(connection: sqlite3.Connection, now: float) -> Generator[EntryRow, None, None]:
    """Give the rows that are not pinned, those least worth keeping first, those in use last."""
    for condition in ("last_used <= ?", "last_used > ?"):
        # Few rows will be taken: without the hint SQLite would sort them all.
        rows = connection.execute(
            "SELECT * FROM entries INDEXED BY entries_by_worth "
            f"WHERE NOT pinned AND {condition} ORDER BY worth",
            (now - _IN_USE_SECONDS,),
        )
        names = [column[0] for column in rows.description]
        for row in rows:
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


def _sizes(connection: sqlite3.Connection) -> Sizes:
    return sizes_row(
        connection.execute("SELECT entries, payload_bytes, stored_bytes FROM sizes").fetchone()
    )


def _settle_sizes(connection: sqlite3.Connection) -> Sizes:
    found: Any = connection.execute(
        "SELECT count(*), total(payload_bytes), total(stored_bytes) FROM entries"
    ).fetchone()
    sizes = sizes_row(found)
    connection.execute(
        "INSERT OR REPLACE INTO sizes (id, entries, payload_bytes, stored_bytes) "
        "VALUES (1, ?, ?, ?)",
        dataclasses.astuple(sizes),
    )
    return sizes


def _database(connection: sqlite3.Connection) -> sqlite_utils.Database:
    import sqlite_utils  # a tenth of a second, which a program need not wait for

    return sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
