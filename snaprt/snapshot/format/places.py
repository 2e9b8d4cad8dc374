"""Opens what a path names, in a folder or in a packed file, and finds the members of a zip.

A packed file is a zip whose members are snapshots and the stored arrays that they refer to, each
stored as it is. It can stand in a path like the folder that it was made of:
``one.pack/NAME.inputs.snap``.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from snaprt.host.regular_files import open_file
from snaprt.snapshot.format.schema import MARK, MARK_MEMBER, SUFFIXES

PACK_MARK = b"application/vnd.snaprt.pack"
SNAPSHOT_SUFFIX = ".snap"
ZIP_END = b"PK\x05\x06"
_ZIP_START = b"PK\x03\x04"
_HEADER_BYTES = 30
_MARK_AT = _HEADER_BYTES + len(MARK_MEMBER)  # it is stored first and without extra fields
_NAMES_IN_UTF8 = 0x800
"""The flag of a zip member whose name is not in code page 437. Source: PKWARE's APPNOTE, 4.4.4."""
_END_BYTES = 22
"""Of the record at the end, without the comment. Source: the same, 4.3.16."""
_MANY = 0xFFFF
"""Stands there in place of a number of members that does not fit."""


def is_snapshot(start: bytes) -> bool:
    """Return whether a file that begins with these bytes (80 or more) claims to be a snapshot."""
    return start.startswith(_ZIP_START) and start[_MARK_AT:].startswith(MARK)


def is_pack(start: bytes) -> bool:
    """Return whether a file that begins with these bytes (80 or more) claims to be packed."""
    return start.startswith(_ZIP_START) and start[_MARK_AT:].startswith(PACK_MARK)


def is_pack_file(path: Path) -> bool:
    """Return whether there is a file at ``path`` that claims to be a packed one."""
    try:
        with open_file(path) as file:
            return is_pack(file.read(_MARK_AT + len(PACK_MARK)))
    except OSError:
        return False


def pack_of(path: Path) -> Path | None:
    """Return the packed file inside which ``path`` leads; None where it leads into none."""
    for parent in path.parents:
        if parent.is_file():
            return parent if is_pack_file(parent) else None
        if parent.is_dir():
            return None
    return None


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, or a member of a packed file, to read its bytes.

    Raises:
        OSError: There is none, or it cannot be read.
        zipfile.BadZipFile: The packed file is damaged.
        ValueError: The same.
    """
    pack = None if path.is_file() else pack_of(path)
    if pack is None:
        return open_file(path)
    name = path.relative_to(pack).as_posix()
    file = open(pack, "rb")  # noqa: SIM115
    try:
        members = directory(file)[1]
        if name not in members:
            for other in members:  # which may be the name of what is asked for, damaged
                locate(file, members, other)
            raise FileNotFoundError(f"{pack} holds no {name}")
        return _Part(file, *locate(file, members, name))
    except BaseException:
        file.close()
        raise


def exists(path: Path) -> bool:
    """Return whether something is in a path's place, or it leads to a member of a packed file.

    A folder, a link that leads nowhere, or what a damaged packed file may have held is not absent:
    whoever opens it says what it is.
    """
    if os.path.lexists(path):
        return True
    if pack_of(path) is None:
        return False
    try:
        open_bytes(path).close()
    except FileNotFoundError:
        return False
    except (OSError, ValueError, zipfile.BadZipFile):
        return True
    return True


def size(path: Path) -> int:
    """Return the size in bytes of what a path leads to.

    Raises:
        OSError: There is no such file.
    """
    with open_bytes(path) as file:
        return file.seek(0, os.SEEK_END)


def snapshots_in(place: Path) -> list[Path]:
    """Return the snapshots directly in a folder or a packed file, by name; none if it is neither.

    A folder with the name of a recording is among them: whoever opens it says so.

    Raises:
        OSError: The folder cannot be read.
    """
    if place.is_dir():
        names = [entry.name for entry in os.scandir(place) if _is_recording(entry)]
    else:
        names = list(_members(place)) if is_pack_file(place) else []
    return [
        place / name
        for name in sorted(names)
        if name.endswith(SNAPSHOT_SUFFIX) and "/" not in name and not name.startswith(".")
    ]


def _is_recording(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file() or (entry.name.endswith(tuple(SUFFIXES.values())) and entry.is_dir())
    except OSError:  # links that form a loop, for example
        return False


def _members(pack: Path) -> tuple[str, ...]:
    """Return the names of a packed file's members, but for the mark; none where it is damaged."""
    try:
        with open_file(pack) as file:
            members = directory(file)[1]
            for name in members:  # which the file says twice
                locate(file, members, name)
    except (OSError, ValueError, zipfile.BadZipFile):
        return ()
    return tuple(name for name in members if name != MARK_MEMBER)


def directory(file: BinaryIO) -> tuple[bytes, Mapping[str, zipfile.ZipInfo]]:
    """Return the comment of a zip of ours, and its members by name.

    The file says twice how many there are, which is compared; `locate` does so with their names.

    Raises:
        zipfile.BadZipFile: It is damaged.
        ValueError: The same.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos, comment = archive.infolist(), archive.comment
    except NotImplementedError as error:  # of a version of zip that there is not
        raise zipfile.BadZipFile(str(error)) from error
    file.seek(-_END_BYTES - len(comment), os.SEEK_END)
    (count,) = struct.unpack("<H", file.read(_END_BYTES)[10:12])
    if count not in (len(infos), _MANY):
        raise zipfile.BadZipFile(f"it holds {len(infos)} of {count} members")
    if any(info.header_offset < 0 for info in infos):
        raise zipfile.BadZipFile("it lacks bytes that come before its directory")
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise zipfile.BadZipFile("two of its members have the same name")
    return comment, members


def locate(file: BinaryIO, members: Mapping[str, zipfile.ZipInfo], name: str) -> tuple[int, int]:
    """Return offset and length in bytes of a zip member's content, which is stored as it is.

    Raises:
        ValueError: It is missing, or the zip's directory or the member's header is damaged.
    """
    if name not in members:
        raise ValueError(f"the member {name} is missing")
    info = members[name]
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"the member {name} is compressed by zip")
    file.seek(info.header_offset)
    header = file.read(_HEADER_BYTES)
    if len(header) != _HEADER_BYTES or not header.startswith(_ZIP_START):
        raise ValueError(f"the header of the member {name} is bad")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    encoding = "utf-8" if info.flag_bits & _NAMES_IN_UTF8 else "cp437"
    if file.read(name_length) != info.orig_filename.encode(encoding):
        raise ValueError(f"the header of the member {name} has a different name")
    offset = info.header_offset + _HEADER_BYTES + name_length + extra_length
    if offset + info.file_size > file.seek(0, os.SEEK_END):
        raise ValueError(f"the member {name} extends past the end of the file")
    return offset, info.file_size


class _Part(io.RawIOBase, BinaryIO):
    """A part of a file as if it were a file, which it closes with itself."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return int(count)

    def close(self) -> None:
        self._file.close()
        super().close()
