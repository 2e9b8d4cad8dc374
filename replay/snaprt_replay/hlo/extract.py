"""Cut pieces out of an HLO module into a separate module.

A piece computes some values from others: `Piece` names both, and the instructions between them are
found by going backward. The new module takes one array for each given value and returns one array
for each requested value; the elements of tuples are passed one by one, and tokens not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from snaprt.hlo.literals import OPAQUE, TOKEN, TUPLE
from snaprt.hlo.proto import ShapeProto, XlaMessage
from snaprt_replay.hlo.hlo_module import (
    Editor,
    called_by,
    called_computations,
    copy_of,
    reached,
    take_name,
)


@dataclasses.dataclass(frozen=True, order=True)
class Value:
    """One array of a computation."""

    instruction: int  # the id of the instruction that makes it
    path: tuple[int, ...] = ()  # its position in the result; () unless that is a tuple


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one computation: what computes `results` from the values of `given`."""

    results: tuple[int, ...]  # the ids of the instructions whose values are requested
    # The ids of the instructions whose values are known; parameters always are.
    given: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Extract:
    """A module made of pieces, whose parameters and results it has one after the other."""

    module: XlaMessage  # an HloModuleProto
    parameters: tuple[tuple[Value, ...], ...]  # for each piece, the values it takes
    results: tuple[tuple[Value, ...], ...]  # for each piece, the values it returns
    instructions: int  # how many the module has besides parameters and constants


def arrays_of(instruction: XlaMessage) -> Iterator[tuple[Value, XlaMessage]]:
    """Yield the arrays in an instruction's result with their shapes; tokens are left out."""

    def within(shape: XlaMessage, path: tuple[int, ...]) -> Iterator[tuple[Value, XlaMessage]]:
        if shape.element_type == TUPLE:
            for index, element in enumerate(shape.tuple_shapes):
                yield from within(element, (*path, index))
        elif shape.element_type not in (TOKEN, OPAQUE):
            yield Value(instruction.id, path), shape

    yield from within(instruction.shape, ())


def extract(module: XlaMessage, computation: XlaMessage, pieces: Sequence[Piece]) -> Extract:
    """Make a module of pieces of one computation; the pieces share no instructions in it.

    Args:
        module: The HloModuleProto that the computation is part of; it is not changed.
        computation: Any of its computations, including the body of a loop.
        pieces: What to compute.
    """
    return _Extraction(module, computation).make(pieces)


