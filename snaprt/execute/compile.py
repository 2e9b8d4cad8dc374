"""Compile recorded programs, through the persistent cache.

It knows programs and executables; it does not know when graphs are cut or who watches them run.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key
from snaprt_cache.misses import record_miss, script_name
from snaprt_cache.store import Cache

from snaprt import jaxapi, metrics, settings
from snaprt.errors import CompileError
from snaprt.execute import prefetch
from snaprt.execute.collect import GRAPH_NAME, calls_back, collect_program
from snaprt.execute.key import module_digest, module_key
from snaprt.execute.lower import lowering, placed
from snaprt.execute.notes import (
    Note,
    devices_by_id,
    devices_of_placement,
    note_key,
    read_note,
    write_note,
)
from snaprt.execute.once import compile_once, load_entry
from snaprt.execute.store import persistent_cache
from snaprt.execute.summary import summarise
from snaprt.lazy.graph import Program

_log = logging.getLogger("snaprt.compile")
_numbers = itertools.count()


@dataclass(frozen=True)
class ModuleArtifacts:
    """A program in the forms in which it is recorded.

    Attributes:
        stablehlo: Portable StableHLO artifact (versioned bytecode) with source locations.
        hlo: Serialised ``xla.HloModuleProto``, before optimisation.
        compile_options: Serialised ``xla.CompileOptionsProto``.
        num_devices: How many devices one execution runs on.
    """

    stablehlo: bytes
    hlo: bytes
    compile_options: bytes
    num_devices: int


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

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: Executable) -> ModuleArtifacts:
    lowered = executable.lowered()
    return ModuleArtifacts(
        stablehlo=jaxapi.portable_stablehlo(lowered),
        hlo=jaxapi.hlo_proto(lowered),
        compile_options=jaxapi.compile_options(executable.devices).SerializeAsString(),
        num_devices=len(executable.devices),
    )


def compile_program(
    program: Program, promoted: frozenset[int], overrides: Mapping[str, Any]
) -> Executable:
    """Lower ``program``, and load its executable from the persistent cache or compile it.

    Args:
        program: What to compile, with the arrays it will first be called with.
        promoted: Which of its literals become arguments, after the inputs.
        overrides: Compiler options by name that do not change what the program computes.

    Raises:
        CompileError: If JAX cannot lower it or XLA cannot compile it.
    """
    arguments = len(program.inputs) + len(promoted)
    results = len(program.outputs)
    folder = settings.get("SNAPRT_COLLECT")
    try:
        if folder is not None:
            found = _collect(program, promoted, folder)
        else:
            found = _obtain(program, promoted, arguments, results, overrides)
    except CacheError:
        raise
    except Exception as error:
        raise CompileError(
            f"the graph of {len(program.nodes)} operations that was cut here could not be "
            f"compiled: {error}",
            hint="the traceback above shows the error of JAX or XLA; its arrays stay pending",
        ) from error
    return Executable(
        name=GRAPH_NAME,
        graph_id=found.graph_id,
        number=next(_numbers),
        devices=found.devices,
        input_names=tuple(f"arg{i}" for i in range(arguments)),
        output_names=tuple(f"out{i}" for i in range(results)),
        donated=program.donated,
        from_cache=found.from_cache,
        call=found.compiled,
        lowered=found.lowered,
        is_collected=folder is not None,
    )


@dataclass(frozen=True)
class _Found:
    """An executable, with what is known of it."""

    compiled: jax.stages.Compiled
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
    program: Program,
    promoted: frozenset[int],
    arguments: int,
    results: int,
    overrides: Mapping[str, Any],
) -> _Found:
    """Find the executable by the program's digest, else by its module, else compile it."""
    lower = lowering(program, promoted)
    cache = persistent_cache()
    key_of_note = None if cache is None else note_key(program, promoted, cache)
    with placed(program.placement):
        if cache is not None and key_of_note is not None:
            noted = _load_noted(cache, key_of_note, program, lower)
            if noted is not None:
                return noted
        lowered = lower()
        stablehlo = jaxapi.stablehlo_without_locations(lowered)
        graph_id = module_digest(stablehlo)[:16]
        devices = jaxapi.devices_of_lowered(lowered)
        compiled, from_cache, key = _load_or_compile(
            cache, lowered, stablehlo, devices, arguments, results, overrides
        )
    if cache is not None and key_of_note is not None and key is not None:
        ids = tuple(device.id for device in devices)
        note = Note(key, graph_id, arguments, results, ids)
        write_note(cache, key_of_note, note, GRAPH_NAME)
    return _Found(compiled, graph_id, devices, from_cache, lambda: lowered)


def _load_noted(
    cache: Cache, key: Key, program: Program, lower: Callable[[], jax.stages.Lowered]
) -> _Found | None:
    ready = prefetch.take(key)
    if ready is not None:
        metrics.counter_add("LoweringSkipped")
        return _Found(ready.compiled, ready.note.graph_id, ready.devices, True, lower)
    note = read_note(cache, key)
    entry = None if note is None else cache.get(note.executable, counted=False)
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
    if cache is None or calls_back(stablehlo):
        if cache is not None:
            metrics.counter_add("PersistentCacheUncacheable")
        return _compile(lowered, overrides), False, None
    key = module_key(stablehlo, devices, kind="compiled", folder=cache.folder)

    def load() -> jax.stages.Compiled | None:
        entry = cache.get(key)
        if entry is None:
            return None
        return load_entry(
            cache, key, entry, lambda b: jaxapi.load_compiled(b, arguments, results, devices)
        )

    def compile_and_put() -> tuple[jax.stages.Compiled, bool]:
        name = f"{script_name()}: {GRAPH_NAME}"
        record_miss(cache, key, name)
        started = time.perf_counter()
        compiled = _compile(lowered, overrides)
        seconds = time.perf_counter() - started
        try:
            payload = jaxapi.serialize_compiled(compiled)
        except Exception as error:
            metrics.counter_add("PersistentCacheUncacheable")
            _log.info("an executable cannot be stored: %s", error)
            return compiled, False
        told = entry_metadata(name, "compiled", seconds, devices[0])
        told["summary"] = summarise(lowered.compiler_ir("stablehlo"))
        return compiled, cache.put(key, payload, told)

    loaded = load()
    if loaded is not None:
        return loaded, True, key
    compiled, from_cache, is_there = compile_once(cache, key, load, compile_and_put)
    return compiled, from_cache, key if is_there else None


def _compile(lowered: jax.stages.Lowered, overrides: Mapping[str, Any]) -> jax.stages.Compiled:
    # It is stored here: a cache under jax.jit would store it once more.
    with metrics.timed("CompileTime"), jaxapi.without_compilation_cache():
        return lowered.compile(compiler_options=dict(overrides) or None)


def entry_metadata(
    name: str, kind: str, seconds: float, device: jaxapi.Device
) -> dict[str, str | int | float]:
    """Return what the cache's index tells about an entry."""
    return {
        "name": name,
        "kind": kind,
        "compile_seconds": seconds,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "jax_version": jax.__version__,
        "jaxlib_version": jaxapi.JAXLIB_VERSION,
    }
