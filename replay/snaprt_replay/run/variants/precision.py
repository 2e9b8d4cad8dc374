"""Raise a program to float64: every float input, constant and operation, on its HloModuleProto.

Complex numbers become complex128, integers stay. What has no float64 form stays as it is, between
two conversions, and is named in the result's notes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from snaprt.errors import UsageError
from snaprt.hlo.literals import (
    ELEMENT_TYPES,
    TUPLE,
    array_to_literal,
    leaf_shapes,
    literal_to_array,
)
from snaprt.hlo.proto import HloModuleProto, XlaMessage, parse
from snaprt_replay import floatbits
from snaprt_replay.hlo.hlo_module import Editor, copy_of

_F64, _C128 = 12, 18
# LAPACK's own prefixes for single and double precision, real and complex.
_DOUBLE: Final = {"lapack_s": "lapack_d", "lapack_c": "lapack_z"}
# What gives another result each time, whatever the inputs: no precision makes it a reference.
_STATEFUL: Final = ("infeed", "outfeed", "recv", "rng", "rng-get-and-update-state", "send")


@dataclasses.dataclass(frozen=True, eq=False)
class Raised:
    """A raised program."""

    module: XlaMessage  # the HloModuleProto
    notes: tuple[str, ...]  # what was not raised, in sentences


def read_module(content: bytes) -> XlaMessage:
    """Parse a serialized HloModuleProto; raise SnapshotError if it is none."""
    return parse(HloModuleProto, content, "HLO module")


def raised_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that a value of ``dtype`` has in the raised program."""
    if floatbits.is_float(dtype):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if floatbits.is_complex(dtype) else dtype


def is_raised(dtype: np.dtype, other: np.dtype) -> bool:
    """Return whether ``other`` is not ``dtype`` itself, but what it is raised to."""
    return dtype != other and raised_dtype(dtype) == other


def raise_to_f64(module: XlaMessage) -> Raised:
    """Return the program with float64 in the place of every smaller float.

    A conversion between two floats then changes nothing, and neither does a rounding to the
    precision that a value has anyway; a rounding to less is part of the program and stays.

    Args:
        module: An HloModuleProto with default layouts; it is not changed.

    Raises:
        UsageError: It holds what no reference can be made of: random state, infeed.
    """
    raised = copy_of(module)
    for field in ("input_output_alias", "buffer_donor", "schedule"):
        raised.ClearField(field)
    _raise_program_shape(raised.host_program_shape)
    editor = Editor(raised)
    notes: dict[str, None] = {}
    for computation in raised.computations:
        _raise_program_shape(computation.program_shape)
        shapes = {
            instruction.id: copy_of(instruction.shape) for instruction in computation.instructions
        }
        by_id = {instruction.id: instruction for instruction in computation.instructions}

        def replace(
            instruction: XlaMessage,
            shapes: Mapping[int, XlaMessage] = shapes,
            by_id: Mapping[int, XlaMessage] = by_id,
        ) -> Sequence[XlaMessage]:
            operands = [by_id[operand] for operand in instruction.operand_ids]
            before = [shapes[operand] for operand in instruction.operand_ids]
            return _raise_instruction(_Raising(editor, instruction, operands, before, notes))

        editor.replace_each(computation, replace)
    return Raised(raised, tuple(notes))


def _raise_program_shape(program: XlaMessage) -> None:
    for shape in (*program.parameters, program.result):
        raise_shape(shape)


def raise_shape(shape: XlaMessage) -> None:
    """Give a ShapeProto the element types of the raised program, in place."""
    for leaf in leaf_shapes(shape):
        row = ELEMENT_TYPES.get(leaf.element_type)
        if row is None or row.dtype is None:
            continue
        if floatbits.is_float(row.dtype):
            leaf.element_type = _F64
        elif floatbits.is_complex(row.dtype):
            leaf.element_type = _C128


@dataclasses.dataclass(frozen=True, eq=False)
class _Raising:
    """An instruction that is raised."""

    editor: Editor  # makes instructions
    instruction: XlaMessage  # as in the file
    operands: Sequence[XlaMessage]  # what it reads, raised
    before: Sequence[XlaMessage]  # the operands' shapes in the file
    notes: dict[str, None]  # takes what was not raised


def _raise_instruction(raising: _Raising) -> Sequence[XlaMessage]:
    """Return what takes an instruction's place."""
    instruction, opcode = raising.instruction, raising.instruction.opcode
    if opcode in _STATEFUL:
        raise UsageError(
            f"the program cannot be raised to float64: {instruction.name!r} ({opcode}) produces "
            "different values in each run",
            hint="draw random numbers from a key, as jax.random does",
        )
    instruction.ClearField("original_value")
    special = _SPECIAL.get(opcode)
    if special is not None:
        replacement = special(raising)
        if replacement is not None:
            return replacement
    raise_shape(instruction.shape)
    for shape in instruction.operand_shapes_with_layout:
        raise_shape(shape)
    return [instruction]


