"""Compiles ahead of time: what was collected becomes the entry that its run will look up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from snaprt_cache.errors import CacheError
from snaprt_cache.key import Key
from snaprt_cache.store import Cache

from snaprt import jaxapi
from snaprt.compile.ahead.collect import GRAPH_NAME, CollectedProgram, restored
from snaprt.compile.cached.fast_key import Note, key_of_program, read_note, write_note
from snaprt.compile.key import TOPOLOGY, module_digest
from snaprt.compile.lower import placed
from snaprt.compile.obtain import Request, obtain, refuse_objects_of_another_process
from snaprt.errors import CompileError, UsageError

#: What libtpu wants to hear on a machine without a TPU, where nobody tells it.
TOPOLOGY_VARIABLES: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Warmed:
    """What became of a program."""

    key: str
    was_there: bool
    seconds: float


def warm_collected(program: CollectedProgram, module: bytes, cache: Cache) -> Warmed:
    """Compile a collected program for the devices that are here, as its run would compile it.

    Raises:
        UsageError: The program is for another version, platform or number of devices.
        CompileError: XLA refuses it, or the module is not the one that was collected.
    """
    check_versions(program)
    try:
        client = jax.local_devices(backend=program.platform)[0].client
        devices = {device.id: device for device in client.devices()}
        placement = program.placement(devices)
        arguments = [restored(value, devices) for value in program.arguments]
        results = [restored(value, {}) for value in program.results]
    except (RuntimeError, KeyError, ValueError) as error:
        raise UsageError(
            f"the program was collected on {program.device_count} devices of platform "
            f"{program.platform!r}, but this machine does not have them: {error}",
            hint="collect and warm on the same kind of machine",
        ) from error
    for name, value in program.settings.items():
        if value is not None:
            jax.config.update(name, value)
    with placed(placement):
        stand_in = jaxapi.lower(jaxapi.zeros_function(results), arguments, program.donated)
        if jaxapi.signature_of_lowered(stand_in) != program.signature:
            raise CompileError(
                "cannot rebuild the program from the collected file",
                hint="collect it again; if that fails too, it is compiled at run time",
            )
        lowered = jaxapi.with_module(stand_in, _checked_module(program, module))
        stablehlo = jaxapi.stablehlo_without_locations(lowered)
        module_ir = lowered.compiler_ir("stablehlo")
        calls = jaxapi.custom_calls(module_ir, stablehlo)
        refuse_objects_of_another_process(calls)
        used = jaxapi.devices_of_lowered(lowered)
        key, warmed = _warm(
            Request(
                name=program.name,
                kind="compiled",
                module=module_ir,
                calls=calls,
                devices=used,
                digest=lambda: module_digest(stablehlo),
                identity=lambda: {"signature": program.signature},
                compile=lambda: jaxapi.serialize_compiled(
                    jaxapi.compile_named(lowered, module_digest(stablehlo)[:16])
                ),
                serialize=bytes,
                load=None,
            ),
            cache,
            "the program failed to compile",
        )
    ids = tuple(device.id for device in used)
    note = Note(key, program.graph_id, len(arguments), len(results), ids)
    for digest, noted in (
        (program.program_digest, note),
        (program.digest_of_any_donation, replace(note, donated=program.donated)),
    ):
        key_of_note = key_of_program(digest, placement, cache)
        if digest and read_note(cache, key_of_note) != noted:
            write_note(cache, key_of_note, noted, GRAPH_NAME)
    return warmed


def _warm(request: Request[bytes], cache: Cache, what: str) -> tuple[Key, Warmed]:
    """Compile unless the cache has a sound entry, or another process is about to store one."""
    try:
        obtained = obtain(request, cache)
    except (CacheError, CompileError):
        raise
    except Exception as error:
        raise CompileError(f"{what}: {error}") from error
    if obtained.key is None:
        raise CompileError(f"cannot store the executable in {cache.path}")
    return obtained.key, Warmed(obtained.key.digest, obtained.from_cache, obtained.seconds)


def check_versions(program: CollectedProgram) -> None:
    """Refuse a program that another JAX lowered: this one would lower it to another module.

    Raises:
        UsageError: It was another JAX, or another jaxlib.
    """
    if (program.jax, program.jaxlib) != (jax.__version__, jaxapi.JAXLIB_VERSION):
        raise UsageError(
            f"the program was collected with jax {program.jax} and jaxlib {program.jaxlib}, but "
            f"this is jax {jax.__version__} and jaxlib {jaxapi.JAXLIB_VERSION}",
            hint="collect it again with these versions",
        )


def _parsed(module: bytes) -> Any:
    try:
        return jaxapi.parse_module(module)
    except ValueError as error:
        raise CompileError(f"cannot read the module: {error}") from error


def _checked_module(program: CollectedProgram, module: bytes) -> Any:
    parsed = _parsed(module)
    if module_digest(jaxapi.bytecode_without_locations(parsed)) != program.module_digest:
        raise CompileError(
            f"the module in {program.module} differs from the collected one",
            hint="the file was changed; collect it again",
        )
    return parsed


def warm_for_topology(module: bytes, topology: str, name: str, cache: Cache) -> Warmed:
    """Compile a module for a TPU topology, on a machine without one.

    Raises:
        UsageError: libtpu is not installed, or knows no such topology.
        CompileError: The module cannot be read, or the compiler refuses it.
    """
    devices = topology_devices(topology)
    parsed = _parsed(module)
    jaxapi.without_scans(parsed, "tpu")
    calls = jaxapi.custom_calls(parsed)
    refuse_objects_of_another_process(calls)
    used = devices[: jaxapi.partitions_of(parsed)]
    stablehlo = jaxapi.bytecode_without_locations(parsed)
    request = Request(
        name=name,
        kind="topology",
        module=parsed,
        calls=calls,
        devices=used,
        kind_of_key=TOPOLOGY,
        digest=lambda: module_digest(stablehlo),
        identity=lambda: {"topology": topology},
        compile=lambda: jaxapi.compile_for_topology(parsed, used),
        serialize=bytes,
        load=None,
    )
    return _warm(request, cache, f"the module failed to compile for {topology}")[1]


def topology_devices(topology: str) -> tuple[Any, ...]:
    """Return the devices of a TPU topology, none of which is here.

    Raises:
        UsageError: libtpu is not installed, or knows no such topology.
    """
    from jax.experimental import topologies

    for variable, value in TOPOLOGY_VARIABLES.items():
        os.environ.setdefault(variable, value)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of several types, by cause and version
        raise UsageError(
            f"no TPU topology {topology!r} to compile for: {error}",
            hint="install snaprt[tpu], and use a topology such as tpu:v5e:2x2",
        ) from error
    return tuple(description.devices)
