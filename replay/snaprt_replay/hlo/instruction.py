"""What an instruction gives and where it comes from: its shape, its size, its source line."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from snaprt.hlo.literals import ELEMENT_TYPES, TOKEN, TUPLE, leaf_shapes
from snaprt.hlo.proto import XlaMessage

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
