"""Opens snapshot files and verifies all that is read; it must not know JAX or how they are written.

Nothing in a file is believed before it is checked: the manifest against the digest in the zip
comment, every member against the manifest. Whatever is wrong is a ``SnapshotError`` that names the
file.
"""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import blake3
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import manifest_json, places, schema, seeded, store
from snaprt.snapshot.format.dtypes import from_storage, storage_dtype
from snaprt.snapshot.format.encode import BLOCK_BYTES, unshuffle

_ZIP_END = b"PK\x05\x06"
_LONGEST_HEADER = 4096  # bytes of a .npy header; numpy's own are 128 for any shape we write
_PIECE = 8 << 20
_MOST_PER_BYTE = {"none": 1, "zstd": 1 << 16, "zstd-shuffled": 1 << 16}
"""Raw bytes that one stored byte can stand for; zstd's densest block: 128 KiB in 4 bytes."""
_RECORD_AGAIN = "the file cannot be used; record the execution again"


def open_snapshot(path: str | os.PathLike[str]) -> SnapshotFile:
    """Open a snapshot file and verify its manifest; arrays are read and verified one by one.

    Raises:
        SnapshotError: There is no such file, it is not a snapshot, it was cut short or damaged,
            or it was written by a newer snaprt.
    """
    return SnapshotFile(Path(path))


def sibling_outputs(path: str | os.PathLike[str]) -> Path | None:
    """Return the ``.outputs.snap`` that belongs to an ``.inputs.snap``, if it is there."""
    return _sibling(Path(path), "inputs", "outputs")


def sibling_inputs(path: str | os.PathLike[str]) -> Path | None:
    """Return the ``.inputs.snap`` that belongs to an ``.outputs.snap``, if it is there."""
    return _sibling(Path(path), "outputs", "inputs")


def _sibling(path: Path, role: schema.Role, other: schema.Role) -> Path | None:
    if not path.name.endswith(schema.SUFFIXES[role]):
        return None
    sibling = path.with_name(path.name.removesuffix(schema.SUFFIXES[role]) + schema.SUFFIXES[other])
    return sibling if places.exists(sibling) else None


def is_snapshot(start: bytes) -> bool:
    """Return whether a file that begins with these bytes (80 or more) claims to be a snapshot."""
    return start.startswith(places.ZIP_START) and start[places.MARK_AT :].startswith(schema.MARK)


