"""Opens snapshot files and verifies all that is read.

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
from typing import BinaryIO, Final

import blake3
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import arrays, places, schema, seeded, store

_LONGEST_HEADER = 4096  # bytes of a .npy header; numpy's own are 128 for any shape we write
_MOST_PER_BYTE = {"none": 1, "zstd": 1 << 16, "zstd-shuffled": 1 << 16}
"""Raw bytes that one stored byte can stand for; zstd's densest block: 128 KiB in 4 bytes."""
_RECORD_AGAIN = "the file cannot be used; record the execution again"
_COPY_ARRAYS = "copy the folder arrays/ with the snapshots again"


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


def sibling_second_outputs(path: str | os.PathLike[str]) -> Path | None:
    """Return the ``.outputs.snap`` of the second run of the execution of an ``.inputs.snap``."""
    return _sibling(Path(path), "inputs", "outputs", "-again2")


def _sibling(path: Path, role: schema.Role, other: schema.Role, run: str = "") -> Path | None:
    if not path.name.endswith(schema.SUFFIXES[role]):
        return None
    stem = schema.without_run(path.name.removesuffix(schema.SUFFIXES[role]))
    sibling = path.with_name(f"{stem}{run}{schema.SUFFIXES[other]}")
    return sibling if places.exists(sibling) else None


