"""How one array becomes bytes: ``.npy``, shuffled and compressed where that pays.

Large arrays pass through in pieces, so that no second copy of one is made.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np
import zstandard

from snaprt.snapshot.format import schema

BLOCK_BYTES = 1 << 20
"""So much is reordered at a time; the last block is what is left. A multiple of every itemsize."""


def shuffle(values: memoryview, itemsize: int) -> memoryview:
    """Return the bytes of whole numbers in shuffled order.

    Args:
        values: Of any number of blocks, the last one perhaps shorter.
        itemsize: Bytes of one number.
    """
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


PIECE = 8 << 20
"""Bytes: large enough for the disk, small enough to stay in the processor's cache."""
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


@dataclass(frozen=True)
class Worth:
    """When compressing an array is worth the time.

    Attributes:
        share: An array is compressed where a sample of it shrinks to this share ...
        share_if_large: ... and one of 64 MiB or more only here.
        shuffles: Whether the bytes may be shuffled before, which ordinary tools do not undo.
    """

    share: float
    share_if_large: float
    shuffles: bool


WRITTEN_EACH_TIME = Worth(share=0.75, share_if_large=0.25, shuffles=False)
"""For an array that every execution writes again: no slower than the disk."""
WRITTEN_ONCE = Worth(share=0.9, share_if_large=0.5, shuffles=True)
"""For an array that is written once for all executions, and kept."""


def bytes_of(stored: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without a copy."""
    return stored.reshape(-1).view(np.uint8).data


def npy_header(array: np.ndarray) -> bytes:
    """Return the header of the ``.npy`` of an array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    )
    return header.getvalue()


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


def put(sink: Any, stored: np.ndarray, compression: str) -> str:
    """Write an array to a binary file.

    Args:
        sink: Has ``write``; what it was given last must stay as it is until the next call.
        stored: As ``dtypes.to_storage`` returns it.
        compression: One of ``layout.COMPRESSIONS``.

    Returns:
        The BLAKE3 of the elements, in hex.
    """
    values = bytes_of(stored)
    header = npy_header(stored)
    digest = blake3.blake3(max_threads=_DIGEST_THREADS if len(values) >= LARGE else 1)
    if compression == "none":
        sink.write(header)
        for piece in _pieces(values):
            digest.update(piece)
            sink.write(piece)
        return digest.hexdigest()
    frame = zstandard.ZstdCompressor(_EFFORT_LARGE if len(values) >= LARGE else _EFFORT)
    with frame.stream_writer(sink, size=len(header) + len(values), closefd=False) as compressed:
        compressed.write(header)
        for piece in _pieces(values):
            digest.update(piece)
            shuffled = compression == "zstd-shuffled"
            compressed.write(shuffle(piece, stored.itemsize) if shuffled else piece)
    return digest.hexdigest()


def digests(stored: np.ndarray) -> tuple[str, str]:
    """Return the BLAKE3 of the whole ``.npy``, and of the elements alone, in hex."""
    values = bytes_of(stored)
    threads = _DIGEST_THREADS if len(values) >= LARGE else 1
    of_file, of_elements = (blake3.blake3(max_threads=threads) for _ in range(2))
    of_file.update(npy_header(stored))
    for piece in _pieces(values):
        of_file.update(piece)
        of_elements.update(piece)
    return of_file.hexdigest(), of_elements.hexdigest()


def _pieces(values: memoryview) -> Iterator[memoryview]:
    for offset in range(0, len(values), PIECE):
        yield values[offset : offset + PIECE]


assert PIECE % BLOCK_BYTES == 0  # a piece is shuffled as if all were


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
        stored: The same, as ``dtypes.to_storage`` returns it.
        member: Where they were written to.
        compression: One of ``layout.COMPRESSIONS``.
        stored_bytes: How long that is.
        digest: BLAKE3 of the elements, in hex.
        in_store: Whether it lies in the store, not in the file.
    """
    shape = fetched.shape[: fetched.ndim - 1] if array.key_dtype else fetched.shape
    return schema.ArrayRecord(
        name=array.name,
        shape=shape,
        dtype=array.key_dtype or fetched.dtype.name,
        weak_type=array.weak_type,
        member=member,
        compression=compression,
        stored_dtype=stored.dtype.str,
        stored_shape=stored.shape,
        stored_bytes=stored_bytes,
        raw_bytes=stored.nbytes,
        digest=digest,
        key_impl=array.key_impl,
        sharding=array.sharding,
        global_shape=shape if array.global_shape is None else array.global_shape,
        in_store=in_store,
        sharding_number=array.sharding_number,
        index=array.index,
    )
