"""The two sides at one place in the program, and how they are compared there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.extract import Piece, Value
from snaprt_replay.hlo.hlo_module import parameters
from snaprt_replay.localize.matching import Matching, match
from snaprt_replay.localize.measure import error_between, move
from snaprt_replay.localize.program import Line
from snaprt_replay.localize.session import Order, Session, Side, Values


@dataclasses.dataclass(frozen=True, eq=False)
class ComputationFrame:
    """One computation as it runs once: the program itself, one iteration of a loop, a branch."""

    sides: tuple[Side, Side]  # the suspect and the reference
    lines: tuple[Line, Line]  # their computations
    matching: Matching  # which instruction of one is which instruction of the other
    names: tuple[str, ...]  # the enclosing loops and branches, outermost first
    # The values of its parameters; like all values, by the suspect's instructions.
    arguments: Values

    @property
    def line(self) -> Line:
        """Return the suspect's computation."""
        return self.lines[0]


def frame_of(
    sides: tuple[Side, Side], computation_ids: tuple[int, int], arguments: Sequence[Values]
) -> ComputationFrame:
    """Return the frame of two computations that take the same arguments.

    Args:
        sides: The suspect and the reference.
        computation_ids: Their computations.
        arguments: The arrays of each parameter, in order, by any instruction's values.
    """
    suspect, reference = (
        side.program.line(computation_id)
        for side, computation_id in zip(sides, computation_ids, strict=True)
    )
    frame = ComputationFrame(sides, (suspect, reference), match(suspect, reference), (), {})
    return called_with(frame, (), arguments)


def called_with(
    frame: ComputationFrame, names: tuple[str, ...], arguments: Sequence[Values]
) -> ComputationFrame:
    """Return a frame of the same computations, called with other arguments."""
    declared = parameters(frame.line.computation)
    values = {
        Value(parameter.id, value.path): array
        for parameter, argument in zip(declared, arguments, strict=True)
        for value, array in argument.items()
    }
    return dataclasses.replace(frame, names=names, arguments=values)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """The values that a piece gave on both sides, by the suspect's instructions."""

    suspect: Values  # the suspect's values
    reference: Values  # the reference's values
    # The reference's values for inputs moved by a rounding (`measure.move`); empty if not run.
    moved: Values = dataclasses.field(default_factory=dict)

    def error(self, *instructions: int) -> float:
        """Return the largest error of some instructions' values, by default of all."""
        return max(
            (
                error_between(self.reference[value], array, self.moved.get(value))
                for value, array in self.suspect.items()
                if not instructions or value.instruction in instructions
            ),
            default=0.0,
        )

    def clean(self) -> Values:
        """Return the reference's values in the program's own dtypes; both sides start from them."""
        with np.errstate(over="ignore"):  # what overflows there is infinite on both sides
            return {
                value: array.astype(self.suspect[value].dtype, copy=False)
                for value, array in self.reference.items()
            }


