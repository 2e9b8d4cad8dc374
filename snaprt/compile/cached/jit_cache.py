"""Put the persistent cache under plain ``jax.jit``, in this process, in the place of JAX's own."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax
from snaprt_cache import modes
from snaprt_cache.key import Key
from snaprt_cache.lock import Flight
from snaprt_cache.store import Cache

from snaprt import jaxapi, settings
from snaprt.compile import times
from snaprt.compile.cached import prefetch
from snaprt.compile.cached.once import flight
from snaprt.compile.cached.store import count_event, is_bypassed
from snaprt.compile.key import jit_key
from snaprt.compile.native_calls import obstacle, told_of_calls
from snaprt.compile.summary import summarize

READ_BYTES: Final = "PersistentCacheReadBytes"
WRITTEN_BYTES: Final = "PersistentCacheWrittenBytes"

# JAX asks for a program and then puts it: the keys of a few programs on their way are enough.
_KEPT_KEYS: Final = 256

_MIN_COMPILE_SECONDS: Final = "jax_persistent_cache_min_compile_time_secs"
_JAX_DEFAULT_MIN_COMPILE_SECONDS: Final = 1.0

# The parts of a key that the index tells of an entry, and what it calls them.
_TOLD: Final = {
    "platform": "platform",
    "device_kind": "device_kind",
    "jax": "jax_version",
    "jaxlib": "jaxlib_version",
}

_lock = threading.Lock()
_installed: list[_UnderJax] = []


def install(cache: Cache) -> None:
    """Have JAX look for compiled programs in ``cache``, and put there what it compiles.

    JAX's own settings hold, but for one: what compiles in less than a second is stored as well,
    unless the user has set ``jax_persistent_cache_min_compile_time_secs``. A second call takes
    another cache; the first one's entries stay.
    """
    with _lock:
        if _installed:
            _installed[0].cache = cache
            return
        under_jax = _UnderJax(cache)
        _installed.append(under_jax)
    if (
        _MIN_COMPILE_SECONDS.upper() not in os.environ
        and getattr(jax.config, _MIN_COMPILE_SECONDS) == _JAX_DEFAULT_MIN_COMPILE_SECONDS
    ):
        jax.config.update(_MIN_COMPILE_SECONDS, 0.0)
    if settings.get("SNAPRT_CACHE_MODE") == modes.FAIL_ON_MISS.name:
        # JAX would only warn, and compile.
        jax.config.update("jax_raise_persistent_cache_errors", True)
    jaxapi.use_compilation_cache(
        under_jax, under_jax.name_of, under_jax.prefetched, under_jax.compiled
    )
    prefetch.start()


@dataclass
class _Compiling:
    """What a thread of JAX has asked for in vain, and compiles now."""

    name: str
    digest: str
    flight: Flight
    lock: int | None
    since: float


class _OfThread(threading.local):
    """What a thread last asked for, which is what it then compiles and puts."""

    key: Key | None = None
    compilation: jaxapi.Compilation | None = None
    calls = jaxapi.CustomCalls()
    compiling: _Compiling | None = None

    def __init__(self) -> None:
        self.stopwatch = times.Stopwatch()


class _UnderJax:
    """What JAX is given once and takes for its cache: ``get``, ``put`` and ``_path``.

    A ``get`` that finds nothing makes its thread the one that compiles this program: other threads
    and processes wait for its ``put``, or for ``compiled``.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, Key] = OrderedDict()
        self._thread = _OfThread()

    @property
    def _path(self) -> Path:
        """Where the cache is; JAX shows it in its log."""
        return self.cache.path

    def name_of(self, compilation: jaxapi.Compilation) -> str | None:
        """Return the string for a compilation, and remember the key it stands for.

        What names objects of this process, such as callbacks, has none, nor has anything while
        passes of the program's own are in the compiler.
        """
        asked = self._thread
        asked.stopwatch = times.Stopwatch()
        calls = jaxapi.custom_calls(compilation.written, compilation.module)
        if calls.bound_to or is_bypassed():
            count_event("PersistentCacheUncacheable", 1)
            return None
        with asked.stopwatch.stage(times.KEY):
            key = jit_key(compilation, kind=prefetch.JIT_KIND, folder=self.cache.folder)
        name = f"{compilation.name}-{key.digest}"
        asked.key, asked.compilation, asked.calls = key, compilation, calls
        with self._lock:
            self._keys[name] = key
            self._keys.move_to_end(name)
            if len(self._keys) > _KEPT_KEYS:
                self._keys.popitem(last=False)
        return name

    def prefetched(
        self, name: str, devices: Sequence[jaxapi.Device]
    ) -> jaxapi.JitExecutable | None:
        """Return what a string stands for if it was loaded for these devices beforehand."""
        with self._thread.stopwatch.stage(times.CACHE):
            ready = prefetch.take(self._keys[name], devices)
        if ready is None:
            return None
        count_event(READ_BYTES, len(ready.entry.payload))
        executable: jaxapi.JitExecutable = ready.loaded
        return executable

    def get(self, name: str) -> bytes | None:
        """Return the entry that JAX put under this string, verified; None where there is none."""
        stopwatch = self._thread.stopwatch
        with stopwatch.stage(times.CACHE):
            payload = self._get(name)
        # JAX does that next, until `compiled`.
        stopwatch.begin(times.COMPILE if payload is None else times.LOAD)
        return payload

    def _get(self, name: str) -> bytes | None:
        asked = self._thread
        if asked.compiling is not None and asked.compiling.name != name:
            self._leave(in_vain=True)
        key, program = self._keys[name], _program(name)
        entry = self.cache.get(key, name=program, obstacle=obstacle)
        if entry is None and asked.compiling is None:
            is_stored = functools.partial(self.cache.offers, key.digest)
            locks = flight(self.cache)
            role, lock = locks.join(key.digest, is_stored)
            if not role.leader and is_stored():
                entry = self.cache.get(key, obstacle=obstacle)
            if entry is None:
                self.cache.record_miss(key, program)
                asked.compiling = _Compiling(name, key.digest, locks, lock, time.perf_counter())
        if entry is None:
            return None
        count_event(READ_BYTES, len(entry.payload))
        return entry.payload

    def put(self, name: str, value: bytes) -> None:
        """Store what JAX compiled, as JAX packed it: compressed, behind its compile time."""
        with self._thread.stopwatch.stage(times.CACHE):
            compiling = self._thread.compiling
            is_ours = compiling is not None and compiling.name == name
            # JAX packs whole seconds only, and few programs take one.
            seconds = time.perf_counter() - compiling.since if compiling and is_ours else 0.0
            key = self._keys[name]
            metadata = self._metadata(key)
            metadata.update(name=_program(name), kind=prefetch.JIT_KIND, compile_seconds=seconds)
            is_stored = self.cache.put(key, value, metadata)
            if is_stored:
                count_event(WRITTEN_BYTES, len(value))
            if is_ours:
                self._leave(in_vain=not is_stored)

    def compiled(self, error: BaseException | None) -> None:
        """Let those go on who wait for this thread: JAX has compiled, loaded, or failed to."""
        asked = self._thread
        asked.stopwatch.end()
        if error is None and asked.compilation is not None and asked.key is not None:
            is_compiled = times.COMPILE in asked.stopwatch.nanoseconds
            times.prepared(
                times.JIT,
                asked.compilation.name,
                asked.key.digest[:16],
                asked.stopwatch,
                compiled=is_compiled,
                loaded=not is_compiled,
            )
        asked.compilation = None
        # After Ctrl-C or an exit another may try.
        self._leave(in_vain=error is None or isinstance(error, Exception))

    def _leave(self, *, in_vain: bool) -> None:
        compiling, self._thread.compiling = self._thread.compiling, None
        if compiling is not None:
            compiling.flight.leave(compiling.digest, compiling.lock, in_vain=in_vain)

    def _metadata(self, key: Key) -> dict[str, str | int | float]:
        told: dict[str, str | int | float] = {
            _TOLD[part.name]: part.value for part in key.parts if part.name in _TOLD
        }
        asked = self._thread
        compilation = asked.compilation
        if compilation is None or asked.key != key:
            return told
        ids = ",".join(str(device.id) for device in compilation.devices)
        calls = told_of_calls(asked.calls, compilation.devices[0].platform)
        summary = summarize(compilation.written)
        return {**told, **calls, "summary": summary, "device_ids": ids}


def _program(name: str) -> str:
    """Return the name of the program from one of the strings."""
    return name.rpartition("-")[0] or name