class SnapshotFile:
    """A snapshot file whose manifest has been verified. It holds no file open.

    Attributes:
        path: The file.
        manifest: What was recorded, by which program, on what.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading() as file:
            comment, self._members = self._directory(file)
            self.manifest = self._read_manifest(file, comment)
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
                f"{self.path} holds no array named {name}",
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
        self._check_record(record)
        if record.seeded:
            return self._draw(record)
        with self._reading(what, self._stored_path(record)) as file:
            if record.in_store:
                source = _decompressed(file, 0, file.seek(0, os.SEEK_END), record, what)
            else:
                source = self._member_stream(file, record, what)
            _check_size(record)
            _read_npy_header(source, record)
            try:
                stored = np.empty(record.stored_shape, np.dtype(record.stored_dtype))
            except MemoryError as error:
                raise SnapshotError(
                    f"{what} of {self.path}: out of memory: needs {record.raw_bytes:,} bytes"
                ) from error
            digest = blake3.blake3()
            itemsize = stored.itemsize if record.compression == "zstd-shuffled" else 1
            arrays.read_into(source, arrays.bytes_of(stored), itemsize, digest)
            if digest.hexdigest() != record.digest:
                raise ValueError("its digest does not match")
            return stored if record.key_impl else arrays.from_storage(stored, record.dtype)

    def stored_files(self) -> Mapping[str, Path]:
        """Return where the arrays lie that are kept in the store, by the names of their members.

        Raises:
            SnapshotError: One is not there.
        """
        paths: dict[str, Path] = {}
        for record in self.manifest.arrays:
            path = self._stored_path(record)
            if path is not None:
                with self._reading(f"array {record.name}", path):
                    paths[record.member] = path
        return paths

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

    @contextmanager
    def _reading(self, what: str = "", stored: Path | None = None) -> Iterator[BinaryIO]:
        """Open the file, or a stored array; whatever goes wrong becomes a SnapshotError."""
        try:
            with places.open_bytes(stored or self.path) as file:
                yield file
        except SnapshotError:
            raise
        except FileNotFoundError as error:
            if stored is not None:
                raise SnapshotError(
                    f"{what} of {self.path} is stored separately in {stored}, which does not exist",
                    hint="copy the folder arrays/ with the snapshots, or pack everything into "
                    "one file where it was recorded: snaprt pack FILE -o OUT",
                ) from error
            raise SnapshotError(
                f"there is no file {self.path}", hint="check the path and that the disk is mounted"
            ) from error
        except IsADirectoryError as error:
            if stored is not None:
                raise SnapshotError(
                    f"{what} of {self.path} is stored separately in {stored}, which is a directory",
                    hint=_COPY_ARRAYS,
                ) from error
            raise SnapshotError(
                f"{self.path} is a directory, not a snapshot", hint="name one .snap file in it"
            ) from error
        except OSError as error:
            raise SnapshotError(
                f"cannot read {stored or self.path}: {error.strerror or error}",
                hint="name a file that you have permission to read"
                if stored is None
                else _COPY_ARRAYS,
            ) from error
        except Exception as error:  # the many ways in which zipfile, zstd and numpy refuse bytes
            subject = f"{what}: " if what else ""
            subject += f"{stored}, where it is stored: " if stored else ""
            raise self._damaged(
                f"{subject}{str(error) or type(error).__name__}",
                "remove the stored array, and record the execution again" if stored else "",
            ) from error

    def _damaged(self, why: str, hint: str = "") -> SnapshotError:
        return SnapshotError(f"{self.path} is damaged: {why}", hint=hint or _RECORD_AGAIN)

    def _directory(self, file: BinaryIO) -> tuple[bytes, Mapping[str, zipfile.ZipInfo]]:
        """Return the zip's comment, and where each member lies."""
        start = file.read(80)
        if not places.is_snapshot(start):
            what = "is empty" if not start else "is not a snaprt snapshot"
            raise SnapshotError(
                f"{self.path} {what}",
                hint="snapshots end in .snap; `snaprt inspect FILE` also identifies other files",
            )
        try:
            return places.directory(file)
        except zipfile.BadZipFile as error:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))
            if places.ZIP_END in file.read():
                raise
            raise SnapshotError(
                f"{self.path} is truncated: it ends after {size:,} bytes without the zip directory",
                hint="copy it again from where it was recorded",
            ) from error

    def _read_manifest(self, file: BinaryIO, comment: bytes) -> schema.Manifest:
        parsed = schema.parse_comment(comment)
        if parsed is None:
            raise self._damaged("the zip comment with the format version is invalid")
        version, digest = parsed
        if version > schema.FORMAT_MAJOR:
            raise SnapshotError(
                f"{self.path} was written by a newer snaprt, format {version}; this one reads up "
                f"to {schema.FORMAT_MAJOR}",
                hint="pip install --upgrade snaprt",
            )
        offset, length = places.locate(file, self._members, schema.MANIFEST_MEMBER)
        file.seek(offset)
        return _checked_manifest(file.read(length), digest)

    def _read_module(self, file: BinaryIO, name: str) -> bytes:
        record = self.manifest.module[name]
        _check_size(record)
        source = self._member_stream(file, record, record.member)
        content = arrays.read_exactly(source, record.raw_bytes)
        if blake3.blake3(content).hexdigest() != record.digest:
            raise ValueError(f"the digest of {record.member} does not match")
        return content

    def _member_stream(
        self, file: BinaryIO, record: schema.ArrayRecord | schema.MemberRecord, what: str
    ) -> BinaryIO:
        offset, length = places.locate(file, self._members, record.member)
        return _decompressed(file, offset, length, record, what)

    def _stored_path(self, record: schema.ArrayRecord) -> Path | None:
        """Return where the store keeps an array; None for one that lies in the file."""
        if not record.in_store:
            return None
        if not store.MEMBER.fullmatch(record.member):
            raise self._damaged(f"it refers to an array in {record.member!r:.200}")
        return self.path.parent / record.member

    def _check_record(self, record: schema.ArrayRecord) -> None:
        """Check that a record fits together before memory is taken on its word."""
        expected = np.dtype(np.uint32)
        if not record.key_impl:
            expected = arrays.storage_dtype(record.dtype)
        stored = record.stored_dtype == expected.newbyteorder("<").str
        size = math.prod(record.stored_shape) * expected.itemsize == record.raw_bytes
        shape = record.key_impl or record.shape == record.stored_shape
        if not (stored and size and shape):
            raise self._damaged(f"the manifest's data about array {record.name} is inconsistent")

    def _draw(self, record: schema.ArrayRecord) -> np.ndarray:
        try:
            return seeded.draw(record)
        except (KeyError, ValueError, OverflowError) as error:
            raise self._damaged(
                f"cannot draw values for array {record.name} from the manifest: {error}",
                "pack it again where it was recorded",
            ) from error


