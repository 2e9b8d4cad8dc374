"""Loads, in a thread, the executables that this program used when it last ran.

The thread works while Python still imports and traces, and the runtime finds the executable ready,
or waits for the rest of its loading. What was used is remembered in the cache, by the program's
path. It knows notes and keys, nothing of when graphs are cut.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
from snaprt_cache.key import Key, KeyPart
from snaprt_cache.store import Cache, Entry

from snaprt import jaxapi, metrics, settings
from snaprt.execute.notes import Note, devices_by_id, read_note
from snaprt.execute.store import persistent_cache

_log = logging.getLogger("snaprt.cache")

#: Loading stops after this many seconds: the program has long overtaken it.
MAX_SECONDS = 60.0
#: Nothing more is loaded once the executables loaded so far have this many bytes.
MAX_BYTES = 1 << 30
#: How many programs are remembered.
MAX_PROGRAMS = 256


@dataclass(frozen=True)
class Prefetched:
    """An executable, loaded before it was asked for."""

    compiled: jax.stages.Compiled
    note: Note
    devices: tuple[jaxapi.Device, ...]
    entry: Entry


@dataclass
class _State:
    """What one process has prefetched and used; guarded by ``lock``."""

    cache: Cache | None = None
    loading: dict[str, Future[Prefetched | None]] = field(default_factory=dict)
    remembered: list[str] = field(default_factory=list)
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
        _state.remembered = _read_list(cache)
        _state.loading = {digest: Future() for digest in _state.remembered}
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_forget_after_fork)
    if _state.remembered:
        _state.thread = threading.Thread(
            target=_load_all, args=(cache,), name="snaprt-prefetch", daemon=True
        )
        _state.thread.start()


def take(key: Key) -> Prefetched | None:
    """Return the executable that the note of ``key`` leads to, if it was prefetched."""
    with _state.lock:
        _state.used[key.digest] = None
        future = _state.loading.pop(key.digest, None)
    if future is None:
        return None
    with metrics.timed("PrefetchWait"):
        found = future.result()
    if found is not None and _state.cache is not None:
        metrics.counter_add("PrefetchUsed")
        _state.cache.count_hit(found.entry)
    return found


def _load_all(cache: Cache) -> None:
    """Load in the order of last time, until the bounds are reached; runs in the thread."""
    deadline = time.monotonic() + MAX_SECONDS
    room = MAX_BYTES
    for digest in _state.remembered:
        with _state.lock:
            future = _state.loading.get(digest)
        if future is None:  # the program was faster, and loads it itself
            continue
        found = None
        if room > 0 and time.monotonic() < deadline and not _state.stopping:
            try:
                found = _load(cache, digest)
            except Exception as error:  # whoever wants it will meet the error, and compile
                _log.info("a program could not be prefetched: %s", error)
        if found is not None:
            room -= len(found.entry.payload)
            metrics.counter_add("Prefetched")
        future.set_result(found)


def _load(cache: Cache, digest: str) -> Prefetched | None:
    header = cache.header(digest)
    note = None if header is None else read_note(cache, header.key)
    entry = None if note is None else cache.get(note.executable, counted=False)
    if note is None or entry is None:
        return None
    platform = str(entry.metadata.get("platform", "")) or None
    devices = devices_by_id(note.device_ids, jax.local_devices(backend=platform)[0])
    compiled = jaxapi.load_compiled(entry.payload, note.arguments, note.results, devices)
    return Prefetched(compiled, note, devices, entry)


def _list_key() -> Key:
    """Return the key of the list of a program: its path, or the module's that runs as it."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or sys.argv[0]
    return Key((KeyPart("prefetch of", os.path.abspath(path)), KeyPart("jax", jax.__version__)))


def _read_list(cache: Cache) -> list[str]:
    entry = cache.get(_list_key(), counted=False)
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
    _state.loading = {}
    _state.thread = None


def _finish() -> None:
    """Store what was used in place of what was remembered, at exit.

    The thread is waited for first: XLA's client must not go away while it loads something.
    """
    _state.stopping = True
    if _state.thread is not None:
        _state.thread.join()
    used = list(_state.used)[:MAX_PROGRAMS]
    if _state.cache is not None and used and used != _state.remembered:
        metadata = {"name": "prefetch list", "kind": "list"}
        _state.cache.put(_list_key(), json.dumps(used).encode(), metadata, counted=False)
