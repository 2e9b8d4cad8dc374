"""What a snapshot file holds, declared once: the manifest's records, what is to be written, names.

``docs/reference/snapshot-format.md`` describes the same byte by byte, for people without this
package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from snaprt.graph.proof import Proof

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
"""How an array is compressed; the last one: one zstd frame of its shuffled bytes (`arrays.py`)."""

Role = Literal["inputs", "outputs"]
ROLES: tuple[Role, ...] = ("inputs", "outputs")
SUFFIXES: dict[Role, str] = {"inputs": ".inputs.snap", "outputs": ".outputs.snap"}

Index = tuple[tuple[int, int], ...]
"""Where a part of an array begins and ends in each dimension of the whole."""

_LONGEST_NAME = 120  # of a graph, in a file name: file systems allow 255 bytes for all of it
_UNSAFE_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.+=-]+")
_GRAPH_ID = re.compile(r"[0-9a-f]{16}")
_RUN = re.compile(r"(?:[0-9a-f]{8})?")  # format 1.0 has none
_MOST = 1 << 63  # of what is counted, and numbers processes, executables and devices
_FARTHEST = 6e10  # seconds from 1970, before or after: years that every calendar has


@dataclass(frozen=True)
class ModuleBytes:
    """What XLA was given."""

    stablehlo: bytes  # a portable artifact (versioned StableHLO bytecode, with locations)
    hlo: bytes  # a serialized, unoptimized `xla.HloModuleProto`
    compile_options: bytes  # a serialized `xla.CompileOptionsProto`


@dataclass(frozen=True)
class MemberRecord:
    """One member of the module as the manifest lists it."""

    member: str
    compression: str
    stored_bytes: int
    raw_bytes: int
    digest: str  # BLAKE3 of the raw bytes


@dataclass(frozen=True, kw_only=True)
class ArrayTraits:
    """What is known of an array before it is written, and stays so."""

    weak_type: bool = False  # whether JAX held it as weakly typed
    key_impl: str = ""  # the PRNG's name for `jax.random.wrap_key_data`; empty for other arrays
    sharding: str = ""  # the whole array's, as JAX prints it
    global_shape: tuple[int, ...] = ()  # of the whole array over all devices
    sharding_number: int = -1  # place of the sharding in `Manifest.shardings`; -1: none
    index: Index | None = None  # which part of the whole it is; None where nobody noted it

    def traits(self) -> dict[str, Any]:
        """Return these fields alone, by name."""
        return {name: getattr(self, name) for name in _TRAITS}


_TRAITS = tuple(field.name for field in dataclasses.fields(ArrayTraits))


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(ArrayTraits):
    """One array as the manifest lists it."""

    name: str  # unique in the file
    shape: tuple[int, ...]  # of this device's part; for PRNG keys, of the key array
    dtype: str  # the true dtype, as in `bfloat16`; for PRNG keys as in `key<fry>`
    member: str  # the zip member that holds the `.npy`
    compression: str  # one of `COMPRESSIONS`
    stored_dtype: str  # in the `.npy`, as `numpy.dtype.str` prints it
    stored_shape: tuple[int, ...]  # in the `.npy`; other than `shape` for PRNG keys alone
    stored_bytes: int  # length of the member
    raw_bytes: int  # length of the array, without the `.npy` header
    digest: str  # BLAKE3 of the array's bytes: C order, little-endian, without the header
    in_store: bool = False  # whether `member` is a file of the store beside the snapshot
    # Where the values were left out, that from which they are drawn: see `seeded.py`. Such a record
    # has no member and no digest.
    seeded: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse sizes that no array has."""
        for sizes in (self.shape, self.stored_shape, self.global_shape, *(self.index or ())):
            if sizes and min(sizes) < 0:
                raise ValueError(f"the size of array {self.name} is negative")


@dataclass(frozen=True)
class ShardingRecord:
    """How an array is spread over devices; from `axis_names` on of named shardings alone."""

    kind: str  # the class of JAX's sharding, as in `NamedSharding`
    devices: tuple[int, ...]  # the ids, in its own order
    memory_kind: str = ""  # the memory it lies in, as JAX calls it
    hlo: str = ""  # the same sharding as XLA writes it in HLO; for every kind
    axis_names: tuple[str, ...] = ()  # of the mesh
    axis_sizes: tuple[int, ...] = ()  # of the mesh, whose devices are `devices` in C order
    axis_types: tuple[str, ...] = ()  # `Auto`, `Explicit` or `Manual`
    # For each dimension, the mesh axes it is split over, the slowest first; dimensions that are
    # left out at the end are not split.
    spec: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class TraceErrorRecord:
    """An error that was raised while a graph was being recorded.

    The file's module is the graph so far, its arrays are that graph's inputs.
    """

    kind: str  # the error's class, with its module, as in `builtins.TypeError`
    message: str
    stack: tuple[str, ...]  # `file:line (function)` of the user's frames, outermost first
    x64: bool = False  # whether 64-bit types were enabled
    pending: int = 0  # how many operations the graph had
    left_out: int = 0  # how many of them the file's module does not have
    primitive: str = ""  # the JAX primitive that failed; empty where none did
    module: str = ""  # the Python module that defines how the primitive is lowered
    operands: tuple[Mapping[str, Any], ...] = ()  # `shape`, `dtype`, `weak_type`, `text` of each
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # as `trace_errors` writes
    # Where no primitive failed, the public function of JAX's that raised the error, as in
    # `jax.numpy.where`; `params` are then its arguments.
    function: str = ""
    unencodable: tuple[str, ...] = ()  # what of operands and parameters could not be written


