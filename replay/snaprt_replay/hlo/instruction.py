"""What an instruction gives and where it comes from: its shape, its size, its source line.

Also which instructions of a module give the largest arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Final

from snaprt.hlo.literals import ELEMENT_TYPES, TOKEN, TUPLE, leaf_shapes
from snaprt.hlo.proto import HloModuleProto, XlaMessage, parse
from snaprt_replay.hlo.hlo_module import called_computations

_INSTALLED = ("site-packages", "dist-packages", "/jax/_src/", "<frozen")


def bytes_of(shape: XlaMessage) -> int:
    """Return how many bytes the arrays of a shape have."""
    total = 0
    for leaf in leaf_shapes(shape):
        row = ELEMENT_TYPES.get(leaf.element_type)
        total += prod(leaf.dimensions) * (row.bits if row else 0) // 8
    return total


def shape_text(shape: XlaMessage) -> str:
    """Return a shape as HLO text has it: ``f32[8,16]``, ``(s32[], f32[4])``."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    if shape.element_type == TOKEN:
        return "token[]"
    row = ELEMENT_TYPES.get(shape.element_type)
    return f"{row.name if row else '?'}[{','.join(map(str, shape.dimensions))}]"


def source_of(module: XlaMessage, instruction: XlaMessage) -> str:
    """Return ``file:line (function)`` of the user's innermost frame for an instruction, or ''.

    Source: OpMetadata and StackFrameIndexProto of openxla's xla/xla_data.proto and hlo.proto.
    """
    metadata, index = instruction.metadata, module.stack_frame_index
    innermost, frame_id = "", metadata.stack_frame_id
    while 0 < frame_id <= len(index.stack_frames):
        frame = index.stack_frames[frame_id - 1]
        if 0 < frame.file_location_id <= len(index.file_locations):
            location = index.file_locations[frame.file_location_id - 1]
            file = _numbered(index.file_names, location.file_name_id)
            function = _numbered(index.function_names, location.function_name_id)
            text = f"{file}:{location.line}" + (f" ({function})" if function else "")
            if not any(part in file for part in _INSTALLED):
                return text
            innermost = innermost or text
        # An index from a file may go round in a circle: parents come first in a whole one.
        frame_id = frame.parent_frame_id if frame.parent_frame_id < frame_id else 0
    if not innermost and metadata.source_file:
        return f"{metadata.source_file}:{metadata.source_line}"
    return innermost


def _numbered(names: Sequence[str], number: int) -> str:
    return names[number - 1] if 0 < number <= len(names) else ""


#: These give what another array holds already.
_NO_ARRAYS_OF_THEIR_OWN: Final = frozenset({"bitcast", "get-tuple-element", "optimization-barrier"})


def largest_arrays(module: bytes, most: int = 3) -> list[dict[str, str | int]]:
    """Return the ``most`` largest arrays of an optimized module, the largest first.

    Arrays inside a fusion are left out, because they are never in memory.

    Args:
        module: A serialized HloModuleProto.
        most: How many.

    Returns:
        For each array its ``bytes``, its ``shape``, the ``opcode`` of the instruction that computes
        it, and its ``source`` line, or ''. Arrays that have all of these in common are one, and
        ``count`` says how many they are.
    """
    parsed = parse(HloModuleProto, module, "the optimized module")
    fused = {
        number
        for computation in parsed.computations
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for number in instruction.called_computation_ids
    }
    inside = {computation.id for computation in called_computations(parsed, fused)}
    arrays = Counter(
        (
            bytes_of(instruction.shape),
            shape_text(instruction.shape),
            instruction.opcode,
            source_of(parsed, instruction),
        )
        for computation in parsed.computations
        if computation.id not in inside
        for instruction in computation.instructions
        if instruction.shape.element_type != TUPLE
        and instruction.opcode not in _NO_ARRAYS_OF_THEIR_OWN
    )
    largest = sorted(arrays.items(), key=lambda item: -item[0][0])[:most]
    return [
        {"bytes": size, "shape": shape, "opcode": opcode, "source": source, "count": count}
        for (size, shape, opcode, source), count in largest
    ]
