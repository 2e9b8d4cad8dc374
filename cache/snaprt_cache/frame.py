"""The bytes of one blob file: how an entry is laid out, signed, and verified before it is used.

docs/reference/cache-format.md describes the layout.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import blake3
import zstandard

from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key, KeyPart

#: What is said about an entry, beside its key.
Metadata = Mapping[str, str | int | float]

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
#: Length of a signature: HMAC-SHA256 (RFC 2104).
_SIGNATURE_BYTES: Final = {UNSIGNED_VERSION: 0, SIGNED_VERSION: 32}
# What is signed with one key for one purpose must not pass for something else.
_DOMAIN: Final = b"snaprt blob 2"

#: A shorter key could be guessed.
LEAST_KEY_BYTES: Final = 16
_LARGEST_KEY_BYTES: Final = 1 << 16
_MAKE_A_KEY: Final = "Create one: (umask 077 && head -c 32 /dev/urandom > FILE)"


class BlobDamaged(Exception):  # noqa: N818 (a finding about a file, caught by the store)
    """The bytes are not those of a whole blob; the message says which check failed."""


class BlobRefused(Exception):  # noqa: N818 (a finding about a file, caught by the store)
    """The bytes are a blob, but not one that was signed with our key."""


@dataclass(frozen=True)
class Signing:
    """What a cache does about signatures."""

    key: bytes | None = None  # what entries are signed with; None signs nothing
    # Whether an entry in the directory must carry a right signature to be used.
    required: bool = False

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``; empty without a key."""
        if self.key is None:
            return b""
        return hmac.digest(self.key, _DOMAIN + content, hashlib.sha256)

    def check(self, content: bytes, signature: bytes) -> None:
        """Raise BlobRefused where a signature is required, and this is not the right one."""
        if not self.required:
            return
        if not signature:
            raise BlobRefused("it is not signed")
        if not hmac.compare_digest(self.sign(content), signature):
            raise BlobRefused("it is signed with a different key")


UNSIGNED: Final = Signing()


@dataclass(frozen=True)
class BlobHeader:
    """What a blob says about itself; enough to rebuild the index's row."""

    key: Key  # the key with its parts
    metadata: Metadata  # what the caller said about the entry
    created: float  # when it was made, Unix time in seconds
    payload_bytes: int  # length of the payload as the caller gave it
    stored_bytes: int  # length of the compressed payload
    stored_digest: bytes  # BLAKE3 of the compressed payload, 32 bytes
    header_bytes: int  # length of all that stands before the compressed payload
    signed: bool = False  # whether it carries a signature, right or wrong

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.header_bytes + self.stored_bytes


