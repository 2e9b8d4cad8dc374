"""Takes out of a snapshot what its owner does not want to share.

``values``: of each array stay its shape, its dtype, some statistics and a seed (``seeded.py``).
``names``: the graph, its inputs and outputs, functions and mesh axes get neutral names, in the
manifest and inside the module. ``paths``: source files, paths in the environment and in flags.
What the module computes with stays: its operations, their shapes, and its constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import blake3
import jax

from snaprt import jaxapi, variables
from snaprt.errors import SnapshotError
from snaprt.graph.proof import Proof
from snaprt.hlo.proto import HloModuleProto, parse, serialize
from snaprt.snapshot.format import schema, seeded
from snaprt.snapshot.format.read import SnapshotFile

RedactionKind = Literal["values", "names", "paths"]
KINDS: Final[tuple[RedactionKind, ...]] = ("values", "names", "paths")

TAKEN_OUT: Final = "(redacted)"
_LARGE_CONSTANT = 1024  # bytes: smaller ones are part of what is computed

_PATH = re.compile(r"[/\\]|^~")


@dataclasses.dataclass(frozen=True)
class Redaction:
    """What is taken out of the snapshots that are packed together."""

    kinds: frozenset[RedactionKind]
    # Makes the seeds, so that equal arrays get equal ones, and nobody can test a guess.
    secret: bytes = dataclasses.field(default_factory=lambda: os.urandom(32), repr=False)


def redact(file: SnapshotFile, redaction: Redaction) -> tuple[schema.Contents, tuple[str, ...]]:
    """Return what is left of a snapshot, to be written, and what its owner should know of it.

    Raises:
        SnapshotError: The snapshot is damaged, its module cannot be rewritten, or a path is left.
    """
    manifest, kinds = file.manifest, redaction.kinds
    if manifest.trace_error is not None:
        raise SnapshotError(
            f"{file.path} records an error raised while a graph was recorded: its message and "
            "parameters cannot be redacted",
            hint="pack it without --redact, or send only the message",
        )
    module = _redact_module(file, kinds)  # first: it says so if the module cannot be read
    axes = jaxapi.mesh_axes(file.module.stablehlo) if "names" in kinds else ()
    names = _Names(manifest.execution, axes)
    contents = schema.Contents(
        execution=_redact_execution(manifest.execution, names, kinds),
        module=module,
        arrays=tuple(_redact_array(file, array, names, redaction) for array in manifest.arrays),
        shardings=tuple(
            names.of_sharding(sharding) if "names" in kinds else sharding
            for sharding in manifest.shardings
        ),
        proof=Proof() if "names" in kinds else manifest.proof,
    )
    if "paths" in kinds:
        _check_no_path_is_left(file, contents)
    return contents, _notes(file, module, kinds)


class _Names:
    """The neutral names of what has one in an execution."""

    def __init__(self, execution: schema.ExecutionRecord, axes: Sequence[str]) -> None:
        self._sides: Mapping[str, Sequence[str]] = {
            "inputs": execution.input_names,
            "outputs": execution.output_names,
        }
        self._axes = {name: f"axis{number}" for number, name in enumerate(axes)}

    def of_arrays(self, role: schema.Role) -> tuple[str, ...]:
        word = "arg" if role == "inputs" else "out"
        return tuple(f"{word}{number}" for number in range(len(self._sides[role])))

    def of_array(self, role: schema.Role, name: str) -> str:
        side = tuple(self._sides[role])
        return self.of_arrays(role)[side.index(name)] if name in side else TAKEN_OUT

    def of_sharding(self, sharding: schema.ShardingRecord) -> schema.ShardingRecord:
        axes = {**self._axes}
        for name in sharding.axis_names:
            axes.setdefault(name, f"axis{len(axes)}")
        return dataclasses.replace(
            sharding,
            axis_names=tuple(axes[name] for name in sharding.axis_names),
            spec=tuple(tuple(axes[name] for name in part) for part in sharding.spec),
        )


def _redact_execution(
    execution: schema.ExecutionRecord, names: _Names, kinds: frozenset[RedactionKind]
) -> schema.ExecutionRecord:
    # An older version of us recorded more of the environment than is to be shared.
    environment = {
        name: variables.without_credentials(value)
        for name, value in execution.environment.items()
        if variables.steers(name, jax.config.values)
    }
    changes: dict[str, Any] = {
        "redacted": tuple(kind for kind in KINDS if kind in {*kinds, *execution.redacted}),
        "environment": environment,
    }
    if "names" in kinds:
        changes |= {
            "name": "graph",
            "input_names": names.of_arrays("inputs"),
            "output_names": names.of_arrays("outputs"),
        }
    if "names" in kinds or "paths" in kinds:
        # A condition may name a graph, a message or a line of source anything.
        changes |= {
            "source_locations": (),
            "host": "",
            "recheck": execution.recheck
            and dataclasses.replace(execution.recheck, outputs=(), finding=TAKEN_OUT),
            "error": TAKEN_OUT if execution.error else "",
            "reason": TAKEN_OUT if execution.reason else "",
            "environment": {
                name: TAKEN_OUT if name.startswith("SNAPRT_") or _PATH.search(value) else value
                for name, value in environment.items()
            },
            "xla_flags": " ".join(map(_redact_flag, execution.xla_flags.split())),
        }
    return dataclasses.replace(execution, **changes)


def _redact_flag(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return f"{name}{equals}{TAKEN_OUT}" if _PATH.search(value or name) else flag


def _redact_array(
    file: SnapshotFile, record: schema.ArrayRecord, names: _Names, redaction: Redaction
) -> schema.ArrayContent | schema.ArrayRecord:
    changes: dict[str, Any] = {}
    if "names" in redaction.kinds:
        changes = {"name": names.of_array(file.role, record.name), "sharding": ""}
    if "values" in redaction.kinds and not record.seeded:
        changes |= {
            "member": "",
            "compression": "none",
            "stored_bytes": 0,
            "digest": "",
            "in_store": False,
            "seeded": _summary(file, record, redaction.secret),
        }
    changed = dataclasses.replace(record, **changes)
    if changed.in_store or changed.seeded:
        return changed
    return schema.ArrayContent(
        changed.name,
        functools.partial(file.array, record.name),
        record.raw_bytes,
        key_dtype=record.dtype if record.key_impl else "",
        **changed.traits(),
    )


def _summary(file: SnapshotFile, record: schema.ArrayRecord, secret: bytes) -> Mapping[str, float]:
    keyed = blake3.blake3(f"{record.dtype} {record.digest}".encode(), key=secret)
    seed = int.from_bytes(keyed.digest(4), "little")
    if record.key_impl:
        return {"seed": seed}
    return seeded.summarize(file.array(record.name), seed)


def _redact_module(file: SnapshotFile, kinds: frozenset[RedactionKind]) -> schema.ModuleBytes:
    module = file.module
    if kinds <= {"values"}:
        return module
    try:
        stablehlo = jaxapi.without_locations_or_names(module.stablehlo, names="names" in kinds)
        hlo = (
            jaxapi.module_to_hlo_proto(jaxapi.parse_module(stablehlo))
            if "names" in kinds
            else _without_source(module.hlo, file.path)
        )
        options = module.compile_options
        if options:
            options = jaxapi.compile_options_without_paths(options)
    except ValueError as error:
        writer = file.manifest.execution.versions.get("jaxlib", "that wrote it")
        raise SnapshotError(
            f"cannot redact the module in {file.path}: {error}",
            hint=f"redact it with jaxlib {writer}: an older jaxlib cannot read all of its output",
        ) from error
    return schema.ModuleBytes(stablehlo, hlo, options)


def _without_source(hlo: bytes, path: Path) -> bytes:
    """Return an HLO module without source files and lines; names of operations stay."""
    module: Any = parse(HloModuleProto, hlo, path)
    module.ClearField("stack_frame_index")
    for computation in module.computations:
        for instruction in computation.instructions:
            for field in ("source_file", "source_line", "stack_frame_id"):
                instruction.metadata.ClearField(field)
    return serialize(module)


def _check_no_path_is_left(file: SnapshotFile, contents: schema.Contents) -> None:
    """Refuse what would give away a path that the snapshot itself names, wherever it is."""
    execution = file.manifest.execution
    sources = {where.rpartition(":")[0] for where in execution.source_locations}
    paths = {
        str(Path.home()),
        *(source for source in sources if _PATH.search(source) and len(source) > 3),
    }
    module = contents.module
    places = {
        "manifest": repr(contents.execution).encode(),
        "StableHLO": module.stablehlo,
        "HLO": module.hlo,
        "compile options": module.compile_options,
    }
    for path in sorted(paths - {"/"}):
        for where, content in places.items():
            if any(form in content for form in _forms(path)):
                raise SnapshotError(
                    f"cannot share {file.path} without paths: its {where} still contains {path}",
                    hint="please report this; --redact names removes more",
                )


def _forms(path: str) -> tuple[bytes, ...]:
    """Return as which bytes a path may stand in a file: what is no Unicode is spelt out, or not."""
    forms = [path.encode("utf-8", "backslashreplace")]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(os.fsencode(path))
    return tuple(forms)


def _notes(
    file: SnapshotFile, module: schema.ModuleBytes, kinds: frozenset[RedactionKind]
) -> tuple[str, ...]:
    parsed: Any = parse(HloModuleProto, module.hlo, file.path)
    instructions = [
        instruction for part in parsed.computations for instruction in part.instructions
    ]
    notes = []
    large = [
        instruction.literal.ByteSize()
        for instruction in instructions
        if instruction.opcode == "constant"
    ]
    large = [size for size in large if size > _LARGE_CONSTANT]
    if "values" in kinds and large:
        notes.append(
            f"the module keeps {len(large)} large constants ({sum(large):,} bytes), which "
            "--redact does not remove: pass them to the program as arguments instead"
        )
    kernels = {
        instruction.custom_call_target
        for instruction in instructions
        if instruction.opcode == "custom-call" and len(instruction.backend_config) > _LARGE_CONSTANT
    }
    if kernels and kinds & {"names", "paths"}:
        notes.append(
            "custom calls contain code that is not redacted and may hold names and paths: "
            f"{', '.join(sorted(kernels))}"
        )
    return tuple(notes)
