"""The last misses of a cache, with the parts of their keys, so that one can ask why they missed.

A file of JSON lines beside the index. Nothing depends on it: every trouble with it is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Final

from snaprt_cache.errors import CacheError
from snaprt_cache.folder import Folder
from snaprt_cache.key import Key, KeyPart

FILE_NAME: Final = "misses.jsonl"
#: How many misses are told of; a few more may be in the file.
KEPT_MISSES: Final = 200
_VERSION: Final = 1
# The file may grow this large before it is cut to the last misses.
_LARGEST_BYTES: Final = 1 << 20
# One line is appended with one write, which other processes' lines do not come into.
_LARGEST_LINE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Miss:
    """One program that was not in the cache and had to be compiled."""

    key: Key  # its key with the parts
    name: str  # the program, as its maker called it
    script: str  # the Python program that asked, such as ``train.py``
    process: int  # the number of its process
    time: float  # Unix time in seconds
    mode: str  # the mode in which the cache was asked; empty where it is not known
    obstacle: str = ""  # why the entry that was there could not be used; empty where there was none


def append_miss(folder: Folder, key: Key, name: str, mode: str, obstacle: str) -> None:
    """Append a miss of this process to the file in a cache's folder, if both are there."""
    content = {
        "version": _VERSION,
        "time": time.time(),
        "process": os.getpid(),
        "name": name,
        "script": script_name(),
        "mode": mode,
        "obstacle": obstacle,
        "parts": key.listed(),
    }
    line = f"{json.dumps(content, separators=(',', ':'))}\n".encode("ascii")
    if len(line) > _LARGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError, CacheError):
        descriptor = folder.open(FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _LARGEST_BYTES:
            # One that is appended at this very moment may be lost.
            folder.replace(FILE_NAME, _lines(folder)[-KEPT_MISSES:])


def script_name() -> str:
    """Return the file name of the Python program that runs; empty where there is none."""
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def read_misses(folder: Folder) -> list[Miss]:
    """Return the last misses, oldest first; lines that cannot be read are left out."""
    read = (_parse(line) for line in _lines(folder)[-KEPT_MISSES:])
    return [miss for miss in read if miss is not None]


def forget_misses(folder: Folder) -> None:
    """Remove the file."""
    with contextlib.suppress(OSError):
        folder.remove(FILE_NAME)


def _lines(folder: Folder) -> list[bytes]:
    """Return the lines at the end of the file, as many as there should be."""
    try:
        descriptor = folder.open(FILE_NAME, os.O_RDONLY)
    except (OSError, CacheError):
        return []
    with open(descriptor, "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - 2 * _LARGEST_BYTES)
        file.seek(start)
        return file.read(2 * _LARGEST_BYTES).splitlines(keepends=True)[start > 0 :]


def _parse(line: bytes) -> Miss | None:
    try:
        content = json.loads(line)
        if content["version"] != _VERSION:
            return None
        parts = tuple(KeyPart(str(name), str(value)) for name, value in content["parts"])
        return Miss(
            key=Key(parts),
            name=str(content["name"]),
            script=str(content["script"]),
            process=int(content["process"]),
            time=float(content["time"]),
            mode=str(content.get("mode", "")),
            obstacle=str(content.get("obstacle", "")),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
