"""What is in a snapshot file: names, versions and records; it must not know how files are accessed.

``docs/snapshot-format.md`` describes the same byte by byte, for people without this package.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FORMAT_NAME = "snaprt-snapshot"
FORMAT_MAJOR = 1
"""Raised when an older reader would misread the file; such a reader refuses it by this number."""
FORMAT_MINOR = 1
"""Raised when something is added that an older reader may ignore."""

MARK_MEMBER = "mimetype"
"""The first member, stored as it is: its bytes are at a fixed place, so the file can be told."""
MARK = b"application/vnd.snaprt.snapshot"
MANIFEST_MEMBER = "manifest.json"
MODULE_MEMBERS = {
    "stablehlo": "module.stablehlo",
    "hlo": "module.hlo.pb",
    "compile_options": "compile_options.pb",
}
"""Attribute of ``ModuleBytes`` to the member that holds it."""

Role = Literal["inputs", "outputs"]
ROLES: tuple[Role, ...] = ("inputs", "outputs")
SUFFIXES: dict[Role, str] = {"inputs": ".inputs.snap", "outputs": ".outputs.snap"}

_LONGEST_NAME = 120  # of a graph, in a file name: file systems allow 255 bytes for all of it


@dataclass(frozen=True)
class ModuleBytes:
    """What XLA was given: the module twice over, and its options.

    Attributes:
        stablehlo: A portable artifact (versioned StableHLO bytecode, with locations).
        hlo: A serialised, unoptimised ``xla.HloModuleProto``.
        compile_options: A serialised ``xla.CompileOptionsProto``.
    """

    stablehlo: bytes
    hlo: bytes
    compile_options: bytes


@dataclass(frozen=True)
class MemberRecord:
    """One member of the module as the manifest lists it; the digest is of the raw bytes."""

    member: str
    compression: str
    stored_bytes: int
    raw_bytes: int
    digest: str


@dataclass(frozen=True)
class ArrayRecord:
    """One array as the manifest lists it.

    Attributes:
        name: Unique in the file.
        shape: Of this device's part; for PRNG keys, of the key array.
        dtype: The true dtype's name, as in ``bfloat16``; for PRNG keys as in ``key<fry>``.
        weak_type: Whether JAX held it as weakly typed.
        member: The zip member that holds the ``.npy``.
        compression: ``none`` or ``zstd``.
        stored_dtype: Dtype in the ``.npy``, as ``numpy.dtype.str`` prints it.
        stored_shape: Shape in the ``.npy``; other than ``shape`` for PRNG keys alone.
        stored_bytes: Length of the member.
        raw_bytes: Length of the array, without the ``.npy`` header.
        digest: BLAKE3 of the array's bytes: C order, little-endian, without the header.
        key_impl: The PRNG's name for ``jax.random.wrap_key_data``; empty for other arrays.
        sharding: The whole array's sharding, as JAX prints it.
        global_shape: Shape of the whole array over all devices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    member: str
    compression: str
    stored_dtype: str
    stored_shape: tuple[int, ...]
    stored_bytes: int
    raw_bytes: int
    digest: str
    key_impl: str
    sharding: str
    global_shape: tuple[int, ...]


@dataclass(frozen=True)
class DeviceRecord:
    """A device: JAX's ``platform``, ``device_kind``, ``id`` and ``process_index``."""

    platform: str
    kind: str
    id: int
    process: int


