"""Writes snapshot files, each whole or not at all.

A file grows under a temporary name beside its own, is forced to disk and renamed. Large arrays
pass through in pieces: no second copy of one is made, and the disk works while checksums are made.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import blake3
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.host.whole_files import NO_SPACE, TOO_LARGE, remedy, temporary_name
from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.repeated import Form
from snaprt.snapshot.format.small_zip import (
    FIRST_TIME,
    LAST_TIME,
    MOST_MEMBERS,
    SmallZip,
    checksum,
    shown_time,
)
from snaprt.snapshot.format.store import ArrayStore
from snaprt.snapshot.format.whole_writes import WholeWrites

SMALL_FILE: Final = 1 << 20
"""Bytes up to which a snapshot is written at once, and left to the system to put on disk.

Forcing takes milliseconds, and there may be thousands. Should the machine fail before the system
has written one, it is empty or cut short, which whoever reads it is told.
"""

MOST_ARRAYS: Final = MOST_MEMBERS - len(schema.MODULE_MEMBERS) - 2  # the mark, the manifest
_MOST_BUFFERS: Final = 1024  # that Linux and macOS write at once
_WORTH: Final = 0.75  # of the module: it is compressed where it shrinks to this share
_EFFORT: Final = 3
_T = TypeVar("_T")
RECORD_ELSEWHERE: Final = "use another folder: set the folder with --dump or SNAPRT_DUMP_DIR"


def write_snapshot(
    path: str | os.PathLike[str],
    contents: schema.Contents,
    *,
    elsewhere: str = "name another folder",
) -> schema.Manifest:
    """Write one snapshot file.

    It appears under ``path`` complete and on disk, or not at all; a file that is there already is
    replaced. The folder is made where it does not exist.

    Args:
        path: The file.
        contents: What is in it.
        elsewhere: How to name another folder, for the hint of an error.

    Returns:
        The manifest as written.

    Raises:
        SnapshotError: The file system refused, or an array has a dtype no snapshot can hold.
    """
    return write_file(Path(path), contents, None, elsewhere).manifest


class Written(NamedTuple):
    """A snapshot file that is there."""

    manifest: schema.Manifest
    length: int  # in bytes
    form: Form | None  # of files like it


def write_file(
    path: Path,
    contents: schema.Contents,
    store: ArrayStore | None,
    elsewhere: str = RECORD_ELSEWHERE,
) -> Written:
    """Write one snapshot file as `write_snapshot`; return what else is known of it.

    A store keeps all but the smallest arrays; without one the file holds them itself.
    """

    def write(temporary: str) -> Written:
        if _size(contents) <= SMALL_FILE and len(contents.arrays) < MOST_ARRAYS:
            manifest, parts, form = _small_container(contents, store)
            return Written(manifest, _write_at_once(temporary, parts), form)
        with _in_folder(temporary, lambda: WholeWrites(temporary)) as file:
            manifest = _write_container(file, contents, store)
            os.fsync(file.fileno())
            return Written(manifest, os.fstat(file.fileno()).st_size, None)

    size = functools.partial(_size, contents)
    return _replace(str(path.parent), path.name, write, size, elsewhere)


def write_parts(folder: str, name: str, parts: Sequence[Any]) -> int:
    """Write one small snapshot file that is given in parts; return its length in bytes.

    Raises:
        SnapshotError: The file system refused.
    """
    write = functools.partial(_write_at_once, parts=parts)
    return _replace(folder, name, write, lambda: sum(map(len, parts)), RECORD_ELSEWHERE)


def _replace(
    folder: str, name: str, write: Callable[[str], _T], size: Callable[[], int], elsewhere: str
) -> _T:
    """Have ``write`` make a temporary file, give it its name, and return what that returned."""
    temporary = f"{folder}{os.sep}{temporary_name(name)}"
    try:
        try:
            result = write(temporary)
            os.replace(temporary, f"{folder}{os.sep}{name}")
        except BaseException:
            with contextlib.suppress(OSError):  # it may not be there yet
                os.unlink(temporary)
            raise
    except OSError as error:
        raise _refused(Path(folder, name), size(), error, elsewhere) from error
    return result


def _refused(path: Path, size: int, error: OSError, elsewhere: str) -> SnapshotError:
    message = f"cannot write {path}: {error.strerror or error}"
    if error.errno in TOO_LARGE:
        message += f"; it needs up to {size:,} bytes"
    if error.errno in NO_SPACE:
        with contextlib.suppress(OSError):
            message += f" and {shutil.disk_usage(path.parent).free:,} bytes are free there"
    return SnapshotError(message, hint=remedy(error, elsewhere))


def _size(contents: schema.Contents) -> int:
    """Return about how many bytes a file takes."""
    nbytes = (array.nbytes for array in contents.arrays if isinstance(array, schema.ArrayContent))
    return sum(nbytes) + len(contents.module.stablehlo) + len(contents.module.hlo)


def _in_folder(path: str, make: Callable[[], _T]) -> _T:
    """Return what ``make`` returns, which opens a file in a folder that may not be there yet."""
    try:
        return make()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return make()


def _write_at_once(path: str, parts: Sequence[Any]) -> int:
    """Write a file without a buffer, and without what else `open` asks of the system."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    file = _in_folder(path, lambda: os.open(path, flags, 0o666))
    try:
        length, offset = sum(map(len, parts)), 0
        if len(parts) <= _MOST_BUFFERS and hasattr(os, "writev"):
            offset = os.writev(file, parts)  # without a copy
        if offset < length:  # such as on a disk that is full, which it says the next time
            content = memoryview(b"".join(parts))
            while offset < length:
                offset += os.write(file, content[offset:])
    finally:
        os.close(file)
    return length


