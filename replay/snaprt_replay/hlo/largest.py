"""Finds the arrays of a compiled module that need the most memory."""

from __future__ import annotations

from collections import Counter
from typing import Final

from snaprt.hlo.literals import TUPLE
from snaprt.hlo.proto import HloModuleProto, parse
from snaprt_replay.hlo.hlo_module import called_computations
from snaprt_replay.hlo.instruction import bytes_of, shape_text, source_of

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
