"""Keeps arrays beside the snapshots under the digest of their bytes, each once.

``FOLDER/arrays/ab/abcd....npy`` is an array whose ``.npy`` has the BLAKE3 abcd...: what is there
never changes, so that any number of processes may share it. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any, BinaryIO, Final

import blake3
import numpy as np
import zstandard

from snaprt import metrics, settings
from snaprt.host.regular_files import open_file
from snaprt.host.whole_files import remove_leftovers, temporary_name
from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.whole_writes import WholeWrites

_log = logging.getLogger("snaprt.snapshot")

SUFFIXES: Final = {"none": ".npy", "zstd": ".npy.zst", "zstd-shuffled": ".npy.shuffled.zst"}
"""What a stored array's name ends in, by its compression."""

FOLDER: Final = "arrays"
MEMBER: Final = re.compile(
    rf"{FOLDER}/([0-9a-f]{{2}})/\1[0-9a-f]{{62}}({'|'.join(map(re.escape, SUFFIXES.values()))})"
)
"""What a record calls an array in the store: its path from the folder of the snapshots."""


class ArrayStore:
    """The arrays that the snapshots of one folder share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, Hashable], tuple[weakref.ref[object], schema.ArrayRecord]] = {}
        self._sound: set[str] = set()  # members that this process has written or read whole
        remove_leftovers(folder / FOLDER)

    def put(self, array: schema.ArrayContent) -> schema.ArrayRecord:
        """Store an array, if it is not there yet, and return its record.

        One that was stored before, and cannot have changed since, is not even fetched.

        Raises:
            OSError: The file system refused.
            SnapshotError: The array has a dtype no snapshot can hold.
        """
        record = self._seen_before(array)
        if record is None:
            fetched = np.asarray(array.fetch())
            record = self._stored(array, fetched, arrays.to_storage(fetched))
            self._remember(array, record)
        # The rest is the array's own; these two are its place in one file.
        return dataclasses.replace(record, name=array.name, sharding_number=array.sharding_number)

    def _seen_before(self, array: schema.ArrayContent) -> schema.ArrayRecord | None:
        if array.identity is None:
            return None
        source, part = array.identity
        reference, record = self._seen.get((id(source), part), (None, None))
        if record is None or reference is None or reference() is not source:
            return None
        if self._reuse(record.member) is None:  # somebody has cleared the folder
            return None
        metrics.counter_add("SnapshotArrayNotFetched")
        return record

    def _remember(self, array: schema.ArrayContent, record: schema.ArrayRecord) -> None:
        if array.identity is None:
            return
        source, part = array.identity
        seen, key = self._seen, (id(source), part)
        seen[key] = (weakref.ref(source, lambda _: seen.pop(key, None) and None), record)

    def _stored(
        self, array: schema.ArrayContent, fetched: np.ndarray, stored: np.ndarray
    ) -> schema.ArrayRecord:
        address, digest = arrays.digests(stored)
        describe = functools.partial(
            arrays.describe, array, fetched, stored, digest=digest, in_store=True
        )
        for compression in SUFFIXES:  # another version may have decided otherwise
            member = _member(address, compression)
            size = self._reuse(member)
            if size is None:
                continue
            if self._is_sound(member, address, stored, compression):
                metrics.counter_add("SnapshotArrayReused")
            else:
                _log.warning("rewriting %s, which is damaged", self._folder / member)
                metrics.counter_add("SnapshotArrayMended")
                size = self._write(member, stored, compression, replace=True)
            return describe(member=member, compression=compression, stored_bytes=size)
        compression = arrays.choose_compression(stored, arrays.WRITTEN_ONCE)
        member = _member(address, compression)
        size = self._write(member, stored, compression)
        return describe(member=member, compression=compression, stored_bytes=size)

    def _reuse(self, member: str) -> int | None:
        """Return the size of a stored array, made new again for who looks for old ones."""
        path = self._folder / member
        try:
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(path)
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def _is_sound(self, member: str, address: str, stored: np.ndarray, compression: str) -> bool:
        """Return whether a stored array has the bytes that its name says; look once a process."""
        if member not in self._sound:
            try:
                with open_file(self._folder / member) as file:
                    if _digest_in(file, stored, compression) != address:
                        return False
            except (OSError, ValueError, zstandard.ZstdError):
                return False
            self._sound.add(member)
        return True

    def _write(
        self, member: str, stored: np.ndarray, compression: str, *, replace: bool = False
    ) -> int:
        path = self._folder / member
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / FOLDER / temporary_name(path.name)
        try:
            with WholeWrites(temporary) as file:
                arrays.put(file, stored, compression)
                os.fsync(file.fileno())
            if replace:
                os.replace(temporary, path)
            else:
                move_unless_there(temporary, path)
            self._sound.add(member)
        finally:
            temporary.unlink(missing_ok=True)
        _force_to_disk(path.parent)
        size = path.stat().st_size
        metrics.metric_add("SnapshotBytes", size)
        return size


def _digest_in(file: BinaryIO, stored: np.ndarray, compression: str) -> str:
    """Return the BLAKE3, in hex, of the ``.npy`` in a file that ought to be that of ``stored``.

    Raises:
        ValueError: It is longer or shorter than that.
        zstandard.ZstdError: Nothing comes of the bytes.
    """
    source: Any = file
    if compression != "none":
        source = zstandard.ZstdDecompressor().stream_reader(file)
    header = arrays.npy_header(stored.dtype.str, stored.shape)
    digest = blake3.blake3(arrays.read_exactly(source, len(header)))
    itemsize = stored.itemsize if compression == "zstd-shuffled" else 1
    buffer = memoryview(bytearray(min(arrays.PIECE, stored.nbytes)))
    for start in range(0, stored.nbytes, arrays.PIECE):
        arrays.read_into(source, buffer[: stored.nbytes - start], itemsize, digest)
    if source.read(1):
        raise ValueError("it is too long")
    return digest.hexdigest()


def _member(address: str, compression: str) -> str:
    return f"{FOLDER}/{address[:2]}/{address}{SUFFIXES[compression]}"


def move_unless_there(temporary: Path, path: Path) -> None:
    """Give a file its name, unless another process was faster: its length may be recorded."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not path.exists():
            os.replace(temporary, path)


def _force_to_disk(folder: Path) -> None:
    """Make a new name in a folder last, before a snapshot refers to it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_of_folder: dict[Path, ArrayStore] = {}


def store_for(folder: Path) -> ArrayStore | None:
    """Return the store of a folder; None while ``SNAPRT_RECORD_DEDUPE`` is off.

    Raises:
        UsageError: The setting has a value that it does not allow.
    """
    if not settings.get("SNAPRT_RECORD_DEDUPE"):
        return None
    store = _of_folder.get(folder)
    if store is None:
        store = _of_folder.setdefault(folder, ArrayStore(folder))
    return store
