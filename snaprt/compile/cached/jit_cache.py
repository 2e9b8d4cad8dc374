"""Put the persistent cache under plain ``jax.jit``, in this process.

JAX compiles between two questions, so `snaprt.compile.obtain` serves it in halves: a `Turn` begins
when it asks in vain, and ends when it has stored what it compiled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jax
from snaprt_cache import modes
from snaprt_cache.key import Key
from snaprt_cache.store import Cache, Entry

from snaprt import jaxapi, settings
from snaprt.compile import times
from snaprt.compile.cached import prefetch, speculate
from snaprt.compile.cached.store import count_event, is_bypassed
from snaprt.compile.key import JIT, Subject, key_of, module_digest
from snaprt.compile.obtain import Turn, metadata, obstacle
from snaprt.compile.summaries import summarize

# JAX asks for a program and then puts it: the keys of a few programs on their way are enough.
_KEPT_KEYS: Final = 256

_MIN_COMPILE_SECONDS: Final = "jax_persistent_cache_min_compile_time_secs"
_JAX_DEFAULT_MIN_COMPILE_SECONDS: Final = 1.0

#: What the index calls the kind of an entry that JAX made.
KIND: Final = prefetch.JIT_KIND
READ_BYTES: Final = "PersistentCacheReadBytes"
WRITTEN_BYTES: Final = "PersistentCacheWrittenBytes"

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
    jaxapi.hide_own_frames()
    prefetch.start()
    if settings.get("SNAPRT_SPECULATE") and settings.get("SNAPRT_PREFETCH"):
        speculate.Speculator(cache, under_jax.key_asked_for, under_jax.lowered)


class _UnderJax:
    """What JAX takes for its compilation cache: ``get`` and ``put`` by a string of our making.

    A ``get`` that finds nothing makes its thread the one that compiles this program: other threads
    and processes wait for its ``put``, or for JAX to end in another way.
    """

    def __init__(self, cache: Cache) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, Key] = OrderedDict()
        # What a thread last asked for is what it then compiles and puts.
        self._request = _Request()
        self.cache = cache

    @property
    def _path(self) -> Path:
        """Where the cache is; JAX shows it in its log."""
        return self.cache.path

    def get(self, name: str) -> bytes | None:
        """Return what JAX put under a string, verified; None where there is none."""
        request = self._request
        with request.stopwatch.stage(times.CACHE):
            entry = self._get(request, self._key_of(name), _program(name))
        # JAX does that next, until `compiled`.
        request.stopwatch.begin(times.COMPILE if entry is None else times.LOAD)
        if entry is None:
            return None
        count_event(READ_BYTES, len(entry.payload))
        return entry.payload

    def _get(self, request: _Request, key: Key, program: str) -> Entry | None:
        if request.turn is not None and request.turn.key != key:
            request.end_turn(in_vain=True)

        def ask() -> Entry | None:
            return self.cache.get(key, name=program, obstacle=obstacle)

        if request.turn is not None:
            return ask()
        # First, so that `compiled` ends it where Ctrl-C comes before this returns.
        request.turn = Turn(self.cache, key)
        entry = request.turn.take(ask)
        if entry is None:
            self.cache.record_miss(key, program)
            request.since = time.perf_counter()
        else:
            request.turn = None
        return entry

    def put(self, name: str, value: bytes) -> None:
        """Store what JAX compiled, as JAX packed it: compressed, behind its compile time."""
        request, key, compilation = self._request, self._key_of(name), self._request.compilation
        if compilation is None or request.key != key:
            return  # of another program, which this one was compiled in the midst of
        with request.stopwatch.stage(times.CACHE):
            is_ours = request.turn is not None and request.turn.key == key
            # JAX packs whole seconds only, and few programs take one.
            seconds = time.perf_counter() - request.since if is_ours else 0.0
            fields = metadata(_program(name), KIND, seconds, compilation.devices, request.calls)
            fields["summary"] = summarize(compilation.written)
            fields["device_ids"] = ",".join(str(device.id) for device in compilation.devices)
            is_stored = self.cache.put(key, value, fields)
            if is_stored:
                count_event(WRITTEN_BYTES, len(value))
            if is_ours:
                request.end_turn(in_vain=not is_stored)

    def prefetched(
        self, name: str, devices: Sequence[jaxapi.Device]
    ) -> jaxapi.JitExecutable | None:
        """Return what a string stands for if it was loaded for these devices beforehand."""
        with self._request.stopwatch.stage(times.CACHE):
            ready = prefetch.take(self._key_of(name), devices)
        if ready is None:
            return None
        count_event(READ_BYTES, len(ready.entry.payload))
        executable: jaxapi.JitExecutable = ready.loaded
        return executable

    def compiled(self, error: BaseException | None) -> None:
        """Take note that JAX has compiled, or loaded, or failed to.

        Args:
            error: What it ended with. After Ctrl-C or an exit another may try.
        """
        request = self._request
        request.end_turn(in_vain=error is None or isinstance(error, Exception))
        request.stopwatch.end()
        if error is None and request.compilation is not None and request.key is not None:
            is_compiled = times.COMPILE in request.stopwatch.nanoseconds
            times.prepared(
                times.JIT,
                request.compilation.name,
                request.key.digest[:16],
                request.stopwatch,
                compiled=is_compiled,
                loaded=not is_compiled,
            )
        request.compilation = None

    def name_of(self, compilation: jaxapi.Compilation) -> str | None:
        """Return the string for a compilation, and remember the key it stands for.

        What names objects of this process, such as callbacks, has none, nor has anything while
        passes of the program's own are in the compiler.
        """
        request = self._request
        request.stopwatch = times.Stopwatch()
        digest = compilation.digest
        calls = jaxapi.CustomCalls()
        if digest is None:
            calls = jaxapi.custom_calls(compilation.written, compilation.module)
            digest = module_digest(compilation.module)
        if calls.bound_to or is_bypassed():
            count_event("PersistentCacheUncacheable", 1)
            return None
        with request.stopwatch.stage(times.KEY):
            key = key_of(
                Subject(
                    JIT,
                    digest,
                    self.cache.folder,
                    compilation.devices,
                    kind=KIND,
                    jit=compilation,
                )
            )
        name = f"{compilation.name}-{key.digest}"
        request.key, request.compilation, request.calls = key, compilation, calls
        if compilation.lowering is not None:
            request.lowered = compilation.lowering, digest
        with self._lock:
            self._keys[name] = key
            self._keys.move_to_end(name)
            if len(self._keys) > _KEPT_KEYS:
                self._keys.popitem(last=False)
        return name

    def key_asked_for(self) -> Key | None:
        """Return the key for which JAX last asked in this thread."""
        return self._request.key

    def lowered(self) -> tuple[jaxapi.Lowering, str] | None:
        """Return what this thread lowered last where that was asked about, and its digest; once."""
        lowering, self._request.lowered = self._request.lowered, None
        return lowering

    def _key_of(self, name: str) -> Key:
        with self._lock:
            return self._keys[name]


def _program(name: str) -> str:
    """Return the name of the program from one of the strings."""
    return name.rpartition("-")[0] or name


class _Request(threading.local):
    key: Key | None = None
    lowered: tuple[jaxapi.Lowering, str] | None = None
    compilation: jaxapi.Compilation | None = None
    calls = jaxapi.CustomCalls()
    turn: Turn | None = None
    since = 0.0

    def __init__(self) -> None:
        self.stopwatch = times.Stopwatch()

    def end_turn(self, *, in_vain: bool) -> None:
        """Let those go on who wait for this thread, if there are any."""
        if self.turn is not None:
            self.turn.end(in_vain=in_vain)
            self.turn = None
