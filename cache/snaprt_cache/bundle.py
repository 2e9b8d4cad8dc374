"""Many entries in one file, to carry from one cache to another: the same entries, the same bytes.

docs/reference/cache-format.md describes the layout.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import io
import json
import os
import re
import secrets
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import blake3

from snaprt_cache.errors import CacheError, remedy
from snaprt_cache.folder import try_lock
from snaprt_cache.frame import UNSIGNED, BlobDamaged, BlobRefused, check_blob, pieces

FORMAT_NAME: Final = "snaprt bundle"
FORMAT_VERSION: Final = 1

_MANIFEST: Final = "manifest.json"
_SIGNATURE: Final = "signature"
# What is signed with one key for one purpose must not pass for something else.
_DOMAIN: Final = b"snaprt bundle 1\n"
_SIGNATURE_BYTES: Final = 2 * hashlib.sha256().digest_size + 1  # hexadecimal, and a line feed
_BLOCK_BYTES: Final = tarfile.BLOCKSIZE
_TRAILER: Final = bytes(2 * _BLOCK_BYTES)
_MAX_MANIFEST_BYTES: Final = 64 << 20
_MAX_BLOB_BYTES: Final = 1 << 36
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
# Its writer may stand between making a file and locking it.
_STALE_SECONDS: Final = 60.0
_TEMPORARY_PREFIX: Final = ".snaprt-bundle."
_TEMPORARY_NAME: Final = re.compile(r"\.snaprt-bundle\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class BundledBlob:
    """One blob in a bundle."""

    key: str  # the digest of the entry's key, 64 hexadecimal digits
    bytes: int  # the size of its blob file
    blake3: str  # the digest of its blob file, 64 hexadecimal digits


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written, or read and found whole."""

    path: Path
    blobs: tuple[BundledBlob, ...]  # what is in it, by key
    signed: bool  # whether it carries a signature; one that was read with a key carries a right one


@dataclass(frozen=True)
class _Front:
    """What stands before the blobs."""

    manifest: bytes
    blobs: tuple[BundledBlob, ...]
    signature: bytes


def write_bundle(
    path: Path, keys: Iterable[str], open_blob: Callable[[str], BinaryIO], signing_key: bytes | None
) -> Bundle:
    """Write a bundle: the same entries and the same signing key give the same bytes.

    Args:
        path: The file, replaced if it is there.
        keys: The digests of the keys of the entries that go in, in any order.
        open_blob: Opens the blob file of a key; called twice for each.
        signing_key: Signs the bundle; None leaves it unsigned.

    Raises:
        CacheError: A blob is damaged or has changed meanwhile, or the file cannot be written.
    """
    if path.exists() and not path.is_file():  # what takes the place of a device takes it for all
        raise CacheError(
            f"cannot write the bundle {path}: not a regular file",
            hint="Name a new file, or an existing one to replace.",
        )
    _remove_stale(path)
    blobs = tuple(_described(key, open_blob) for key in sorted(set(keys)))
    manifest = _manifest_bytes(blobs)
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # says that its writer lives
            _write_member(file, _MANIFEST, len(manifest), [manifest])
            if signing_key is not None:
                signature = _signature(signing_key, manifest)
                _write_member(file, _SIGNATURE, len(signature), [signature])
            for blob in blobs:
                digest = blake3.blake3()
                with open_blob(blob.key) as content:
                    _write_member(file, _member_name(blob), blob.bytes, _hashed(content, digest))
                if digest.hexdigest() != blob.blake3:
                    raise CacheError(
                        f"the entry {blob.key[:12]} changed while the bundle was written",
                        hint="Write the bundle again.",
                    )
            file.write(_TRAILER)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CacheError(
            f"cannot write the bundle {path}: {error.strerror or error}",
            hint=remedy(error, "name a file in a writable directory"),
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return Bundle(path, blobs, signing_key is not None)


def read_bundle(path: Path, signing_key: bytes | None) -> Bundle:
    """Read a bundle to its end and verify all of it: signature, manifest and every blob.

    Args:
        path: The file.
        signing_key: What the bundle must be signed with; None takes signed and unsigned ones.

    Raises:
        CacheError: It is damaged, or not signed with the key, or cannot be read.
    """
    with _opened(path) as file:
        front = _read_front(path, file)
        if signing_key is not None:
            _check_signature(path, front, signing_key)
        for blob, content in _read_blobs(path, file, front.blobs):
            _verify(path, blob, content)
    return Bundle(path, front.blobs, bool(front.signature))


def bundled_blobs(bundle: Bundle) -> Iterator[tuple[str, BinaryIO]]:
    """Return the key and the content of each blob of a bundle that ``read_bundle`` found whole.

    The content is a file that can be read until the next one is asked for.

    Raises:
        CacheError: The file has changed since.
    """
    with _opened(bundle.path) as file:
        if _read_front(bundle.path, file).blobs != bundle.blobs:
            raise _damaged(bundle.path, "it has changed since it was verified")
        for blob, content in _read_blobs(bundle.path, file, bundle.blobs):
            yield blob.key, content


def _remove_stale(path: Path) -> None:
    """Remove what writers of bundles that were killed left in a folder."""
    with contextlib.suppress(OSError):
        for name in filter(_TEMPORARY_NAME.fullmatch, os.listdir(path.parent)):
            with contextlib.suppress(OSError), open(path.with_name(name), "r+b") as file:
                age = time.time() - os.fstat(file.fileno()).st_mtime
                if abs(age) > _STALE_SECONDS and try_lock(file.fileno()):
                    os.unlink(path.with_name(name))


# The file: a tar archive, of which only what `write_bundle` writes is accepted.


def _manifest_bytes(blobs: Iterable[BundledBlob]) -> bytes:
    content = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "entries": [vars(blob) for blob in blobs],
    }
    return (json.dumps(content, indent=1) + "\n").encode("ascii")