def encode_blob(
    key: Key, payload: bytes, metadata: Metadata, signing: Signing = UNSIGNED
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
            "parts": key.listed(),
            "metadata": dict(metadata),
        },
        separators=(",", ":"),
    ).encode("ascii")
    if len(description) > MAX_DESCRIPTION_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise CacheError(
            f"the entry {key.digest[:12]} is too large for the cache: "
            f"{len(description)} bytes of key parts and metadata, {len(payload)} bytes of payload",
            hint="Replace long key parts with their digests.",
        )
    stored = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
    if _is_bomb(len(stored), len(payload)):
        raise CacheError(
            f"the entry {key.digest[:12]} is not stored: its {len(payload):,} bytes compress to "
            f"{len(stored):,}, a ratio that readers reject because it could be used to exhaust "
            "memory",
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
    signature = signing.sign(fixed + description)
    inner = signature + description
    head = fixed + blake3.blake3(fixed + inner).digest() + inner
    sizes = len(payload), len(stored), stored_digest, len(head)
    return BlobHeader(key, dict(metadata), created, *sizes, bool(signature)), head, stored


def read_header(
    digest: str, file: BinaryIO, signing: Signing, key: Key | None = None
) -> BlobHeader:
    """Read and verify the header of a blob.

    Lengths are held against the file's own length before anything of that length is read, and
    nothing is parsed before its digest, and its signature where one is required, are right.

    Args:
        digest: The digest of the key whose blob it should be.
        file: Holds the blob and nothing else.
        signing: Whether a signature is required, and with which key.
        key: The key itself, where it is known, which saves making it from the blob.

    Raises:
        BlobDamaged: It is no whole blob of this key.
        BlobRefused: It is not signed with the key.
        OSError: The file cannot be read.
    """
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    prefix = _read_exactly(file, _PREFIX_BYTES)
    magic, version, description_bytes, stored_bytes, payload_bytes, key_digest, stored_digest = (
        _FIXED.unpack_from(prefix)
    )
    if magic != MAGIC:
        raise BlobDamaged("it does not start with the header of a blob")
    signature_bytes = _SIGNATURE_BYTES.get(version)
    if signature_bytes is None:
        raise BlobDamaged(f"its format version is {version}, not {[*_SIGNATURE_BYTES]}")
    if description_bytes > MAX_DESCRIPTION_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise BlobDamaged("its header has an invalid length")
    if _is_bomb(stored_bytes, payload_bytes):
        raise BlobDamaged(f"its {stored_bytes:,} bytes claim to hold {payload_bytes:,}")
    header_bytes = _PREFIX_BYTES + signature_bytes + description_bytes
    if file_bytes != header_bytes + stored_bytes:
        raise BlobDamaged(f"its size, {file_bytes} bytes, does not match its header")
    inner = _read_exactly(file, signature_bytes + description_bytes)
    fixed = prefix[: _FIXED.size]
    if blake3.blake3(fixed + inner).digest() != prefix[_FIXED.size :]:
        raise BlobDamaged("its header does not match the header's digest")
    signature, description = inner[:signature_bytes], inner[signature_bytes:]
    signing.check(fixed + description, signature)
    key, metadata, created = _parse_description(description, key)
    if bytes.fromhex(key.digest) != key_digest:
        raise BlobDamaged("its key parts do not match its key")
    if key.digest != digest:
        raise BlobDamaged("it belongs to another key")
    sizes = payload_bytes, stored_bytes, stored_digest, header_bytes
    return BlobHeader(key, metadata, created, *sizes, bool(signature))


def _is_bomb(stored_bytes: int, payload_bytes: int) -> bool:
    return payload_bytes > max(_ANY_RATIO_BYTES, MAX_RATIO * stored_bytes)


def read_blob(
    digest: str, file: BinaryIO, signing: Signing, key: Key | None = None
) -> tuple[BlobHeader, bytes]:
    """Read and verify a whole blob; return its header and its payload.

    Args and raises as ``read_header``.
    """
    header = read_header(digest, file, signing, key)
    stored = _read_exactly(file, header.stored_bytes)
    if blake3.blake3(stored).digest() != header.stored_digest:
        raise BlobDamaged("its payload does not match the payload's digest")
    try:
        if zstandard.frame_content_size(stored) != header.payload_bytes:
            raise BlobDamaged("the length of its payload does not match its header")
        return header, zstandard.ZstdDecompressor().decompress(stored)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BlobDamaged(f"its payload cannot be decompressed: {error}") from error


def check_blob(digest: str, file: BinaryIO, signing: Signing) -> BlobHeader:
    """Verify a whole blob of any size in little memory; leave ``file`` at its end.

    Args and raises as ``read_header``.
    """
    header = read_header(digest, file, signing)
    hasher = blake3.blake3()
    missing = header.stored_bytes
    while missing:
        piece = _read_exactly(file, min(missing, _PIECE_BYTES))
        hasher.update(piece)
        missing -= len(piece)
    if hasher.digest() != header.stored_digest:
        raise BlobDamaged("its payload does not match the payload's digest")
    file.seek(header.header_bytes)
    length = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as unpacked:
            while length <= header.payload_bytes and (piece := unpacked.read(_PIECE_BYTES)):
                length += len(piece)
    except zstandard.ZstdError as error:
        raise BlobDamaged(f"its payload cannot be decompressed: {error}") from error
    if length != header.payload_bytes:
        raise BlobDamaged("the length of its payload does not match its header")
    file.seek(header.file_bytes)
    return header


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Return what is left of a file, a megabyte at a time."""
    return iter(lambda: file.read(_PIECE_BYTES), b"")


def _parse_description(
    description: bytes, key: Key | None
) -> tuple[Key, dict[str, str | int | float], float]:
    try:
        content: dict[str, Any] = json.loads(description)
        if key is None or content["parts"] != key.listed():
            key = Key(tuple(KeyPart(str(name), str(value)) for name, value in content["parts"]))
        metadata = {
            str(name): value
            for name, value in content["metadata"].items()
            if isinstance(value, str | int | float)
        }
        return key, metadata, float(content["created"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobDamaged(f"its description cannot be read: {error!r}") from error


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    content = file.read(count) or b""
    if len(content) == count:
        return content
    # One read may give less than asked for: at most 2 GiB on Linux, or after a signal.
    parts = [content]
    missing = count - len(content)
    while missing and parts[-1]:
        parts.append(file.read(missing) or b"")
        missing -= len(parts[-1])
    if missing:
        raise BlobDamaged(f"it is {missing} bytes too short")
    return b"".join(parts)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes into is an empty one."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(descriptor, True)
    return descriptor


def read_key_file(path: str | Path) -> bytes:
    """Return the key in a file: all of its bytes.

    Raises:
        CacheError: It cannot be read, anybody may read or change it, or it is too short.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_LARGEST_KEY_BYTES + 1)
    except OSError as error:
        raise CacheError(
            f"cannot read the key file {path}: {error.strerror or error}",
            hint=f"Set SNAPRT_CACHE_KEY_FILE to a readable file. {_MAKE_A_KEY}",
        ) from error
    if hasattr(os, "geteuid") and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise CacheError(
            f"other users can read or change the key file {path} (mode {stat.S_IMODE(mode):04o})",
            hint=f"Run: chmod 600 '{path}'   (640 allows the file's group to read it)",
        )
    if not LEAST_KEY_BYTES <= len(key) <= _LARGEST_KEY_BYTES:
        raise CacheError(
            f"the key file {path} has {len(key)} bytes; a key needs {LEAST_KEY_BYTES} to "
            f"{_LARGEST_KEY_BYTES}",
            hint=_MAKE_A_KEY,
        )
    return key
