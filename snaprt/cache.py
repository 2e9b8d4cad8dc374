"""The compile cache as a library: open one, look into it, put it under plain ``jax.jit``."""

from __future__ import annotations

import os
from pathlib import Path

from snaprt_cache import (
    Cache,
    CacheError,
    CacheStats,
    Entry,
    EntryRow,
    Key,
    KeyPart,
    default_path,
)

from snaprt.compile.cached.store import persistent_cache

__all__ = [
    "Cache",
    "CacheError",
    "CacheStats",
    "Entry",
    "EntryRow",
    "Key",
    "KeyPart",
    "default_path",
    "install",
    "open",
]


def open(path: str | Path | None = None) -> Cache:  # noqa: A001 (read as `snaprt.cache.open`)
    """Open a compile cache, and have this process and those it starts compile through it.

    Args:
        path: Its directory, made when the first entry is stored; by default ``SNAPRT_CACHE_DIR``,
            else snaprt's in the user's cache directory.

    Returns:
        The cache that compiled programs go through. What happens in it is counted in
        ``snaprt.metrics``; with ``SNAPRT_CACHE=off`` nothing but the caller uses it.

    Raises:
        CacheError: The directory belongs to another user, or others may write into it.
    """
    cache = Cache.open(path)
    os.environ["SNAPRT_CACHE_DIR"] = str(cache.path)
    return persistent_cache() or cache


def install(path: str | Path | None = None) -> Cache:
    """Put the compile cache under plain ``jax.jit``, in this process.

    It takes the place of JAX's own compilation cache, whatever directory that was given. Programs
    that compile in under a second are stored too, unless ``jax_persistent_cache_min_compile_time
    _secs`` is set. What is compiled before the call is not looked for: call it first. Without a
    change to the program, ``SNAPRT_JAX_CACHE=1`` and ``snaprt run`` do the same.

    Args:
        path: The cache's directory, as for ``open``.

    Returns:
        The cache. What happens in it is counted in ``snaprt.metrics``. With ``SNAPRT_CACHE=off``
        JAX stays as it was.

    Raises:
        CacheError: The directory belongs to another user, or others may write into it.
    """
    cache = open(path)
    install_if_on()
    return cache


def install_if_on() -> None:
    """Put the cache that the settings name under ``jax.jit``, if there is one to use."""
    cache = persistent_cache()
    if cache is not None:
        from snaprt.compile.cached import jit_cache

        jit_cache.install(cache)
