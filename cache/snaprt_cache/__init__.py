"""The persistent compile cache: knows bytes and keys, never graphs, and never snaprt."""

from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key, KeyPart, cpu_features, file_digest, relevant_xla_flags
from snaprt_cache.rows import EntryRow
from snaprt_cache.store import Cache, CacheStats, Entry, default_path

__all__ = [
    "Cache",
    "CacheError",
    "CacheStats",
    "Entry",
    "EntryRow",
    "Key",
    "KeyPart",
    "cpu_features",
    "default_path",
    "file_digest",
    "relevant_xla_flags",
]