class SnapshotFile:
    """A snapshot file whose manifest has been verified. It holds no file open.

    Attributes:
        path: The file.
        manifest: What was recorded, by which program, on what.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading() as file:
            self._members = _directory(file, path)
            self.manifest = self._read_manifest(file)
        self._arrays = {record.name: record for record in self.manifest.arrays}

    @property
    def role(self) -> schema.Role:
        """Whether the arrays are the execution's ``inputs`` or its ``outputs``."""
        return self.manifest.execution.role

    @property
    def array_names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order in which the module takes or returns them."""
        return tuple(self._arrays)

    @functools.cached_property
    def module(self) -> schema.ModuleBytes:
        """The recorded module and its compile options.

        Raises:
            SnapshotError: They are damaged.
        """
        with self._reading() as file:
            return schema.ModuleBytes(
                **{name: self._read_module(file, name) for name in schema.MODULE_MEMBERS}
            )

    def record(self, name: str) -> schema.ArrayRecord:
        """Return what the manifest says of an array.

        Raises:
            SnapshotError: There is no array of that name.
        """
        try:
            return self._arrays[name]
        except KeyError:
            raise SnapshotError(
                f"{self.path} holds no array called {name}",
                hint=f"it holds: {', '.join(self._arrays) or 'none'}",
            ) from None

    def array(self, name: str) -> np.ndarray:
        """Read one array and verify its digest.

        Returns:
            Shape and dtype as recorded, in memory of its own; for PRNG keys their data (uint32,
            one dimension more). Where the values were left out, the file's seed gives others.

        Raises:
            SnapshotError: There is no array of that name, or it is damaged.
        """
        record = self.record(name)
        what = f"array {name}"
        _check_record(self.path, record)
        if record.seeded:
            return self._draw(record)
        with self._reading(what, self._stored_path(record)) as file:
            source = self._array_stream(file, record, what)
            _check_size(record, record.raw_bytes)
            _read_npy_header(source, record)
            try:
                stored = np.empty(record.stored_shape, np.dtype(record.stored_dtype))
            except MemoryError as error:
                raise SnapshotError(
                    f"{what} of {self.path}: out of memory: needs {record.raw_bytes:,} bytes"
                ) from error
            itemsize = stored.itemsize if record.compression == "zstd-shuffled" else 1
            digest = _read_into(source, stored.reshape(-1).view(np.uint8).data, itemsize)
            if digest != record.digest:
                raise ValueError("its digest does not match")
            return stored if record.key_impl else from_storage(stored, record.dtype)

    @contextmanager
    def _reading(self, what: str = "it", stored: Path | None = None) -> Iterator[BinaryIO]:
        """Open the file, or a stored array; whatever goes wrong becomes a SnapshotError."""
        try:
            with places.open_bytes(stored or self.path) as file:
                yield file
        except SnapshotError:
            raise
        except FileNotFoundError as error:
            if stored is not None:
                raise SnapshotError(
                    f"{what} of {self.path} is kept beside it in {stored}, which is not there",
                    hint="copy the folder arrays/ with the snapshots; or make one file of all "
                    "where it was recorded: snaprt pack FILE -o OUT",
                ) from error
            raise SnapshotError(
                f"there is no file {self.path}", hint="check the path; is the disk mounted?"
            ) from error
        except IsADirectoryError as error:
            raise SnapshotError(
                f"{self.path} is a directory, not a snapshot", hint="name one .snap file in it"
            ) from error
        except OSError as error:
            raise SnapshotError(
                f"cannot read {stored or self.path}: {error.strerror or error}"
            ) from error
        except Exception as error:  # the many ways in which zipfile, zstd and numpy refuse bytes
            subject = "" if what == "it" else f"{what}: "
            subject += f"{stored}, in which it is kept: " if stored else ""
            raise SnapshotError(
                f"{self.path} is damaged: {subject}{str(error) or type(error).__name__}",
                hint="remove the stored array, and record the execution again"
                if stored
                else _RECORD_AGAIN,
            ) from error

    def _draw(self, record: schema.ArrayRecord) -> np.ndarray:
        try:
            return seeded.draw(record)
        except (KeyError, ValueError, OverflowError) as error:
            raise SnapshotError(
                f"{self.path} is damaged: nothing can be drawn from what it says of array "
                f"{record.name}: {error}",
                hint="pack it again where it was recorded",
            ) from error

    def stored_files(self) -> Mapping[str, Path]:
        """Return where the arrays lie that are kept in the store, by the names of their members.

        Raises:
            SnapshotError: One is not there.
        """
        found: dict[str, Path] = {}
        for record in self.manifest.arrays:
            path = self._stored_path(record)
            if path is not None:
                with self._reading(f"array {record.name}", path):
                    found[record.member] = path
        return found

    def check(self) -> None:
        """Read all that is in the file itself: the module, and arrays that the store does not have.

        Raises:
            SnapshotError: Something is damaged.
        """
        _ = self.module
        for record in self.manifest.arrays:
            if not record.in_store and not record.seeded:
                self.array(record.name)

    def check_stored(self, member: str) -> None:
        """Read the arrays that are kept in one file of the store.

        Raises:
            SnapshotError: One is damaged.
        """
        for record in self.manifest.arrays:
            if record.in_store and record.member == member:
                self.array(record.name)

    def _stored_path(self, record: schema.ArrayRecord) -> Path | None:
        """Return where the store keeps an array; None for one that lies in the file."""
        if not record.in_store:
            return None
        if not store.MEMBER.fullmatch(record.member):
            raise SnapshotError(
                f"{self.path} is damaged: it looks for an array in {record.member!r:.200}",
                hint=_RECORD_AGAIN,
            )
        return self.path.parent / record.member

    def _read_manifest(self, file: BinaryIO) -> schema.Manifest:
        parsed = schema.parse_comment(self._members.comment)
        if parsed is None:
            raise SnapshotError(
                f"{self.path} is damaged: the zip comment that holds the format's version is bad",
                hint=_RECORD_AGAIN,
            )
        version, digest = parsed
        if version > schema.FORMAT_MAJOR:
            raise SnapshotError(
                f"{self.path} was written by a newer snaprt, format {version}; "
                f"this one reads up to {schema.FORMAT_MAJOR}",
                hint="pip install --upgrade snaprt",
            )
        offset, length = self._members.locate(file, schema.MANIFEST_MEMBER)
        file.seek(offset)
        text = file.read(length)
        if blake3.blake3(text).hexdigest() != digest:
            raise ValueError("the manifest's digest does not match")
        return manifest_json.from_json(text)

    def _read_module(self, file: BinaryIO, name: str) -> bytes:
        record = self.manifest.module[name]
        _check_size(record, record.raw_bytes)
        source = self._member_stream(file, record, record.member)
        content = _read_exactly(source, record.raw_bytes)
        if blake3.blake3(content).hexdigest() != record.digest:
            raise ValueError(f"the digest of {record.member} does not match")
        return content

    def _member_stream(
        self, file: BinaryIO, record: schema.ArrayRecord | schema.MemberRecord, what: str
    ) -> BinaryIO:
        offset, length = self._members.locate(file, record.member)
        return _decompressed(file, offset, length, record, what)

    def _array_stream(self, file: BinaryIO, record: schema.ArrayRecord, what: str) -> BinaryIO:
        if not record.in_store:
            return self._member_stream(file, record, what)
        return _decompressed(file, 0, file.seek(0, os.SEEK_END), record, what)


def _decompressed(
    file: BinaryIO,
    offset: int,
    length: int,
    record: schema.ArrayRecord | schema.MemberRecord,
    what: str,
) -> BinaryIO:
    if length != record.stored_bytes:
        raise ValueError(f"{what} has {length:,} bytes where {record.stored_bytes:,} should be")
    file.seek(offset)
    if record.compression == "none":
        return file
    if record.compression not in schema.COMPRESSIONS:
        raise ValueError(f"{what} has the unknown compression {record.compression}")
    return zstandard.ZstdDecompressor().stream_reader(file, read_size=min(length, 1 << 20) or 1)


class _Directory:
    """The zip's central directory: where each member lies."""

    def __init__(self, comment: bytes, members: Mapping[str, zipfile.ZipInfo]) -> None:
        self.comment = comment
        self._members = members

    def locate(self, file: BinaryIO, name: str) -> tuple[int, int]:
        """Return offset and length in bytes of a member's content, which is stored as it is."""
        if name not in self._members:
            raise ValueError(f"the member {name} is missing")
        return places.locate(file, self._members, name)


