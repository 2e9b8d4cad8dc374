"""Find an executable in the persistent cache, or make it: the one way for all that is compiled.

Recorded programs, bare modules, `jax.jit` and what is compiled ahead of time differ in what a
`Request` says: the key, and how to compile, store and load. Of the processes that want one
executable at the same time, one compiles it, and the others wait for its entry.

An executable that calls a native function which nobody has initialized ends the process. So each
entry names the functions that it calls, and they are made available before it is loaded.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import jax
from snaprt_cache.folder import Access
from snaprt_cache.key import Key
from snaprt_cache.lock import Flight
from snaprt_cache.store import Cache, Entry

from snaprt import jaxapi, metrics, settings
from snaprt.compile import times
from snaprt.compile.cached.store import count_event
from snaprt.compile.key import MODULE, Subject, key_of
from snaprt.compile.summaries import summarize
from snaprt.errors import CompileError
from snaprt.host.interruptions import raise_if_interrupted

_log = logging.getLogger("snaprt.compile")

T = TypeVar("T")

Metadata = Mapping[str, str | int | float]
"""What is said about an entry, in the cache's index and to who loads it."""

#: What the metadata of an entry calls the native functions.
TOLD_AS: Final = "custom_calls"


@dataclass(frozen=True)
class Request(Generic[T]):
    """An executable that is wanted."""

    name: str  # what the cache's index calls it
    kind: str  # the form in which it is stored
    module: Any
    calls: jaxapi.CustomCalls
    devices: Sequence[jaxapi.Device]  # where it will run, in the order of its partitions
    digest: Callable[[], str]  # of the module
    compile: Callable[[], T]
    serialize: Callable[[T], bytes]
    # Makes it of what `serialize` returned; ``None`` where it is enough that the cache has it.
    load: Callable[[bytes], T] | None
    # What it needs of this very process, so that no other may have it; mostly empty.
    bound_to: str = ""
    kind_of_key: str = MODULE
    # What its key says beside this: the other attributes of a `Subject`, by name.
    identity: Callable[[], Mapping[str, Any]] = dict

    def subject(self, folder: Path) -> Subject:
        """Return what its key identifies, of the cache in a folder."""
        digest, devices = self.digest(), self.devices
        return Subject(self.kind_of_key, digest, folder, devices, self.kind, **self.identity())


@dataclass(frozen=True)
class Obtained(Generic[T]):
    """What became of a request."""

    # The executable; ``None`` where the cache has it and it was not to be loaded.
    executable: T | None
    from_cache: bool  # whether the cache had it
    key: Key | None  # the key under which the cache has it now; ``None`` where it has not
    seconds: float = 0.0  # seconds that the compiler took

    @property
    def loaded(self) -> T:
        """The executable, of a request that says how to load it."""
        assert self.executable is not None
        return self.executable


def obtain(request: Request[T], cache: Cache | None) -> Obtained[T]:
    """Load an executable from the cache, or compile it and store it there.

    Raises:
        CacheError: It is not there, and the mode of the cache lets nothing compile.
        Exception: What ``request.compile`` raises.
    """
    if cache is None or request.bound_to:
        if cache is not None:
            metrics.counter_add("PersistentCacheUncacheable")
        executable, seconds = _compile(request, is_to_be_stored=False)
        return Obtained(executable, False, None, seconds)
    with times.stage(times.KEY):
        key = key_of(request.subject(cache.folder))

    def ask() -> Obtained[T] | None:
        entry = cache.get(
            key, name=request.name, counted=request.load is not None, obstacle=obstacle
        )
        if entry is None or request.load is None:
            return None if entry is None else Obtained(None, True, key)
        executable = load_entry(cache, key, entry, request.load)
        return None if executable is None else Obtained(executable, True, key)

    def make() -> tuple[Obtained[T], bool]:
        if request.load is not None:
            cache.record_miss(key, request.name)
        executable, seconds = _compile(request, is_to_be_stored=True)
        is_stored = _store(cache, key, request, executable, seconds)
        return Obtained(executable, False, key if is_stored else None, seconds), is_stored

    with times.stage(times.CACHE):
        return once(cache, key, ask, make)


def _compile(request: Request[T], *, is_to_be_stored: bool) -> tuple[T, float]:
    _log.info("XLA compiles: begin")
    started = time.perf_counter()
    # A cache under jax.jit would store it once more, or load what cannot be stored here.
    with (
        times.stage(times.COMPILE),
        metrics.timed("CompileTime"),
        jaxapi.without_compilation_cache(keeps_jaxs=not is_to_be_stored),
    ):
        executable = request.compile()
    _log.info("XLA compiles: end")
    return executable, time.perf_counter() - started


