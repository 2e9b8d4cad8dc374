"""How an array becomes bytes and comes back: its dtype, its ``.npy``, shuffling, compression.

NumPy's ``.npy`` format has no name for the dtypes that ml_dtypes adds. Narrow integers are stored
as 8-bit ones of the same value; of floats, the bits are stored under an integer dtype of the same
width. The manifest keeps the true name. Large arrays pass through in pieces, so that no second copy
of one is made.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import blake3
import ml_dtypes
import numpy as np
import zstandard

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import schema

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""What ``.npy`` can name itself, and XLA has too."""

_BITS_IN_BYTES = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    # Narrower than a byte: one element takes one byte, as in ml_dtypes.
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
)
_STORED_AS = {"bfloat16": "uint16", **dict.fromkeys(_BITS_IN_BYTES, "uint8")}
"""True dtype name to the dtype whose ``.npy`` holds its bits."""

_WIDENED_TO = {
    **dict.fromkeys(("int1", "int2", "int4"), "int8"),
    **dict.fromkeys(("uint1", "uint2", "uint4"), "uint8"),
}
"""True dtype name to the dtype whose ``.npy`` holds its values; ml_dtypes leaves the upper half of
each byte undefined, so the bits would not do."""

DTYPE_NAMES = (*_NATIVE, *_STORED_AS, *_WIDENED_TO)
"""Every dtype name that a manifest may hold, PRNG keys aside."""


@functools.cache
def storage_dtype(name: str) -> np.dtype:
    """Return the little-endian dtype under which an array of dtype ``name`` is stored.

    Raises:
        SnapshotError: No snapshot can hold an array of that dtype.
    """
    stored = name if name in _NATIVE else (_STORED_AS | _WIDENED_TO).get(name)
    if stored is None:
        raise SnapshotError(
            f"a snapshot cannot hold arrays of dtype {name}",
            hint=f"supported dtypes: {', '.join(DTYPE_NAMES)}, and JAX's PRNG keys",
        )
    return np.dtype(stored).newbyteorder("<")


def true_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype called ``name``, from NumPy or from ml_dtypes.

    Raises:
        SnapshotError: Neither knows that name.
    """
    if name in _NATIVE:
        return np.dtype(name)
    scalar = getattr(ml_dtypes, name, None) if name in DTYPE_NAMES else None
    if scalar is None:
        raise SnapshotError(
            f"unknown dtype {name}",
            hint="a newer ml_dtypes may support it: pip install --upgrade ml_dtypes",
        )
    return np.dtype(scalar)


@functools.cache
def _name_of(dtype: np.dtype) -> str:
    return dtype.name  # which NumPy puts together each time


def to_storage(array: np.ndarray) -> np.ndarray:
    """View ``array`` as it is stored: C order, little-endian, a dtype that ``.npy`` can name.

    Copies only narrow integers, and an array that is not contiguous.

    Raises:
        SnapshotError: No snapshot can hold an array of that dtype.
    """
    name = _name_of(array.dtype)
    stored = storage_dtype(name)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array).reshape(array.shape)
    if name in _STORED_AS:
        array = array.reshape(-1).view(stored.newbyteorder("=")).reshape(array.shape)
    return array.astype(stored, copy=False)


def from_storage(stored: np.ndarray, name: str) -> np.ndarray:
    """Return what ``to_storage`` was given: the same shape and bits, dtype ``name``, native order.

    Raises:
        SnapshotError: ml_dtypes does not know the dtype.
    """
    native = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    dtype = true_dtype(name)
    if name in _NATIVE or name in _WIDENED_TO:
        return native.astype(dtype, copy=False)
    return native.reshape(-1).view(dtype).reshape(stored.shape)


BLOCK_BYTES = 1 << 20
"""So much is shuffled at a time; the last block is what is left. A multiple of every itemsize."""
PIECE = 8 << 20
"""Bytes: large enough for the disk, small enough to stay in the processor's cache."""
assert PIECE % BLOCK_BYTES == 0  # a piece is shuffled as if all were
_AT_ONCE = 1 << 20  # bytes: below, a stream takes zstd longer than a second copy
SMALL = 4 << 10
"""Bytes: below, compression saves nothing and ordinary tools have it easier."""
LARGE = 64 << 20
"""Bytes: from here on a good disk takes an array faster than zstd shrinks it."""