@dataclass(frozen=True)
class DeviceRecord:
    """A device: JAX's ``platform``, ``device_kind``, ``id`` and ``process_index``."""

    platform: str
    kind: str
    id: int
    process: int


@dataclass(frozen=True)
class RecheckRecord:
    """What came of running an execution again, where that gave other bits."""

    wrong_run: int  # 1 is the execution itself, 2 its second run; 0: nobody can tell
    devices: tuple[DeviceRecord, ...]  # the devices on which results differ
    suspects: tuple[DeviceRecord, ...]  # of these, the ones that computed wrong; none: unknown
    outputs: tuple[str, ...]  # the names of the outputs that differ
    ran_on: tuple[DeviceRecord, ...]  # where each run ran, of a program of one device
    finding: str = ""  # all that in a sentence


@dataclass(frozen=True)
class ExecutionRecord:
    """Which execution was recorded, and what surrounded it."""

    role: Role  # which arrays of the execution the file holds
    name: str  # the graph's name, not yet cut down to what file systems allow
    graph_id: str  # 16 hex digits that are the same for the same graph
    process: int  # `jax.process_index()`
    executable: int  # number of the executable in its process, from 0
    device_index: int  # place of the device among the executable's addressable devices
    execution_count: int  # how many executions of this executable on this device came before
    step: int  # how many steps came before; -1 where nobody counts them
    time: float  # seconds since 1970 when the execution began
    device: DeviceRecord  # whose arrays these are
    devices: tuple[DeviceRecord, ...]  # of the program, in its own order
    platform_version: str  # the backend's own words about its version
    versions: Mapping[str, str]  # package to version: snaprt, jax, jaxlib, numpy, python ...
    xla_flags: str  # `XLA_FLAGS` at the time
    environment: Mapping[str, str]  # the environment variables that steer JAX and XLA
    jax_config: Mapping[str, str]  # JAX's settings that change what a program computes
    input_names: tuple[str, ...]  # of all inputs, in the order the module takes them
    output_names: tuple[str, ...]  # of all outputs, in the order the module returns them
    donated: tuple[int, ...]  # numbers of the inputs whose memory the execution may reuse
    source_locations: tuple[str, ...]  # `file:line (function)` of what made the module
    redacted: tuple[str, ...] = ()  # what was taken out before the file was shared
    driver: str = ""  # the device's, where it has one
    processor: str = ""  # the machine's, where the device is one
    run: str = ""  # 8 hex digits that tell this process from others that write into the folder
    rank: int = 0  # which of the processes of a job: `process`, or RANK where JAX knows one only
    reason: str = ""  # the condition that held, as the user wrote it; or `error`, `keep-last`
    error: str = ""  # what the execution, or the program after it, failed with, and its traceback
    host: str = ""  # the name of the machine
    run_number: int = 1  # of which run of the execution the outputs are; 2: it ran again
    recheck: RecheckRecord | None = None  # of an execution that gave other bits when it ran again


_Record = TypeVar("_Record")


def changed(record: _Record, **changes: Any) -> _Record:
    """Return a record with other values, as `dataclasses.replace`, of what checks none of them."""
    copy = object.__new__(type(record))
    vars(copy).update(vars(record), **changes)
    return copy


def first_line(error: str) -> str:
    """Return what an `Execution.error` says first; where that is a traceback, what it ends with."""
    first, *rest = error.strip().splitlines() or [""]
    before, is_traceback, _ = first.partition("Traceback (most recent call last):")
    if not is_traceback:
        return first
    last = next((line for line in rest if line and not line.startswith(" ")), "")
    return (before + last).rstrip(" :")


@dataclass(frozen=True)
class Manifest:
    """Everything in a snapshot file but the bytes of the module and of the arrays."""

    execution: ExecutionRecord
    module: Mapping[str, MemberRecord]
    arrays: tuple[ArrayRecord, ...]
    shardings: tuple[ShardingRecord, ...] = ()
    proof: Proof = dataclasses.field(default_factory=Proof)
    trace_error: TraceErrorRecord | None = None