def _directory(file: BinaryIO, path: Path) -> _Directory:
    start = file.read(places.MARK_AT + len(schema.MARK))
    if not is_snapshot(start):
        what = "is empty" if not start else "is not a snaprt snapshot"
        raise SnapshotError(
            f"{path} {what}", hint="snapshots end in .snap; `snaprt inspect FILE` tells other files"
        )
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        if _ZIP_END in file.read():
            raise
        raise SnapshotError(
            f"{path} was cut short: it ends after {size:,} bytes without the zip directory",
            hint="copy it again from where it was recorded",
        ) from error
    return _Directory(archive.comment, {info.filename: info for info in archive.infolist()})


def _check_record(path: Path, record: schema.ArrayRecord) -> None:
    """Check that a record fits together before memory is taken on its word."""
    expected = np.dtype(np.uint32) if record.key_impl else storage_dtype(record.dtype)
    stored = record.stored_dtype == expected.newbyteorder("<").str
    size = math.prod(record.stored_shape) * expected.itemsize == record.raw_bytes
    shape = record.key_impl or record.shape == record.stored_shape
    if not (stored and size and shape):
        raise SnapshotError(
            f"{path} is damaged: what the manifest says of array {record.name} contradicts itself",
            hint=_RECORD_AGAIN,
        )


def _check_size(record: schema.ArrayRecord | schema.MemberRecord, size: int) -> None:
    """Check that the member can hold ``size`` bytes before memory is taken for them."""
    if size > record.stored_bytes * _MOST_PER_BYTE[record.compression]:
        raise ValueError(f"{record.member} is too short for what it should hold")


def _read_npy_header(source: BinaryIO, record: schema.ArrayRecord) -> None:
    start = _read_exactly(source, 10)
    length = struct.unpack("<H", start[8:])[0]
    if length > _LONGEST_HEADER:
        raise ValueError("the .npy header is too long")
    header = io.BytesIO(start + _read_exactly(source, length))
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError("the .npy header is of another version")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    if (shape, fortran_order, dtype.str) != (record.stored_shape, False, record.stored_dtype):
        raise ValueError("the .npy header says something else than the manifest")


def _read_exactly(source: BinaryIO, length: int) -> bytes:
    content = source.read(length)
    if len(content) != length:
        raise ValueError("it ends too early")
    return content


def _read_into(source: BinaryIO, target: memoryview, itemsize: int) -> str:
    """Fill ``target`` from ``source`` and return the BLAKE3 of what was read, in hex.

    Args:
        source: Gives the bytes, shuffled where ``itemsize`` is not 1.
        target: Where they go, in their order.
        itemsize: Of the numbers whose bytes are shuffled.
    """
    digest = blake3.blake3()
    for start in range(0, len(target), _PIECE):
        piece = target[start : start + _PIECE]
        _fill(source, piece)
        if itemsize > 1:
            piece[:] = unshuffle(piece, itemsize)
        digest.update(piece)
    return digest.hexdigest()


def _fill(source: BinaryIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = source.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it ends too early")
        done += count


assert _PIECE % BLOCK_BYTES == 0  # a piece is unshuffled as if it were all
