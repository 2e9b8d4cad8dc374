"""An HLO module as a graph that can be edited.

HloModuleProto is a flat list of computations, each a flat list of instructions in dependency order,
with ids for edges. That makes it the easiest form of a program to cut: `Editor` makes and replaces
instructions, and `verify` checks that the result is still a module that XLA can read. XLA itself
fails a CHECK on some malformed modules, which ends the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Final

import numpy as np

from snaprt.errors import SnapshotError
from snaprt.hlo.literals import (
    ELEMENT_TYPES,
    TOKEN,
    TUPLE,
    array_shape,
    array_to_literal,
    leaf_shapes,
)
from snaprt.hlo.proto import HloInstructionProto, HloModuleProto, XlaMessage, parse

_CUSTOM_CALL = "custom-call"
_LOW_BITS = 2**32 - 1


# How many operands an operation has. XLA's converters read them without checking.
_EXACT_OPERANDS = {
    0: "constant iota parameter partition-id replica-id",
    1: "abs bitcast bitcast-convert broadcast cbrt ceil cholesky convert copy cosine "
    "count-leading-zeros erf exponential exponential-minus-one fft floor get-dimension-size "
    "get-tuple-element imag is-finite log log-plus-one logistic negate not optimization-barrier "
    "popcnt real reduce-precision reshape reverse round-nearest-afz round-nearest-even rsqrt sign "
    "sine slice sqrt tan tanh transpose while",
    2: "add and atan2 compare complex convolution divide gather maximum minimum multiply or pad "
    "power remainder set-dimension-size shift-left shift-right-arithmetic shift-right-logical "
    "subtract triangular-solve xor",
    3: "clamp select select-and-scatter",
}
_LEAST_OPERANDS = {
    1: "all-reduce concatenate dynamic-slice sort",
    2: "conditional dot dynamic-update-slice reduce reduce-window",
    3: "scatter",
}


def _by_opcode(table: Mapping[int, str]) -> Mapping[str, int]:
    return {opcode: count for count, opcodes in table.items() for opcode in opcodes.split()}


_EXACT = _by_opcode(_EXACT_OPERANDS)
_LEAST = _by_opcode(_LEAST_OPERANDS)


def entry_computation(module: XlaMessage) -> XlaMessage:
    """Return the module's entry computation; raise SnapshotError if it has none."""
    for computation in module.computations:
        if computation.id == module.entry_computation_id:
            return computation
    raise SnapshotError(
        f"HLO module {module.name!r} has no entry computation.",
        hint="The file is damaged or of another kind.",
    )


def root_instruction(computation: XlaMessage) -> XlaMessage:
    """Return the instruction that computes the result; raise SnapshotError if there is none."""
    for instruction in reversed(computation.instructions):
        if instruction.id == computation.root_id:
            return instruction
    raise SnapshotError(f"HLO computation {computation.name!r} has no root instruction.")


def parameters(computation: XlaMessage) -> list[XlaMessage]:
    """Return the computation's parameter instructions, ordered by number."""
    numbered = [
        instruction for instruction in computation.instructions if instruction.opcode == "parameter"
    ]
    return sorted(numbered, key=lambda instruction: instruction.parameter_number)


def instructions(module: XlaMessage) -> Iterator[XlaMessage]:
    """Yield every instruction of every computation of the module."""
    for computation in module.computations:
        yield from computation.instructions