def _store(cache: Cache, key: Key, request: Request[T], executable: T, seconds: float) -> bool:
    try:
        payload = request.serialize(executable)
    except CompileError:
        raise
    except Exception as error:
        raise_if_interrupted(error)
        metrics.counter_add("PersistentCacheUncacheable")
        _log.info("cannot store an executable: %s", error)
        return False
    fields = metadata(request.name, request.kind, seconds, request.devices, request.calls)
    return cache.put(key, payload, {**fields, "summary": summarize(request.module)})


class Turn:
    """The turn to make an entry: others who want it wait until it has ended."""

    def __init__(self, cache: Cache, key: Key) -> None:
        self.key = key
        self._cache = cache
        self._flight = flight(cache)
        self._lock: int | None = None

    def take(self, ask: Callable[[], T | None]) -> T | None:
        """Return what ``ask`` finds in the cache; ``None`` where the caller is to make it.

        It asks again where another process or thread has made the entry meanwhile.
        """
        cached = ask()
        if cached is None:
            is_stored = functools.partial(self._cache.offers, self.key.digest)
            role, self._lock = self._flight.join(self.key.digest, is_stored)
            if not role.leader and is_stored():
                cached = ask()
        return cached

    def end(self, *, in_vain: bool) -> None:
        """Let the others go on; ``in_vain`` where they will find nothing, and need not wait."""
        lock, self._lock = self._lock, None
        self._flight.leave(self.key.digest, lock, in_vain=in_vain)


def once(
    cache: Cache,
    key: Key,
    ask: Callable[[], T | None],
    make: Callable[[], tuple[T, bool]],
) -> T:
    """Return what the cache has, or make it, unless another process is about to store it.

    Args:
        cache: Where to look.
        key: What is wanted.
        ask: Asks the cache; ``None`` if it has nothing that can be used.
        make: Makes it, and says whether it was stored.
    """
    turn = Turn(cache, key)
    cached = turn.take(ask)
    if cached is not None:
        return cached
    in_vain = True
    try:
        result, is_stored = make()
        in_vain = not is_stored
    except BaseException as error:
        in_vain = isinstance(error, Exception)  # Ctrl-C says nothing about the program
        raise
    finally:
        turn.end(in_vain=in_vain)
    return result


def load_entry(cache: Cache, key: Key, entry: Entry, load: Callable[[bytes], T]) -> T | None:
    """Load what a verified entry holds; one that cannot be loaded is discarded, to be made anew."""
    try:
        with times.stage(times.LOAD), metrics.timed("LoadTime"):
            return load(entry.payload)
    except Exception as error:
        raise_if_interrupted(error)
        _log.warning("cannot load a cached executable, recompiling: %s", error)
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


def metadata(
    name: str,
    kind: str,
    seconds: float,
    devices: Sequence[jaxapi.Device],
    calls: jaxapi.CustomCalls,
) -> dict[str, str | int | float]:
    """Return what is said about an entry, but for the summary of its program."""
    device = devices[0]
    return {
        TOLD_AS: json.dumps(jaxapi.functions_of_process(calls.targets, device.platform)),
        "name": name,
        "kind": kind,
        "compile_seconds": seconds,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "jax_version": jax.__version__,
        "jaxlib_version": jaxapi.JAXLIB_VERSION,
    }


def obstacle(metadata: Metadata) -> str:
    """Make the functions of an entry's executable available; return why it cannot be used.

    Returns:
        Empty where the executable can be loaded and run.
    """
    targets = _targets(metadata)
    if targets is None:
        return "it does not list its native functions: an older snaprt stored it"
    missing = jaxapi.make_available(targets, str(metadata.get("platform", "")))
    if missing:
        return f"it calls {', '.join(missing)}, which this process has not registered with JAX"
    return ""


def can_be_made_available_in_background(metadata: Metadata) -> bool:
    """Return whether a thread may make the functions of an entry's executable available.

    It may import nothing for that: the program might be importing it at the same time.
    """
    targets = _targets(metadata)
    return targets is not None and not jaxapi.modules_awaited(targets)


def _targets(metadata: Metadata) -> list[str] | None:
    try:
        return [str(name) for name in json.loads(str(metadata[TOLD_AS]))]
    except (KeyError, ValueError, TypeError):
        return None


def bound_to_process(lowered: jax.stages.Lowered, calls: jaxapi.CustomCalls) -> str:
    """Return what a program needs of this very process, whose executable no other may have."""
    return calls.bound_to or ("Python objects" if jaxapi.holds_objects(lowered) else "")


def refuse_objects_of_another_process(calls: jaxapi.CustomCalls) -> None:
    """Refuse a module from a file that names objects of the process that it was lowered in.

    Raises:
        CompileError: It does; XLA would follow an address that means something else here.
    """
    if calls.bound_to:
        raise CompileError(
            f"the module needs {calls.bound_to}, which exists only in the process that recorded it",
            hint="record the program without it; `snaprt inspect` prints the module and the arrays",
        )
