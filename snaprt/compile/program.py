"""Compile recorded programs: found in the cache by their digest, else lowered and obtained."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key
from snaprt_cache.reports import script_name
from snaprt_cache.store import Cache

from snaprt import jaxapi, metrics, settings
from snaprt.compile import times
from snaprt.compile.ahead.collect import GRAPH_NAME, collect_program
from snaprt.compile.cached import prefetch
from snaprt.compile.cached.fast_key import (
    ANY_DONATION,
    Note,
    devices_by_id,
    devices_of_placement,
    fits,
    note_key,
    read_note_of,
    write_note,
)
from snaprt.compile.cached.store import persistent_cache
from snaprt.compile.executable import Executable, new_number
from snaprt.compile.key import module_digest
from snaprt.compile.loaded import differs_little
from snaprt.compile.lower import FLAG_NAME, lowering, placed
from snaprt.compile.obtain import Request, bound_to_process, load_entry, obstacle, obtain, once
from snaprt.errors import CompileError, UsageError
from snaprt.graph.program import Program
from snaprt.host.interruptions import raise_if_interrupted
from snaprt.units import counted

_log = logging.getLogger("snaprt.compile")


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
            `snaprt.compile.lower`.

    Returns:
        The executable. Where ``program`` could donate more or less than it does, it may be one that
        the cache has and that does so; see `snaprt.compile.loaded`.

    Raises:
        CompileError: If JAX cannot lower it or XLA cannot compile it.
        UsageError: If a setting is not one that is allowed.
    """
    folder = settings.get("SNAPRT_COLLECT")
    size = len(program.nodes)
    operations = counted(size, "operation")
    inputs = counted(len(program.inputs), "input")
    _log.info("a graph of %s and %s: begin", operations, inputs)
    started = time.perf_counter()
    try:
        with times.measured() as stopwatch:
            if folder is not None:
                prepared, is_watched = _collect(program, promoted, folder), False
            else:
                prepared, program = _find(program, promoted, overrides, is_watched)
    except (CacheError, UsageError):
        raise
    except Exception as error:
        raise_if_interrupted(error)
        raise CompileError(
            f"the graph of {counted(size, 'operation')} could not be compiled: {error}",
            hint="the traceback above shows the error of JAX or XLA; arrays that do not depend "
            "on the failed graph stay pending",
        ) from error
    spent = times.prepared(
        times.LAZY,
        GRAPH_NAME,
        prepared.graph_id,
        stopwatch,
        operations=size,
        compiled=times.COMPILE in stopwatch.nanoseconds,
        loaded=prepared.from_cache,
    )
    is_collected = folder is not None
    how = "collected" if is_collected else "from the cache" if prepared.from_cache else "compiled"
    seconds = time.perf_counter() - started
    _log.info("graph %s of %s: %s in %.3f s", prepared.graph_id, operations, how, seconds)
    executable = _executable(
        prepared, spent, program, promoted, is_collected=is_collected, flag=is_watched
    )
    return replace(executable, is_pure=not any(node.effects for node in program.nodes))


def uncompiled_program(
    program: Program, promoted: frozenset[int], *, is_watched: bool = False
) -> Executable:
    """Lower a program that cannot be compiled, so that it can be recorded; it cannot be called.

    Raises:
        Exception: It cannot be lowered either.
    """
    with placed(program.placement):
        prepared = _only_lowered(lowering(program, promoted, is_watched)())
    return _executable(prepared, times.ProgramTimes(), program, promoted, flag=is_watched)


def unfinished_program(program: Program | None, trace_error: Any) -> Executable:
    """Lower what was recorded before an error ended the recording, to show its operations."""
    if program is None:
        with jaxapi.evaluating():
            prepared = _only_lowered(jaxapi.lower(list, ()))
    else:
        prepared = _only_lowered(lowering(program, frozenset())())
    executable = _executable(prepared, times.ProgramTimes(), program, frozenset())
    return replace(executable, name=f"{GRAPH_NAME}.error", trace_error=trace_error)


def _only_lowered(lowered: jax.stages.Lowered) -> _Prepared:
    graph_id = module_digest(jaxapi.stablehlo_without_locations(lowered))[:16]

    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        raise CompileError(f"the graph {GRAPH_NAME}.{graph_id} could not be compiled")

    return _Prepared(call, graph_id, jaxapi.devices_of_lowered(lowered), False, lambda: lowered)


def _executable(
    prepared: _Prepared,
    spent: times.ProgramTimes,
    program: Program | None,
    promoted: frozenset[int],
    *,
    is_collected: bool = False,
    flag: bool = False,
) -> Executable:
    names = [f"out{number}" for number in range(0 if program is None else len(program.outputs))]
    return Executable(
        name=GRAPH_NAME,
        graph_id=prepared.graph_id,
        number=new_number(),
        devices=prepared.devices,
        input_names=() if program is None else program.input_names(promoted),
        output_names=(*names, FLAG_NAME) if flag else tuple(names),
        donated=() if program is None else program.donated,
        from_cache=prepared.from_cache,
        call=prepared.compiled,
        lowered=prepared.lowered,
        is_collected=is_collected,
        is_watched=flag,
        times=spent,
    )


@dataclass(frozen=True)
class _Prepared:
    """An executable, with what is known of it."""

    compiled: Callable[..., Sequence[jax.Array]]
    graph_id: str
    devices: tuple[jaxapi.Device, ...]
    from_cache: bool
    lowered: Callable[[], jax.stages.Lowered]


