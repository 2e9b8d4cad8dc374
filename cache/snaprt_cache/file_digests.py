"""Digests of files, remembered across processes: XLA's library has hundreds of megabytes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

import blake3

from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder
from snaprt_cache.lock import Flight

#: What the file is called.
FILE_NAME: Final = "file-digests.json"
_VERSION: Final = 2
_LARGEST_BYTES: Final = 1 << 20
_MEMO_ROWS: Final = 64
_CHUNK_BYTES: Final = 1 << 18
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
    memo = None if memo_folder is None else Folder(memo_folder.parent, (memo_folder.name,))
    row = (
        f"{os.path.abspath(path)}:"
        f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    )
    if abs(time.time() - status.st_mtime) <= _MEMO_MIN_AGE_SECONDS:
        return _digest_of_content(path)
    digest = _digests_of_this_process.get(row)
    if digest is None:
        digest = _digest_of_content(path) if memo is None else _remembered_digest(path, memo, row)
        _digests_of_this_process[row] = digest
    return digest


def _digest_of_content(path: str | Path) -> str:
    # Read, not mapped: the pages of a mapped file count as memory of this process.
    digest = blake3.blake3()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _remembered_digest(path: str | Path, memo: Folder, row: str) -> str:
    """Look the digest up, or read the file while other processes that need it wait for that."""

    def remembered() -> str | None:
        return _rows(memo).get(row)

    digest = remembered()
    if digest is not None:
        return digest
    flight = Flight(memo.path, _MEMO_WAIT_SECONDS)
    name = blake3.blake3(row.encode("utf-8", "surrogatepass")).hexdigest()
    with flight.lead(name, lambda: remembered() is not None) as role:
        digest = remembered()
        if digest is None:
            digest = _digest_of_content(path)
            role.stored = _write(memo, {**_rows(memo), row: digest})
    return digest


def problem(folder: Folder) -> str:
    """Return what is wrong with the file in a cache's folder; empty if it is sound or not there."""
    try:
        _read(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except (CacheError, ValueError) as error:
        return str(error)
    return ""


def _rows(folder: Folder) -> dict[str, str]:
    """Return what is remembered; nothing where the file is absent, damaged or others' to write."""
    try:
        return _read(folder)
    except (OSError, CacheError, ValueError):
        return {}  # The files are read again.


def _read(folder: Folder) -> dict[str, str]:
    with open(folder.open(FILE_NAME, os.O_RDONLY), encoding="utf-8") as file:
        text = file.read(_LARGEST_BYTES)
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            return {}
        rows: dict[str, str] = content["files"]
        # One digit that changed would give each key another digest, and every entry be missed.
        if content["check"] == _check(rows):
            return rows
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a list of digests") from error
    raise ValueError("its rows do not match their digest")


def _write(folder: Folder, rows: dict[str, str]) -> bool:
    newest = dict(list(rows.items())[-_MEMO_ROWS:])
    content = {"version": _VERSION, "files": newest, "check": _check(newest)}
    try:
        folder.replace(FILE_NAME, [json.dumps(content, indent=1).encode("ascii")])
    except (OSError, CacheError):
        return False
    return True


def _check(rows: dict[str, str]) -> str:
    text = "".join(f"{row}\0{digest}\0" for row, digest in rows.items())
    return blake3.blake3(text.encode("utf-8", "surrogatepass")).hexdigest()
