"""Compile recorded programs, through the persistent cache.

It knows programs and executables; it does not know when graphs are cut or who watches them run.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key
from snaprt_cache.miss.journal import script_name
from snaprt_cache.store import Cache

from snaprt import jaxapi, metrics, settings
from snaprt.compile import times
from snaprt.compile.ahead.collect import GRAPH_NAME, collect_program
from snaprt.compile.cached import prefetch
from snaprt.compile.cached.fast_key import (
    Note,
    devices_by_id,
    devices_of_placement,
    note_key,
    read_note,
    write_note,
)
from snaprt.compile.cached.once import compile_once, load_entry
from snaprt.compile.cached.store import persistent_cache
from snaprt.compile.key import module_digest, module_key
from snaprt.compile.lower import lowering, placed
from snaprt.compile.nan_flag import FLAG_NAME
from snaprt.compile.native_calls import bound_to_process, obstacle, told_of_calls
from snaprt.compile.summary import summarize
from snaprt.errors import CompileError, UsageError
from snaprt.graph.artifacts import ModuleArtifacts, proof_of
from snaprt.graph.program import Program

_log = logging.getLogger("snaprt.compile")
_numbers = itertools.count()


def new_number() -> int:
    """Return a number that no other executable of this process has."""
    return next(_numbers)


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program, ready to be called with flat arguments.

    Attributes:
        name: The name of its module.
        graph_id: The first 16 hexadecimal digits of the digest of its StableHLO.
        number: Counts the executables of this process.
        devices: The devices it runs on.
        input_names: A name for each argument.
        output_names: A name for each result.
        donated: The arguments whose memory it takes.
        from_cache: Whether it came from the persistent cache rather than from the compiler.
        call: Runs it: arrays in, list of arrays out.
        lowered: Lowers the program again (or returns what compiling left), for recording.
        is_collected: Whether it was written down to be compiled later, and its results are zeros.
        is_watched: Whether its last result is the flag of `snaprt.compile.nan_flag`.
        times: Where its time has gone.
    """

    name: str
    graph_id: str
    number: int
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    from_cache: bool
    call: Callable[..., Sequence[jax.Array]]
    lowered: Callable[[], jax.stages.Lowered]
    is_collected: bool = False
    is_watched: bool = False
    times: times.ProgramTimes = field(default_factory=times.ProgramTimes)

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: Executable) -> ModuleArtifacts:
    return artifacts_of(executable.lowered(), executable.call)


def artifacts_of(lowered: jax.stages.Lowered, compiled: Any) -> ModuleArtifacts:
    """Return a program in the forms in which it is recorded.

    Args:
        lowered: The program.
        compiled: Its `jax.stages.Compiled`; what is none of those proves nothing.
    """
    return ModuleArtifacts(
        stablehlo=jaxapi.portable_stablehlo(lowered),
        hlo=jaxapi.hlo_proto(lowered),
        compile_options=jaxapi.compile_options_of_lowered(lowered).SerializeAsString(),
        num_devices=len(jaxapi.devices_of_lowered(lowered)),
        proof=proof_of(jaxapi.loaded_executable(compiled)),
    )


def compile_program(
    program: Program,
    promoted: frozenset[int],
    overrides: Mapping[str, Any],
    *,
    is_watched: bool = False,
) -> Executable:
    """Lower ``program``, and load its executable from the persistent cache or compile it.

    Args:
        program: What to compile, with the arrays it will first be called with.
        promoted: Which of its literals become arguments, after the inputs.
        overrides: Compiler options by name that do not change what the program computes.
        is_watched: Whether it gets a flag, unless it is only collected; see
            `snaprt.compile.nan_flag`.

    Raises:
        CompileError: If JAX cannot lower it or XLA cannot compile it.
        UsageError: If a setting is not one that is allowed.
    """
    folder = settings.get("SNAPRT_COLLECT")
    size = len(program.nodes)
    _log.info("a graph of %d operations and %d inputs: begin", size, len(program.inputs))
    started = time.perf_counter()
    try:
        with times.measured() as stopwatch:
            if folder is not None:
                found, is_watched = _collect(program, promoted, folder), False
            else:
                found = _obtain(program, promoted, overrides, is_watched)
    except (CacheError, UsageError):
        raise
    except Exception as error:
        raise CompileError(
            f"the graph of {size} operations that was cut here could not be compiled: {error}",
            hint="the traceback above shows the error of JAX or XLA; arrays that do not depend on "
            "what was refused stay pending",
        ) from error
    spent = times.prepared(
        times.LAZY,
        GRAPH_NAME,
        found.graph_id,
        stopwatch,
        operations=size,
        compiled=times.COMPILE in stopwatch.nanoseconds,
        loaded=found.from_cache,
    )
    is_collected = folder is not None
    how = "collected" if is_collected else "from the cache" if found.from_cache else "compiled"
    seconds = time.perf_counter() - started
    _log.info("graph %s of %d operations: %s in %.3f s", found.graph_id, size, how, seconds)
    return _executable(program, promoted, found, spent, is_collected=is_collected, flag=is_watched)