_SAMPLE_BLOCK = 64 << 10  # bytes: less would hide what shuffling gains
_SAMPLE_BLOCKS = 8
_SHUFFLE_GAIN = 0.95  # shuffled where that makes the sample smaller by this factor
_DIGEST_THREADS = 2  # of BLAKE3 over a large array: it then costs less than the zip's own CRC-32
_EFFORT = 3
_EFFORT_LARGE = 1


def shuffle(values: memoryview, itemsize: int) -> memoryview:
    """Return the bytes of whole numbers of ``itemsize`` bytes in shuffled order, block by block."""
    return _reordered(values, itemsize, undo=False)


def unshuffle(shuffled: memoryview, itemsize: int) -> memoryview:
    """Return what ``shuffle`` was given."""
    return _reordered(shuffled, itemsize, undo=True)


def _reordered(content: memoryview, itemsize: int, *, undo: bool) -> memoryview:
    source = np.frombuffer(content, np.uint8)
    result = np.empty_like(source)
    for start in range(0, source.size, BLOCK_BYTES):
        block = source[start : start + BLOCK_BYTES]
        shape = (itemsize, -1) if undo else (-1, itemsize)
        target = result[start : start + BLOCK_BYTES]
        target.reshape(shape[::-1])[...] = block.reshape(shape).T
    return result.data


@dataclass(frozen=True)
class Worth:
    """When compressing an array is worth the time."""

    share: float  # an array is compressed where a sample of it shrinks to this share ...
    share_if_large: float  # ... and one of 64 MiB or more only here
    shuffles: bool  # whether the bytes may be shuffled before, which ordinary tools do not undo


WRITTEN_EACH_TIME = Worth(share=0.75, share_if_large=0.25, shuffles=False)
"""For an array that every execution writes again: no slower than the disk."""
WRITTEN_ONCE = Worth(share=0.9, share_if_large=0.5, shuffles=True)
"""For an array that is written once for all executions, and kept."""