@dataclass(frozen=True)
class ArrayContent(ArrayTraits):
    """An array to be written."""

    name: str
    # Returns the values; called once, when the array's turn has come, so that one array at a time
    # is in host memory.
    fetch: Callable[[], np.ndarray]
    nbytes: int  # about how many bytes it will return
    key_dtype: str = ""  # as in `key<fry>`, where `fetch` returns the data of PRNG keys
    # An object that never changes and which part of it is taken; who has seen both knows the
    # values. None for what may change.
    identity: tuple[object, Hashable] | None = None


@dataclass(frozen=True)
class Contents:
    """All that goes into one snapshot file."""

    execution: ExecutionRecord
    module: ModuleBytes
    arrays: Sequence[ArrayContent | ArrayRecord]  # a record: nothing is to be written of it
    shardings: tuple[ShardingRecord, ...] = ()
    proof: Proof = dataclasses.field(default_factory=Proof)
    trace_error: TraceErrorRecord | None = None


def to_json(manifest: Manifest) -> bytes:
    """Serialize a manifest as UTF-8 JSON."""
    body = {
        "format": FORMAT_NAME,
        "version": [major_version(manifest.arrays), FORMAT_MINOR],
        **vars(manifest),
    }
    # Of these parts alone nobody knows that they have no NaN, which the faster encoder drops.
    if manifest.trace_error is None and not any(array.seeded for array in manifest.arrays):
        import msgspec

        with contextlib.suppress(ValueError, TypeError, msgspec.MsgspecError):
            return msgspec.json.encode(body)
    # Words that are no Unicode, as in the environment, stay as they are.
    return json.dumps(body, ensure_ascii=False, default=vars).encode("utf-8", "backslashreplace")


def from_json(text: bytes) -> Manifest:
    """Parse a manifest and check each value; keys of a newer minor version are ignored.

    Raises:
        ValueError: It is not JSON, a key is missing or has a value of another kind, or one that
            snaprt never writes and that would end up in the name of a file, or in a date.
    """
    import msgspec

    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, RecursionError):
        # Such as NaN, and words that are no Unicode, which Python's parser takes.
        try:
            manifest = msgspec.convert(json.loads(text), Manifest)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"its manifest: {error}") from error
    _check_identity(manifest.execution)
    return manifest


def _check_identity(execution: ExecutionRecord) -> None:
    """Refuse what no recorder writes of that by which files are named and told apart."""
    allowed = {
        "graph_id": _GRAPH_ID.fullmatch(execution.graph_id) is not None,
        "run": _RUN.fullmatch(execution.run) is not None,
        "time": abs(execution.time) <= _FARTHEST,  # NaN is not
        **{name: 0 <= getattr(execution, name) < _MOST for name in _COUNTED},
    }
    for name, is_allowed in allowed.items():
        if not is_allowed:
            value = repr(getattr(execution, name))
            raise ValueError(f"its manifest has an invalid {name}: {value:.100}")


_COUNTED = ("process", "executable", "device_index", "execution_count", "run_number")


def file_name(execution: ExecutionRecord) -> str:
    """Return the snapshot's file name, safe on every common file system."""
    name = _safe(execution.name).strip(".")[:_LONGEST_NAME]
    return (
        f"{name or 'graph'}.{_safe(execution.graph_id)}"
        f"-process{execution.process:06d}{f'-run{_safe(execution.run)}' if execution.run else ''}"
        f"-executable{execution.executable:06d}"
        f"-device{execution.device_index:06d}-execution{execution.execution_count:06d}"
        f"{_again(execution)}{SUFFIXES[execution.role]}"
    )


def _safe(text: str) -> str:
    return _UNSAFE_IN_A_NAME.sub("_", text)


def _again(execution: ExecutionRecord) -> str:
    is_first = execution.run_number == 1 or execution.role == "inputs"
    return "" if is_first else f"-again{execution.run_number}"


def without_run(stem: str) -> str:
    """Return the file name of an execution, without its suffix, for that of any run of it."""
    return re.sub(r"-again\d+$", "", stem)


def major_version(arrays: Iterable[ArrayRecord]) -> int:
    """Return the oldest format whose readers understand a file with these arrays."""
    is_plain = all(
        not array.in_store and not array.seeded and array.compression in PLAIN_COMPRESSIONS
        for array in arrays
    )
    return PLAIN_MAJOR if is_plain else FORMAT_MAJOR


def comment(manifest: Manifest, manifest_digest: str) -> bytes:
    """Return the zip comment: format name, version, and the manifest's BLAKE3 in hex."""
    version = f"{major_version(manifest.arrays)}.{FORMAT_MINOR}"
    return f"{FORMAT_NAME} {version} blake3:{manifest_digest}".encode()


def parse_comment(text: bytes) -> tuple[int, str] | None:
    """Return the major version and the manifest's digest; None where it is not ours."""
    match = re.match(rb"%s (\d{1,6})\.\d+(?: blake3:([0-9a-f]{64}))?" % FORMAT_NAME.encode(), text)
    return (int(match[1]), (match[2] or b"").decode()) if match else None