def uncompiled_program(
    program: Program, promoted: frozenset[int], *, is_watched: bool = False
) -> Executable:
    """Lower a program that cannot be compiled, so that it can be recorded; it cannot be called.

    Args:
        program: What could not be compiled.
        promoted: Which of its literals become arguments, after the inputs.
        is_watched: Whether it was to get a flag.

    Raises:
        Exception: It cannot be lowered either.
    """
    with placed(program.placement):
        lowered = lowering(program, promoted, is_watched)()
        graph_id = module_digest(jaxapi.stablehlo_without_locations(lowered))[:16]
        devices = jaxapi.devices_of_lowered(lowered)

    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        raise CompileError(f"the graph {GRAPH_NAME}.{graph_id} could not be compiled")

    found = _Found(call, graph_id, devices, False, lambda: lowered)
    spent = times.ProgramTimes()
    return _executable(program, promoted, found, spent, is_collected=False, flag=is_watched)


def _executable(
    program: Program,
    promoted: frozenset[int],
    found: _Found,
    spent: times.ProgramTimes,
    *,
    is_collected: bool,
    flag: bool,
) -> Executable:
    arguments = len(program.inputs) + len(promoted)
    results = [f"out{i}" for i in range(len(program.outputs))]
    return Executable(
        name=GRAPH_NAME,
        graph_id=found.graph_id,
        number=new_number(),
        devices=found.devices,
        input_names=tuple(f"arg{i}" for i in range(arguments)),
        output_names=(*results, FLAG_NAME) if flag else tuple(results),
        donated=program.donated,
        from_cache=found.from_cache,
        call=found.compiled,
        lowered=found.lowered,
        is_collected=is_collected,
        is_watched=flag,
        times=spent,
    )


@dataclass(frozen=True)
class _Found:
    """An executable, with what is known of it."""

    compiled: Callable[..., Sequence[jax.Array]]
    graph_id: str
    devices: tuple[jaxapi.Device, ...]
    from_cache: bool
    lowered: Callable[[], jax.stages.Lowered]


def _collect(program: Program, promoted: frozenset[int], folder: Path) -> _Found:
    """Write the program into ``folder`` instead of compiling it."""
    lower = lowering(program, promoted)
    with placed(program.placement):
        lowered = lower()
        zeros, graph_id = collect_program(program, promoted, lowered, folder)
        devices = jaxapi.devices_of_lowered(lowered)
    return _Found(zeros, graph_id, devices, False, lambda: lowered)


def _obtain(
    program: Program, promoted: frozenset[int], overrides: Mapping[str, Any], is_watched: bool
) -> _Found:
    """Find the executable by the program's digest, else by its module, else compile it.

    Of the processes that want one program at the same time, one lowers and compiles it: the others
    wait for its note.
    """
    arguments = len(program.inputs) + len(promoted)
    results = len(program.outputs) + is_watched
    lower = lowering(program, promoted, is_watched)
    cache = persistent_cache()
    with times.stage(times.KEY):
        key_of_note = None if cache is None else note_key(program, promoted, is_watched, cache)

    def by_note() -> _Found | None:
        assert cache is not None
        assert key_of_note is not None
        return _load_noted(cache, key_of_note, program, lower)

    def by_module() -> tuple[_Found, bool]:
        lowered = lower()
        with times.stage(times.KEY):
            stablehlo = jaxapi.stablehlo_without_locations(lowered)
            graph_id = module_digest(stablehlo)[:16]
        devices = jaxapi.devices_of_lowered(lowered)
        _log.info("graph %s: lowered", graph_id)
        compiled, from_cache, key = _load_or_compile(
            cache, lowered, stablehlo, devices, arguments, results, overrides
        )
        is_noted = False
        if cache is not None and key_of_note is not None and key is not None:
            ids = tuple(device.id for device in devices)
            note = Note(key, graph_id, arguments, results, ids)
            is_noted = write_note(cache, key_of_note, note, GRAPH_NAME)
        return _Found(compiled, graph_id, devices, from_cache, lambda: lowered), is_noted

    with placed(program.placement):
        if cache is None or key_of_note is None:
            return by_module()[0]
        with times.stage(times.CACHE):
            return by_note() or compile_once(cache, key_of_note, by_note, by_module)[0]


