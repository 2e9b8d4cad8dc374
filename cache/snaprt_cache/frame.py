"""The bytes of one blob file: how an entry is laid out, and how it is verified before it is used.

Knows nothing of folders, the index or what the payload means. The layout is described in
``docs/cache-format.md``.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

import blake3
import zstandard

from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key, KeyPart
from snaprt_cache.signing import SIGNATURE_BYTES, Signing, is_signed, sign

#: The first byte is no text and the last is a line feed, so that no text file or transfer as text
#: passes for a blob.
MAGIC: Final = b"\x89SNAPRT\n"
#: The version of a blob that nobody signed, and of one that carries a signature.
UNSIGNED_VERSION: Final = 1
SIGNED_VERSION: Final = 2
ZSTD_LEVEL: Final = 3
#: What a header may ask us to allocate at most; a real one is far below.
MAX_DESCRIPTION_BYTES: Final = 1 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 36
#: How often larger than what is stored a payload may be, where it is large: executables compress to
#: a tenth, and what is nearly all zeros is made to fill the memory of whoever reads it.
MAX_RATIO: Final = 1000
_ANY_RATIO_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20

# magic, version, description length, stored length, payload length, key digest, stored digest
_FIXED: Final = struct.Struct("<8sIIQQ32s32s")
_DIGEST_BYTES: Final = 32
_PREFIX_BYTES: Final = _FIXED.size + _DIGEST_BYTES
_SIGNATURE_BYTES: Final = {UNSIGNED_VERSION: 0, SIGNED_VERSION: SIGNATURE_BYTES}
_UNSIGNED: Final = Signing()


class BlobDamaged(Exception):  # noqa: N818 (a finding about a file, caught by the store)
    """The bytes are not those of a whole blob; the message says which check failed."""


class BlobRefused(Exception):  # noqa: N818 (a finding about a file, caught by the store)
    """The bytes are a blob, but not one that was signed with our key."""


class Readable(Protocol):
    """Where a blob is read from."""

    def read(self, count: int, /) -> bytes | None:
        """Return at most ``count`` bytes; none at the end."""


@dataclass(frozen=True)
class BlobHeader:
    """What a blob says about itself; enough to rebuild the index's row.

    Attributes:
        key: The key with its parts.
        metadata: What the caller said about the entry.
        created: When it was made, Unix time in seconds.
        payload_bytes: Length of the payload as the caller gave it.
        stored_bytes: Length of the compressed payload.
        stored_digest: BLAKE3 of the compressed payload, 32 bytes.
        header_bytes: Length of all that stands before the compressed payload.
        signed: Whether it carries a signature, right or wrong.
    """

    key: Key
    metadata: Mapping[str, str | int | float]
    created: float
    payload_bytes: int
    stored_bytes: int
    stored_digest: bytes
    header_bytes: int
    signed: bool = False


def encode_blob(
    key: Key,
    payload: bytes,
    metadata: Mapping[str, str | int | float],
    signing: Signing = _UNSIGNED,
) -> tuple[BlobHeader, bytes, bytes]:
    """Return the header, its bytes, and the compressed payload that follows them in the file.

    Args:
        key: The entry's key.
        payload: Its bytes; they are compressed here.
        metadata: What its header is to say about it.
        signing: With its key, if it has one, the blob is signed.

    Raises:
        CacheError: The key parts and the metadata, or the payload, are larger than a blob may hold.
    """
    created = time.time()
    description = json.dumps(
        {
            "created": created,
            "parts": [[part.name, part.value] for part in key.parts],
            "metadata": dict(metadata),
        },
        separators=(",", ":"),
    ).encode("ascii")
    if len(description) > MAX_DESCRIPTION_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise CacheError(
            f"the entry {key.digest[:12]} is too large for the cache: "
            f"{len(description)} bytes of key parts and metadata, {len(payload)} bytes of payload",
            hint="Put long key parts in as digests.",
        )
    stored = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
    if _is_bomb(len(stored), len(payload)):
        raise CacheError(
            f"the entry {key.digest[:12]} is not stored: its {len(payload):,} bytes compress to "
            f"{len(stored):,}, and nobody would read that, for it could be made to fill memory",
        )
    stored_digest = blake3.blake3(stored).digest()
    fixed = _FIXED.pack(
        MAGIC,
        UNSIGNED_VERSION if signing.key is None else SIGNED_VERSION,
        len(description),
        len(stored),
        len(payload),
        bytes.fromhex(key.digest),
        stored_digest,
    )
    signature = b"" if signing.key is None else sign(signing.key, fixed + description)
    inner = signature + description
    head = fixed + blake3.blake3(fixed + inner).digest() + inner
    header = BlobHeader(
        key,
        dict(metadata),
        created,
        len(payload),
        len(stored),
        stored_digest,
        len(head),
        bool(signature),
    )
    return header, head, stored


def read_header(file: Readable, file_bytes: int, signing: Signing = _UNSIGNED) -> BlobHeader:
    """Read and verify the header at the start of a blob.

    Lengths are held against the file's own length before anything of that length is read, and
    nothing is parsed before its digest, and its signature where one is required, are right.

    Args:
        file: Stands at the start of the blob.
        file_bytes: How long the file is.
        signing: Whether a signature is required, and with which key.

    Raises:
        BlobDamaged: It is no whole blob of this format.
        BlobRefused: It is not signed with the key.
        OSError: The file cannot be read.
    """
    prefix = _read_exactly(file, _PREFIX_BYTES)
    magic, version, description_bytes, stored_bytes, payload_bytes, key_digest, stored_digest = (
        _FIXED.unpack_from(prefix)
    )
    if magic != MAGIC:
        raise BlobDamaged("it does not start as a blob does")
    signature_bytes = _SIGNATURE_BYTES.get(version)
    if signature_bytes is None:
        raise BlobDamaged(f"it has format version {version}, not {[*_SIGNATURE_BYTES]}")
    if description_bytes > MAX_DESCRIPTION_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise BlobDamaged("its header gives a length that no blob has")
    if _is_bomb(stored_bytes, payload_bytes):
        raise BlobDamaged(f"its {stored_bytes:,} bytes claim to hold {payload_bytes:,}")
    header_bytes = _PREFIX_BYTES + signature_bytes + description_bytes
    if file_bytes != header_bytes + stored_bytes:
        raise BlobDamaged(f"it has {file_bytes} bytes, which is not what its header says")
    inner = _read_exactly(file, signature_bytes + description_bytes)
    fixed = prefix[: _FIXED.size]
    if blake3.blake3(fixed + inner).digest() != prefix[_FIXED.size :]:
        raise BlobDamaged("its header does not match the header's digest")
    signature, description = inner[:signature_bytes], inner[signature_bytes:]
    if signing.required:
        _check_signature(signing, fixed + description, signature)
    key, metadata, created = _parse_description(description)
    if bytes.fromhex(key.digest) != key_digest:
        raise BlobDamaged("its key parts do not match its key")
    return BlobHeader(
        key,
        metadata,
        created,
        payload_bytes,
        stored_bytes,
        stored_digest,
        header_bytes,
        bool(signature),
    )


def _is_bomb(stored_bytes: int, payload_bytes: int) -> bool:
    return payload_bytes > max(_ANY_RATIO_BYTES, MAX_RATIO * stored_bytes)


def _check_signature(signing: Signing, content: bytes, signature: bytes) -> None:
    if not signature:
        raise BlobRefused("it is not signed")
    if signing.key is None or not is_signed(signing.key, content, signature):
        raise BlobRefused("it is signed with another key")


def read_payload(file: Readable, header: BlobHeader) -> bytes:
    """Read, verify and decompress the payload; ``file`` stands where ``read_header`` left it.

    Raises:
        BlobDamaged: The payload is not the one that the header describes.
        OSError: The file cannot be read.
    """
    stored = _read_exactly(file, header.stored_bytes)
    if blake3.blake3(stored).digest() != header.stored_digest:
        raise BlobDamaged("its payload does not match the payload's digest")
    try:
        if zstandard.frame_content_size(stored) != header.payload_bytes:
            raise BlobDamaged("its payload has another length than its header says")
        return zstandard.ZstdDecompressor().decompress(stored)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BlobDamaged(f"its payload cannot be decompressed: {error}") from error


def check_payload(file: BinaryIO, header: BlobHeader) -> None:
    """Verify the payload as ``read_payload`` does, a piece at a time, in little memory.

    Args:
        file: Stands where ``read_header`` left it; it can seek.
        header: What was read there.

    Raises:
        BlobDamaged: The payload is not the one that the header describes.
        OSError: The file cannot be read.
    """
    start = file.tell()
    digest = blake3.blake3()
    missing = header.stored_bytes
    while missing:
        piece = _read_exactly(file, min(missing, _PIECE_BYTES))
        digest.update(piece)
        missing -= len(piece)
    if digest.digest() != header.stored_digest:
        raise BlobDamaged("its payload does not match the payload's digest")
    file.seek(start)
    length = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as unpacked:
            while piece := unpacked.read(_PIECE_BYTES):
                length += len(piece)
                if length > header.payload_bytes:
                    break
    except zstandard.ZstdError as error:
        raise BlobDamaged(f"its payload cannot be decompressed: {error}") from error
    if length != header.payload_bytes:
        raise BlobDamaged("its payload has another length than its header says")
    file.seek(start + header.stored_bytes)


def _parse_description(description: bytes) -> tuple[Key, dict[str, str | int | float], float]:
    try:
        content: dict[str, Any] = json.loads(description)
        parts = tuple(KeyPart(str(name), str(value)) for name, value in content["parts"])
        metadata = {
            str(name): value
            for name, value in content["metadata"].items()
            if isinstance(value, str | int | float)
        }
        return Key(parts), metadata, float(content["created"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobDamaged(f"its description cannot be read: {error!r}") from error


def _read_exactly(file: Readable, count: int) -> bytes:
    content = file.read(count) or b""
    if len(content) == count:
        return content
    # One read may give less than asked for: at most 2 GiB on Linux, or after a signal.
    pieces = [content]
    missing = count - len(content)
    while missing and pieces[-1]:
        pieces.append(file.read(missing) or b"")
        missing -= len(pieces[-1])
    if missing:
        raise BlobDamaged(f"it ends {missing} bytes too early")
    return b"".join(pieces)
