"""Give the state of loops and branches the same layout in two programs; this must not run any.

An edit in a loop can change which of the surrounding values become part of its state, and in which
order: XLA's converter appends the values that the body reads in the order in which it meets them,
and moves values out that no longer change. The computations inside can be compared and exchanged
only if both programs have the same layout.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from snaprt.hlo.literals import TUPLE, dtype_of
from snaprt.hlo.proto import HloInstructionProto, ShapeProto, XlaMessage
from snaprt_replay.hlo.hlo_module import (
    Editor,
    Steps,
    copy_of,
    instructions,
    parameters,
    reached,
    root_instruction,
    set_instructions,
    shape_text,
)
from snaprt_replay.localize.edits import edits_between, with_nested
from snaprt_replay.localize.matching import STEPPED, ComputationDiff, Digests, compare
from snaprt_replay.localize.program import FlatModule, Line

_MOST_DEPTH = 8  # of nested loops and branches
_MOST_COPIED = 50  # instructions copied to give one program a value that only the other has
_PASSED_ON = "get-tuple-element"

_Layout = Sequence[tuple[int | None, int | None]]
"""For each element of the common state, its number in the suspect and in the reference."""


def aligned(suspect: FlatModule, reference: FlatModule) -> ComputationDiff:
    """Compare two programs after giving their loops and branches the same state layout.

    Compare them unchanged where a layout cannot be changed, or where fewer operations differ that
    way, for example because an edit swapped two values of the state.
    """
    as_they_are = compared = compare(suspect.entry, reference.entry)
    for _ in range(_MOST_DEPTH):
        laid_out = None if compared.is_same else _lay_out_alike(compared)
        if laid_out is None:
            break
        compared = compare(*(program.entry for program in laid_out))
    if compared is not as_they_are and all(
        _is_compared_inside(nested) for nested, _ in with_nested(as_they_are)
    ):
        return min(compared, as_they_are, key=lambda diff: len(edits_between(diff)))
    return compared


def _is_compared_inside(compared: ComputationDiff) -> bool:
    by_id = compared.lines[0].by_id
    return all(
        partner in compared.inside
        for partner in compared.partners
        if by_id[partner].opcode in STEPPED
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of a loop or of a branch: where it gets the values that it reads."""

    line: Line  # the computation that contains it
    instruction: XlaMessage  # the loop, or the conditional
    position: int  # the index of the operand that is passed
    called: tuple[int, ...]  # the ids of the computations that receive the operand

    @property
    def is_loop(self) -> bool:
        return self.instruction.opcode == "while"

    @property
    def operand(self) -> XlaMessage:
        return self.line.by_id[self.instruction.operand_ids[self.position]]

    @property
    def is_tuple(self) -> bool:
        return self.operand.shape.element_type == TUPLE

    @property
    def elements(self) -> list[int]:
        """Return the ids of the values that are passed."""
        return list(self.operand.operand_ids) if self.is_tuple else [self.operand.id]

    def parameter(self, number: int) -> XlaMessage:
        return parameters(self.line.program.computations[self.called[number]])[0]

    def can_be_laid_out(self) -> bool:
        """Return whether each element is one array that is stored and read individually."""
        program = self.line.program
        if self.is_tuple and self.operand.opcode != "tuple":
            return False
        if any(self.line.by_id[element].shape.element_type == TUPLE for element in self.elements):
            return False
        readers = [
            (self.instruction.id, self.line.computation)
            if self.is_loop
            else (0, self.line.computation)
        ]
        if self.is_tuple:
            for number, called in enumerate(self.called):
                readers.append((self.parameter(number).id, program.computations[called]))
        if (
            self.is_loop
            and root_instruction(program.computations[self.called[0]]).opcode != "tuple"
        ):
            return False
        return all(
            instruction.opcode == _PASSED_ON
            for read, computation in readers
            for instruction in computation.instructions
            if read in instruction.operand_ids
        ) and all(read != computation.root_id for read, computation in readers)