def _load_noted(
    cache: Cache, key: Key, program: Program, lower: Callable[[], jax.stages.Lowered]
) -> _Found | None:
    ready = prefetch.take(key)
    if ready is not None and ready.note is not None:
        metrics.counter_add("LoweringSkipped")
        return _Found(ready.loaded, ready.note.graph_id, ready.devices, True, lower)
    note = read_note(cache, key)
    entry = None
    if note is not None:
        entry = cache.get(note.executable, counted=False, obstacle=obstacle)
    if note is None or entry is None:
        return None

    def load(payload: bytes) -> _Found:
        devices = devices_by_id(note.device_ids, devices_of_placement(program.placement)[0])
        compiled = jaxapi.load_compiled(payload, note.arguments, note.results, devices)
        return _Found(compiled, note.graph_id, devices, True, lower)

    found = load_entry(cache, note.executable, entry, load)
    if found is not None:
        cache.count_hit(entry)
        metrics.counter_add("LoweringSkipped")
    return found


def _load_or_compile(
    cache: Cache | None,
    lowered: jax.stages.Lowered,
    stablehlo: bytes,
    devices: tuple[jaxapi.Device, ...],
    arguments: int,
    results: int,
    overrides: Mapping[str, Any],
) -> tuple[jax.stages.Compiled, bool, Key | None]:
    """Return the executable, whether it came from the cache, and its key if it is there now."""
    calls = jaxapi.custom_calls(lowered.compiler_ir("stablehlo"), stablehlo)
    if cache is None or bound_to_process(lowered, calls):
        if cache is not None:
            metrics.counter_add("PersistentCacheUncacheable")
        return _compile(lowered, overrides), False, None
    with times.stage(times.KEY):
        signature = jaxapi.call_of_lowered(lowered)
        key = module_key(
            stablehlo, devices, kind="compiled", signature=signature, folder=cache.folder
        )
    name = f"{script_name()}: {GRAPH_NAME}"

    def load() -> jax.stages.Compiled | None:
        entry = cache.get(key, name=name, obstacle=obstacle)
        if entry is None:
            return None
        return load_entry(
            cache, key, entry, lambda b: jaxapi.load_compiled(b, arguments, results, devices)
        )

    def compile_and_put() -> tuple[jax.stages.Compiled, bool]:
        cache.record_miss(key, name)
        started = time.perf_counter()
        compiled = _compile(lowered, overrides)
        seconds = time.perf_counter() - started
        try:
            payload = jaxapi.serialize_compiled(compiled)
        except Exception as error:
            metrics.counter_add("PersistentCacheUncacheable")
            _log.info("an executable cannot be stored: %s", error)
            return compiled, False
        told = entry_metadata(name, "compiled", seconds, devices[0], calls)
        told["summary"] = summarize(lowered.compiler_ir("stablehlo"))
        return compiled, cache.put(key, payload, told)

    with times.stage(times.CACHE):
        loaded = load()
        if loaded is not None:
            return loaded, True, key
        compiled, from_cache, is_there = compile_once(cache, key, load, compile_and_put)
        return compiled, from_cache, key if is_there else None


def _compile(lowered: jax.stages.Lowered, overrides: Mapping[str, Any]) -> jax.stages.Compiled:
    _log.info("XLA compiles: begin")
    # It is stored here: a cache under jax.jit would store it once more.
    with (
        times.stage(times.COMPILE),
        metrics.timed("CompileTime"),
        jaxapi.without_compilation_cache(),
    ):
        compiled = lowered.compile(compiler_options=dict(overrides) or None)
    _log.info("XLA compiles: end")
    return compiled


def entry_metadata(
    name: str, kind: str, seconds: float, device: jaxapi.Device, calls: jaxapi.CustomCalls
) -> dict[str, str | int | float]:
    """Return what is told about an entry, in the cache's index and to who loads it."""
    return {
        **told_of_calls(calls, device.platform),
        "name": name,
        "kind": kind,
        "compile_seconds": seconds,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "jax_version": jax.__version__,
        "jaxlib_version": jaxapi.JAXLIB_VERSION,
    }