def _signature(key: bytes, manifest: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + manifest, hashlib.sha256).hex().encode("ascii") + b"\n"


def _member_name(blob: BundledBlob) -> str:
    return f"blobs/{blob.key[:2]}/{blob.key}.blob"


def _member_header(name: str, size: int) -> bytes:
    """Return a member's header, without a time, an owner or anything else of this machine."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK_BYTES)


def _write_member(file: BinaryIO, name: str, size: int, content: Iterable[bytes]) -> None:
    for piece in (_member_header(name, size), *content, _padding(size)):
        file.write(piece)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.ESPIPE, "it is a pipe; save what it holds as a file")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise CacheError(
            f"cannot read the bundle {path}: {error.strerror or error}",
            hint="Name a file that `snaprt cache export` wrote.",
        ) from error


def _read_front(path: Path, file: BinaryIO) -> _Front:
    """Read what stands before the blobs; the file's length is what its manifest says."""
    first = _take(path, file, _BLOCK_BYTES)
    try:
        size = tarfile.TarInfo.frombuf(first, "ascii", "strict").size
    except (tarfile.TarError, ValueError) as error:
        raise _damaged(path, f"it does not start with the header of a bundle: {error}") from error
    if size > _MAX_MANIFEST_BYTES or first != _member_header(_MANIFEST, size):
        raise _damaged(path, "it does not start with the header of a bundle")
    manifest = _take_content(path, file, size)
    blobs = _parse_manifest(path, manifest)
    place = file.tell()
    signature = b""
    if file.read(_BLOCK_BYTES) == _member_header(_SIGNATURE, _SIGNATURE_BYTES):
        signature = _take_content(path, file, _SIGNATURE_BYTES)
        place = file.tell()
    file.seek(place)
    rest = sum(_BLOCK_BYTES + blob.bytes + -blob.bytes % _BLOCK_BYTES for blob in blobs)
    expected = place + rest + len(_TRAILER)
    if (length := os.fstat(file.fileno()).st_size) != expected:
        raise _damaged(path, f"it has {length} bytes instead of {expected}")
    return _Front(manifest, blobs, signature)


def _read_blobs(
    path: Path, file: BinaryIO, blobs: Iterable[BundledBlob]
) -> Iterator[tuple[BundledBlob, BinaryIO]]:
    for blob in blobs:
        if _take(path, file, _BLOCK_BYTES) != _member_header(_member_name(blob), blob.bytes):
            raise _damaged(path, f"the entry {blob.key[:12]} is in the wrong place")
        start = file.tell()
        content = io.BufferedReader(_Section(file, start, blob.bytes))
        if _digest(content) != blob.blake3:
            raise _damaged(path, f"the entry {blob.key[:12]} does not match its digest")
        content.seek(0)
        yield blob, content
        file.seek(start + blob.bytes)
        _take_padding(path, file, blob.bytes)
    if _take(path, file, len(_TRAILER)) != _TRAILER:
        raise _damaged(path, "it does not end as a bundle does")