def choose_compression(stored: np.ndarray, worth: Worth) -> str:
    """Compress a few blocks spread over the array and say how all of it should be."""
    values = bytes_of(stored)
    size = len(values)
    if size < SMALL:
        return "none"
    blocks = min(_SAMPLE_BLOCKS, -(-size // _SAMPLE_BLOCK))
    stride = size // blocks // stored.itemsize * stored.itemsize
    sample = b"".join(values[i * stride : i * stride + _SAMPLE_BLOCK] for i in range(blocks))
    share, compression = _share(sample), "zstd"
    if worth.shuffles and stored.itemsize > 1:
        shuffled = _share(shuffle(memoryview(sample), stored.itemsize))
        if shuffled < share * _SHUFFLE_GAIN:
            share, compression = shuffled, "zstd-shuffled"
    limit = worth.share_if_large if size >= LARGE else worth.share
    return compression if share <= limit else "none"


def _share(sample: bytes | memoryview) -> float:
    return len(zstandard.ZstdCompressor(_EFFORT_LARGE).compress(sample)) / len(sample)


def bytes_of(stored: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without a copy."""
    return stored.reshape(-1).view(np.uint8).data


@functools.lru_cache(maxsize=1024)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of the ``.npy`` of an array; the dtype as `numpy.dtype.str` prints it."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def put(sink: Any, stored: np.ndarray, compression: str) -> str:
    """Write an array to a binary file.

    Args:
        sink: Has ``write``; what it was given last must stay as it is until the next call.
        stored: As ``to_storage`` returns it.
        compression: One of ``schema.COMPRESSIONS``.

    Returns:
        The BLAKE3 of the elements, in hex.
    """
    values = bytes_of(stored)
    header = npy_header(stored.dtype.str, stored.shape)
    digest = _digest(values)
    if compression == "none":
        sink.write(header)
        for piece in _pieces(values):
            digest.update(piece)
            sink.write(piece)
        return digest.hexdigest()
    frame = zstandard.ZstdCompressor(_EFFORT_LARGE if len(values) >= LARGE else _EFFORT)
    if compression == "zstd" and len(values) < _AT_ONCE:
        digest.update(values)
        sink.write(frame.compress(b"".join((header, values))))
        return digest.hexdigest()
    try:
        with frame.stream_writer(sink, size=len(header) + len(values), closefd=False) as compressed:
            compressed.write(header)
            for piece in _pieces(values):
                digest.update(piece)
                shuffled = compression == "zstd-shuffled"
                compressed.write(shuffle(piece, stored.itemsize) if shuffled else piece)
    except zstandard.ZstdError as error:
        if isinstance(error.__context__, OSError):  # not all could be written: of a full disk, say
            raise error.__context__ from None
        raise
    return digest.hexdigest()


def digests(stored: np.ndarray) -> tuple[str, str]:
    """Return the BLAKE3 of the whole ``.npy``, and of the elements alone, in hex."""
    values = bytes_of(stored)
    of_file, of_elements = _digest(values), _digest(values)
    of_file.update(npy_header(stored.dtype.str, stored.shape))
    for piece in _pieces(values):
        of_file.update(piece)
        of_elements.update(piece)
    return of_file.hexdigest(), of_elements.hexdigest()


def _digest(values: memoryview) -> blake3.blake3:
    return blake3.blake3(max_threads=_DIGEST_THREADS if len(values) >= LARGE else 1)


def _pieces(values: memoryview) -> Iterator[memoryview]:
    for offset in range(0, len(values), PIECE):
        yield values[offset : offset + PIECE]


def read_into(source: Any, target: memoryview, itemsize: int, digest: blake3.blake3) -> None:
    """Fill ``target`` with the elements of an array, and add them to a digest.

    Args:
        source: A decompressed ``.npy`` after its header.
        target: Where they go, in their order.
        itemsize: Of the numbers whose bytes are shuffled; 1 where they are not.
        digest: Learns the bytes.

    Raises:
        ValueError: The source ends too early.
    """
    for piece in _pieces(target):
        offset = 0
        while offset < len(piece):
            count = source.readinto(piece[offset:])
            if not count:
                raise ValueError("it is truncated")
            offset += count
        if itemsize > 1:
            piece[:] = unshuffle(piece, itemsize)
        digest.update(piece)


def read_exactly(source: Any, length: int) -> bytes:
    """Return so many bytes of a file; raise ValueError if it has fewer."""
    content: bytes = source.read(length)
    if len(content) != length:
        raise ValueError("it is truncated")
    return content


def describe(
    array: schema.ArrayContent,
    fetched: np.ndarray,
    stored: np.ndarray,
    *,
    member: str,
    compression: str,
    stored_bytes: int,
    digest: str,
    in_store: bool = False,
) -> schema.ArrayRecord:
    """Return what the manifest says of an array.

    Args:
        array: What was to be written.
        fetched: Its values.
        stored: The same, as ``to_storage`` returns it.
        member: Where they were written to.
        compression: One of ``schema.COMPRESSIONS``.
        stored_bytes: How long that is.
        digest: BLAKE3 of the elements, in hex.
        in_store: Whether it lies in the store, not in the file.
    """
    shape = fetched.shape[: fetched.ndim - 1] if array.key_dtype else fetched.shape
    return schema.ArrayRecord(
        **{**array.traits(), "global_shape": array.global_shape or shape},
        name=array.name,
        shape=shape,
        dtype=array.key_dtype or _name_of(fetched.dtype),
        member=member,
        compression=compression,
        stored_dtype=stored.dtype.str,
        stored_shape=stored.shape,
        stored_bytes=stored_bytes,
        raw_bytes=stored.nbytes,
        digest=digest,
        in_store=in_store,
    )