def _small_container(
    contents: schema.Contents, store: ArrayStore | None
) -> tuple[schema.Manifest, Sequence[Any], Form | None]:
    """Return what `_write_container` would write, but for what a zip of 4 GiB would need."""
    archive = SmallZip(shown_time(int(contents.execution.time)))
    members: list[tuple[str, bytes, int]] = []

    def add(member: str, content: bytes, sum_: int | None) -> None:
        sum_ = checksum(content) if sum_ is None else sum_
        members.append((member, content, sum_))
        archive.add(member, content, known_checksum=sum_)

    def add_array(member: str, array: schema.ArrayContent) -> schema.ArrayRecord:
        fetched, stored, compression, member = _prepared(member, array)
        sink = io.BytesIO()
        digest = arrays.put(sink, stored, compression)
        content = sink.getvalue()
        archive.add(member, content)
        return arrays.describe(
            array, fetched, stored, member=member, compression=compression,
            stored_bytes=len(content), digest=digest,
        )  # fmt: skip

    manifest, comment = _fill(add, add_array, contents, store)
    return manifest, archive.closed(comment), Form.of(manifest, members[:-1])


def _write_container(
    file: WholeWrites, contents: schema.Contents, store: ArrayStore | None
) -> schema.Manifest:
    """Write a zip whose members are stored as they are: what is compressed is so inside."""
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
    when = contents.execution.time
    with contextlib.ExitStack() as undo:
        # Without this, what goes wrong below would be hidden by what `close` says of it.
        undo.callback(_close_quietly, archive)
        manifest, archive.comment = _fill(
            functools.partial(_add, archive, when),
            functools.partial(_add_array, archive, file, when),
            contents,
            store,
        )
        undo.pop_all()
    archive.close()
    return manifest


def _fill(
    add: Callable[[str, bytes, int | None], None],
    add_array: Callable[[str, schema.ArrayContent], schema.ArrayRecord],
    contents: schema.Contents,
    store: ArrayStore | None,
) -> tuple[schema.Manifest, bytes]:
    """Add all members in their order; return the manifest, and the comment of the zip."""
    add(schema.MARK_MEMBER, schema.MARK, None)
    module = {}
    for attribute, member in schema.MODULE_MEMBERS.items():
        stored, sum_, record = _compressed(member, getattr(contents.module, attribute))
        module[attribute] = record
        add(record.member, stored, sum_)
    records = []
    for number, array in enumerate(contents.arrays):
        if isinstance(array, schema.ArrayRecord):
            records.append(array)
        elif store is not None and array.nbytes >= arrays.SMALL:
            records.append(store.put(array))
        else:
            records.append(add_array(f"arrays/{number:04d}.npy", array))
    manifest = schema.Manifest(
        contents.execution,
        module,
        tuple(records),
        contents.shardings,
        contents.proof,
        contents.trace_error,
    )
    text = schema.to_json(manifest)
    add(schema.MANIFEST_MEMBER, text, None)
    return manifest, schema.comment(manifest, blake3.blake3(text).hexdigest())


def _close_quietly(archive: zipfile.ZipFile) -> None:
    with contextlib.suppress(Exception):
        archive.close()


def _info(member: str, when: float) -> zipfile.ZipInfo:
    when = min(max(when, FIRST_TIME), LAST_TIME)
    info = zipfile.ZipInfo(member, date_time=time.gmtime(when)[:6])
    info.external_attr = 0o644 << 16
    return info


def _add(archive: zipfile.ZipFile, when: float, member: str, content: bytes, _: int | None) -> None:
    archive.writestr(_info(member, when), content)


def _add_array(
    archive: zipfile.ZipFile,
    file: WholeWrites,
    when: float,
    member: str,
    array: schema.ArrayContent,
) -> schema.ArrayRecord:
    fetched, stored, compression, member = _prepared(member, array)
    with archive.open(_info(member, when), "w", force_zip64=True) as sink:
        start = file.tell()
        digest = arrays.put(sink, stored, compression)
        end = file.tell()
    return arrays.describe(
        array,
        fetched,
        stored,
        member=member,
        compression=compression,
        stored_bytes=end - start,
        digest=digest,
    )


def _prepared(member: str, array: schema.ArrayContent) -> tuple[np.ndarray, np.ndarray, str, str]:
    """Return an array as it is and as it is stored, how it is compressed, and the member's name.

    It is stored as ``.npy``, or as one zstd frame of that where a sample says it pays.
    """
    fetched = np.asarray(array.fetch())
    stored = arrays.to_storage(fetched)
    compression = arrays.choose_compression(stored, arrays.WRITTEN_EACH_TIME)
    return fetched, stored, compression, f"{member}.zst" if compression == "zstd" else member


def _compressed(member: str, content: bytes) -> tuple[bytes, int, schema.MemberRecord]:
    """Return a part of the module as it is stored: one zstd frame where that is shorter.

    With the zip's checksum of that, and what the manifest says of it.
    """
    small = len(content) <= SMALL_FILE
    return (_compressed_once if small else _compressed_once.__wrapped__)(member, content)


@functools.lru_cache(maxsize=32)  # every execution of a program has the same
def _compressed_once(member: str, content: bytes) -> tuple[bytes, int, schema.MemberRecord]:
    stored = zstandard.ZstdCompressor(_EFFORT).compress(content)
    shorter = len(stored) <= len(content) * _WORTH
    if not shorter:
        stored = content
    return (
        stored,
        checksum(stored),
        schema.MemberRecord(
            member=f"{member}.zst" if shorter else member,
            compression="zstd" if shorter else "none",
            stored_bytes=len(stored),
            raw_bytes=len(content),
            digest=blake3.blake3(content).hexdigest(),
        ),
    )