def _take(path: Path, file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    if len(content) != count:
        raise _damaged(path, "it is truncated")
    return content


def _take_content(path: Path, file: BinaryIO, size: int) -> bytes:
    content = _take(path, file, size)
    _take_padding(path, file, size)
    return content


def _take_padding(path: Path, file: BinaryIO, size: int) -> None:
    padding = _padding(size)
    if _take(path, file, len(padding)) != padding:
        raise _damaged(path, "there is extra data between its members")


class _Section(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._place = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        )
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._place)]
        self._file.seek(self._start + self._place)
        content = self._file.read(len(view))
        view[: len(content)] = content
        self._place += len(content)
        return len(content)


def _hashed(file: BinaryIO, digest: blake3.blake3) -> Iterator[bytes]:
    for piece in pieces(file):
        digest.update(piece)
        yield piece


def _digest(file: BinaryIO) -> str:
    digest = blake3.blake3()
    for _ in _hashed(file, digest):
        pass
    return digest.hexdigest()


def _parse_manifest(path: Path, manifest: bytes) -> tuple[BundledBlob, ...]:
    try:
        content = json.loads(manifest)
        name, version = content["format"], content["version"]
        if name == FORMAT_NAME and isinstance(version, int) and version > FORMAT_VERSION:
            raise CacheError(
                f"the bundle {path} has format version {version}; this snaprt reads "
                f"{FORMAT_VERSION}",
                hint="Update snaprt, or write the bundle with an older one.",
            )
        blobs = tuple(BundledBlob(**entry) for entry in content["entries"])
        whole = manifest == _manifest_bytes(blobs) and all(map(_is_sound, blobs))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"cannot read its manifest: {error!r}") from error
    if not whole or [*blobs] != sorted(set(blobs), key=lambda blob: blob.key):
        raise _damaged(path, "its manifest was not written by snaprt")
    return blobs


def _is_sound(blob: BundledBlob) -> bool:
    return (
        all(
            isinstance(text, str) and _DIGEST.fullmatch(text) is not None
            for text in (blob.key, blob.blake3)
        )
        and type(blob.bytes) is int
        and 0 < blob.bytes <= _MAX_BLOB_BYTES
    )


# Whether to believe it.


def _described(key: str, open_blob: Callable[[str], BinaryIO]) -> BundledBlob:
    with open_blob(key) as content:
        _check_or_refuse(key, content, f"the entry {key[:12]}")
        size = content.tell()
        content.seek(0)
        return BundledBlob(key, size, _digest(content))


def _verify(path: Path, blob: BundledBlob, content: BinaryIO) -> None:
    _check_or_refuse(blob.key, content, f"the bundle {path} holds an entry, {blob.key[:12]}, that")


def _check_or_refuse(key: str, content: BinaryIO, what: str) -> None:
    try:
        check_blob(key, content, UNSIGNED)
    except (BlobDamaged, BlobRefused) as error:
        raise CacheError(
            f"{what} is damaged: {error}",
            hint="`snaprt cache verify --heal` quarantines damaged entries.",
        ) from error


def _check_signature(path: Path, front: _Front, key: bytes) -> None:
    if not front.signature:
        raise CacheError(
            f"the bundle {path} is not signed, and SNAPRT_CACHE_KEY_FILE requires a signature",
            hint="Export it with SNAPRT_CACHE_KEY_FILE set to the same key. If you trust its "
            "author, import it with SNAPRT_CACHE_KEY_FILE unset.",
        )
    if not hmac.compare_digest(front.signature, _signature(key, front.manifest)):
        raise CacheError(
            f"the bundle {path} was signed with a different key than SNAPRT_CACHE_KEY_FILE, or "
            "was changed later",
            hint="Get the key file from the author of the bundle, or do not use the bundle.",
        )


def _damaged(path: Path, reason: str) -> CacheError:
    return CacheError(
        f"{path} is not a valid bundle: {reason}",
        hint="Copy it again, or write it again with `snaprt cache export`. Nothing was imported.",
    )
