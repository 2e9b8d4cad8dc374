"""Who made an entry: signatures with a key that a team shares, and where that key comes from.

Knows bytes and key files, not how a blob is laid out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt_cache.errors import CacheError

#: Length of a signature: HMAC-SHA256 (RFC 2104).
SIGNATURE_BYTES: Final = 32
#: A shorter key could be guessed.
LEAST_KEY_BYTES: Final = 16
_LARGEST_KEY_BYTES: Final = 1 << 16
# What is signed with one key for one purpose must not pass for something else.
_DOMAIN: Final = b"snaprt blob 2"
_MAKE_A_KEY: Final = "Make one with: (umask 077 && head -c 32 /dev/urandom > FILE)"


@dataclass(frozen=True)
class Signing:
    """What a cache does about signatures.

    Attributes:
        key: What entries are signed with; None signs nothing.
        required: Whether an entry in the directory must carry a right signature to be used.
    """

    key: bytes | None = None
    required: bool = False


def sign(key: bytes, content: bytes) -> bytes:
    """Return the signature of ``content``, 32 bytes."""
    return hmac.digest(key, _DOMAIN + content, hashlib.sha256)


def is_signed(key: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` was made with ``key`` for ``content``."""
    return hmac.compare_digest(sign(key, content), signature)


def read_key_file(path: str | Path) -> bytes:
    """Return the key in a file: all of its bytes.

    Raises:
        CacheError: It cannot be read, anybody may read or change it, or it is too short.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_LARGEST_KEY_BYTES + 1)
    except OSError as error:
        raise CacheError(
            f"the key file {path} cannot be read: {error.strerror or error}",
            hint=f"Set SNAPRT_CACHE_KEY_FILE to a file that you can read. {_MAKE_A_KEY}",
        ) from error
    if hasattr(os, "geteuid") and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise CacheError(
            f"others may read or change the key file {path} (mode {stat.S_IMODE(mode):04o})",
            hint=f"Run: chmod 600 '{path}'   (640 lets the file's group read it)",
        )
    if not LEAST_KEY_BYTES <= len(key) <= _LARGEST_KEY_BYTES:
        raise CacheError(
            f"the key file {path} has {len(key)} bytes; a key has {LEAST_KEY_BYTES} to "
            f"{_LARGEST_KEY_BYTES}",
            hint=_MAKE_A_KEY,
        )
    return key