def reached(first: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """Return the ids that are reachable in a graph, including those that the walk starts from.

    Args:
        first: Where the walk starts.
        following: Returns the successors of an id, such as an instruction's operands or the
            computations that a computation calls.
    """
    visited: set[int] = set()
    waiting = list(first)
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            waiting.extend(following(node))
    return visited


def called_by(instructions: Iterable[XlaMessage]) -> Iterator[int]:
    """Yield the ids of the computations that instructions call."""
    for instruction in instructions:
        yield from instruction.called_computation_ids


def called_computations(module: XlaMessage, first: Iterable[int]) -> list[XlaMessage]:
    """Return these computations and all that they call, even indirectly, in the module's order."""
    by_id = {computation.id: computation for computation in module.computations}
    called = reached(first, lambda computation_id: called_by(by_id[computation_id].instructions))
    return [computation for computation in module.computations if computation.id in called]


def drop_uncalled(module: XlaMessage) -> None:
    """Remove the computations that the entry does not call, not even indirectly."""
    computations = list(map(copy_of, called_computations(module, [module.entry_computation_id])))
    module.ClearField("computations")
    module.computations.extend(computations)


def copy_of(message: XlaMessage) -> XlaMessage:
    """Return a copy of a message, since a message in a list is freed with the list."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def set_instructions(computation: XlaMessage, replacements: Iterable[XlaMessage]) -> None:
    """Replace a computation's instructions, some of which may be kept."""
    copies = list(map(copy_of, replacements))
    computation.ClearField("instructions")
    computation.instructions.extend(copies)


def take_name(name: str, names: set[str], mark: str = ".") -> str:
    """Return a name that is not taken, and take it: names are unique in the whole module."""
    free, number = name, 0
    while free in names:
        number += 1
        free = f"{name}{mark}{number}"
    names.add(free)
    return free


def library_calls(module: XlaMessage) -> tuple[str, ...]:
    """Return the targets of custom calls that a compiler inserted, such as ``__cublas$gemm``."""
    targets = {
        instruction.custom_call_target
        for instruction in instructions(module)
        if instruction.opcode == _CUSTOM_CALL
    }
    return tuple(sorted(target for target in targets if target.startswith("__")))


class Editor:
    """Makes new instructions for a module, and replaces existing ones.

    Args:
        module: The HloModuleProto to edit in place.
    """

    def __init__(self, module: XlaMessage) -> None:
        self.module = module
        # XLA keeps only the low half of an id when it renumbers instructions.
        self._last_id = max(
            (instruction.id & _LOW_BITS for instruction in instructions(module)), default=0
        )

    def new(
        self,
        opcode: str,
        shape: XlaMessage,
        operands: Sequence[XlaMessage],
        *,
        like: XlaMessage,
        dimensions: Sequence[int] = (),
    ) -> XlaMessage:
        """Return a new instruction, not yet in any computation.

        Args:
            opcode: XLA's name for the operation.
            shape: The result's ShapeProto; it is copied.
            operands: The instructions it reads, in order.
            like: The instruction it is made for, which lends its metadata and part of its name.
            dimensions: What the operation uses the field `dimensions` for.
        """
        new_id = self.new_id(like)
        instruction = HloInstructionProto(
            name=f"{like.name}.{opcode}.{self._last_id}",
            opcode=opcode,
            id=new_id,
            operand_ids=[operand.id for operand in operands],
            dimensions=dimensions,
        )
        instruction.shape.CopyFrom(shape)
        if like.HasField("metadata"):
            instruction.metadata.CopyFrom(like.metadata)
        return instruction

    def twin(
        self, instruction: XlaMessage, operands: Sequence[XlaMessage] | None = None
    ) -> XlaMessage:
        """Return a copy of an instruction with a new id, and with other operands if given."""
        copy = copy_of(instruction)
        new = self.new(instruction.opcode, instruction.shape, (), like=instruction)
        copy.id, copy.name = new.id, new.name
        if operands is not None:
            copy.operand_ids[:] = [operand.id for operand in operands]
        return copy

    def new_id(self, like: XlaMessage) -> int:
        """Return an unused id, for an instruction of the same computation as `like`."""
        self._last_id += 1
        return (like.id & ~_LOW_BITS) | self._last_id

    def replace_each(
        self, computation: XlaMessage, replace: Callable[[XlaMessage], Sequence[XlaMessage]]
    ) -> None:
        """Replace each instruction by those that `replace` returns for it, in order.

        The last of them usually keeps the old id, so that the users of the old value read it.
        """
        replaced: list[XlaMessage] = []
        for instruction in computation.instructions:
            replaced.extend(replace(instruction))
        set_instructions(computation, replaced)


def declare_parameters(module: XlaMessage) -> None:
    """Let a module say what its entry's parameters are, after they have changed."""
    entry = entry_computation(module)
    shapes = [parameter.shape for parameter in parameters(entry)]
    for program_shape in (entry.program_shape, module.host_program_shape):
        program_shape.ClearField("parameters")
        program_shape.ClearField("parameter_names")
        program_shape.parameters.extend(shapes)
        program_shape.parameter_names.extend(f"p{number}" for number in range(len(shapes)))


class Steps:
    """New instructions in their order, not yet in any computation.

    Args:
        editor: Makes them.
        like: The instruction that they are made for.
    """

    def __init__(self, editor: Editor, like: XlaMessage) -> None:
        self.made: list[XlaMessage] = []
        self._editor = editor
        self._like = like

    def add(self, opcode: str, shape: XlaMessage, *operands: XlaMessage) -> XlaMessage:
        """Add an instruction."""
        self.made.append(self._editor.new(opcode, shape, operands, like=self._like))
        return self.made[-1]

    def add_twin(
        self, instruction: XlaMessage, operands: Sequence[XlaMessage] | None = None
    ) -> XlaMessage:
        """Add a copy of an instruction, with other operands if given."""
        self.made.append(self._editor.twin(instruction, operands))
        return self.made[-1]

    def add_filled(self, value: np.generic | np.ndarray, shape: XlaMessage) -> XlaMessage:
        """Add an array that has one value everywhere."""
        scalar = self.add("constant", array_shape(value.dtype, ()))
        scalar.literal.CopyFrom(array_to_literal(np.asarray(value)))
        return self.add("broadcast", shape, scalar)

    def stand_for(self, instruction: XlaMessage) -> list[XlaMessage]:
        """Return them, of which the last takes an instruction's place: its users know it by id."""
        self.made[-1].id, self.made[-1].name = instruction.id, instruction.name
        return self.made


def verify(module: XlaMessage) -> None:
    """Check that XLA can read a module.

    Raises:
        SnapshotError: It has no entry or root, a value is used before it is defined, an id or a
            parameter number is used twice, an operation reads too many or too few values, or a
            call leads nowhere. The message names the place.
    """
    entry_computation(module)
    parameter_counts: dict[int, int] = {}
    for computation in module.computations:
        _verify_computation(computation, parameter_counts)
        if computation.id in parameter_counts:
            raise _malformed(computation, "has the id of another computation")
        parameter_counts[computation.id] = len(parameters(computation))
    entry = entry_computation(module)
    shape = module.host_program_shape
    declared = [*shape.parameters, shape.result]
    actual = [instruction.shape for instruction in (*parameters(entry), root_instruction(entry))]
    if list(map(_kinds, declared)) != list(map(_kinds, actual)):
        raise _malformed(entry, "does not have the parameters and result that the module declares")


def _kinds(shape: XlaMessage) -> list[tuple[int, ...]]:
    return [(leaf.element_type, *leaf.dimensions) for leaf in leaf_shapes(shape)]


def _verify_computation(computation: XlaMessage, parameter_counts: Mapping[int, int]) -> None:
    defined: dict[int, XlaMessage] = {}
    low_ids: set[int] = set()
    names: set[str] = set()
    for instruction in computation.instructions:
        place = f"has an instruction {instruction.name!r} that"
        missing = [operand for operand in instruction.operand_ids if operand not in defined]
        if missing:
            raise _malformed(computation, f"{place} reads {missing[0]}, which is not defined yet")
        called = list(instruction.called_computation_ids)
        uncallable = [
            computation_id for computation_id in called if computation_id not in parameter_counts
        ]
        if uncallable:
            raise _malformed(computation, f"{place} calls {uncallable[0]}, which does not exist")
        count = len(instruction.operand_ids)
        exact = _EXACT.get(instruction.opcode, count)
        if instruction.opcode in ("call", "fusion"):
            exact = parameter_counts[called[0]] if called else -1
        if count != exact or count < _LEAST.get(instruction.opcode, 0):
            raise _malformed(
                computation,
                f"{place} reads {count} values, the wrong number for {instruction.opcode}",
            )
        if instruction.id & _LOW_BITS in low_ids:
            raise _malformed(computation, f"{place} has the same id as another instruction")
        if instruction.name in names:
            raise _malformed(computation, f"{place} has the same name as another instruction")
        if not instruction.opcode:
            raise _malformed(computation, f"{place} has no operation")
        if not _tuples_agree(instruction, defined):
            raise _malformed(
                computation, f"{place} is a tuple with a different length than its parts"
            )
        defined[instruction.id] = instruction
        low_ids.add(instruction.id & _LOW_BITS)
        names.add(instruction.name)
    if computation.root_id not in defined:
        raise _malformed(computation, "has no root instruction")
    numbers = [parameter.parameter_number for parameter in parameters(computation)]
    if numbers != list(range(len(numbers))):
        raise _malformed(computation, f"numbers its parameters {numbers}")


def _tuples_agree(instruction: XlaMessage, defined: Mapping[int, XlaMessage]) -> bool:
    """Return whether a tuple has as many elements as the values that it is built or taken from."""
    length = len(instruction.shape.tuple_shapes)
    if instruction.opcode == "tuple":
        return length == len(instruction.operand_ids)
    if instruction.opcode in ("while", "get-tuple-element"):
        source = len(defined[instruction.operand_ids[0]].shape.tuple_shapes)
        if instruction.opcode == "while":
            return length == source
        return 0 <= instruction.tuple_index < source
    return True


def _malformed(computation: XlaMessage, what: str) -> SnapshotError:
    return SnapshotError(
        f"Not a well-formed HLO module: computation {computation.name!r} {what}.",
        hint="The file is damaged, or was written by an unknown version of XLA.",
    )


_INSTALLED = ("site-packages", "dist-packages", "/jax/_src/", "<frozen")


def bytes_of(shape: XlaMessage) -> int:
    """Return how many bytes the arrays of a shape have."""
    total = 0
    for leaf in leaf_shapes(shape):
        row = ELEMENT_TYPES.get(leaf.element_type)
        total += prod(leaf.dimensions) * (row.bits if row else 0) // 8
    return total


def shape_text(shape: XlaMessage) -> str:
    """Return a shape as it is written in HLO text: ``f32[8,16]``, ``(s32[], f32[4])``."""
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
        # An index from a damaged file may have a cycle; in a valid one, parents come first.
        frame_id = frame.parent_frame_id if frame.parent_frame_id < frame_id else 0
    if not innermost and metadata.source_file:
        return f"{metadata.source_file}:{metadata.source_line}"
    return innermost


def _numbered(names: Sequence[str], number: int) -> str:
    return names[number - 1] if 0 < number <= len(names) else ""


#: Their results are already in another array.
_NO_ARRAYS_OF_THEIR_OWN: Final = frozenset({"bitcast", "get-tuple-element", "optimization-barrier"})


def largest_arrays(module: bytes) -> list[dict[str, str | int]]:
    """Return the three largest arrays of an optimized module, the largest first.

    Arrays inside a fusion are left out, because they are never in memory.

    Args:
        module: A serialized HloModuleProto.

    Returns:
        For each array its ``bytes``, its ``shape``, the ``opcode`` of the instruction that computes
        it, and its ``source`` line, or ''. Arrays that have all of these in common are one entry,
        and ``count`` says how many there are.
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
    largest = sorted(arrays.items(), key=lambda item: -item[0][0])[:3]
    return [
        {"bytes": size, "shape": shape, "opcode": opcode, "source": source, "count": count}
        for (size, shape, opcode, source), count in largest
    ]
