"""Digests of files, remembered across processes: XLA's library has hundreds of megabytes.

Knows files, not what their digests are for.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import blake3

from snaprt_cache.errors import CacheError
from snaprt_cache.flight import Flight
from snaprt_cache.folder import make_private_folders, refuse_if_unsafe

_MEMO_NAME: Final = "file-digests.json"
_MEMO_ROWS: Final = 64
# A file that changed this recently may change again without a new time stamp.
_MEMO_MIN_AGE_SECONDS: Final = 2.0
# Reading a file takes less than waiting for a process that does not get on with it.
_MEMO_WAIT_SECONDS: Final = 2.0
_digests_of_this_process: dict[str, str] = {}


def file_digest(path: str | Path, memo_folder: Path | None = None) -> str:
    """Return the BLAKE3 digest of a file's content, 64 hexadecimal digits.

    XLA's library has hundreds of megabytes, so the digest is remembered: in this process, and
    across processes in a small file, by path, device, inode, size and time of change.

    Args:
        path: The file.
        memo_folder: Where to remember; None for this process only. A folder that cannot be written,
            or that others can write to, costs the time of reading the file again.

    Raises:
        OSError: The file cannot be read.
    """
    status = os.stat(path)
    if memo_folder is not None and not _is_private(memo_folder):
        memo_folder = None
    row = (
        f"{os.path.abspath(path)}:"
        f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    )
    if abs(time.time() - status.st_mtime) <= _MEMO_MIN_AGE_SECONDS:
        return _digest_of_content(path)
    digest = _digests_of_this_process.get(row)
    if digest is None:
        digest = (
            _digest_of_content(path)
            if memo_folder is None
            else _remembered_digest(path, memo_folder, row)
        )
        _digests_of_this_process[row] = digest
    return digest


def _digest_of_content(path: str | Path) -> str:
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


def _remembered_digest(path: str | Path, memo_folder: Path, row: str) -> str:
    """Look the digest up, or read the file while other processes that need it wait for that."""

    def remembered() -> str | None:
        return _read_memo(memo_folder).get(row)

    digest = remembered()
    if digest is not None:
        return digest
    flight = Flight(memo_folder, _MEMO_WAIT_SECONDS)
    name = blake3.blake3(row.encode("utf-8", "surrogatepass")).hexdigest()
    with flight.lead(name, lambda: remembered() is not None) as role:
        digest = remembered()
        if digest is None:
            digest = _digest_of_content(path)
            role.stored = _write_memo(memo_folder, {**_read_memo(memo_folder), row: digest})
    return digest


def _is_private(folder: Path) -> bool:
    """Return whether nobody else can write there what a file's digest is."""
    try:
        refuse_if_unsafe(folder.parent)
        refuse_if_unsafe(folder)
    except (CacheError, OSError):
        return False
    return True


def _read_memo(folder: Path) -> dict[str, str]:
    try:
        rows = json.loads((folder / _MEMO_NAME).read_text(encoding="utf-8"))["files"]
        return {str(row): str(digest) for row, digest in rows.items() if len(str(digest)) == 64}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Absent or damaged: the files are read again.
        return {}


def _write_memo(folder: Path, rows: dict[str, str]) -> bool:
    newest = dict(list(rows.items())[-_MEMO_ROWS:])
    temporary = ""
    try:
        make_private_folders(folder.parent, folder)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{_MEMO_NAME}.", dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": 1, "files": newest}, file, indent=1)
        os.replace(temporary, folder / _MEMO_NAME)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
