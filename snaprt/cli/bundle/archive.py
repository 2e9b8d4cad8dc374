"""Writes the file of a bundle, whole or not at all.

It is a gzipped tar file that says nothing of who made it: no owner, no name of the file itself.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import IO, BinaryIO, Final

from snaprt.cli.bundle.hiding import Hiding
from snaprt.refusals import remedy, writing
from snaprt.whole_files import remove_leftovers, temporary_name

# What is larger is prepared on disk.
_MOST_IN_MEMORY: Final = 64 << 20
_START: Final = 1 << 13
# Text, whatever a program has printed into it.
_TEXT: Final = frozenset((".txt", ".json"))


class BundleFile:
    """A bundle that is being written; leaving the scope before `finish` removes what is there.

    Args:
        path: Where it will be; what is there is replaced.

    Raises:
        UsageError: Nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(temporary_name(path.name))
        elsewhere = "name a file in an existing, writable directory: --outfile run.tar.gz"
        with writing(f"write {path}", elsewhere, hint=remedy):
            if path.is_dir():
                raise IsADirectoryError(0, "it is a directory")
            remove_leftovers(path.parent)
            self._file: BinaryIO = self._temporary.open("xb")
        os.chmod(self._temporary, 0o600)
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0)
        self._tar = tarfile.TarFile(mode="w", fileobj=self._gzip, format=tarfile.PAX_FORMAT)

    def add(self, name: str, content: IO[bytes], length: int, modified: float) -> None:
        """Add a member of ``length`` bytes, which are read from ``content``."""
        member = tarfile.TarInfo(name)
        member.size = length
        member.mtime = int(modified)
        self._tar.addfile(member, content)

    def finish(self) -> int:
        """Put the file in its place, and return how many bytes it has."""
        self._tar.close()
        self._gzip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._temporary.stat().st_size
        os.replace(self._temporary, self.path)
        return size

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing writes what is buffered, which on a full disk fails once more.
        with contextlib.suppress(OSError, ValueError):
            self._gzip.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def prepared(path: Path, hiding: Hiding, scratch: Path) -> IO[bytes] | None:
    """Return a file as it may be shown, read from its start; ``None`` where it may not at all.

    Text is rewritten line by line. What is not text is taken as it is, or, if something in it would
    be hidden, not at all: a change would damage it.

    Args:
        path: The file.
        hiding: What is hidden.
        scratch: A folder for what is too large for the memory.
    """
    if not hiding.rules:
        return path.open("rb")
    with path.open("rb") as file:
        start = file.read(_START)
        file.seek(0)
        if _is_binary(start) and path.suffix not in _TEXT:
            content = file.read()
            return None if hiding.hides_in(content) else io.BytesIO(content)
        shown = tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY, dir=str(scratch))  # noqa: SIM115
        for line in file:
            text = line.decode("utf-8", "surrogateescape")
            shown.write(hiding.text(text).encode("utf-8", "surrogateescape"))
    shown.seek(0)
    return shown


def _is_binary(start: bytes) -> bool:
    """Return whether what a file begins with is not UTF-8, but for a character that is cut."""
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return len(start) < _START or error.start < _START - 3
    return b"\0" in start