def run_suspect(
    session: Session, frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> list[Values]:
    """Run pieces on the suspect side alone."""
    return session.run(_suspect_order(frame, pieces, values))[0]


def run_reference(
    session: Session, frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> list[Values]:
    """Run pieces on the reference side alone."""
    return _by_suspect(frame, session.run(_reference_order(frame, pieces, values))[0])


def run_both(
    session: Session, frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> list[Pair]:
    """Run the same pieces on both sides, from the same values."""
    suspect, reference = session.run(
        _suspect_order(frame, pieces, values), _reference_order(frame, pieces, values)
    )
    return [Pair(*pair) for pair in zip(suspect, _by_suspect(frame, reference), strict=True)]


def run_clean(
    session: Session, frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> list[Pair]:
    """Run pieces on both sides, to see which makes an error that rounding does not explain.

    Where there is an error, run the same modules on the reference side again, with inputs moved by
    a rounding: a cancellation amplifies the rounding of any correct execution just as much.
    """
    pairs = run_both(session, frame, pieces, values)
    if all(pair.error() <= 1.0 for pair in pairs):
        return pairs
    generator = np.random.default_rng(0)
    moved = [
        {value: move(array, generator) for value, array in piece_values.items()}
        for piece_values in values
    ]
    answers = run_reference(session, frame, pieces, moved)
    return [
        dataclasses.replace(pair, moved=answer) for pair, answer in zip(pairs, answers, strict=True)
    ]


def _suspect_order(
    frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> Order:
    return Order(frame.sides[0], frame.line, pieces, values)


def _reference_order(
    frame: ComputationFrame, pieces: Sequence[Piece], values: Sequence[Values]
) -> Order:
    matching = frame.matching
    return Order(
        frame.sides[1],
        frame.lines[1],
        [
            Piece(
                tuple(matching[result] for result in piece.results),
                frozenset(matching[instruction] for instruction in piece.given),
            )
            for piece in pieces
        ],
        [
            {
                Value(matching[value.instruction], value.path): array
                for value, array in piece_values.items()
                if value.instruction in matching
            }
            for piece_values in values
        ],
    )


def _by_suspect(frame: ComputationFrame, results: Sequence[Values]) -> list[Values]:
    suspect_ids: Mapping[int, int] = {
        reference_id: suspect_id for suspect_id, reference_id in frame.matching.items()
    }
    return [
        {
            Value(suspect_ids[value.instruction], value.path): array
            for value, array in result.items()
        }
        for result in results
    ]


MOST_ITERATIONS: Final = 1000
"""How many iterations of a loop are searched, from its start."""
_TOLD_EVERY: Final = 50

Enter = Callable[
    [Session, ComputationFrame, XlaMessage, Sequence[Values]],
    "tuple[ComputationFrame, Pair] | None",
]
"""Take an instruction and its operands' values; return the frame that goes wrong, and its result.

None if none does.
"""


def enter_loop(
    session: Session, frame: ComputationFrame, loop: XlaMessage, operands: Sequence[Values]
) -> tuple[ComputationFrame, Pair] | None:
    """Return the first iteration of body or condition in which the suspect makes an error.

    Where no error exceeds its tolerance, return the iteration with the largest.
    """
    state = operands[0]
    body, condition = (
        frame_of(frame.sides, _called(frame, loop, position), [state]) for position in (0, 1)
    )
    worst: tuple[float, ComputationFrame, Pair] | None = None
    for number in range(MOST_ITERATIONS):
        if number % _TOLD_EVERY == 0:
            session.tell(f"iteration {number} of {loop.name}")
        names = (*frame.names, f"{loop.name} iteration {number}")
        condition = called_with(condition, (*names, "condition"), [state])
        goes_on = _result(session, condition)
        if goes_on.error() > 1.0:
            return condition, goes_on
        if not _only(goes_on.reference):
            break
        body = called_with(body, names, [state])
        result = _result(session, body)
        error = result.error()
        if error > 1.0:
            return body, result
        if worst is None or error > worst[0]:
            worst = (error, body, result)
        # The next state is the reference's result in the program's own dtypes.
        state = {Value(0, value.path): array for value, array in result.clean().items()}
    return worst[1:] if worst else None


def enter_branch(
    session: Session, frame: ComputationFrame, conditional: XlaMessage, operands: Sequence[Values]
) -> tuple[ComputationFrame, Pair] | None:
    """Return the branch that was taken if the suspect makes an error in it."""
    number = branch_taken(conditional, operands[0])
    names = (*frame.names, f"{conditional.name} branch {number}")
    arguments = [operands[number + 1]]
    branch = frame_of(frame.sides, _called(frame, conditional, number), arguments)
    branch = called_with(branch, names, arguments)
    result = _result(session, branch)
    return (branch, result) if result.error() > 1.0 else None


def branch_taken(conditional: XlaMessage, index: Values) -> int:
    """Return the number of the branch that a conditional takes for its first operand's value."""
    value, count = _only(index), len(conditional.called_computation_ids)
    if value.dtype == np.bool_:
        return 0 if value else 1
    # XLA takes the last branch for an index that is out of range.
    return int(value) if 0 <= int(value) < count else count - 1


ENTER: Final[Mapping[str, Enter]] = {"while": enter_loop, "conditional": enter_branch}


def _called(frame: ComputationFrame, instruction: XlaMessage, number: int) -> tuple[int, int]:
    partner = frame.lines[1].by_id[frame.matching[instruction.id]]
    return instruction.called_computation_ids[number], partner.called_computation_ids[number]


def _result(session: Session, frame: ComputationFrame) -> Pair:
    (pair,) = run_clean(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    return pair


def _only(values: Values) -> np.ndarray:
    (array,) = values.values()
    return array
