"""Turn an optimized HLO module back into one that XLA compiles.

An HloSnapshot contains the module after the compiler's last pass: scheduled, fused, with a layout
on every shape, and with `bitcast`s that are only meaningful with those layouts. Here each of these
is rewritten as operations that mean the same with any layout. Every value keeps its id, name and
metadata. A module as the user wrote it changes little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import prod

from snaprt.errors import SnapshotError
from snaprt.hlo.literals import (
    ELEMENT_TYPES,
    TOKEN,
    TUPLE,
    array_to_literal,
    leaf_shapes,
    literal_leaves,
    literal_to_array,
    minor_to_major,
)
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import (
    Editor,
    Steps,
    declare_parameters,
    entry_computation,
    instructions,
    parameters,
    verify,
)

_NOTES = {
    "fusion": "fusions became calls",
    "bitcast": "bitcasts became transposes and reshapes",
    "async": "asynchronous operations became plain ones",
    "tuple": "tuple parameters were split",
    "layout": "layouts were dropped",
    "schedule": "the schedule was dropped",
    "donation": "the donation of inputs was dropped",
    "generator": "warning: it uses the device's own random numbers, which differ in each run",
}


@dataclasses.dataclass
class _Restoration:
    """The state of rewriting one module."""

    editor: Editor
    optimized: bool
    changes: set[str] = dataclasses.field(default_factory=set)
    # In the current computation: the instructions by id, and the removed asynchronous starts.
    by_id: dict[int, XlaMessage] = dataclasses.field(default_factory=dict)
    starts: dict[int, XlaMessage] = dataclasses.field(default_factory=dict)


def restore(module: XlaMessage) -> tuple[str, ...]:
    """Rewrite a module in place so that XLA compiles it from the start again.

    Args:
        module: An HloModuleProto, optimized or not.

    Returns:
        What was changed, in sentences for the reader of a comparison.

    Raises:
        SnapshotError: The module is malformed, exchanges data with the host or another device, or
            has an operation that cannot be expressed without the layouts it was compiled for.
    """
    verify(module)
    _refuse_exchanges(module)
    restoration = _Restoration(Editor(module), is_optimized(module))
    # Inside out: a bitcast reads the layouts, which are dropped last.
    for computation in module.computations:
        restoration.by_id = {
            instruction.id: instruction for instruction in computation.instructions
        }
        restoration.starts = {}
        restoration.editor.replace_each(
            computation, lambda instruction: _restore_one(instruction, restoration)
        )
        computation.is_fusion_computation = False
        computation.execution_thread = ""
    _split_tuple_parameters(module, restoration)
    _drop_layouts(module, restoration)
    _drop_module_attributes(module, restoration)
    verify(module)
    return tuple(note for word, note in _NOTES.items() if word in restoration.changes)


def is_optimized(module: XlaMessage) -> bool:
    """Return whether the compiler's late passes have processed the module."""
    return module.HasField("schedule") or any(
        instruction.opcode in _ONLY_OPTIMIZED for instruction in instructions(module)
    )


def _refuse_exchanges(module: XlaMessage) -> None:
    """Reject a module that exchanges values with the outside while it runs."""
    for instruction in instructions(module):
        if instruction.opcode in _EXCHANGES:
            raise SnapshotError(
                f"Module {module.name!r} exchanges data with the host or another device while it "
                f"runs ({instruction.opcode} {instruction.name!r}), so it cannot be replayed "
                "alone."
            )


