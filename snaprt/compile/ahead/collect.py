"""Writes down the programs that a run wants, instead of compiling and running them.

Every program gets zeros for its results, so that the run goes on to want its next programs. So a
run whose values decide which operations come next may collect others than it will want.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import jax
from snaprt_cache.key import relevant_xla_flags
from snaprt_cache.misses import script_name

from snaprt import jaxapi, metrics
from snaprt.compile.ahead.collected import (
    MODULE_SUFFIX,
    CollectedProgram,
    NotWritable,
    described,
    write_program,
)
from snaprt.compile.ahead.collection import collection
from snaprt.compile.key import compiler_settings, environment_flags, module_digest
from snaprt.compile.lower import digest_of_lowering
from snaprt.compile.native_calls import bound_to_process
from snaprt.graph.digest import Unstable
from snaprt.graph.program import Program

_log = logging.getLogger("snaprt.cache")

#: The name of the module that a recorded graph becomes.
GRAPH_NAME: Final = "lazy_graph"


def collect_program(
    program: Program, promoted: frozenset[int], lowered: jax.stages.Lowered, folder: Path
) -> tuple[jax.stages.Compiled, str]:
    """Write ``program`` into ``folder``; return what answers its calls with zeros, and its id.

    To be called where the program would be compiled, see `snaprt.compile.lower.placed`.
    """
    stablehlo = jaxapi.stablehlo_without_locations(lowered)
    calls = jaxapi.custom_calls(lowered.compiler_ir("stablehlo"), stablehlo)
    digest = module_digest(stablehlo)
    shapes = jaxapi.shapes_of(program.arguments(promoted))
    results = jaxapi.results_of_lowered(lowered)
    zeros = jaxapi.lower(jaxapi.zeros_function(results), shapes)
    with collection.lock:
        if not collection.programs:
            _log.warning("programs are written to %s and not run: every result is zero", folder)
        collection.programs += 1
        collection.over_devices += len(jaxapi.devices_of_lowered(lowered)) > 1
        try:
            if needed := bound_to_process(lowered, calls):
                raise NotWritable(needed)
            if jaxapi.signature_of_lowered(zeros) != jaxapi.signature_of_lowered(lowered):
                raise NotWritable("a signature that its arguments and results do not tell")
            described_program = _described(program, promoted, lowered, digest, shapes, results)
            is_new = write_program(folder, described_program, jaxapi.bytecode(lowered))
            collection.written += is_new
            collection.without_digest += not described_program.program_digest
            metrics.counter_add("CollectedProgram")
        except NotWritable as reason:
            collection.left_out[str(reason)] += 1
    with jaxapi.without_compilation_cache():
        return zeros.compile(), digest[:16]


def _described(
    program: Program,
    promoted: frozenset[int],
    lowered: jax.stages.Lowered,
    digest: str,
    shapes: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[object],
) -> CollectedProgram:
    devices = jaxapi.devices_of_lowered(lowered)
    placement = program.placement
    default = placement.default_device
    return CollectedProgram(
        name=f"{script_name()}: {GRAPH_NAME}",
        module=f"{digest[:16]}{MODULE_SUFFIX}",
        module_digest=digest,
        graph_id=digest[:16],
        program_digest=_digest_or_none(lambda: digest_of_lowering(program, promoted)),
        jax=jax.__version__,
        jaxlib=jaxapi.JAXLIB_VERSION,
        platform=devices[0].platform,
        device_count=devices[0].client.device_count(),
        xla_flags=relevant_xla_flags(environment_flags()),
        settings=compiler_settings(),
        arguments=tuple(map(described, shapes)),
        results=tuple(map(described, results)),
        signature=jaxapi.signature_of_lowered(lowered),
        committed=placement.committed,
        devices=tuple(device.id for device in placement.devices),
        default_device=default if isinstance(default, str | None) else default.id,
        x64=placement.x64,
    )


def _digest_or_none(find: Callable[[], str]) -> str:
    try:
        return find()
    except Unstable:
        return ""
    except Exception as error:  # a form of JAX's that is not foreseen: the module decides
        _log.info("a program has no digest: %r", error)
        return ""
