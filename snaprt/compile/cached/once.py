"""Have one process compile a program while the others that want it wait for its entry."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
from snaprt_cache.folder import Access
from snaprt_cache.key import Key
from snaprt_cache.lock import Flight
from snaprt_cache.store import Cache, Entry

from snaprt import metrics, settings
from snaprt.compile import times
from snaprt.compile.cached.store import count_event

_log = logging.getLogger("snaprt.compile")

T = TypeVar("T")


def compile_once(
    cache: Cache,
    key: Key,
    load: Callable[[], T | None],
    compile_and_put: Callable[[], tuple[T, bool]],
) -> tuple[T, bool, bool]:
    """Compile a program that was not in the cache, unless another process is about to store it.

    Args:
        cache: The cache that was asked for it.
        key: Its key.
        load: Asks the cache again; ``None`` if it has nothing that can be loaded.
        compile_and_put: Returns the executable, and whether it was stored.

    Returns:
        The executable, whether it came from the cache, and whether it is there now.
    """
    is_stored = functools.partial(cache.offers, key.digest)
    with flight(cache).lead(key.digest, is_stored) as role:
        if not role.leader and is_stored():
            loaded = load()
            if loaded is not None:
                return loaded, True, True
        compiled, role.stored = compile_and_put()
        return compiled, False, role.stored


def load_entry(cache: Cache, key: Key, entry: Entry, load: Callable[[bytes], T]) -> T | None:
    """Load what a verified entry holds; one that cannot be loaded is discarded, to be made anew.

    Args:
        cache: The cache that gave the entry.
        key: Its key.
        entry: The entry.
        load: Makes an executable of its payload.
    """
    try:
        with times.stage(times.LOAD), metrics.timed("LoadTime"):
            return load(entry.payload)
    except Exception as error:
        _log.warning("a cached executable could not be loaded and is compiled anew: %s", error)
        cache.discard(key, f"cannot be loaded: {error}")
        return None


def flight(cache: Cache) -> Flight:
    """Return the locks of a cache, with the bound on waiting that is set now."""
    # The processes of one job may need each other to compile, but on CPUs: none of them may wait.
    # Nor need one that does not read what others store.
    is_free = jax.process_count() == 1 or jax.default_backend() == "cpu"
    can_wait = cache.mode.reads and cache.mode.writes and is_free
    wait_seconds = settings.get("SNAPRT_CACHE_WAIT") if can_wait else 0.0
    return _flight(cache.folder, wait_seconds, cache.access)


@functools.cache
def _flight(folder: Path, wait_seconds: float, access: Access) -> Flight:
    return Flight(folder, wait_seconds, count_event, access=access)