def _lay_out_alike(compared: ComputationDiff) -> tuple[FlatModule, FlatModule] | None:
    """Return both programs with the same layout for the outermost loops and branches."""
    pairs = [
        (nested, calls, layout)
        for nested, _ in with_nested(compared)
        for calls in _changed_calls(nested)
        for layout in [_layout(nested, *calls)]
        if any(suspect_number != reference_number for suspect_number, reference_number in layout)
    ]
    if not pairs:
        return None
    layouts: dict[tuple[int, ...], _Layout] = {}
    for _, (suspect_call, reference_call), layout in pairs:
        layouts.setdefault((*suspect_call.called, *reference_call.called), layout)
    programs = []
    for side in (0, 1):
        editing = _Editing(compared.lines[side].program)
        visited: set[tuple[int, ...]] = set()
        for nested, calls, _ in pairs:
            key = (*calls[0].called, *calls[1].called)
            editing.lay_out(nested, calls, side, layouts[key], key not in visited)
            visited.add(key)
        programs.append(editing.program())
    return programs[0], programs[1]


def _changed_calls(compared: ComputationDiff) -> Iterator[tuple[_Call, _Call]]:
    """Yield pairs of calls that correspond to each other and whose layout can be changed."""
    ours, theirs = compared.lines
    for suspect_id, reference_id in compared.partners.items():
        pair = ours.by_id[suspect_id], theirs.by_id[reference_id]
        if pair[0].opcode != pair[1].opcode or pair[0].opcode not in STEPPED:
            continue
        calls = [
            _calls(line, instruction)
            for line, instruction in zip(compared.lines, pair, strict=True)
        ]
        for suspect_call, reference_call in zip(*calls, strict=False):
            if suspect_call.can_be_laid_out() and reference_call.can_be_laid_out():
                yield suspect_call, reference_call


def _calls(line: Line, instruction: XlaMessage) -> list[_Call]:
    called = tuple(instruction.called_computation_ids)
    if instruction.opcode == "while":
        return [_Call(line, instruction, 0, called)]
    return [
        _Call(line, instruction, i + 1, (computation_id,))
        for i, computation_id in enumerate(called)
    ]


# --- which elements correspond ---


def _layout(compared: ComputationDiff, suspect: _Call, reference: _Call) -> _Layout:
    """Return which elements of two calls correspond: the same value, or similar uses."""
    calls = (suspect, reference)
    keys = [
        [(_shape(call, i), digests.values[i]) for i in call.elements]
        for call, digests in zip(calls, compared.digests, strict=True)
    ]
    uses = [_uses(call) for call in calls]
    pairs: dict[int, int] = {}

    def pair(is_alike: Callable[[int, int], bool]) -> None:
        """Pair elements that are alike, starting with those whose uses are most similar."""
        candidates = sorted(
            (-(uses[0][i] & uses[1][j]).total(), abs(i - j), i, j)
            for i in range(len(keys[0]))
            for j in range(len(keys[1]))
            if i not in pairs and j not in pairs.values() and is_alike(i, j)
        )
        for *_, i, j in candidates:
            if i not in pairs and j not in pairs.values():
                pairs[i] = j

    changing = [_changing(call) for call in calls]
    pair(lambda i, j: keys[0][i] == keys[1][j] and (i in changing[0]) == (j in changing[1]))
    pair(lambda i, j: compared.partners.get(suspect.elements[i]) == reference.elements[j])
    counterparts = [set[int](), set[int]()]
    if not suspect.is_loop:
        for side, call in enumerate(calls):
            numbered = enumerate(call.elements)
            counterparts[side] = {
                i for i, element in numbered if _is_known(compared, element, 1 - side)
            }
    pair(
        lambda i, j: (
            keys[0][i][0] == keys[1][j][0]
            and (i in changing[0] and j in changing[1])
            and not (i in counterparts[0] and j in counterparts[1])
        )
    )
    pair(lambda i, j: keys[0][i] == keys[1][j])
    added = [(None, j) for j in range(len(keys[1])) if j not in pairs.values()]
    return [*((i, pairs.get(i)) for i in range(len(keys[0]))), *added]


def _shape(call: _Call, element: int) -> str:
    return shape_text(call.line.by_id[element].shape)


def _changing(call: _Call) -> set[int]:
    """Return which elements of a loop's state an iteration changes."""
    if not call.is_loop:
        return set(range(len(call.elements)))
    body = call.line.program.line(call.called[0])
    state = call.parameter(0).id
    passed = enumerate(body.by_id[i] for i in body.root.operand_ids)
    return {
        i
        for i, element in passed
        if element.opcode != _PASSED_ON
        or element.tuple_index != i
        or state not in element.operand_ids
    }


