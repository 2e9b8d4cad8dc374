"""Writes an execution as XLA's HloSnapshot; it must not know where it came from.

Source: ``xla/service/hlo.proto``; XLA's own tools (``run_hlo_module``) read such files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snaprt import jaxapi
from snaprt.errors import SnapshotError, UsageError
from snaprt.hlo.literals import TUPLE, array_to_literal
from snaprt.hlo.proto import (
    PROTOBUF_LIMIT,
    HloModuleProto,
    HloSnapshot,
    LiteralProto,
    XlaMessage,
    parse,
    serialize,
)
from snaprt_replay.hlo.hlo_module import entry_computation, root_instruction
from snaprt_replay.load.case import Case, NamedArray


def write_hlo_snapshot(case: Case, path: Path) -> None:
    """Write the module before optimization, the arguments and the result.

    Raises:
        UsageError: It would be more than protobuf can hold, which is 2 GB.
        SnapshotError: XLA has no HLO for the module, or no element type for an array.
    """
    size = sum(array.value.nbytes for array in (*(case.inputs or ()), *(case.outputs or ())))
    if size > PROTOBUF_LIMIT:
        raise _too_large(case, size)
    try:
        content = jaxapi.module_to_hlo_proto(jaxapi.parse_module(case.stablehlo))
    except ValueError as error:
        raise SnapshotError(f"the module of {case.path} has no HLO: {error}") from error
    module = parse(HloModuleProto, content, case.path)
    snapshot = HloSnapshot(execution_platform=case.environment.get("platform", ""))
    snapshot.hlo.hlo_module.CopyFrom(module)
    for array in case.inputs or ():
        snapshot.arguments.append(array_to_literal(array.value))
    if case.outputs is not None:
        snapshot.result.CopyFrom(_result(module, case.outputs))
    if snapshot.ByteSize() > PROTOBUF_LIMIT:
        raise _too_large(case, snapshot.ByteSize())
    path.write_bytes(serialize(snapshot))


def _too_large(case: Case, size: int) -> UsageError:
    return UsageError(
        f"{case.path} holds {size:,} bytes, more than XLA's HloSnapshot can (2 GiB)",
        hint="XLA would write an empty file; --to npz and --to python have no such limit",
    )


def _result(module: XlaMessage, outputs: Sequence[NamedArray]) -> XlaMessage:
    literals = [array_to_literal(array.value) for array in outputs]
    root = root_instruction(entry_computation(module))
    if root.shape.element_type != TUPLE:
        return literals[0]
    result = LiteralProto()
    result.shape.element_type = TUPLE
    result.shape.tuple_shapes.extend(one.shape for one in literals)
    result.tuple_literals.extend(literals)
    return result
