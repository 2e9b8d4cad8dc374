"""Writes down the programs that a run wants, instead of compiling and running them.

Every program gets zeros for its results, so that the run goes on to want its next programs. So a
run whose values decide which operations come next may collect others than it will want. Beside the
module stands a small JSON file. It holds no code, and what it says of the module is checked when
the program is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from blake3 import blake3
from snaprt_cache.key import relevant_xla_flags
from snaprt_cache.reports import script_name

from snaprt import jaxapi, metrics
from snaprt.compile.ahead.collection import collection
from snaprt.compile.cached.fast_key import ANY_DONATION
from snaprt.compile.key import compiler_settings, environment_flags, module_digest
from snaprt.compile.lower import digest_of_lowering
from snaprt.compile.obtain import bound_to_process
from snaprt.errors import UsageError
from snaprt.graph.digest import Unstable
from snaprt.graph.program import Placement, Program
from snaprt.host.regular_files import read_file
from snaprt.host.whole_files import going_on_without_room, remedy_sentence, write_whole, writing

SCHEMA: Final = "snaprt.collected"
VERSION: Final = 2  # 1 says nothing of donation
#: How the name of the JSON file ends; the module's ends with `MODULE_SUFFIX`.
SUFFIX: Final = ".program.json"
MODULE_SUFFIX: Final = ".mlirbc"


class NotWritable(Exception):  # noqa: N818 - a finding, counted by who collects
    """A program needs something that has no form in a file; the message names it."""


@dataclass(frozen=True)
class CollectedProgram:
    """What the JSON file says."""

    name: str  # what the cache's index calls it
    module: str  # the file of the module, in the same directory: MLIR bytecode of this jaxlib
    module_digest: str  # of the module without source locations, as in the executable's key
    graph_id: str  # see `snaprt.compile.executable.Executable`
    # By which the program finds its executable without being lowered; empty where it has none.
    program_digest: str
    jax: str
    jaxlib: str
    platform: str
    device_count: int
    xla_flags: tuple[str, ...]  # the flags that may change its executable
    settings: Mapping[str, Any]  # JAX's settings that may change its executable
    arguments: tuple[Mapping[str, Any], ...]  # the abstract value of each argument, see `described`
    results: tuple[Mapping[str, Any], ...]  # the abstract value of each result
    signature: str  # see `snaprt.jaxapi.signature_of_lowered`
    committed: bool
    devices: tuple[int, ...]
    default_device: int | str | None
    x64: bool
    donated: tuple[int, ...] = ()  # the inputs whose memory it takes
    # Its digest whatever it donates; empty where it has none, or can donate nothing.
    digest_of_any_donation: str = ""

    def placement(self, devices: Mapping[int, Any]) -> Placement:
        """Return where it runs, with the devices of this process by their ids.

        Raises:
            KeyError: There is no such device here.
        """
        default = self.default_device
        return Placement(
            committed=self.committed,
            devices=tuple(devices[number] for number in self.devices),
            default_device=devices[default] if isinstance(default, int) else default,
            x64=self.x64,
        )


def write_program(folder: Path, program: CollectedProgram, module: bytes) -> bool:
    """Write both files, the JSON file last; return whether the program is new in ``folder``.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "version": VERSION, **dataclasses.asdict(program)}
    text = json.dumps(content, indent=1, sort_keys=True).encode()
    path = folder / f"{program.graph_id}-{blake3(text).hexdigest()[:8]}{SUFFIX}"
    if path.exists():
        return False
    write_whole(folder / program.module, module)
    write_whole(path, text)
    return True


def read_program(path: Path) -> CollectedProgram:
    """Read the JSON file of a collected program.

    Raises:
        UsageError: It is none, or of a newer version.
    """
    try:
        content = json.loads(read_file(path))
        if content.pop("schema") != SCHEMA:
            raise ValueError("it has a different schema")
        version = content.pop("version")
        if not 1 <= version <= VERSION:
            raise ValueError(f"its version is {version}; this snaprt reads 1 to {VERSION}")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        program = CollectedProgram(**fields)
        if Path(program.module).name != program.module:
            raise ValueError("its module is not in the same directory")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a readable collected program: {error}",
            hint="`snaprt cache collect` writes such files.",
        ) from error
    return program


def described(value: Any) -> Mapping[str, Any]:
    """Return an abstract value, or what has its attributes, in a form for JSON.

    Raises:
        NotWritable: Its sharding has no such form.
    """
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "weak_type": bool(getattr(value, "weak_type", False)),
        "sharding": _described_sharding(value.sharding)
        if isinstance(value, jax.ShapeDtypeStruct)
        else None,
    }


