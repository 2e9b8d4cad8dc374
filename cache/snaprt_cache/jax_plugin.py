"""The cache in the form that JAX asks for one: ``get`` and ``put`` by a string of JAX's making.

JAX's ``CacheInterface`` is these two methods and ``_path``; nothing of JAX is needed to have them,
so whoever installs this knows JAX. What a string stands for, and what to say about an entry, is
handed in.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt_cache.key import Key
from snaprt_cache.lock.flight import Flight
from snaprt_cache.store import Cache, Obstacle

READ_BYTES: Final = "PersistentCacheReadBytes"
WRITTEN_BYTES: Final = "PersistentCacheWrittenBytes"

#: What the index calls the kind of an entry that JAX made.
KIND: Final = "jit"


@dataclass
class _Compiling:
    """What a thread of JAX has asked for in vain, and compiles now."""

    name: str
    digest: str
    flight: Flight
    lock: int | None
    since: float


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.compiling: _Compiling | None = None


class JaxCache:
    """What JAX takes for its compilation cache; safe for threads, processes and forks.

    A ``get`` that finds nothing makes its thread the one that compiles this program: other threads
    and processes wait for its ``put``. Whoever installs the cache calls ``compiled`` when JAX has
    compiled, or failed to.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        key_of: Callable[[str], Key],
        flight_of: Callable[[], Flight],
        metadata_of: Callable[[Key], Mapping[str, str | int | float]],
        on_event: Callable[[str, float], None],
        obstacle: Obstacle | None = None,
    ) -> None:
        """Touch no disk yet.

        Args:
            cache: Where the entries are.
            key_of: Returns the key that one of JAX's strings stands for.
            flight_of: Returns the locks by which one process compiles for all.
            metadata_of: Returns what to say about an entry beside its name, kind and compile time.
            on_event: Called with the bytes of each hit and each put.
            obstacle: Returns why this process cannot use an entry, as for `Cache.get`.
        """
        self._cache = cache
        self._key_of = key_of
        self._flight_of = flight_of
        self._metadata_of = metadata_of
        self._on_event = on_event
        self._obstacle = obstacle
        self._thread = _OfThread()

    @property
    def _path(self) -> Path:
        """Where the cache is; JAX shows it in its log."""
        return self._cache.path

    def get(self, key: str) -> bytes | None:
        """Return the entry that JAX put under this string, verified; None where there is none."""
        self._leave_unless(key)
        cache_key = self._key_of(key)
        entry = self._cache.get(cache_key, name=_program(key), obstacle=self._obstacle)
        if entry is None and self._thread.compiling is None:
            stored = functools.partial(self._cache.offers, cache_key.digest)
            flight = self._flight_of()
            role, lock = flight.join(cache_key.digest, stored)
            if not role.leader and stored():
                entry = self._cache.get(cache_key, obstacle=self._obstacle)
            if entry is None:
                self._cache.record_miss(cache_key, _program(key))
                self._thread.compiling = _Compiling(
                    key, cache_key.digest, flight, lock, since=time.perf_counter()
                )
        if entry is None:
            return None
        self._on_event(READ_BYTES, len(entry.payload))
        return entry.payload

    def put(self, key: str, value: bytes) -> None:
        """Store what JAX compiled, as JAX packed it: compressed, behind its compile time."""
        compiling = self._thread.compiling
        ours = compiling if compiling is not None and compiling.name == key else None
        # JAX packs whole seconds only, and few programs take one.
        seconds = time.perf_counter() - ours.since if ours is not None else 0.0
        cache_key = self._key_of(key)
        metadata = {
            **self._metadata_of(cache_key),
            "name": _program(key),
            "kind": KIND,
            "compile_seconds": seconds,
        }
        stored = self._cache.put(cache_key, value, metadata)
        if stored:
            self._on_event(WRITTEN_BYTES, len(value))
        if ours is not None:
            self._leave(in_vain=not stored)

    def compiled(self, error: BaseException | None = None) -> None:
        """Let those go on who wait for this thread, if JAX has put nothing.

        Args:
            error: What the compilation ended with. After Ctrl-C or an exit another may try.
        """
        self._leave(in_vain=error is None or isinstance(error, Exception))

    def _leave_unless(self, key: str) -> None:
        compiling = self._thread.compiling
        if compiling is not None and compiling.name != key:
            self._leave(in_vain=True)

    def _leave(self, *, in_vain: bool) -> None:
        compiling = self._thread.compiling
        if compiling is not None:
            self._thread.compiling = None
            compiling.flight.leave(compiling.digest, compiling.lock, in_vain=in_vain)


def _program(key: str) -> str:
    """Return the name of the program from one of JAX's strings."""
    return key.rpartition("-")[0] or key
