"""The compile cache as a library: open it, inspect it, use it for plain ``jax.jit``."""

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
    """Open a compile cache, and compile through it in this process and its child processes.

    Args:
        path: Its directory, created when the first entry is stored; by default
            ``SNAPRT_CACHE_DIR``, else snaprt's directory in the user's cache directory.

    Returns:
        The cache that compiled programs use. Its events are counted in ``snaprt.metrics``. With
        ``SNAPRT_CACHE=off``, only the caller uses it.

    Raises:
        CacheError: The directory belongs to another user, or other users can write to it.

    Examples:
        >>> cache = snaprt.cache.open("programs")
        >>> with snaprt.lazy():
        ...     y = jnp.arange(7.0) * 3
        ...     snaprt.mark_step()
        >>> cache.stats().puts
        1
    """
    cache = Cache.open(path)
    os.environ["SNAPRT_CACHE_DIR"] = str(cache.path)
    return persistent_cache() or cache


def install(path: str | Path | None = None) -> Cache:
    """Use the compile cache for plain ``jax.jit`` in this process.

    It replaces JAX's own compilation cache, with any directory. Programs that compile in under a
    second are stored too, unless ``jax_persistent_cache_min_compile_time_secs`` is set. Call it
    before the program compiles anything. ``SNAPRT_JAX_CACHE=1`` and ``snaprt run`` do the same
    without a change to the program.

    Args:
        path: The directory of the cache, as for ``open``.

    Returns:
        The cache. Its events are counted in ``snaprt.metrics``. With ``SNAPRT_CACHE=off``, JAX is
        unchanged.

    Raises:
        CacheError: The directory belongs to another user, or other users can write to it.

    Examples:
        >>> cache = snaprt.cache.install("programs")
        >>> y = jax.jit(lambda x: x * 11)(jnp.ones(3))
        >>> "jit__lambda" in [row.name for row in cache.entries()]
        True
    """
    cache = open(path)
    install_if_on()
    return cache


def install_if_on() -> None:
    """Use the configured cache for ``jax.jit``, if there is one."""
    cache = persistent_cache()
    if cache is not None:
        from snaprt.compile.cached import jit_cache

        jit_cache.install(cache)