def _restore_one(instruction: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    if restoration.optimized:
        # The order of execution, which the schedule determined.
        instruction.ClearField("control_predecessor_ids")
    instruction.ClearField("original_value")
    if instruction.opcode in _STATEFUL:
        restoration.changes.add("generator")
    rewrite = _REWRITES.get(instruction.opcode)
    if rewrite is not None:
        return rewrite(instruction, restoration)
    if restoration.optimized:
        # How to emit the operation, chosen for the recording's layouts and machine.
        instruction.backend_config = b""
    return [instruction]


def _restore_fusion(fusion: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    fusion.opcode = "call"
    fusion.fusion_kind = ""
    fusion.backend_config = b""
    fusion.ClearField("output_operand_aliasing")
    restoration.changes.add("fusion")
    return [fusion]


def _restore_bitcast(bitcast: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    """Express a bitcast without layouts.

    A bitcast reads the same bytes with another shape: put the operand into the order of its bytes,
    read them as the new type, reshape to the new dimensions, and undo the order of the result.
    """
    operand = restoration.by_id[_only_operand(bitcast)]
    steps: list[XlaMessage] = []

    def step(opcode: str, shape: XlaMessage, dimensions: Sequence[int] = ()) -> None:
        source = steps[-1] if steps else operand
        if opcode == "bitcast-convert" or list(source.shape.dimensions) != list(shape.dimensions):
            pass
        elif opcode == "reshape" or list(dimensions) == list(range(len(dimensions))):
            return
        steps.append(
            restoration.editor.new(opcode, shape, [source], like=bitcast, dimensions=dimensions)
        )

    bytes_before = tuple(reversed(minor_to_major(operand.shape)))
    bytes_after = tuple(reversed(minor_to_major(bitcast.shape)))
    physical_before = [operand.shape.dimensions[dimension] for dimension in bytes_before]
    physical_after = [bitcast.shape.dimensions[dimension] for dimension in bytes_after]
    step("transpose", _with_dimensions(operand.shape, physical_before), bytes_before)
    if operand.shape.element_type == bitcast.shape.element_type:
        _require(prod(physical_before) == prod(physical_after), bitcast)
        step("reshape", _with_dimensions(operand.shape, physical_after))
    else:
        flat_before, flat_after = _flat_dimensions(operand.shape, bitcast)
        step("reshape", _with_dimensions(operand.shape, flat_before))
        step("bitcast-convert", _with_dimensions(bitcast.shape, flat_after))
        step("reshape", _with_dimensions(bitcast.shape, physical_after))
    order_back = [bytes_after.index(dimension) for dimension in range(len(bytes_after))]
    step("transpose", bitcast.shape, order_back)
    restoration.changes.add("bitcast")
    if not steps:
        bitcast.opcode = "copy"
        return _restore_copy(bitcast, restoration)
    last = steps[-1]
    bitcast.opcode = last.opcode
    bitcast.backend_config = b""
    for field in ("operand_ids", "dimensions"):
        bitcast.ClearField(field)
        getattr(bitcast, field).extend(getattr(last, field))
    return [*steps[:-1], bitcast]


def _flat_dimensions(shape: XlaMessage, bitcast: XlaMessage) -> tuple[list[int], list[int]]:
    """Return the dimensions before and after a bitcast-convert between types of any widths."""
    before, after = (ELEMENT_TYPES.get(typed.element_type) for typed in (shape, bitcast.shape))
    counts = prod(shape.dimensions), prod(bitcast.shape.dimensions)
    if before is None or after is None or counts[0] * before.bits != counts[1] * after.bits:
        _require(False, bitcast)
    if counts[0] == counts[1]:
        return [counts[0]], [counts[1]]
    if counts[0] < counts[1]:
        return [counts[0]], [counts[0], counts[1] // max(counts[0], 1)]
    return [counts[1], counts[0] // max(counts[1], 1)], [counts[1]]


def _require(holds: bool, instruction: XlaMessage) -> None:
    if not holds:
        raise SnapshotError(
            f"Bitcast {instruction.name!r} does not keep the number of bytes of its operand.",
            hint="The module is damaged, or its shapes are padded for an unknown device; record "
            "the program with snaprt instead.",
        )


def _with_dimensions(shape: XlaMessage, dimensions: Sequence[int]) -> XlaMessage:
    """Return a row-major array shape with the same element type."""
    row_major = type(shape)(element_type=shape.element_type, dimensions=dimensions)
    row_major.is_dynamic_dimension.extend([False] * len(dimensions))
    row_major.layout.minor_to_major.extend(reversed(range(len(dimensions))))
    return row_major


def _restore_copy(copy: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    # A copy changes the layout or the buffer, never the value.
    copy.backend_config = b""
    if restoration.optimized and copy.shape.element_type not in (TUPLE, TOKEN):
        copy.opcode = "reshape"
    return [copy]


def _restore_constant(constant: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    # The elements are in the order of the literal's own layout, which will be dropped.
    for leaf in literal_leaves(constant.literal):
        rank = len(leaf.shape.dimensions)
        if minor_to_major(leaf.shape) != tuple(reversed(range(rank))):
            leaf.CopyFrom(array_to_literal(literal_to_array(leaf)))
    return [constant]


def _restore_custom_call(call: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    # Its code reads and writes raw buffers, so the layouts it ran with affect what it computes; its
    # backend_config holds its arguments.
    if restoration.optimized and not call.constrain_layout:
        operands = [restoration.by_id[operand].shape for operand in call.operand_ids]
        if any(
            not _is_row_major(leaf)
            for shape in (*operands, call.shape)
            for leaf in leaf_shapes(shape)
        ):
            call.constrain_layout = True
            call.ClearField("operand_shapes_with_layout")
            call.operand_shapes_with_layout.extend(operands)
    return [call]


def _start(instruction: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    restoration.starts[instruction.id] = instruction
    restoration.changes.add("async")
    return []


def _update(instruction: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    restoration.starts[instruction.id] = _started_by(instruction, restoration)
    return []


def _started_by(instruction: XlaMessage, restoration: _Restoration) -> XlaMessage:
    start = restoration.starts.get(_only_operand(instruction))
    if start is None:
        raise SnapshotError(f"{instruction.opcode} {instruction.name!r} has no matching start.")
    return start


def _only_operand(instruction: XlaMessage) -> int:
    if len(instruction.operand_ids) != 1:
        raise SnapshotError(
            f"{instruction.opcode} {instruction.name!r} does not read exactly one value.",
            hint="The file is damaged; dump it again.",
        )
    return instruction.operand_ids[0]


def _finish(instruction: XlaMessage, restoration: _Restoration) -> Sequence[XlaMessage]:
    start = _started_by(instruction, restoration)
    instruction.opcode = {"copy-start": "copy", "async-start": "call"}[start.opcode]
    instruction.async_execution_thread = ""
    for field in ("operand_ids", "called_computation_ids"):
        instruction.ClearField(field)
        getattr(instruction, field).extend(getattr(start, field))
    return _restore_one(instruction, restoration)


_ONLY_OPTIMIZED = frozenset({"async-start", "bitcast", "copy-start", "fusion"})
_STATEFUL = frozenset({"rng", "rng-get-and-update-state"})
_EXCHANGES = frozenset({"infeed", "outfeed", "recv", "recv-done", "send", "send-done"})
_Rewrite = Callable[[XlaMessage, _Restoration], Sequence[XlaMessage]]
_REWRITES: Mapping[str, _Rewrite] = {
    "async-done": _finish,
    "async-start": _start,
    "async-update": _update,
    "bitcast": _restore_bitcast,
    "constant": _restore_constant,
    "copy": _restore_copy,
    "copy-done": _finish,
    "copy-start": _start,
    "custom-call": _restore_custom_call,
    "fusion": _restore_fusion,
}


def _split_tuple_parameters(module: XlaMessage, restoration: _Restoration) -> None:
    """Give the entry computation one array parameter for each element of a tuple parameter."""
    entry = entry_computation(module)
    if all(parameter.shape.element_type != TUPLE for parameter in parameters(entry)):
        return
    restoration.changes.add("tuple")
    next_number = 0
    replacements_of: dict[int, list[XlaMessage]] = {}
    for parameter in parameters(entry):
        if parameter.shape.element_type != TUPLE:
            parameter.parameter_number = next_number
            next_number += 1
            continue
        steps = Steps(restoration.editor, parameter)
        for shape in parameter.shape.tuple_shapes:
            if shape.element_type == TUPLE:
                raise SnapshotError(
                    f"Module {module.name!r} has a parameter that is a tuple of tuples.",
                    hint="Record the program with snaprt instead.",
                )
            steps.add("parameter", shape).parameter_number = next_number
            next_number += 1
        steps.add("tuple", parameter.shape, *steps.made)
        replacements_of[parameter.id] = steps.stand_for(parameter)
    restoration.editor.replace_each(
        entry, lambda instruction: replacements_of.get(instruction.id, [instruction])
    )
    declare_parameters(module)


def _is_row_major(shape: XlaMessage) -> bool:
    return minor_to_major(shape) == tuple(reversed(range(len(shape.dimensions))))


def _drop_layouts(module: XlaMessage, restoration: _Restoration) -> None:
    def default(shape: XlaMessage) -> None:
        for leaf in leaf_shapes(shape):
            if not _is_row_major(leaf):
                restoration.changes.add("layout")
            rank = len(leaf.dimensions)
            # Cleared completely: tiles, memory spaces and element sizes belong to one device.
            leaf.ClearField("layout")
            if leaf.element_type in ELEMENT_TYPES:
                leaf.layout.minor_to_major.extend(reversed(range(rank)))

    for computation in module.computations:
        for instruction in computation.instructions:
            if not instruction.constrain_layout:
                default(instruction.shape)
    programs = [
        *(computation.program_shape for computation in module.computations),
        module.host_program_shape,
    ]
    for program in programs:
        for shape in (*program.parameters, program.result):
            default(shape)


def _drop_module_attributes(module: XlaMessage, restoration: _Restoration) -> None:
    if module.HasField("schedule"):
        restoration.changes.add("schedule")
    for alias in (module.input_output_alias, module.buffer_donor):
        if alias.ByteSize():
            restoration.changes.add("donation")
    for field in (
        "schedule",
        "input_output_alias",
        "buffer_donor",
        "cross_program_prefetches",
        "device_assignment",
    ):
        module.ClearField(field)
