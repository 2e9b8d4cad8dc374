"""Run a program one operation at a time, each compiled alone.

No pass of the compiler then sees two operations together: what differs from running the program
whole is what fusing, reordering and simplifying across operations did. Loops, conditionals and
calls are followed here; a reduction's or a sort's own function stays part of its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from snaprt.hlo.literals import TOKEN, TUPLE, literal_leaves, literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo import hlo_module
from snaprt_replay.hlo.extract import Piece, extract

#: Compiles a serialized HloModuleProto; what it returns takes arrays and returns arrays.
Compile = Callable[[bytes], Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]]

# An array, or a tuple of values; a token is an empty tuple.
_Value = Any


class OpByOp:
    """A program whose operations are compiled as they are met.

    Args:
        module: The HloModuleProto, with default layouts.
        compile_module: How to compile one operation.
    """

    def __init__(self, module: XlaMessage, compile_module: Compile) -> None:
        self._module = module
        self._compile = compile_module
        self._computations = {computation.id: computation for computation in module.computations}
        self._known_positions: dict[int, dict[int, int]] = {}
        self._operations: dict[bytes, Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]] = {}

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the program once and return its results, tuples flattened."""
        entry = hlo_module.entry_computation(self._module)
        result = self._evaluate(entry, _shaped(hlo_module.parameters(entry), inputs))
        return list(_leaves(result))

    def _evaluate(self, computation: XlaMessage, arguments: Sequence[_Value]) -> _Value:
        values: dict[int, _Value] = {}
        for instruction in computation.instructions:
            operands = [values[operand] for operand in instruction.operand_ids]
            if instruction.opcode == "parameter":
                value = arguments[instruction.parameter_number]
            elif instruction.opcode in _FOLLOWED:
                value = _FOLLOWED[instruction.opcode](self, instruction, operands)
            else:
                value = self._run_alone(computation, instruction, operands)
            values[instruction.id] = value
        return values[computation.root_id]

    def _run_alone(
        self, computation: XlaMessage, instruction: XlaMessage, operands: Sequence[_Value]
    ) -> _Value:
        key = self._key(computation, instruction)
        if key not in self._operations:
            piece = Piece((instruction.id,), frozenset(instruction.operand_ids))
            alone = extract(self._module, computation, [piece])
            self._operations[key] = self._compile(alone.module.SerializeToString())
        # The extract takes each value once, in the order in which the computation makes them.
        values = dict(zip(instruction.operand_ids, operands, strict=True))
        positions = self._positions(computation)
        ordered = [values[operand] for operand in sorted(values, key=positions.__getitem__)]
        outputs = self._operations[key]([leaf for value in ordered for leaf in _leaves(value)])
        return _assemble(instruction.shape, iter(outputs))

    def _key(self, computation: XlaMessage, instruction: XlaMessage) -> bytes:
        """Return what two operations have in common that can share an executable."""
        bare = hlo_module.copy_of(instruction)
        for field in ("id", "name", "metadata", "operand_ids", "control_predecessor_ids"):
            bare.ClearField(field)
        positions = self._positions(computation)
        places = [positions[operand] for operand in instruction.operand_ids]
        order = sorted(set(places))
        shapes = [computation.instructions[place].shape.SerializeToString() for place in order]
        ranks = bytes(str([order.index(place) for place in places]), "ascii")
        return b"\0".join([bare.SerializeToString(), ranks, *shapes])

    def _positions(self, computation: XlaMessage) -> Mapping[int, int]:
        """Return where each instruction of a computation stands in it, by id."""
        if computation.id not in self._known_positions:
            self._known_positions[computation.id] = {
                instruction.id: index for index, instruction in enumerate(computation.instructions)
            }
        return self._known_positions[computation.id]

    # --- what is followed ---

    def _call(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        (called,) = instruction.called_computation_ids
        return self._evaluate(self._computations[called], operands)

    def _while(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        body, condition = (
            self._computations[called] for called in instruction.called_computation_ids
        )
        (state,) = operands
        while self._evaluate(condition, [state]).item():
            state = self._evaluate(body, [state])
        return state

    def _conditional(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        selector, *branch_operands = operands
        branches = instruction.called_computation_ids
        if selector.dtype == np.bool_:
            chosen = 0 if selector.item() else 1
        else:  # an index out of range takes the last branch
            number = selector.item()
            chosen = number if 0 <= number < len(branches) else len(branches) - 1
        return self._evaluate(self._computations[branches[chosen]], [branch_operands[chosen]])

    def _constant(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        arrays = [literal_to_array(leaf) for leaf in literal_leaves(instruction.literal)]
        return _assemble(instruction.shape, iter(arrays))

    def _element(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        return operands[0][instruction.tuple_index]

    def _tuple(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        return tuple(operands)

    def _same(self, instruction: XlaMessage, operands: Sequence[_Value]) -> _Value:
        return operands[0]


_FOLLOWED: Final[Mapping[str, Callable[[OpByOp, XlaMessage, Sequence[_Value]], _Value]]] = {
    "after-all": OpByOp._tuple,
    "call": OpByOp._call,
    "conditional": OpByOp._conditional,
    "constant": OpByOp._constant,
    "get-tuple-element": OpByOp._element,
    "optimization-barrier": OpByOp._same,
    "tuple": OpByOp._tuple,
    "while": OpByOp._while,
}


def _shaped(parameters: Sequence[XlaMessage], inputs: Sequence[np.ndarray]) -> list[_Value]:
    leaves = iter(inputs)
    return [_assemble(parameter.shape, leaves) for parameter in parameters]


def _assemble(shape: XlaMessage, leaves: Iterator[np.ndarray]) -> _Value:
    if shape.element_type == TOKEN:
        return ()
    if shape.element_type == TUPLE:
        return tuple(_assemble(element, leaves) for element in shape.tuple_shapes)
    return next(leaves)


def _leaves(value: _Value) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for element in value:
            yield from _leaves(element)
    else:
        yield value
