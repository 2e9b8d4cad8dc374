"""Writes snapshot files, each whole or not at all; it must not know JAX or when to record.

A file grows under a temporary name beside its own, is forced to disk and renamed. Large arrays
pass through in pieces: no second copy of one is made, and the disk works while checksums are made.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
import time
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import blake3
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import encode, manifest_json, schema
from snaprt.snapshot.format.dtypes import to_storage
from snaprt.snapshot.format.leftovers import WholeWrites, temporary_name
from snaprt.snapshot.format.store import ArrayStore

SMALL_FILE = 1 << 20
"""Bytes up to which a snapshot is written at once, and left to the system to put on disk."""

_WORTH = 0.75  # of the module: it is compressed where it shrinks to this share
_EFFORT = 3
_TOO_MUCH = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMES_A_FOLDER = "what is recorded goes where --dump or SNAPRT_DUMP_DIR says"


def write_snapshot(
    path: str | os.PathLike[str], contents: schema.Contents, store: ArrayStore | None = None
) -> schema.Manifest:
    """Write one snapshot file.

    It appears under ``path`` complete and on disk, or not at all; a file that is there already is
    replaced. The folder is made where it does not exist.

    Args:
        path: The file.
        contents: What is in it.
        store: Keeps all but the smallest arrays; None if the file holds them itself.

    Returns:
        The manifest as written.

    Raises:
        SnapshotError: The file system refused, or an array has a dtype no snapshot can hold.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path.name))
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            undo.callback(temporary.unlink, missing_ok=True)
            if _is_small(contents):
                whole = io.BytesIO()
                manifest = _write_container(whole, contents, store)
                temporary.write_bytes(whole.getbuffer())
            else:
                with WholeWrites(temporary) as file:
                    manifest = _write_container(file, contents, store)
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            undo.pop_all()
    except OSError as error:
        raise _refused(path, contents, error) from error
    return manifest


def _refused(path: Path, contents: schema.Contents, error: OSError) -> SnapshotError:
    told = f"cannot write {path}: {error.strerror or error}"
    if error.errno not in _TOO_MUCH:
        return SnapshotError(told, hint=f"another folder? {_NAMES_A_FOLDER}")
    needed = _sizes(contents)
    try:
        free = f" and {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = ""
    return SnapshotError(
        f"{told}; it needs up to {needed:,} bytes{free}",
        hint=f"make room, or take another folder: {_NAMES_A_FOLDER}",
    )


def _is_small(contents: schema.Contents) -> bool:
    """Return whether a file is written at once, and not forced to disk.

    Forcing takes milliseconds, and there may be thousands. Should the machine fail before the
    system has written one, it is empty or cut short, which whoever reads it is told.
    """
    return _sizes(contents) <= SMALL_FILE


def _sizes(contents: schema.Contents) -> int:
    arrays = sum(one.nbytes for one in contents.arrays if isinstance(one, schema.ArrayContent))
    return arrays + len(contents.module.stablehlo) + len(contents.module.hlo)


def _write_container(
    file: WholeWrites | io.BytesIO, contents: schema.Contents, store: ArrayStore | None
) -> schema.Manifest:
    when = contents.execution.time
    with _Container(file, when) as container:
        container.add_bytes(schema.MARK_MEMBER, schema.MARK)
        module = {
            attribute: container.add_compressed(member, getattr(contents.module, attribute))
            for attribute, member in schema.MODULE_MEMBERS.items()
        }
        arrays = tuple(
            _place_array(container, store, f"arrays/{index:04d}.npy", array)
            for index, array in enumerate(contents.arrays)
        )
        manifest = schema.Manifest(
            contents.execution,
            module,
            arrays,
            contents.shardings,
            contents.proof,
            contents.trace_error,
        )
        text = manifest_json.to_json(manifest)
        container.add_bytes(schema.MANIFEST_MEMBER, text)
        container.zip.comment = schema.comment(manifest, blake3.blake3(text).hexdigest())
    return manifest


def _place_array(
    container: _Container,
    store: ArrayStore | None,
    member: str,
    array: schema.ArrayContent | schema.ArrayRecord,
) -> schema.ArrayRecord:
    if isinstance(array, schema.ArrayRecord):
        return array
    if store is None or array.nbytes < encode.SMALL:
        return container.add_array(member, array)
    return store.put(array)


@functools.lru_cache(maxsize=32)  # every execution of a program has the same
def _compressed(member: str, content: bytes) -> tuple[bytes, schema.MemberRecord]:
    stored = zstandard.ZstdCompressor(_EFFORT).compress(content)
    shorter = len(stored) <= len(content) * _WORTH
    if not shorter:
        stored = content
    return stored, schema.MemberRecord(
        member=f"{member}.zst" if shorter else member,
        compression="zstd" if shorter else "none",
        stored_bytes=len(stored),
        raw_bytes=len(content),
        digest=blake3.blake3(content).hexdigest(),
    )


class _Container:
    """A zip file that is being written, all members stored: what is compressed is so inside."""

    def __init__(self, file: WholeWrites | io.BytesIO, when: float) -> None:
        self._file = file
        self._time = time.gmtime(min(max(when, 315532800), 4354819198))[:6]  # what zip can say
        self.zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.zip.close()
        except Exception:
            if error is None:  # else the first error says more than what followed from it
                raise

    def _open(self, member: str) -> Any:
        info = zipfile.ZipInfo(member, date_time=self._time)
        info.external_attr = 0o644 << 16
        return self.zip.open(info, "w", force_zip64=True)

    def add_bytes(self, member: str, content: bytes) -> None:
        info = zipfile.ZipInfo(member, date_time=self._time)
        info.external_attr = 0o644 << 16
        self.zip.writestr(info, content)

    def add_compressed(self, member: str, content: bytes) -> schema.MemberRecord:
        """Add a member of the module, as one zstd frame where that is shorter."""
        small = len(content) <= SMALL_FILE
        stored, record = (_compressed if small else _compressed.__wrapped__)(member, content)
        self.add_bytes(record.member, stored)
        return record

    def add_array(self, member: str, array: schema.ArrayContent) -> schema.ArrayRecord:
        """Add one array as ``.npy``, or as one zstd frame of that where a sample says it pays."""
        fetched = np.asarray(array.fetch())
        stored = to_storage(fetched)
        compression = encode.choose_compression(stored, encode.WRITTEN_EACH_TIME)
        member = f"{member}.zst" if compression == "zstd" else member
        with self._open(member) as sink:
            start = self._file.tell()
            digest = encode.put(sink, stored, compression)
            end = self._file.tell()
        return encode.describe(
            array,
            fetched,
            stored,
            member=member,
            compression=compression,
            stored_bytes=end - start,
            digest=digest,
        )
