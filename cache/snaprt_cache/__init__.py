"""The persistent compile cache: bytes under keys, verified, whatever happens to the disk."""

from snaprt_cache.errors import CacheError
from snaprt_cache.file_digests import file_digest
from snaprt_cache.frame import read_key_file
from snaprt_cache.index import EntryRow
from snaprt_cache.key import Key, KeyPart, cpu_features, relevant_xla_flags
from snaprt_cache.modes import MODES
from snaprt_cache.reports import CacheStats, Entry, Finding
from snaprt_cache.store import DEFAULT_MAX_BYTES, Cache, default_path

__all__ = [
    "DEFAULT_MAX_BYTES",
    "MODES",
    "Cache",
    "CacheError",
    "CacheStats",
    "Entry",
    "EntryRow",
    "Finding",
    "Key",
    "KeyPart",
    "cpu_features",
    "default_path",
    "file_digest",
    "read_key_file",
    "relevant_xla_flags",
]
