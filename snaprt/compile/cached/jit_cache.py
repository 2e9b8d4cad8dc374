"""Put the persistent cache under plain ``jax.jit``, in this process.

It joins the cache's form for JAX to JAX, to the settings and to the metrics; it knows no programs.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import jax
from snaprt_cache import modes
from snaprt_cache.jax_plugin import KIND, READ_BYTES, JaxCache
from snaprt_cache.key import Key
from snaprt_cache.store import Cache

from snaprt import jaxapi, settings
from snaprt.compile import times
from snaprt.compile.cached import prefetch
from snaprt.compile.cached.once import flight
from snaprt.compile.cached.store import count_event, is_bypassed
from snaprt.compile.key import jit_key
from snaprt.compile.native_calls import obstacle, told_of_calls
from snaprt.compile.summaries import summarize

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
            if _installed[0].cache is not cache:
                _installed[0].use(cache)
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


class _UnderJax:
    """What JAX is given once: the cache in its form, and the keys that its strings stand for."""

    def __init__(self, cache: Cache) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, Key] = OrderedDict()
        # What a thread last asked for is what it then compiles and puts.
        self._asked = _Asked()
        self.use(cache)

    def use(self, cache: Cache) -> None:
        """Use another cache from now on."""
        self.cache = cache
        self._path = cache.path
        self._form = JaxCache(
            cache,
            key_of=self._key_of,
            flight_of=lambda: flight(cache),
            metadata_of=self._metadata,
            on_event=count_event,
            obstacle=obstacle,
        )

    def get(self, key: str) -> bytes | None:
        """Return what JAX put under a string."""
        stopwatch = self._asked.stopwatch
        with stopwatch.stage(times.CACHE):
            found = self._form.get(key)
        # JAX does that next, until `compiled`.
        stopwatch.begin(times.COMPILE if found is None else times.LOAD)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Store what JAX compiled."""
        with self._asked.stopwatch.stage(times.CACHE):
            self._form.put(key, value)

    def prefetched(
        self, name: str, devices: Sequence[jaxapi.Device]
    ) -> jaxapi.JitExecutable | None:
        """Return what a string stands for if it was loaded for these devices beforehand."""
        with self._asked.stopwatch.stage(times.CACHE):
            ready = prefetch.take(self._key_of(name), devices)
        if ready is None:
            return None
        count_event(READ_BYTES, len(ready.entry.payload))
        found: jaxapi.JitExecutable = ready.loaded
        return found

    def compiled(self, error: BaseException | None) -> None:
        """Hear that JAX has compiled, or loaded, or failed to."""
        asked = self._asked
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
        self._form.compiled(error)

    def name_of(self, compilation: jaxapi.Compilation) -> str | None:
        """Return the string for a compilation, and remember the key it stands for.

        What names objects of this process, such as callbacks, has none, nor has anything while
        passes of the program's own are in the compiler.
        """
        self._asked.stopwatch = times.Stopwatch()
        calls = jaxapi.custom_calls(compilation.written, compilation.module)
        if calls.bound_to or is_bypassed():
            count_event("PersistentCacheUncacheable", 1)
            return None
        with self._asked.stopwatch.stage(times.KEY):
            key = jit_key(compilation, kind=KIND, folder=self.cache.folder)
        name = f"{compilation.name}-{key.digest}"
        self._asked.key, self._asked.compilation = key, compilation
        self._asked.calls = calls
        with self._lock:
            self._keys[name] = key
            self._keys.move_to_end(name)
            if len(self._keys) > _KEPT_KEYS:
                self._keys.popitem(last=False)
        return name

    def _key_of(self, name: str) -> Key:
        with self._lock:
            return self._keys[name]

    def _metadata(self, key: Key) -> dict[str, str | int | float]:
        told: dict[str, str | int | float] = {
            _TOLD[part.name]: part.value for part in key.parts if part.name in _TOLD
        }
        compilation = self._asked.compilation
        if compilation is None or self._asked.key != key:
            return told
        ids = ",".join(str(device.id) for device in compilation.devices)
        calls = told_of_calls(self._asked.calls, compilation.devices[0].platform)
        summary = summarize(compilation.written)
        return {**told, **calls, "summary": summary, "device_ids": ids}


class _Asked(threading.local):
    key: Key | None = None
    compilation: jaxapi.Compilation | None = None
    calls = jaxapi.CustomCalls()

    def __init__(self) -> None:
        self.stopwatch = times.Stopwatch()
