"""The contents of one file that can be replayed, for display; nothing is executed.

Unlike `load`, which collects everything that a replay needs, this shows a single file as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.hlo.proto import (
    HloModuleProto,
    HloProto,
    HloSnapshot,
    XlaMessage,
    parse,
    serialize,
)
from snaprt.snapshot.format import places
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot, sibling_outputs
from snaprt.snapshot.format.schema import Role, ShardingRecord, TraceErrorRecord
from snaprt.snapshot.format.trace_errors import operation_text
from snaprt.snapshot.share.executions import only_execution
from snaprt_replay import floatbits
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, NamedArray, Signature
from snaprt_replay.load.load import load
from snaprt_replay.load.snapshots import readable_module
from snaprt_replay.load.xla_files import read_unoptimized_snapshot


@dataclass(frozen=True, eq=False)
class FileContents:
    """The contents of a file."""

    path: Path
    format: str  # one of `sniff.FORMATS`
    name: str  # the module's
    facts: Mapping[str, str]  # what was recorded: label to text, in the order to show it
    parameters: tuple[Signature, ...]  # what the module takes
    notes: tuple[str, ...]  # what else a reader should know
    stablehlo: Callable[[], bytes]  # the module in a form that StableHLO's parser takes
    hlo: Callable[[], str] | None  # the module as HLO text, as in the file; None: it has none
    arrays: Callable[[], Iterator[tuple[Role, NamedArray]]]  # one by one

    def array(self, name: str) -> NamedArray:
        """Return the array called ``name``.

        Raises:
            SnapshotError: There is no array with that name.
        """
        names = []
        for _, array in self.arrays():
            if array.name == name:
                return array
            names.append(array.name)
        raise SnapshotError(
            f"{self.path} contains no array named {name}",
            hint=f"it holds: {', '.join(names) or 'no arrays'}",
        )

    def module_text(self, form: Literal["hlo", "stablehlo"]) -> str:
        """Return the module as text."""
        try:
            if form == "hlo" and self.hlo is not None:
                return self.hlo()
            module = jaxapi.parse_module(self.stablehlo())
            if form == "hlo":
                return jaxapi.hlo_text(jaxapi.module_to_hlo_proto(module))
            return jaxapi.stablehlo_text(module)
        except ValueError as error:
            raise SnapshotError(
                f"cannot print the module in {self.path}: {error}",
                hint="print it as StableHLO: --stablehlo" if form == "hlo" else "",
            ) from error


def read(path: str | Path) -> FileContents:
    """Return the contents of a file.

    Raises:
        SnapshotError: It cannot be read, is damaged, or has an unknown format.
    """
    path = Path(path)
    form = sniff.sniff(path)
    if form == sniff.PACK:
        return _of_pack(path)
    if form == sniff.SNAPSHOT:
        return _of_snapshot(open_snapshot(path))
    return _of_case(load(path))


def _of_pack(pack: Path) -> FileContents:
    """Show both sides of the only execution in a packed file, on its first device."""
    first = open_snapshot(only_execution(pack))
    sides = [path for path in (first.path, sibling_outputs(first.path)) if path is not None]
    shown = [_of_snapshot(open_snapshot(path)) for path in sides]
    other_names = [path.name for path in places.snapshots_in(pack) if path not in sides]
    return dataclasses.replace(
        shown[0],
        path=pack,
        format=sniff.PACK,
        facts={**shown[0].facts, "holds": ", ".join(contents.facts["holds"] for contents in shown)},
        notes=(
            *shown[0].notes,
            *(f"also holds {name}: `snaprt ls {pack}`" for name in other_names),
        ),
        arrays=lambda: (array for contents in shown for array in contents.arrays()),
    )


def _of_snapshot(file: SnapshotFile) -> FileContents:
    execution, proof = file.manifest.execution, file.manifest.proof
    when = datetime.datetime.fromtimestamp(execution.time).astimezone()
    facts = {
        "holds": execution.role,
        "graph": execution.graph_id,
        "execution": f"{execution.execution_count} of executable {execution.executable}, "
        f"process {execution.process}"
        + (f", step {execution.step}" if execution.step >= 0 else ""),
        "recorded": when.isoformat(" ", "seconds"),
        "device": f"{execution.device.platform} {execution.device.id} ({execution.device.kind}), "
        f"{execution.device_index + 1} of {len(execution.devices)}",
        "platform": execution.platform_version.replace("\n", " "),
        "driver": execution.driver,
        "processor": execution.processor,
        "shardings": "; ".join(_sharding_text(sharding) for sharding in file.manifest.shardings),
        "executable": proof.fingerprint,
        "optimized HLO": proof.optimised_hlo,
        "versions": _pairs(execution.versions),
        "XLA_FLAGS": execution.xla_flags,
        "environment": _pairs(execution.environment),
        "jax config": _pairs(execution.jax_config),
        "host": execution.host,
        "run": "" if execution.run_number == 1 else f"{execution.run_number} of the execution",
        "because": execution.reason,
        "re-checked": "" if execution.recheck is None else execution.recheck.finding,
        "error": execution.error.strip().replace("\n\n", "\n"),
        "donated": ", ".join(map(str, execution.donated)),
        "aliases": ", ".join(proof.aliases) and f"{', '.join(proof.aliases)} (result <- parameter)",
        "RNG keys": ", ".join(
            f"{array.name} ({array.key_impl})" for array in file.manifest.arrays if array.key_impl
        ),
        **_facts_of_error(file.manifest.trace_error),
        "source": "; ".join(execution.source_locations[:5]),
        "redacted": ", ".join(execution.redacted),
    }

    def arrays() -> Iterator[tuple[Role, NamedArray]]:
        for name in file.array_names:
            yield execution.role, NamedArray(name, file.array(name))

    return FileContents(
        path=file.path,
        format=sniff.SNAPSHOT,
        name=execution.name,
        facts={label: text for label, text in facts.items() if text},
        parameters=(),
        notes=(),
        stablehlo=lambda: readable_module(file)[0],
        hlo=lambda: jaxapi.hlo_text(file.module.hlo),
        arrays=arrays,
    )


def _sharding_text(sharding: ShardingRecord) -> str:
    mesh = ", ".join(
        f"{name} {size}"
        for name, size in zip(sharding.axis_names, sharding.axis_sizes, strict=False)
    )
    axes = ", ".join("+".join(entry) or "-" for entry in sharding.spec)
    named = f" mesh ({mesh}) spec ({axes})" if mesh else ""
    devices = " ".join(map(str, sharding.devices))
    return f"{sharding.kind}{named} {sharding.hlo} on {devices}"


def _facts_of_error(error: TraceErrorRecord | None) -> Mapping[str, str]:
    if error is None:
        return {}
    return {
        "error": f"{error.kind}: {error.message}",
        "failed": operation_text(error),
        "not in the file": ", ".join(error.unencodable),
        "stack": "; ".join(error.stack),
    }


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _of_case(case: Case) -> FileContents:
    print_hlo = _ORIGINAL_HLO.get(case.format)

    def arrays() -> Iterator[tuple[Role, NamedArray]]:
        for array in case.inputs or ():
            yield "inputs", array
        for array in case.outputs or ():
            yield "outputs", array

    return FileContents(
        path=case.path,
        format=case.format,
        name=case.name,
        facts={name: text for name, text in case.environment.items() if text},
        parameters=case.parameters,
        notes=case.notes,
        stablehlo=lambda: case.stablehlo,
        hlo=functools.partial(print_hlo, case.path) if print_hlo else None,
        arrays=arrays,
    )


def _proto_text(path: Path, message_type: type[XlaMessage], *fields: str) -> str:
    """Return the HLO module that an XLA file has in ``fields``, one inside the other."""
    message: Any = parse(message_type, path.read_bytes(), path)
    for field in fields:
        message = getattr(message, field)
    return jaxapi.hlo_text(serialize(message))


def _bare_module_text(path: Path) -> str:
    try:
        return _proto_text(path, HloProto, "hlo_module")
    except (ValueError, SnapshotError):
        return _proto_text(path, HloModuleProto)


# The module as XLA wrote it, not as it was restored for replay.
_ORIGINAL_HLO: Mapping[str, Callable[[Path], str]] = {
    sniff.HLO_TEXT: lambda path: path.read_text(),
    sniff.HLO_MODULE: _bare_module_text,
    sniff.HLO_SNAPSHOT: lambda path: _proto_text(path, HloSnapshot, "hlo", "hlo_module"),
    sniff.HLO_UNOPTIMIZED_SNAPSHOT: lambda path: jaxapi.hlo_text(
        serialize(read_unoptimized_snapshot(path)[0])
    ),
}


def storable(value: np.ndarray) -> np.ndarray:
    """Return an array with a dtype that ``.npy`` supports: bfloat16 etc. as unsigned integers."""
    return value if floatbits.is_builtin(value.dtype) else floatbits.bit_view(value)


def without_type(value: np.ndarray) -> np.ndarray:
    """Return an array with a dtype that ``.npy`` supports: bfloat16 etc. as raw bytes."""
    return value if floatbits.is_builtin(value.dtype) else value.view(f"V{value.dtype.itemsize}")
