"""The last misses of a cache, with the parts of their keys, so that one can ask why they missed.

A file of JSON lines beside the index. Knows keys, not entries; what a miss is compared with is
explain's business. Nothing depends on the file: every trouble with it is passed over in silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snaprt_cache.folder import Access, open_or_make
from snaprt_cache.key import Key, KeyPart

if TYPE_CHECKING:
    from snaprt_cache.store import Cache

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
    """One program that was not in the cache and had to be compiled.

    Attributes:
        key: Its key with the parts.
        name: The program, as its maker called it.
        script: The Python program that asked, such as ``train.py``.
        process: The number of its process.
        time: Unix time in seconds.
        mode: The mode in which the cache was asked; empty where it is not known.
        obstacle: Why the entry that was there could not be used; empty where there was none.
    """

    key: Key
    name: str
    script: str
    process: int
    time: float
    mode: str
    obstacle: str = ""


def record_miss(cache: Cache, key: Key, name: str) -> None:
    """Append a miss to the file in a cache's folder, if it can be written and the mode writes.

    Args:
        cache: The cache; its folder is not made if it is not there yet.
        key: What was asked for.
        name: The program, as its maker calls it.
    """
    if not cache.mode.writes:
        return
    folder = cache.folder
    line = json.dumps(
        {
            "version": _VERSION,
            "time": time.time(),
            "process": os.getpid(),
            "name": name,
            "script": script_name(),
            "mode": cache.mode.name,
            "obstacle": cache.obstacles.get(key.digest, ""),
            "parts": [[part.name, part.value] for part in key.parts],
        },
        separators=(",", ":"),
    )
    content = f"{line}\n".encode("ascii")
    if len(content) > _LARGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError):
        # The folder is the store's to make: it refuses one that others may write to.
        descriptor = open_or_make(folder / FILE_NAME, os.O_WRONLY | os.O_APPEND, cache.access)
        try:
            os.write(descriptor, content)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _LARGEST_BYTES:
            _keep_the_last(folder, cache.access)


def script_name() -> str:
    """Return the file name of the Python program that runs; empty where there is none."""
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def misses(folder: Path) -> list[Miss]:
    """Return the last misses of a cache, oldest first; lines that cannot be read are left out."""
    read = (_parse(line) for line in _lines(folder)[-KEPT_MISSES:])
    return [miss for miss in read if miss is not None]


def forget_misses(folder: Path) -> None:
    """Remove the file."""
    with contextlib.suppress(OSError):
        os.unlink(folder / FILE_NAME)


def _lines(folder: Path) -> list[bytes]:
    try:
        content = (folder / FILE_NAME).read_bytes()
    except OSError:
        return []
    return content.splitlines(keepends=True)


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


def _keep_the_last(folder: Path, access: Access) -> None:
    """Write the file anew with the last misses; one appended at this very moment may be lost."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(_lines(folder)[-KEPT_MISSES:])
        os.chmod(temporary, access.file_mode)
        os.replace(temporary, folder / FILE_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