def _checked_manifest(text: bytes, digest: str) -> schema.Manifest:
    if blake3.blake3(text).hexdigest() != digest:
        raise ValueError("the manifest's digest does not match")
    return schema.from_json(text)


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
        raise ValueError(f"{what} has an unknown compression: {record.compression}")
    return zstandard.ZstdDecompressor().stream_reader(file, read_size=min(length, 1 << 20) or 1)


def _check_size(record: schema.ArrayRecord | schema.MemberRecord) -> None:
    """Check that the member can hold so many bytes before memory is taken for them."""
    if record.raw_bytes > record.stored_bytes * _MOST_PER_BYTE[record.compression]:
        raise ValueError(f"{record.member} is too short for its contents")


def _read_npy_header(source: BinaryIO, record: schema.ArrayRecord) -> None:
    start = arrays.read_exactly(source, 10)
    length = struct.unpack("<H", start[8:])[0]
    if length > _LONGEST_HEADER:
        raise ValueError("the .npy header is too long")
    header = io.BytesIO(start + arrays.read_exactly(source, length))
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError("the .npy header has another version")
    try:
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    except Exception as error:  # it is parsed as Python, whose own words help nobody
        raise ValueError("the .npy header is damaged") from error
    if (shape, fortran_order, dtype.str) != (record.stored_shape, False, record.stored_dtype):
        raise ValueError("the .npy header does not match the manifest")


_TAIL: Final = 32 << 10  # bytes: the manifest of a small program, and the directory behind it
_END: Final = struct.Struct("<4s4H2LH")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_NAME: Final = schema.MANIFEST_MEMBER.encode()


def read_manifest(path: Path) -> tuple[schema.Manifest, int]:
    """Return a snapshot's manifest and the size of its file, for lists of thousands.

    Opening a file with all its checks takes a millisecond. Here the manifest alone is read from the
    file's end and compared with its digest; where anything is unusual, the file is opened as
    everywhere else, and what is wrong with it is said there.

    Raises:
        SnapshotError: As `open_snapshot`.
    """
    try:
        return _manifest_at_the_end(path)
    except (OSError, ValueError, struct.error):
        return open_snapshot(path).manifest, places.size(path)


def _manifest_at_the_end(path: Path) -> tuple[schema.Manifest, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size = os.fstat(descriptor).st_size
        start = max(0, size - _TAIL)
        tail = os.pread(descriptor, _TAIL, start)
        head = tail if not start else os.pread(descriptor, 80, 0)
    finally:
        os.close(descriptor)
    at_end = tail.rindex(places.ZIP_END)
    *_, length, offset, comment_length = _END.unpack_from(tail, at_end)
    comment = tail[at_end + _END.size :]
    parsed = schema.parse_comment(comment)
    at_entry = tail.rindex(_NAME, max(0, offset - start), at_end) - _ENTRY.size
    fields = _ENTRY.unpack_from(tail, max(0, at_entry))
    content, name_length, header = fields[9], fields[10], fields[16] - start
    if (
        not places.is_snapshot(head)
        or len(comment) != comment_length
        or offset + length != start + at_end
        or parsed is None
        or parsed[0] > schema.FORMAT_MAJOR
        or at_entry < 0
        or header < 0
        or name_length != len(_NAME)
    ):
        raise ValueError("unexpected")
    begin = header + 30 + sum(struct.unpack_from("<HH", tail, header + 26))
    return _checked_manifest(tail[begin : begin + content], parsed[1]), size