def _collect(program: Program, promoted: frozenset[int], folder: Path) -> _Prepared:
    """Write the program into ``folder`` instead of compiling it."""
    lower = lowering(program, promoted)
    with placed(program.placement):
        lowered = lower()
        zeros, graph_id = collect_program(program, promoted, lowered, folder)
        devices = jaxapi.devices_of_lowered(lowered)
    return _Prepared(zeros, graph_id, devices, False, lambda: lowered)


def _find(
    program: Program, promoted: frozenset[int], overrides: Mapping[str, Any], is_watched: bool
) -> tuple[_Prepared, Program]:
    """Find the executable by the program's digest, else by its module, else compile it.

    Of the processes that want one program at the same time, one lowers and compiles it: the others
    wait for its note.

    Returns:
        The executable, and the program with what that donates.
    """
    arguments = len(program.inputs) + len(promoted)
    results = len(program.outputs) + is_watched
    lower = lowering(program, promoted, is_watched)
    cache = persistent_cache()
    with times.stage(times.KEY):
        key_of_note = None if cache is None else note_key(program, promoted, is_watched, cache)

    def by_note() -> tuple[_Prepared, Program] | None:
        assert cache is not None
        assert key_of_note is not None
        prepared = _load_noted(cache, key_of_note, program, lower, arguments, results)
        if prepared is not None or not program.donatable:
            return None if prepared is None else (prepared, program)
        with times.stage(times.KEY):
            key = note_key(replace(program, donated=ANY_DONATION), promoted, is_watched, cache)
        note = None if key is None else read_note_of(cache, key, program, arguments, results)
        if note is None or not differs_little(program, note.donated):
            return None
        other = replace(program, donated=note.donated)
        key = note_key(other, promoted, is_watched, cache)
        lower_other = lowering(other, promoted, is_watched)
        if key is None:
            return None
        prepared = _load_noted(cache, key, other, lower_other, arguments, results)
        return None if prepared is None else (prepared, other)

    def by_module() -> tuple[tuple[_Prepared, Program], bool]:
        lowered = lower()
        with times.stage(times.KEY):
            stablehlo = jaxapi.stablehlo_without_locations(lowered)
            graph_id = module_digest(stablehlo)[:16]
        devices = jaxapi.devices_of_lowered(lowered)
        _log.info("graph %s: lowered", graph_id)
        request = _request(lowered, stablehlo, graph_id, devices, arguments, results, overrides)
        obtained = obtain(request, cache)
        is_noted = False
        if cache is not None and key_of_note is not None and obtained.key is not None:
            ids = tuple(device.id for device in devices)
            note = Note(obtained.key, graph_id, arguments, results, ids)
            is_noted = write_note(cache, key_of_note, note, GRAPH_NAME)
            of_any = replace(program, donated=ANY_DONATION)
            if program.donatable and (key := note_key(of_any, promoted, is_watched, cache)):
                write_note(cache, key, replace(note, donated=program.donated), GRAPH_NAME)
        prepared = _Prepared(
            obtained.loaded, graph_id, devices, obtained.from_cache, lambda: lowered
        )
        return (prepared, program), is_noted

    with placed(program.placement):
        if cache is None or key_of_note is None:
            return by_module()[0]
        with times.stage(times.CACHE):
            return once(cache, key_of_note, by_note, by_module)


def _load_noted(
    cache: Cache,
    key: Key,
    program: Program,
    lower: Callable[[], jax.stages.Lowered],
    arguments: int,
    results: int,
) -> _Prepared | None:
    ready = prefetch.take(key)
    if ready is not None and ready.note and fits(ready.note, program, arguments, results):
        metrics.counter_add("LoweringSkipped")
        return _Prepared(ready.loaded, ready.note.graph_id, ready.devices, True, lower)
    note = read_note_of(cache, key, program, arguments, results)
    entry = None
    if note is not None:
        entry = cache.get(note.executable, counted=False, obstacle=obstacle)
    if note is None or entry is None:
        return None

    def load(payload: bytes) -> _Prepared:
        devices = devices_by_id(note.device_ids, devices_of_placement(program.placement)[0])
        compiled = jaxapi.load_compiled(payload, note.arguments, note.results, devices)
        return _Prepared(compiled, note.graph_id, devices, True, lower)

    prepared = load_entry(cache, note.executable, entry, load)
    if prepared is not None:
        cache.count_hit(entry)
        metrics.counter_add("LoweringSkipped")
    return prepared


def _request(
    lowered: jax.stages.Lowered,
    stablehlo: bytes,
    graph_id: str,
    devices: tuple[jaxapi.Device, ...],
    arguments: int,
    results: int,
    overrides: Mapping[str, Any],
) -> Request[jax.stages.Compiled]:
    module = lowered.compiler_ir("stablehlo")
    calls = jaxapi.custom_calls(module, stablehlo)

    return Request(
        name=f"{script_name()}: {GRAPH_NAME}",
        kind="compiled",
        module=module,
        calls=calls,
        devices=devices,
        digest=lambda: module_digest(stablehlo),
        identity=lambda: {"signature": jaxapi.call_of_lowered(lowered)},
        compile=lambda: jaxapi.compile_named(lowered, graph_id, overrides),
        serialize=jaxapi.serialize_compiled,
        load=lambda payload: jaxapi.load_compiled(payload, arguments, results, devices),
        bound_to=bound_to_process(lowered, calls),
    )