def _described_sharding(sharding: Any) -> Mapping[str, Any] | None:
    if sharding is None:
        return None
    kind = type(sharding)
    if kind is jax.sharding.SingleDeviceSharding:
        (device,) = sharding.device_set
        return {"device": device.id, "memory": sharding.memory_kind}
    if kind is jax.sharding.NamedSharding:
        mesh = sharding.mesh
        return {
            "axes": [
                [str(name), mesh.shape[name], axis.name]
                for name, axis in zip(mesh.axis_names, mesh.axis_types, strict=True)
            ],
            "devices": [device.id for device in mesh.devices.flat],
            "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec],
            "memory": sharding.memory_kind,
        }
    raise NotWritable(f"sharding {kind.__name__}")


def restored(value: Mapping[str, Any], devices: Mapping[int, Any]) -> jax.ShapeDtypeStruct:
    """Return what `described` was given, with the devices of this process by their ids.

    Raises:
        KeyError: There is no such device here.
        ValueError: There is no such dtype here.
    """
    return jax.ShapeDtypeStruct(
        tuple(value["shape"]),
        jaxapi.dtype_of_name(value["dtype"]),
        sharding=_restored_sharding(value["sharding"], devices),
        weak_type=value["weak_type"],
    )


def _restored_sharding(
    value: Mapping[str, Any] | None, devices: Mapping[int, Any]
) -> jax.sharding.Sharding | None:
    if value is None:
        return None
    if "device" in value:
        device = devices[value["device"]]
        return jax.sharding.SingleDeviceSharding(device, memory_kind=value["memory"])
    names, sizes, kinds = zip(*value["axes"], strict=True)
    array = np.array([devices[number] for number in value["devices"]], dtype=object)
    mesh = jax.sharding.Mesh(
        array.reshape(sizes),
        names,
        axis_types=tuple(getattr(jax.sharding.AxisType, kind) for kind in kinds),
    )
    spec = [tuple(entry) if isinstance(entry, list) else entry for entry in value["spec"]]
    return jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*spec), memory_kind=value["memory"]
    )


_log = logging.getLogger("snaprt.cache")

#: The name of the module that a recorded graph becomes.
GRAPH_NAME: Final = "lazy_graph"
_ELSEWHERE: Final = "choose another directory with --out or SNAPRT_COLLECT"


def collect_program(
    program: Program, promoted: frozenset[int], lowered: jax.stages.Lowered, folder: Path
) -> tuple[jax.stages.Compiled, str]:
    """Write ``program`` into ``folder``; return what answers its calls with zeros, and its id.

    To be called where the program would be compiled, see `snaprt.compile.lower.placed`.

    Raises:
        UsageError: The folder cannot be written to, though there is room on its disk.
    """
    stablehlo = jaxapi.stablehlo_without_locations(lowered)
    calls = jaxapi.custom_calls(lowered.compiler_ir("stablehlo"), stablehlo)
    digest = module_digest(stablehlo)
    shapes = jaxapi.shapes_of(program.arguments(promoted))
    results = jaxapi.results_of_lowered(lowered)
    zeros = jaxapi.lower(jaxapi.zeros_function(results), shapes, program.donated)
    with collection.lock:
        if not collection.programs:
            _log.warning(
                "writing programs to %s without running them; every result is zero", folder
            )
        collection.programs += 1
        collection.over_devices += len(jaxapi.devices_of_lowered(lowered)) > 1
        try:
            if needed := bound_to_process(lowered, calls):
                raise NotWritable(needed)
            if jaxapi.signature_of_lowered(zeros) != jaxapi.signature_of_lowered(lowered):
                raise NotWritable(
                    "a signature that cannot be derived from its arguments and results"
                )
            described_program = _described(program, promoted, lowered, digest, shapes, results)
            with (
                writing(f"write programs into {folder}", _ELSEWHERE),
                going_on_without_room(lambda error: _left_unwritten(folder, error)),
            ):
                is_new = write_program(folder, described_program, jaxapi.bytecode(lowered))
                collection.written += is_new
                collection.without_digest += not described_program.program_digest
                metrics.counter_add("CollectedProgram")
        except NotWritable as reason:
            collection.left_out[str(reason)] += 1
        except UsageError:
            collection.unwritten += 1
            raise
    with jaxapi.without_compilation_cache():
        return zeros.compile(), digest[:16]


def _left_unwritten(folder: Path, error: OSError) -> None:
    if not collection.unwritten:
        advice = remedy_sentence(error, _ELSEWHERE)
        _log.warning("cannot write programs into %s: %s. %s", folder, error.strerror, advice)
    collection.unwritten += 1


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
    of_any = replace(program, donated=ANY_DONATION)
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
        donated=program.donated,
        digest_of_any_donation=_digest_or_none(lambda: digest_of_lowering(of_any, promoted))
        if program.donatable
        else "",
    )


def _digest_or_none(find: Callable[[], str]) -> str:
    try:
        return find()
    except Unstable:
        return ""
    except Exception as error:  # a form of JAX's that is not foreseen: the module decides
        _log.info("cannot compute the digest of a program: %r", error)
        return ""