class _Extraction:
    def __init__(self, module: XlaMessage, computation: XlaMessage) -> None:
        self.source = module
        self.computation = computation
        self.editor = Editor(module)  # makes new ids; the module itself stays as it is
        self.by_id = {instruction.id: instruction for instruction in computation.instructions}
        self.added: list[XlaMessage] = []
        self.arguments: list[XlaMessage] = []
        # XLA requires names that are unique in the whole module.
        self.names = {
            instruction.name
            for sibling in module.computations
            if sibling.id != computation.id
            for instruction in sibling.instructions
        }
        self.counted = 0

    def make(self, pieces: Sequence[Piece]) -> Extract:
        parameters, results, taps = [], [], []
        for piece in pieces:
            needed, boundary = self._slice(piece)
            copies: dict[int, XlaMessage] = {}
            parameters.append(tuple(self._add_given(boundary, copies)))
            for instruction in needed:
                self._copy(instruction, copies)
            arrays = [array for result in piece.results for array in arrays_of(self.by_id[result])]
            results.append(tuple(value for value, _ in arrays))
            taps += [self._element(copies[value.instruction], value.path) for value, _ in arrays]
        module = self._module(taps)
        return Extract(module, tuple(parameters), tuple(results), self.counted)

    def _slice(self, piece: Piece) -> tuple[list[XlaMessage], list[XlaMessage]]:
        """Return the instructions that a piece computes and those that it takes, in order."""

        def is_given(instruction_id: int) -> bool:
            return instruction_id in piece.given or self.by_id[instruction_id].opcode == "parameter"

        needed = reached(
            piece.results,
            lambda instruction_id: (
                () if is_given(instruction_id) else self.by_id[instruction_id].operand_ids
            ),
        )
        ordered = [
            instruction for instruction in self.computation.instructions if instruction.id in needed
        ]
        return [instruction for instruction in ordered if not is_given(instruction.id)], [
            instruction for instruction in ordered if is_given(instruction.id)
        ]

    def _add_given(
        self, boundary: Sequence[XlaMessage], copies: dict[int, XlaMessage]
    ) -> Iterator[Value]:
        for instruction in boundary:
            arguments = []
            for value, shape in arrays_of(instruction):
                argument = self._new("parameter", shape, (), instruction)
                argument.parameter_number = len(self.arguments)
                self.arguments.append(argument)
                arguments.append(argument)
                yield value
            copies[instruction.id] = self._put_together(
                instruction, instruction.shape, iter(arguments)
            )

    def _put_together(
        self, like: XlaMessage, shape: XlaMessage, arrays: Iterator[XlaMessage]
    ) -> XlaMessage:
        if shape.element_type == TOKEN:
            return self._new("after-all", shape, (), like)
        if shape.element_type != TUPLE:
            return next(arrays)
        elements = [
            self._put_together(like, element_shape, arrays) for element_shape in shape.tuple_shapes
        ]
        return self._new("tuple", shape, elements, like)

    def _copy(self, instruction: XlaMessage, copies: dict[int, XlaMessage]) -> None:
        copy = copy_of(instruction)
        copy.id = self.editor.new_id(instruction)
        copy.operand_ids[:] = [copies[operand].id for operand in instruction.operand_ids]
        copy.ClearField("control_predecessor_ids")
        copies[instruction.id] = self._add(copy)
        self.counted += instruction.opcode != "constant"

    def _element(self, instruction: XlaMessage, path: Sequence[int]) -> XlaMessage:
        for index in path:
            shape = instruction.shape.tuple_shapes[index]
            element = self._new("get-tuple-element", shape, [instruction], instruction)
            element.tuple_index = index
            instruction = element
        return instruction

    def _new(
        self, opcode: str, shape: XlaMessage, operands: Sequence[XlaMessage], like: XlaMessage
    ) -> XlaMessage:
        return self._add(self.editor.new(opcode, shape, operands, like=like))

    def _add(self, instruction: XlaMessage) -> XlaMessage:
        instruction.name = take_name(instruction.name, self.names, ".r")
        self.added.append(instruction)
        return instruction

    def _module(self, taps: Sequence[XlaMessage]) -> XlaMessage:
        shape = ShapeProto(element_type=TUPLE, tuple_shapes=[tap.shape for tap in taps])
        like = self.computation.instructions[0]
        root = self._new("tuple", shape, taps, like)
        module = attributes_of(self.source)
        module.computations.extend(called_computations(self.source, called_by(self.added)))
        entry = module.computations.add(
            name=self.computation.name,
            id=self.computation.id,
            root_id=root.id,
            instructions=self.added,
        )
        for number, argument in enumerate(self.arguments):
            entry.program_shape.parameters.append(argument.shape)
            entry.program_shape.parameter_names.append(f"p{number}")
        entry.program_shape.result.CopyFrom(shape)
        module.host_program_shape.CopyFrom(entry.program_shape)
        module.entry_computation_id = entry.id
        module.entry_computation_name = entry.name
        return module


_OF_THE_WHOLE = (
    "computations",
    "schedule",
    "host_program_shape",
    "input_output_alias",
    "buffer_donor",
    "device_assignment",
    "cross_program_prefetches",
)


def attributes_of(module: XlaMessage) -> XlaMessage:
    """Return a copy of the module's attributes that also apply to any part of it."""
    attributes = copy_of(module)
    for field in _OF_THE_WHOLE:
        attributes.ClearField(field)
    return attributes