@dataclass(frozen=True)
class Execution:
    """Which execution was recorded, and what surrounded it.

    Attributes:
        role: ``inputs`` or ``outputs``: which arrays of the execution the file holds.
        name: The graph's name, not yet cut down to what file systems allow.
        graph_id: 16 hex digits that are the same for the same graph.
        process: ``jax.process_index()``.
        executable: Number of the executable in its process, from 0.
        device_index: Place of the file's device among the executable's addressable devices.
        execution_count: How many executions of this executable on this device came before it.
        step: How many steps came before it; -1 where nobody counts them.
        time: Seconds since 1970 when the execution began.
        device: The device whose arrays these are.
        devices: All devices of the program, in its own order.
        platform_version: The backend's own words about its version.
        versions: Package to version: snaprt, jax, jaxlib, numpy, ml_dtypes, python.
        xla_flags: ``XLA_FLAGS`` at the time.
        environment: The environment variables that steer JAX and XLA.
        jax_config: The values of JAX's settings that change what a program computes.
        input_names: Names of all the inputs, in the order the module takes them.
        output_names: Names of all the outputs, in the order the module returns them.
        donated: Numbers of the inputs whose memory the execution may reuse.
        source_locations: ``file:line (function)`` of the lines that made the module.
    """

    role: Role
    name: str
    graph_id: str
    process: int
    executable: int
    device_index: int
    execution_count: int
    step: int
    time: float
    device: DeviceRecord
    devices: tuple[DeviceRecord, ...]
    platform_version: str
    versions: Mapping[str, str]
    xla_flags: str
    environment: Mapping[str, str]
    jax_config: Mapping[str, str]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    source_locations: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything in a snapshot file but the bytes of the module and of the arrays."""

    execution: Execution
    module: Mapping[str, MemberRecord]
    arrays: tuple[ArrayRecord, ...]


@dataclass(frozen=True)
class ArrayContent:
    """An array to be written.

    Attributes:
        name: Unique in the file.
        fetch: Returns the values; called once, when the array's turn has come, so that one array
            at a time is in host memory.
        nbytes: About how many bytes it will return.
        weak_type: Whether JAX holds it as weakly typed.
        key_dtype: As in ``key<fry>``, where ``fetch`` returns the data of PRNG keys; else empty.
        key_impl: The PRNG's name; empty where ``key_dtype`` is.
        sharding: The whole array's sharding, as JAX prints it.
        global_shape: Shape of the whole array; None where it is the array's own.
    """

    name: str
    fetch: Callable[[], np.ndarray]
    nbytes: int
    weak_type: bool = False
    key_dtype: str = ""
    key_impl: str = ""
    sharding: str = ""
    global_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contents:
    """All that goes into one snapshot file."""

    execution: Execution
    module: ModuleBytes
    arrays: Sequence[ArrayContent]


def file_name(execution: Execution) -> str:
    """Return the snapshot's file name, safe on every common file system."""
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", execution.name).strip(".")[:_LONGEST_NAME]
    return (
        f"{name or 'graph'}.{execution.graph_id}"
        f"-process{execution.process:06d}-executable{execution.executable:06d}"
        f"-device{execution.device_index:06d}-execution{execution.execution_count:06d}"
        f"{SUFFIXES[execution.role]}"
    )


def comment(manifest_digest: str) -> bytes:
    """Return the zip comment: format name, version, and the manifest's BLAKE3 in hex."""
    return f"{FORMAT_NAME} {FORMAT_MAJOR}.{FORMAT_MINOR} blake3:{manifest_digest}".encode()


def parse_comment(text: bytes) -> tuple[int, str] | None:
    """Return the major version and the manifest's digest; None where it is not ours."""
    found = re.match(rb"%s (\d{1,6})\.\d+(?: blake3:([0-9a-f]{64}))?" % FORMAT_NAME.encode(), text)
    return (int(found[1]), (found[2] or b"").decode()) if found else None


def manifest_to_json(manifest: Manifest) -> bytes:
    """Serialise a manifest as UTF-8 JSON, one key a line."""
    body = {
        "format": FORMAT_NAME,
        "version": [FORMAT_MAJOR, FORMAT_MINOR],
        **dataclasses.asdict(manifest),
    }
    return json.dumps(body, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")


def manifest_from_json(text: bytes) -> Manifest:
    """Parse a manifest; keys of a newer minor version are ignored.

    Raises:
        ValueError: It is not JSON, a key is missing or has a value of another kind.
    """
    try:
        body = json.loads(text)
        execution = dict(body["execution"])
        execution["device"] = _record(DeviceRecord, execution["device"])
        execution["devices"] = tuple(_record(DeviceRecord, one) for one in execution["devices"])
        return Manifest(
            execution=_record(Execution, execution),
            module={name: _record(MemberRecord, one) for name, one in body["module"].items()},
            arrays=tuple(_record(ArrayRecord, one) for one in body["arrays"]),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass of ``kind``: lists become tuples, what it does not know is left out.

    A key that an older minor version did not write may be missing: its field has a default.
    """
    known: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name not in values and _has_default(field):
            continue
        value = values[field.name]
        known[field.name] = tuple(value) if isinstance(value, list) else value
        _check_kind(field, known[field.name])
    return kind(**known)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "Role": lambda value: value in ROLES,
    "int": lambda value: isinstance(value, int),
    "bool": lambda value: isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(_whole(n) for n in value),
    "tuple[str, ...]": lambda value: (
        isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    ),
    "Mapping[str, str]": lambda value: (
        isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    ),
}
"""Annotation of a field to the test of a value that came out of JSON."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _check_kind(field: dataclasses.Field[Any], value: Any) -> None:
    test = _KINDS.get(str(field.type))
    if test is not None and not test(value):
        raise TypeError(f"{field.name} should be {field.type}, not {value!r:.60}")
