"""Go into loops and branches: which iteration, which branch; it must not know the search.

A loop is run from outside, one iteration after the other from the reference's state, until the
suspect makes an error in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.extract import Piece, Value
from snaprt_replay.localize.session import Session, Values
from snaprt_replay.localize.sides import Frame, Pair, called_with, frame_of, run_clean

MOST_ITERATIONS: Final = 1000
"""How many iterations of a loop are looked at, from its start."""
_TOLD_EVERY: Final = 50

Enter = Callable[[Session, Frame, XlaMessage, Sequence[Values]], "tuple[Frame, Pair] | None"]
"""Take an instruction and its operands' values; return the frame that goes wrong, and its result.

None if none does.
"""


def enter_loop(
    session: Session, frame: Frame, loop: XlaMessage, operands: Sequence[Values]
) -> tuple[Frame, Pair] | None:
    """Return the first iteration, of body or condition, in which the suspect makes an error.

    Where no iteration makes one beyond its tolerance, it is that of the largest.
    """
    state = operands[0]
    body, condition = (frame_of(frame.sides, _called(frame, loop, one), [state]) for one in (0, 1))
    worst: tuple[float, Frame, Pair] | None = None
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
        # The next state, in the program's own dtypes, is what the reference gave.
        state = {Value(0, value.path): array for value, array in result.clean().items()}
    return worst[1:] if worst else None


def enter_branch(
    session: Session, frame: Frame, conditional: XlaMessage, operands: Sequence[Values]
) -> tuple[Frame, Pair] | None:
    """Return the branch that was taken, if the suspect makes an error in it."""
    number = branch_taken(conditional, operands[0])
    names = (*frame.names, f"{conditional.name} branch {number}")
    taken = [operands[number + 1]]
    branch = frame_of(frame.sides, _called(frame, conditional, number), taken)
    branch = called_with(branch, names, taken)
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


def _called(frame: Frame, instruction: XlaMessage, number: int) -> tuple[int, int]:
    other = frame.lines[1].by_id[frame.matching[instruction.id]]
    return instruction.called_computation_ids[number], other.called_computation_ids[number]


def _result(session: Session, frame: Frame) -> Pair:
    (pair,) = run_clean(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    return pair


def _only(values: Values) -> np.ndarray:
    (array,) = values.values()
    return array
