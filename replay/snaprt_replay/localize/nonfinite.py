"""Find the first operation that makes a NaN or an infinity of finite inputs, on one side alone.

Follow a NaN to where it first appears; where that operation reads an infinity, follow the infinity
too. Infinities among the program's constants, for example in masks, are inputs like any other. A
NaN among them is no fault until a select takes it because of the inputs, as where an index is out
of bounds: that select is where the NaN begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from snaprt.hlo.proto import XlaMessage
from snaprt_replay import floatbits
from snaprt_replay.hlo.extract import Piece, Value
from snaprt_replay.localize.findings import InstructionPlace, place_text
from snaprt_replay.localize.program import between, choose_cuts
from snaprt_replay.localize.search import COARSE_REGIONS, REGIONS, Stretch, whole_of
from snaprt_replay.localize.session import Session, Values
from snaprt_replay.localize.sides import (
    MOST_ITERATIONS,
    ComputationFrame,
    branch_taken,
    called_with,
    frame_of,
    run_suspect,
)

Bad = Callable[[np.ndarray], bool]

_ON_TRUE: Final = 1  # the operand that a select takes where its predicate holds


def has_nan(array: np.ndarray) -> bool:
    """Return whether any element is a NaN."""
    return floatbits.is_inexact(array.dtype) and bool(np.isnan(array).any())


def has_infinity(array: np.ndarray) -> bool:
    """Return whether any element is infinite."""
    return floatbits.is_inexact(array.dtype) and bool(np.isinf(array).any())


def is_finite(array: np.ndarray) -> bool:
    """Return whether no element is NaN or infinite."""
    return not has_nan(array) and not has_infinity(array)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """An operation that produced a value that is not finite."""

    place: InstructionPlace  # the instruction
    operands: Sequence[tuple[str, np.ndarray]]  # the values that it read, by name
    result: Sequence[tuple[str, np.ndarray]]  # the values that it produced, by name
    made: str  # "NaN" or "an infinity"
    # Which operand of a select is the constant that it takes; None if the value is a computed one.
    constant: int | None = None

    @property
    def from_finite(self) -> bool:
        """Return whether all values that it read were finite, apart from that constant."""
        return all(
            is_finite(array)
            for number, (_, array) in enumerate(self.operands)
            if number != self.constant
        )


def first_origin(session: Session, frame: ComputationFrame, outputs: Values) -> Origin | None:
    """Return the operation where the non-finite values in a program's outputs begin.

    None if they come from the inputs or the constants.
    """
    if all(map(is_finite, outputs.values())):
        return None
    nan = any(map(has_nan, outputs.values()))
    bad, kind = (has_nan, "NaN") if nan else (has_infinity, "an infinity")
    origin = _Search(session, bad, kind).inside(whole_of(frame))
    if origin is None or origin.from_finite or not nan:
        return origin
    # The NaN comes from an infinity: find the operation that made the infinity.
    earlier = _Search(session, has_infinity, "an infinity")
    return earlier.inside(whole_of(frame), origin.place) or origin


def origin_sentence(origin: Origin) -> str:
    """Return the result of a search for NaN and Inf in one sentence."""
    if origin.constant is not None:
        holds = "holds" if origin.constant == _ON_TRUE else "does not hold"
        return (
            f"{place_text(origin.place)} takes {origin.made}, a constant of the program, where its "
            f"predicate {holds}"
        )
    inputs = "finite inputs" if origin.from_finite else f"inputs without {origin.made}"
    return f"{place_text(origin.place)} produces {origin.made} from {inputs}"


def no_origin_sentence(suspect: str, nonfinite: bool) -> str:
    """Return the result of such a search where no operation is the origin."""
    if not nonfinite:
        return f"the outputs of {suspect} are finite"
    return (
        f"the non-finite values on {suspect} come from the inputs, or are constants of the program"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    session: Session
    bad: Bad
    kind: str

    def inside(
        self, stretch: Stretch, before: InstructionPlace | None = None, most: int = COARSE_REGIONS
    ) -> Origin | None:
        """Return the first origin in a stretch, before the instruction at `before` if any."""
        frame, line, work = stretch.frame, stretch.frame.line, stretch.work
        if not work:
            return None
        if len(work) == 1:
            return self._at_one(stretch, work[0], before)
        cuts = choose_cuts(line, frame.matching, stretch.region, most)
        regions = between(stretch.region, cuts)
        self.session.tell(
            f"{len(work)} instructions: {len(regions)} regions, searching for {self.kind}"
        )
        piece = stretch.piece(regions)
        (tapped,) = run_suspect(self.session, frame, [piece], [stretch.known_values])
        last = _name_in(frame, before)
        for part in regions:
            results = set(line.results(part.start, part.stop))
            gone_bad = any(
                self.bad(array) for value, array in tapped.items() if value.instruction in results
            )
            # What `before` reads may be used up in its own region, and not be among the results.
            is_last = any(
                instruction.name == last for instruction in line.work(part.start, part.stop)
            )
            if gone_bad or is_last:
                origin = self.inside(stretch.part(part, tapped), before, REGIONS)
                if origin is not None:
                    return origin
            if is_last:
                return None
        return None

    def _at_one(
        self, stretch: Stretch, instruction: XlaMessage, before: InstructionPlace | None
    ) -> Origin | None:
        frame = stretch.frame
        own = frame.line.values_of(instruction)
        piece = Piece(
            (*own, *instruction.operand_ids),
            frozenset(value.instruction for value in stretch.known_values),
        )
        (values,) = run_suspect(self.session, frame, [piece], [stretch.known_values])
        operands = [_of(values, operand) for operand in instruction.operand_ids]
        enter = _ENTER.get(instruction.opcode, _enter_nothing)
        for entered in enter(self, frame, instruction, operands, before):
            origin = self.inside(whole_of(entered), before)
            if origin is not None:
                return origin
        if instruction.name == _name_in(frame, before):
            return None  # `before` itself, or a loop or branch that contains it
        result = {value: array for each in own for value, array in _of(values, each).items()}
        if not any(map(self.bad, result.values())):
            return None  # the bad value is a constant in the same region
        constant = None
        if any(self.bad(array) for operand in operands for array in operand.values()):
            constant = self._constant_taken(frame, instruction, operands)
            if constant is None:
                return None
        return Origin(
            frame.line.place(instruction, frame.names),
            [pair for operand in operands for pair in _named(frame, operand)],
            _named(frame, result),
            self.kind,
            constant,
        )

    def _constant_taken(
        self, frame: ComputationFrame, select: XlaMessage, operands: Sequence[Values]
    ) -> int | None:
        """Return which operand is a NaN of the program that a select takes because of the inputs.

        None if the instruction is no select, or takes no such operand.
        """
        line = frame.line
        if self.bad is not has_nan or select.opcode != "select":
            return None
        if not line.depends_on_inputs(select.operand_ids[0]):
            return None
        predicate, *choices = (next(iter(operand.values())) for operand in operands)
        for number, choice in enumerate(choices, _ON_TRUE):
            if not line.depends_on_inputs(select.operand_ids[number]):
                taken = predicate if number == _ON_TRUE else ~predicate
                if has_nan(choice[np.broadcast_to(taken, choice.shape)]):
                    return number
        return None


def _enter_loop(
    search: _Search,
    frame: ComputationFrame,
    loop: XlaMessage,
    operands: Sequence[Values],
    before: InstructionPlace | None,
) -> Iterator[ComputationFrame]:
    """Yield the iterations that make a bad value of a state that has none, up to that of `before`.

    The last is always the one that contains `before`, if any does: a bad value may be used up
    within it.
    """
    state = operands[0]
    body, condition = (
        frame_of(frame.sides, (called, called), [state]) for called in loop.called_computation_ids
    )
    for number in range(MOST_ITERATIONS):
        condition = called_with(condition, (), [state])
        (goes_on,) = _result(search.session, condition).values()
        if not goes_on:
            return
        body = called_with(body, (*frame.names, f"{loop.name} iteration {number}"), [state])
        if _contains(body, before):
            yield body
            return
        result = _result(search.session, body)
        if any(
            search.bad(array) and not search.bad(previous)
            for array, previous in zip(result.values(), state.values(), strict=True)
        ):
            yield body
        state = {Value(0, value.path): array for value, array in result.items()}


def _enter_branch(
    search: _Search,
    frame: ComputationFrame,
    conditional: XlaMessage,
    operands: Sequence[Values],
    before: InstructionPlace | None,
) -> Iterator[ComputationFrame]:
    number = branch_taken(conditional, operands[0])
    called = conditional.called_computation_ids[number]
    arguments = [operands[number + 1]]
    names = (*frame.names, f"{conditional.name} branch {number}")
    yield called_with(frame_of(frame.sides, (called, called), arguments), names, arguments)


def _enter_nothing(
    search: _Search,
    frame: ComputationFrame,
    instruction: XlaMessage,
    operands: Sequence[Values],
    before: InstructionPlace | None,
) -> Iterator[ComputationFrame]:
    return iter(())


_ENTER = {"while": _enter_loop, "conditional": _enter_branch}


def _contains(frame: ComputationFrame, place: InstructionPlace | None) -> bool:
    """Return whether a place is in a frame, or in a loop or branch inside it."""
    return place is not None and place.frame[: len(frame.names)] == frame.names


def _name_in(frame: ComputationFrame, place: InstructionPlace | None) -> str:
    """Return the name of the frame's own instruction that is at a place, or contains it."""
    if place is None or not _contains(frame, place):
        return ""
    deeper = place.frame[len(frame.names) :]
    return deeper[0].partition(" ")[0] if deeper else place.name  # `while.3 iteration 4`


def _result(session: Session, frame: ComputationFrame) -> Values:
    (values,) = run_suspect(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    return values


def _of(values: Values, instruction: int) -> Values:
    return {value: array for value, array in values.items() if value.instruction == instruction}


def _named(frame: ComputationFrame, values: Values) -> list[tuple[str, np.ndarray]]:
    return [(frame.line.by_id[value.instruction].name, array) for value, array in values.items()]