def _uses(call: _Call) -> list[Counter[bytes]]:
    """Return, for each element, the instructions that read it and the one that updates it."""
    uses: list[Counter[bytes]] = [Counter() for _ in call.elements]
    for number, called in enumerate(call.called):
        line = call.line.program.line(called)
        own = Digests(line).own
        state = call.parameter(number).id
        elements: defaultdict[int, list[int]] = defaultdict(list)
        for instruction in line.order:
            if not call.is_tuple:
                if instruction.id == state:
                    elements[instruction.id].append(0)
            elif instruction.opcode == _PASSED_ON and state in instruction.operand_ids:
                elements[instruction.id].append(instruction.tuple_index)
        for instruction in line.order:
            for read in instruction.operand_ids:
                for element in elements.get(read, ()):
                    if instruction.id != line.root.id or not call.is_loop:
                        uses[element][own[instruction.id]] += 1
        if call.is_loop and number == 0:
            for element, instruction_id in enumerate(line.root.operand_ids):
                uses[element][own[instruction_id]] += 1
    return uses


# --- the edit ---


class _Editing:
    """A copy of a program in which layouts are changed."""

    def __init__(self, program: FlatModule) -> None:
        self.source = program
        self.module = copy_of(program.module)
        self.editor = Editor(self.module)
        self.computations = {
            computation.id: computation for computation in self.module.computations
        }
        elements = (
            instruction
            for instruction in instructions(self.module)
            if instruction.opcode == _PASSED_ON
        )
        self.element = copy_of(next(elements, HloInstructionProto()))

    def program(self) -> FlatModule:
        return FlatModule(self.module, self.source.scopes, self.source.origins)

    def lay_out(
        self,
        compared: ComputationDiff,
        calls: tuple[_Call, _Call],
        side: int,
        layout: _Layout,
        with_called: bool,
    ) -> None:
        """Change the layout of one call and, if `with_called`, of the computations it calls."""
        call, other_call = calls[side], calls[not side]
        numbers = [pair[side] for pair in layout]
        shapes = [
            next(
                owner.line.by_id[owner.elements[number]].shape
                for owner, number in ((call, pair[side]), (other_call, pair[not side]))
                if number is not None
            )
            for pair in layout
        ]
        state = ShapeProto(element_type=TUPLE, tuple_shapes=shapes)
        computation = self.computations[call.line.computation.id]
        by_id = _by_id(computation.instructions)
        instruction = by_id[call.instruction.id]
        created: list[XlaMessage] = []
        operands = []
        for pair, shape in zip(layout, shapes, strict=True):
            own_number, other_number = pair[side], pair[not side]
            if own_number is not None:
                operands.append(by_id[call.elements[own_number]])
                continue
            assert other_number is not None
            added: list[XlaMessage] = []
            element_id = self._like(compared, other_call.elements[other_number], side, added)
            if element_id is None or _depends_on(
                element_id, instruction.id, {**by_id, **_by_id(added)}
            ):
                added = self._zeros(shape, call.operand)
                element_id = added[-1].id
            created += added
            operands.append({**by_id, **_by_id(added)}[element_id])
        created.append(self.editor.new("tuple", state, operands, like=call.operand))
        instruction.operand_ids[call.position] = created[-1].id
        if call.is_loop:
            instruction.shape.CopyFrom(state)
            _renumber(computation, instruction.id, numbers)
        self._insert(computation, created)
        for number, called in enumerate(call.called if with_called else ()):
            self._take(call, number, self.computations[called], state, numbers)

    def _take(
        self,
        call: _Call,
        number: int,
        computation: XlaMessage,
        state: XlaMessage,
        numbers: Sequence[int | None],
    ) -> None:
        """Make a called computation read, and a loop's body return, the new layout."""
        parameter = next(
            instruction
            for instruction in computation.instructions
            if instruction.opcode == "parameter"
        )
        old_shape = copy_of(parameter.shape)
        parameter.shape.CopyFrom(state)
        created: list[XlaMessage] = []
        if call.is_tuple:
            _renumber(computation, parameter.id, numbers)
        else:
            element = self._element(parameter, old_shape, numbers.index(0))
            created.append(element)
            for instruction in computation.instructions:
                instruction.operand_ids[:] = [
                    element.id if i == parameter.id else i for i in instruction.operand_ids
                ]
            if computation.root_id == parameter.id:
                computation.root_id = element.id
        if call.is_loop and number == 0:
            root = next(
                instruction
                for instruction in computation.instructions
                if instruction.id == computation.root_id
            )
            elements: list[int] = []
            for position, old in enumerate(numbers):
                if old is not None:
                    elements.append(root.operand_ids[old])
                    continue
                created.append(self._element(parameter, state.tuple_shapes[position], position))
                elements.append(created[-1].id)
            root.operand_ids[:] = elements
            root.shape.CopyFrom(state)
            computation.program_shape.result.CopyFrom(state)
        computation.program_shape.parameters[0].CopyFrom(state)
        self._insert(computation, created)

    def _like(
        self, compared: ComputationDiff, element: int, side: int, copies: list[XlaMessage]
    ) -> int | None:
        """Return the id of the instruction that has the value of an element of the other side.

        Where there is none, copy it from the other side and add the copies to ``copies``, unless it
        calls a computation.
        """
        existing = _of_value(compared, element, side)
        if existing is not None:
            return existing
        original = compared.lines[not side].by_id[element]
        if (
            original.opcode == "parameter"
            or original.called_computation_ids
            or len(copies) > _MOST_COPIED
        ):
            return None
        operands = [self._like(compared, operand, side, copies) for operand in original.operand_ids]
        copy = copy_of(original)
        copy.id = self.editor.new_id(original)
        copy.name = f"{original.name}.copy.{copy.id}"
        copy.ClearField("metadata")  # its stack frame is another program's
        copy.ClearField("control_predecessor_ids")
        for index, operand in enumerate(operands):
            if operand is None:
                return None
            copy.operand_ids[index] = operand
        copies.append(copy)
        return copy.id

    def _element(self, state: XlaMessage, shape: XlaMessage, position: int) -> XlaMessage:
        # A digest covers whatever else XLA writes in the message, even an empty field.
        element = copy_of(self.element)
        like = self.editor.new(_PASSED_ON, shape, [state], like=state)
        element.MergeFrom(like)
        element.shape.CopyFrom(shape)
        element.operand_ids[:] = [state.id]
        element.tuple_index = position
        return element

    def _zeros(self, shape: XlaMessage, like: XlaMessage) -> list[XlaMessage]:
        steps = Steps(self.editor, like)
        steps.add_filled(np.zeros((), dtype_of(shape)), shape)
        return steps.made

    def _insert(self, computation: XlaMessage, created: Sequence[XlaMessage]) -> None:
        """Add instructions, and sort all of them so that operands come first."""
        everything = _by_id([*computation.instructions, *created])
        ordered: dict[int, None] = {}
        for first in everything:
            waiting = [first]
            while waiting:
                missing = [i for i in everything[waiting[-1]].operand_ids if i not in ordered]
                if missing:
                    waiting += missing
                else:
                    ordered[waiting.pop()] = None
        set_instructions(computation, (everything[instruction_id] for instruction_id in ordered))


