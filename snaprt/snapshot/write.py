"""Writes snapshot files, each whole or not at all; it must not know JAX or when to record.

A file grows under a temporary name beside its own, is forced to disk and renamed. Large arrays
pass through in pieces: no second copy of one is made, and the disk works while checksums are made.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import re
import shutil
import time
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import blake3
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.snapshot import layout
from snaprt.snapshot.dtypes import to_storage

_PIECE = 8 << 20  # bytes: large enough for the disk, small enough to stay in the processor's cache
_BEHIND = 4 << 20  # bytes: a piece of this size is worth handing to another thread
_LARGE = 64 << 20  # bytes: from here on a good disk takes an array faster than zstd shrinks it
_SMALL = 4 << 10  # bytes: below, compression saves nothing and ordinary tools have it easier
_SAMPLE_BLOCK = 32 << 10
_SAMPLE_BLOCKS = 8
_WORTH = 0.75  # an array is compressed where a sample of it shrinks to this share ...
_WORTH_LARGE = 0.25  # ... and a large one only here, where zstd is faster than the disk
_DIGEST_THREADS = 2  # of BLAKE3 over a large array: it then costs less than the zip's own CRC-32
_EFFORT = 3
_EFFORT_LARGE = 1


def write_snapshot(path: str | os.PathLike[str], contents: layout.Contents) -> layout.Manifest:
    """Write one snapshot file.

    It appears under ``path`` complete and on disk, or not at all; a file that is there already is
    replaced. The folder is made where it does not exist.

    Returns:
        The manifest as written.

    Raises:
        SnapshotError: The file system refused, or an array has a dtype no snapshot can hold.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{_process_mark()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            undo.callback(temporary.unlink, missing_ok=True)
            with _WholeWrites(temporary) as file:
                manifest = _write_container(file, contents)
                os.fsync(file.fileno())
            os.replace(temporary, path)
            undo.pop_all()
    except OSError as error:
        raise _refused(path, contents, error) from error
    return manifest


def remove_leftovers(folder: Path) -> int:
    """Remove the temporary files of processes on this machine that ended without cleaning up.

    Returns:
        How many were removed. A folder that cannot be read has none.
    """
    removed = 0
    ours = re.compile(rf"\..*\.snap\.{_process_mark()}-(\d+)\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            found = ours.fullmatch(entry.name)
            if found and not _is_alive(int(found[1])):
                os.unlink(entry.path)
                removed += 1
    return removed


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@functools.cache
def _process_mark() -> str:
    """Return 8 hex digits for the set of processes in which a process number means something."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return blake3.blake3(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


def _refused(path: Path, contents: layout.Contents, error: OSError) -> SnapshotError:
    needed = sum(array.nbytes for array in contents.arrays)
    needed += len(contents.module.stablehlo) + len(contents.module.hlo)
    try:
        free = f" and {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = ""
    return SnapshotError(
        f"cannot write {path}: {error.strerror or error}; it needs up to {needed:,} bytes{free}",
        hint="make room, or record into another directory: XLA_FLAGS=... --xla_dump_to=DIR",
    )


class _WholeWrites(io.FileIO):
    """A new file without a buffer, whose ``write`` writes everything or raises.

    A large piece is written by another thread while the caller computes the checksums of the next,
    so the memory of the last one must stay as it is; what goes wrong is raised by a later call.

    Without a buffer, and deaf in other processes: in a forked child, Python may close what the
    parent's writer thread had open, and nothing of that may reach the parent's file.
    """

    def __init__(self, path: Path) -> None:
        self._pending: Future[None] | None = None
        self._behind = ThreadPoolExecutor(1, "snaprt-snapshot-disk")
        self._process = os.getpid()
        super().__init__(path, "w")

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._finish_pending()
        if len(view) >= _BEHIND:
            try:
                self._pending = self._behind.submit(self._write_all, view)
                return len(view)
            except RuntimeError:  # Python is shutting down and gives out no more threads
                pass
        self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view) and os.getpid() == self._process:
            done += super().write(view[done:]) or 0
        if len(view) >= _BEHIND and hasattr(os, "posix_fadvise"):
            # Lets the disk begin with it now, so that `fsync` has less left to wait for.
            with contextlib.suppress(OSError):
                end = super().tell()
                os.posix_fadvise(self.fileno(), end - done, done, os.POSIX_FADV_DONTNEED)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and os.getpid() == self._process:
            pending.result()

    def tell(self) -> int:
        self._finish_pending()
        return super().tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._finish_pending()
        return super().seek(offset, whence)

    def close(self) -> None:
        try:
            self._finish_pending()
        finally:
            super().close()
            if os.getpid() == self._process:
                self._behind.shutdown(wait=False)


def _write_container(file: _WholeWrites, contents: layout.Contents) -> layout.Manifest:
    when = contents.execution.time
    with _Container(file, when) as container:
        container.add_bytes(layout.MARK_MEMBER, layout.MARK)
        module = {
            attribute: container.add_compressed(member, getattr(contents.module, attribute))
            for attribute, member in layout.MODULE_MEMBERS.items()
        }
        arrays = tuple(
            container.add_array(f"arrays/{index:04d}.npy", array)
            for index, array in enumerate(contents.arrays)
        )
        manifest = layout.Manifest(contents.execution, module, arrays)
        text = layout.manifest_to_json(manifest)
        container.add_bytes(layout.MANIFEST_MEMBER, text)
        container.zip.comment = layout.comment(blake3.blake3(text).hexdigest())
    return manifest


class _Container:
    """A zip file that is being written, all members stored: what is compressed is so inside."""

    def __init__(self, file: _WholeWrites, when: float) -> None:
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

    def add_compressed(self, member: str, content: bytes) -> layout.MemberRecord:
        """Add a member of the module, as one zstd frame where that is shorter."""
        stored = zstandard.ZstdCompressor(_EFFORT).compress(content)
        shorter = len(stored) <= len(content) * _WORTH
        if shorter:
            member += ".zst"
        else:
            stored = content
        self.add_bytes(member, stored)
        return layout.MemberRecord(
            member=member,
            compression="zstd" if shorter else "none",
            stored_bytes=len(stored),
            raw_bytes=len(content),
            digest=blake3.blake3(content).hexdigest(),
        )

    def add_array(self, member: str, array: layout.ArrayContent) -> layout.ArrayRecord:
        """Add one array as ``.npy``, or as one zstd frame of that where a sample says it pays."""
        fetched = np.asarray(array.fetch())
        stored = to_storage(fetched)
        values = stored.reshape(-1).view(np.uint8).data
        shrinks = _shrinks(values)
        member = f"{member}.zst" if shrinks else member
        header = _npy_header(stored)
        with self._open(member) as sink:
            start = self._file.tell()
            digest = (
                self._put_compressed(sink, header, values)
                if shrinks
                else self._put(sink, header, values)
            )
            end = self._file.tell()
        key_shape = fetched.shape[: fetched.ndim - 1]
        shape = key_shape if array.key_dtype else fetched.shape
        return layout.ArrayRecord(
            name=array.name,
            shape=shape,
            dtype=array.key_dtype or fetched.dtype.name,
            weak_type=array.weak_type,
            member=member,
            compression="zstd" if shrinks else "none",
            stored_dtype=stored.dtype.str,
            stored_shape=stored.shape,
            stored_bytes=end - start,
            raw_bytes=len(values),
            digest=digest,
            key_impl=array.key_impl,
            sharding=array.sharding,
            global_shape=shape if array.global_shape is None else array.global_shape,
        )

    def _put(self, sink: Any, header: bytes, values: memoryview) -> str:
        sink.write(header)
        digest = blake3.blake3(max_threads=_DIGEST_THREADS if len(values) >= _LARGE else 1)
        for offset in range(0, len(values), _PIECE):
            piece = values[offset : offset + _PIECE]
            digest.update(piece)
            sink.write(piece)
        return digest.hexdigest()

    def _put_compressed(self, sink: Any, header: bytes, values: memoryview) -> str:
        effort = _EFFORT_LARGE if len(values) >= _LARGE else _EFFORT
        digest = blake3.blake3()
        frame = zstandard.ZstdCompressor(effort).stream_writer(
            sink, size=len(header) + len(values), closefd=False
        )
        with frame:
            frame.write(header)
            for offset in range(0, len(values), _PIECE):
                piece = values[offset : offset + _PIECE]
                digest.update(piece)
                frame.write(piece)
        return digest.hexdigest()


def _npy_header(array: np.ndarray) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    )
    return header.getvalue()


def _shrinks(values: memoryview) -> bool:
    """Compress a few blocks spread over the array and say whether all of it is worth it."""
    size = len(values)
    if size < _SMALL:
        return False
    blocks = min(_SAMPLE_BLOCKS, -(-size // _SAMPLE_BLOCK))
    stride = size // blocks
    sample = b"".join(values[i * stride : i * stride + _SAMPLE_BLOCK] for i in range(blocks))
    share = len(zstandard.ZstdCompressor(_EFFORT_LARGE).compress(sample)) / len(sample)
    return share <= (_WORTH_LARGE if size >= _LARGE else _WORTH)
