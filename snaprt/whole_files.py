"""Writes files that appear whole or not at all; it must not know what is in them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from snaprt.leftovers import remove_leftovers, temporary_name


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as `whole_file` does.

    Raises:
        OSError: The system refused.
    """
    with whole_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place when the block ends; if that fails, what was there stays.

    Devices and pipes, such as ``/dev/null`` and ``/dev/stdout``, are written to: replaced, they
    would be lost. A link stays, and leads to the new file.

    Raises:
        OSError: The system refused.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    _remove_leftovers_once(target.parent)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@functools.cache
def _remove_leftovers_once(folder: Path) -> None:
    """Remove what killed processes left in a folder, which may be large, but not at each file."""
    remove_leftovers(folder)
