"""What is in a snapshot file: names, versions and records; it must not know how files are accessed.

``docs/snapshot-format.md`` describes the same byte by byte, for people without this package.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FORMAT_NAME = "snaprt-snapshot"
FORMAT_MAJOR = 2
"""Raised when an older reader would misread the file; such a reader refuses it by this number."""
PLAIN_MAJOR = 1
"""What a file says whose arrays all lie in it as format 1 has them: readers of format 1 take it."""
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

PLAIN_COMPRESSIONS = ("none", "zstd")
COMPRESSIONS = (*PLAIN_COMPRESSIONS, "zstd-shuffled")
"""How an array is compressed; the last one: one zstd frame of what ``shuffle.py`` makes of it."""

Role = Literal["inputs", "outputs"]
ROLES: tuple[Role, ...] = ("inputs", "outputs")
SUFFIXES: dict[Role, str] = {"inputs": ".inputs.snap", "outputs": ".outputs.snap"}

_LONGEST_NAME = 120  # of a graph, in a file name: file systems allow 255 bytes for all of it


@dataclass(frozen=True)
class ModuleBytes:
    """What XLA was given: the module twice over, and its options.

    Attributes:
        stablehlo: A portable artifact (versioned StableHLO bytecode, with locations).
        hlo: A serialized, unoptimized ``xla.HloModuleProto``.
        compile_options: A serialized ``xla.CompileOptionsProto``.
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
        compression: One of ``COMPRESSIONS``.
        stored_dtype: Dtype in the ``.npy``, as ``numpy.dtype.str`` prints it.
        stored_shape: Shape in the ``.npy``; other than ``shape`` for PRNG keys alone.
        stored_bytes: Length of the member.
        raw_bytes: Length of the array, without the ``.npy`` header.
        digest: BLAKE3 of the array's bytes: C order, little-endian, without the header.
        key_impl: The PRNG's name for ``jax.random.wrap_key_data``; empty for other arrays.
        sharding: The whole array's sharding, as JAX prints it.
        global_shape: Shape of the whole array over all devices.
        in_store: Whether ``member`` is a file of the store beside the snapshot, not a zip member.
        seeded: Where the values were left out, that from which they are drawn: see ``seeded.py``.
            Such a record has no member, and no digest.
        sharding_number: Place of the whole array's sharding in ``Manifest.shardings``; -1: none.
        index: For each dimension of the whole array, where this part begins and ends in it; None
            where nobody noted it.
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
    in_store: bool = False
    seeded: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sharding_number: int = -1
    index: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class ShardingRecord:
    """How an array is spread over devices.

    Attributes:
        kind: The class of JAX's sharding, as in ``NamedSharding``.
        devices: The ids of its devices, in its own order.
        memory_kind: The memory it lies in, as JAX calls it.
        hlo: The same sharding as XLA writes it in HLO; for every kind.
        axis_names: Of the mesh; this and what follows of named shardings alone.
        axis_sizes: Of the mesh, whose devices are ``devices`` in C order.
        axis_types: ``Auto``, ``Explicit`` or ``Manual``.
        spec: For each dimension, the mesh axes it is split over, the slowest first; dimensions
            that are left out at the end are not split.
    """

    kind: str
    devices: tuple[int, ...]
    memory_kind: str = ""
    hlo: str = ""
    axis_names: tuple[str, ...] = ()
    axis_sizes: tuple[int, ...] = ()
    axis_types: tuple[str, ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class ProofRecord:
    """What tells which executable ran.

    Attributes:
        fingerprint: XLA's own of the executable. It differs between one that was compiled and the
            same loaded from a cache.
        optimised_hlo: BLAKE3, in hex, of the optimized module as HLO text with canonical names and
            without source locations; empty where the platform keeps it to itself.
        aliases: ``result <- parameter`` for each result that takes a parameter's memory.
    """

    fingerprint: str = ""
    optimised_hlo: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceErrorRecord:
    """An error that was raised while a graph was being recorded.

    The file's module is the graph so far, its arrays are that graph's inputs.

    Attributes:
        kind: The error's class, with its module, as in ``builtins.TypeError``.
        message: What it says.
        stack: ``file:line (function)`` of the user's frames, outermost first.
        x64: Whether 64-bit types were enabled.
        pending: How many operations the graph had.
        left_out: How many of them the file's module does not have.
        primitive: The name of the JAX primitive that failed; empty where none did.
        module: The Python module that defines how the primitive is lowered.
        operands: Its operands' abstract values: ``shape``, ``dtype``, ``weak_type``, ``text``.
        params: Its parameters by name, as ``parameters.py`` writes them.
        function: Where no primitive failed, the public function of JAX's that raised the error, as
            in ``jax.numpy.where``; ``params`` are then its arguments.
        unencodable: What of operands and parameters could not be written.
    """

    kind: str
    message: str
    stack: tuple[str, ...]
    x64: bool = False
    pending: int = 0
    left_out: int = 0
    primitive: str = ""
    module: str = ""
    operands: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    function: str = ""
    unencodable: tuple[str, ...] = ()


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
        redacted: What was taken out before the file was shared: ``values``, ``names``, ``paths``.
        driver: The device's driver, where it has one.
        processor: The machine's processor, where the device is one.
        run: 8 hex digits that tell this process from all others that write into the folder.
        rank: Which of the processes of a job it is, as RANK says, or as ``process``.
        reason: The condition that held, as the user wrote it; or ``error``, ``keep-last``.
        error: What the execution, or the program after it, failed with, and its traceback.
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
    redacted: tuple[str, ...] = ()
    driver: str = ""
    processor: str = ""
    run: str = ""
    rank: int = 0
    reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class Manifest:
    """Everything in a snapshot file but the bytes of the module and of the arrays."""

    execution: Execution
    module: Mapping[str, MemberRecord]
    arrays: tuple[ArrayRecord, ...]
    shardings: tuple[ShardingRecord, ...] = ()
    proof: ProofRecord = ProofRecord()
    trace_error: TraceErrorRecord | None = None


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
        identity: An object that never changes and which part of it is taken; who has seen both
            knows the values. None for what may change.
        sharding_number: As in ``ArrayRecord``, into ``Contents.shardings``.
        index: As in ``ArrayRecord``.
    """

    name: str
    fetch: Callable[[], np.ndarray]
    nbytes: int
    weak_type: bool = False
    key_dtype: str = ""
    key_impl: str = ""
    sharding: str = ""
    global_shape: tuple[int, ...] | None = None
    identity: tuple[object, Hashable] | None = None
    sharding_number: int = -1
    index: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Contents:
    """All that goes into one snapshot file.

    Attributes:
        execution: Which execution it is of.
        module: What ran.
        arrays: Those to write; a record stands for one of which nothing is to be written.
        shardings: What the arrays' ``sharding_number`` counts.
        proof: What tells which executable ran.
        trace_error: The error that ended the recording of the graph, if one did.
    """

    execution: Execution
    module: ModuleBytes
    arrays: Sequence[ArrayContent | ArrayRecord]
    shardings: tuple[ShardingRecord, ...] = ()
    proof: ProofRecord = ProofRecord()
    trace_error: TraceErrorRecord | None = None


def file_name(execution: Execution) -> str:
    """Return the snapshot's file name, safe on every common file system."""
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", execution.name).strip(".")[:_LONGEST_NAME]
    return (
        f"{name or 'graph'}.{execution.graph_id}"
        f"-process{execution.process:06d}{f'-run{execution.run}' if execution.run else ''}"
        f"-executable{execution.executable:06d}"
        f"-device{execution.device_index:06d}-execution{execution.execution_count:06d}"
        f"{SUFFIXES[execution.role]}"
    )


def major_version(arrays: Iterable[ArrayRecord]) -> int:
    """Return the oldest format whose readers understand a file with these arrays."""
    is_plain = all(
        not one.in_store and not one.seeded and one.compression in PLAIN_COMPRESSIONS
        for one in arrays
    )
    return PLAIN_MAJOR if is_plain else FORMAT_MAJOR


def comment(manifest: Manifest, manifest_digest: str) -> bytes:
    """Return the zip comment: format name, version, and the manifest's BLAKE3 in hex."""
    version = f"{major_version(manifest.arrays)}.{FORMAT_MINOR}"
    return f"{FORMAT_NAME} {version} blake3:{manifest_digest}".encode()


def parse_comment(text: bytes) -> tuple[int, str] | None:
    """Return the major version and the manifest's digest; None where it is not ours."""
    found = re.match(rb"%s (\d{1,6})\.\d+(?: blake3:([0-9a-f]{64}))?" % FORMAT_NAME.encode(), text)
    return (int(found[1]), (found[2] or b"").decode()) if found else None
