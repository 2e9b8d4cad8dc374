"""Loads, in a thread, the executables that this program used when it last ran.

The thread works while Python still imports and traces, and the runtime finds the executable ready,
or waits for the rest of its loading. What was used is remembered in the cache, by the program's
path.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import jax
from snaprt_cache.frame import BlobHeader
from snaprt_cache.key import Key
from snaprt_cache.store import Cache, Entry

from snaprt import jaxapi, metrics, settings
from snaprt.compile.cached.fast_key import KIND as NOTE_KIND
from snaprt.compile.cached.fast_key import Note, devices_by_id, read_note
from snaprt.compile.cached.store import persistent_cache
from snaprt.compile.key import START, Subject, key_of
from snaprt.compile.obtain import can_be_made_available_in_background, obstacle

_log = logging.getLogger("snaprt.cache")

#: What the cache calls the entries that JAX made.
JIT_KIND: Final = "jit"

#: Loading stops after this many seconds: the program has long overtaken it.
MAX_SECONDS: Final = 60.0
#: Nothing more is loaded once the executables loaded so far have this many bytes.
MAX_BYTES: Final = 1 << 30
#: How many programs are remembered.
MAX_PROGRAMS: Final = 256
# How often to look whether JAX has made its devices: never is it made to make them.
_PAUSE_SECONDS: Final = 0.002


@dataclass(frozen=True)
class Prefetched:
    """What was loaded before it was asked for."""

    loaded: Any
    devices: tuple[jaxapi.Device, ...]  # where it runs, in the order of its partitions
    note: Note | None  # of a program that was recorded lazily, else ``None``
    entry: Entry


@dataclass
class _State:
    """What one process has prefetched and used; guarded by ``lock``.

    ``waiting`` are the digests that nobody has asked for yet, and ``under_way`` those of them that
    the thread has begun with. ``then`` is what to do with one as soon as it is loaded.
    """

    cache: Cache | None = None
    list_key: Key | None = None
    remembered: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    under_way: dict[str, Future[Prefetched | None]] = field(default_factory=dict)
    then: dict[str, Callable[[Prefetched], None]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    thread: threading.Thread | None = None
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def start() -> None:
    """Begin to load what the program used last time; returns at once, and never fails."""
    if not settings.get("SNAPRT_PREFETCH"):
        return
    cache = persistent_cache()
    with _state.lock:
        if cache is None or _state.cache is not None:
            return
        _state.cache = cache
        # At exit, the program may have another path: `runpy` puts back what it replaces.
        _state.list_key = key_of(Subject(START, path_of_program(), cache.folder))
        _state.remembered = _read_list(cache, _state.list_key)
        _state.waiting = set(_state.remembered)
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_forget_after_fork)
    if _state.remembered:
        _state.thread = threading.Thread(
            target=_load_all, args=(cache,), name="snaprt-prefetch", daemon=True
        )
        _state.thread.start()


def take(key: Key, devices: Sequence[jaxapi.Device] | None = None) -> Prefetched | None:
    """Return what the entry of ``key`` leads to, if it was prefetched; remember that it was used.

    An entry that the thread has not begun with is left to the caller, who is there first.

    Args:
        key: The key of the entry that is remembered.
        devices: Where it must be loaded; by default where it ran last time.
    """
    with _state.lock:
        _state.used[key.digest] = None
        _state.waiting.discard(key.digest)
        future = _state.under_way.pop(key.digest, None)
    if future is None:
        return None
    with metrics.timed("PrefetchWait"):
        ready = future.result()
    if ready is None or (devices is not None and ready.devices != tuple(devices)):
        return None
    if _state.cache is not None:
        metrics.counter_add("PrefetchUsed")
        _state.cache.count_hit(ready.entry)
    return ready


def when_loaded(digest: str, then: Callable[[Prefetched], None]) -> None:
    """Call ``then`` as soon as the entry of a digest is loaded, if it is, before `take` returns it.

    It is called in the thread that loads, or at once.
    """
    with _state.lock:
        future = _state.under_way.get(digest)
        ready = future.result() if future is not None and future.done() else None
        if ready is None and digest in _state.waiting:
            _state.then[digest] = then
    if ready is not None:
        then(ready)


def is_coming(digest: str) -> bool:
    """Return whether the entry of a digest is loaded, or is being loaded."""
    with _state.lock:
        return digest in _state.under_way


def _load_all(cache: Cache) -> None:
    """Load in the order of last time, until the bounds are reached; runs in the thread."""
    deadline = time.monotonic() + MAX_SECONDS
    room = MAX_BYTES
    for digest in _state.remembered:
        if room <= 0 or time.monotonic() >= deadline or _state.stopping:
            return
        future: Future[Prefetched | None] = Future()
        with _state.lock:
            if digest not in _state.waiting:  # the program was faster
                continue
            _state.under_way[digest] = future
        ready = None
        try:
            ready = _load(cache, digest, deadline)
        except Exception as error:  # whoever wants it will meet the error, and compile
            _log.info("cannot prefetch a program: %s", error)
        finally:
            _loaded(digest, future, ready)
        if ready is not None:
            room -= len(ready.entry.payload)
            metrics.counter_add("Prefetched")


def _loaded(digest: str, future: Future[Prefetched | None], ready: Prefetched | None) -> None:
    with _state.lock:
        then = _state.then.pop(digest, None)
        if then is None or ready is None:
            future.set_result(ready)
            return
    try:
        then(ready)
    finally:
        future.set_result(ready)


def _load(cache: Cache, digest: str, deadline: float) -> Prefetched | None:
    header = cache.header(digest)
    loader = None if header is None else _LOADERS.get(str(header.metadata.get("kind")))
    return None if header is None or loader is None else loader(cache, header, deadline)


def _load_noted(cache: Cache, header: BlobHeader, deadline: float) -> Prefetched | None:
    note = read_note(cache, header.key)
    entry = None if note is None else cache.get(note.executable, counted=False)
    if note is None or entry is None:
        return None
    devices = _devices(note.device_ids, entry, deadline)
    if devices is None or not _may_be_loaded(entry):
        return None
    compiled = jaxapi.load_compiled(entry.payload, note.arguments, note.results, devices)
    return Prefetched(compiled, devices, note, entry)


def _load_jit(cache: Cache, header: BlobHeader, deadline: float) -> Prefetched | None:
    entry = cache.get(header.key, counted=False)
    if entry is None:
        return None
    ids = [int(number) for number in str(entry.metadata.get("device_ids", "")).split(",") if number]
    devices = _devices(ids, entry, deadline) if ids else None
    if devices is None or not _may_be_loaded(entry):
        return None
    return Prefetched(jaxapi.load_jit_executable(entry.payload, devices), devices, None, entry)


def _may_be_loaded(entry: Entry) -> bool:
    metadata = entry.metadata
    return can_be_made_available_in_background(metadata) and not obstacle(metadata)


#: An entry's kind, to what loads it before it is asked for.
_LOADERS: Final[Mapping[str, Callable[[Cache, BlobHeader, float], Prefetched | None]]] = {
    NOTE_KIND: _load_noted,
    "jit": _load_jit,
}


def _devices(ids: Sequence[int], entry: Entry, deadline: float) -> tuple[jaxapi.Device, ...] | None:
    """Return the devices of these ids once the program has made JAX look for devices."""
    while not jaxapi.backends_are_initialized():
        if _state.stopping or time.monotonic() >= deadline:
            return None
        time.sleep(_PAUSE_SECONDS)
    platform = str(entry.metadata.get("platform", "")) or None
    return devices_by_id(ids, jax.local_devices(backend=platform)[0])


def path_of_program() -> str:
    """Return the path of the program, or of the module that runs as it."""
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None) or sys.argv[0]
    try:
        return os.path.abspath(name)
    except FileNotFoundError:  # the working directory was removed, as below `python -c`
        return name


def _read_list(cache: Cache, key: Key) -> list[str]:
    entry = cache.get(key, counted=False)
    if entry is None:
        return []
    try:
        digests = json.loads(entry.payload)
        return [digest for digest in digests if isinstance(digest, str)][:MAX_PROGRAMS]
    except (ValueError, TypeError):
        return []


def _forget_after_fork() -> None:
    """Wait for nothing in a child: the thread that loads is the parent's."""
    _state.lock = threading.Lock()
    _state.waiting, _state.under_way, _state.then = set(), {}, {}
    _state.thread = None


def _finish() -> None:
    """Store what was used in place of what was remembered, at exit.

    The thread is waited for first: XLA's client must not go away while it loads something.
    """
    _state.stopping = True
    if _state.thread is not None:
        _state.thread.join()
    used = list(_state.used)[:MAX_PROGRAMS]
    cache, key = _state.cache, _state.list_key
    if cache is not None and key is not None and used and used != _state.remembered:
        metadata = {"name": "prefetch list", "kind": "list"}
        cache.put(key, json.dumps(used).encode(), metadata, counted=False)