def _renumber(computation: XlaMessage, state: int, numbers: Sequence[int | None]) -> None:
    now: Mapping[int | None, int] = {old: new for new, old in enumerate(numbers)}
    for instruction in computation.instructions:
        if instruction.opcode == _PASSED_ON and state in instruction.operand_ids:
            instruction.tuple_index = now[instruction.tuple_index]


def _of_value(compared: ComputationDiff, element: int, side: int) -> int | None:
    """Return the instruction of one side that has the value of an element of the other."""
    partners = compared.partners if side else compared.partners_back
    if compared.lines[not side].by_id[element].opcode == "parameter":
        return partners.get(element)  # whether or not anything reads it
    value = compared.digests[not side].values[element]
    values = compared.digests[side].values
    matches = (
        instruction.id
        for instruction in compared.lines[side].order
        if values[instruction.id] == value
    )
    return next(matches, None)


def _is_known(compared: ComputationDiff, element: int, side: int) -> bool:
    """Return whether this side can obtain the value of an element of the other side."""
    if _of_value(compared, element, side) is not None:
        return True
    instruction = compared.lines[not side].by_id[element]
    return instruction.opcode == _PASSED_ON and _is_known(
        compared, instruction.operand_ids[0], side
    )


def _by_id(sequence: Sequence[XlaMessage]) -> dict[int, XlaMessage]:
    return {instruction.id: instruction for instruction in sequence}


def _depends_on(instruction_id: int, operand_id: int, by_id: Mapping[int, XlaMessage]) -> bool:
    return operand_id in reached([instruction_id], lambda operand: by_id[operand].operand_ids)
