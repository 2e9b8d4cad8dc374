"""Which journal the index may use: SQLite's write-ahead log only where it is known to be safe.

SQLite 3.7.0 to 3.51.2 can corrupt a database in WAL mode when a write and a checkpoint meet
(https://sqlite.org/wal.html#walresetbug), and WAL needs memory shared between all users of the
file, which no network file system has. Knows nothing of the index's content.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from typing import Final

WAL: Final = "wal"
#: The rollback journal, emptied and not removed after each transaction.
ROLLBACK: Final = "truncate"

_FIXED_SINCE: Final = (3, 51, 3)
# The releases of older lines that have the fix, too: (line, first fixed release of it).
_FIXED_LINES: Final = {(3, 50): 7, (3, 44): 6}

# File systems whose files are only ever open on this machine, as Linux names their types. A type
# that is not listed may be remote, shared with another kernel (9p, virtiofs) or FUSE.
_LOCAL_TYPES: Final = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
_MOUNT_TABLE: Final = Path("/proc/self/mountinfo")


def journal_mode(folder: Path, version: tuple[int, ...] = sqlite3.sqlite_version_info) -> str:
    """Return the journal mode for an index in ``folder``: ``wal`` or ``truncate``.

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
    return _types_by_device(text).get(device, "") in _LOCAL_TYPES


def _types_by_device(mount_table: str) -> dict[int, str]:
    """Read the lines of proc_pid_mountinfo(5): the third field is major:minor."""
    types: dict[int, str] = {}
    for line in mount_table.splitlines():
        fields, separator, rest = line.partition(" - ")
        numbers = re.fullmatch(r"\d+ \d+ (\d+):(\d+) .*", fields)
        if separator and numbers:
            types[os.makedev(int(numbers[1]), int(numbers[2]))] = rest.split(" ")[0]
    return types