_Special = Callable[[_Raising], "Sequence[XlaMessage] | None"]


def _raise_constant(raising: _Raising) -> None:
    _raise_literal(raising.instruction.literal)


def _raise_literal(literal: XlaMessage) -> None:
    if literal.shape.element_type == TUPLE:
        for element in literal.tuple_literals:
            _raise_literal(element)
        raise_shape(literal.shape)
        return
    shape = copy_of(literal.shape)
    raise_shape(shape)
    if shape.element_type != literal.shape.element_type:
        value = literal_to_array(literal)
        literal.CopyFrom(array_to_literal(value.astype(raised_dtype(value.dtype))))


def _raise_reduce_precision(raising: _Raising) -> None:
    row = ELEMENT_TYPES[raising.before[0].element_type]
    assert row.dtype is not None
    if raising.instruction.mantissa_bits < floatbits.mantissa_bits(row.dtype):
        return  # the program rounds on purpose
    raising.instruction.opcode = "reshape"
    raising.instruction.ClearField("mantissa_bits")
    raising.instruction.ClearField("exponent_bits")


def _forget_precision(raising: _Raising) -> None:
    # An algorithm such as BF16_BF16_F32 says how to round; float64 has none of them.
    raising.instruction.ClearField("precision_config")


def _raise_custom_call(raising: _Raising) -> Sequence[XlaMessage] | None:
    instruction, target = raising.instruction, raising.instruction.custom_call_target
    if target[:8] in _DOUBLE:
        instruction.custom_call_target = _DOUBLE[target[:8]] + target[8:]
        return None
    if target[:8] in _DOUBLE.values() or target in _ANY_TYPE:
        return None
    if instruction.called_computation_ids:
        raise UsageError(
            f"cannot raise the program to float64: the custom call {target!r} has no float64 "
            "form and calls functions of the program",
        )
    return _keep(raising, f"the custom call {target!r}")


# Custom calls that say something about their operand, whatever its type.
_ANY_TYPE: Final = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
)


def _keep_bits(raising: _Raising) -> Sequence[XlaMessage]:
    """Keep what looks at the bits of a float, or makes one of bits, in its own type."""
    return _keep(raising, "")


def _keep(raising: _Raising, what: str) -> Sequence[XlaMessage]:
    """Return an instruction in its own types, between conversions from and to the raised ones."""
    editor, instruction, notes = raising.editor, raising.instruction, raising.notes
    down = []
    instructions: list[XlaMessage] = []
    for operand, shape in zip(raising.operands, raising.before, strict=True):
        if shape.element_type == TUPLE or _same_types(shape):
            down.append(operand)
            continue
        instructions.append(editor.new("convert", shape, [operand], like=instruction))
        down.append(instructions[-1])
    if _same_types(instruction.shape):
        if instructions and what:
            notes[f"{what} was computed in its original precision"] = None
        instruction.operand_ids[:] = [operand.id for operand in down]
        return [*instructions, instruction]
    if what:
        notes[f"{what} was computed in its original precision"] = None
    unraised = editor.twin(instruction, down)
    instructions.append(unraised)
    result = _convert_up(editor, unraised, instructions)
    # The last instruction stands for the old one: its users read it by its id and name.
    result.id, result.name = instruction.id, instruction.name
    return instructions


def _convert_up(editor: Editor, value: XlaMessage, instructions: list[XlaMessage]) -> XlaMessage:
    """Append what converts a value, a tuple too, to raised types; return the result."""
    shape = copy_of(value.shape)
    raise_shape(shape)
    if shape.element_type != TUPLE:
        instructions.append(editor.new("convert", shape, [value], like=value))
        return instructions[-1]
    parts = []
    for index, part_shape in enumerate(value.shape.tuple_shapes):
        part = editor.new("get-tuple-element", part_shape, [value], like=value)
        part.tuple_index = index
        instructions.append(part)
        parts.append(part if _same_types(part_shape) else _convert_up(editor, part, instructions))
    instructions.append(editor.new("tuple", shape, parts, like=value))
    return instructions[-1]


def _same_types(shape: XlaMessage) -> bool:
    raised = copy_of(shape)
    raise_shape(raised)
    return raised.SerializeToString() == shape.SerializeToString()


_SPECIAL: Final[Mapping[str, _Special]] = {
    "bitcast-convert": _keep_bits,
    "constant": _raise_constant,
    "convolution": _forget_precision,
    "custom-call": _raise_custom_call,
    "dot": _forget_precision,
    "reduce-precision": _raise_reduce_precision,
    "rng-bit-generator": _keep_bits,
}
