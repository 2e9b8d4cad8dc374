"""Prove which of the operations in which two programs differ makes their results differ.

An operation is at fault if the difference goes once it is in the suspect's program as the reference
has it, and of several the fewest are that it takes. It must not know files or variants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from snaprt.errors import ExecutionError
from snaprt_replay.hlo.extract import Piece, Value
from snaprt_replay.hlo.hlo_module import parameters
from snaprt_replay.localize.edits import Edit, edits_between
from snaprt_replay.localize.matching import Comparison
from snaprt_replay.localize.measure import error_between
from snaprt_replay.localize.session import Order, Session, Side, Values
from snaprt_replay.localize.substitute import CannotCombineError, substituted

MOST_NAMED = 16
"""How many operations are named where none can be proven to be the one."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What came of putting operations of the reference into the suspect's program.

    Args:
        edits: Those that the difference goes with; all candidates where it did not go.
        is_proven: Whether it went.
        before: The outputs' error as the programs are.
        after: The outputs' error with these operations as the reference has them.
        others: In how many more operations the programs differ.
    """

    edits: tuple[Edit, ...]
    is_proven: bool
    before: float
    after: float
    others: int


def prove(
    session: Session,
    side: Side,
    compared: Comparison,
    inputs: Sequence[np.ndarray],
    outputs: Values,
    reference: Values,
) -> Proof:
    """Find the fewest operations that the difference of two programs goes with.

    Args:
        session: Runs them.
        side: The suspect, with its program.
        compared: The suspect's program with the reference's.
        inputs: The inputs of both.
        outputs: What the suspect's program gives.
        reference: What the reference's program gives, run in the same way.

    Raises:
        BudgetSpentError: There was no time.
    """
    edits = edits_between(compared)
    trial = _Trial(session, side, compared, inputs, list(reference.values()))
    before = trial.error_of(list(outputs.values()))
    found = _fewest(edits, trial)
    after = trial.error(found)
    is_proven = bool(found) and after <= 1.0
    named = found if is_proven else edits[:MOST_NAMED]
    return Proof(tuple(named), is_proven, before, after, len(edits) - len(named))


def whole(side: Side, inputs: Sequence[np.ndarray]) -> Order:
    """Return a side's whole program, to be run on its inputs."""
    line = side.program.entry
    taken = {Value(one.id): inputs[one.parameter_number] for one in parameters(line.computation)}
    return Order(side, line, [Piece((line.root.id,))], [taken])


class _Trial:
    def __init__(
        self,
        session: Session,
        side: Side,
        compared: Comparison,
        inputs: Sequence[np.ndarray],
        expected: Sequence[np.ndarray],
    ) -> None:
        self.session = session
        self.side = side
        self.compared = compared
        self.inputs = inputs
        self.expected = expected
        self.known: dict[frozenset[int], float] = {}

    def error(self, edits: Sequence[Edit]) -> float:
        """Return the outputs' error with some operations as the reference has them."""
        key = frozenset(map(id, edits))
        if key not in self.known:
            self.session.tell(f"with {len(edits)} of the operations as the reference has them")
            self.known[key] = self._run(edits)
        return self.known[key]

    def _run(self, edits: Sequence[Edit]) -> float:
        taken = frozenset(pair for one in edits for pair in one.pairs)
        try:
            program = substituted(self.compared, taken)
            side = dataclasses.replace(self.side, program=program)
            ((values,),) = self.session.run(whole(side, self.inputs))
        except (CannotCombineError, ExecutionError):
            return float("inf")
        return self.error_of(list(values.values()))

    def error_of(self, outputs: Sequence[np.ndarray]) -> float:
        pairs = zip(self.expected, outputs, strict=True)
        return max((error_between(right, got) for right, got in pairs), default=0.0)


def _fewest(edits: Sequence[Edit], trial: _Trial) -> Sequence[Edit]:
    """Return edits of which none can be left out (delta debugging, Zeller and Hildebrandt 2002)."""
    found = list(edits)
    if len(found) > 1 and trial.error(found) > 1.0:
        return found
    parts = 2
    while len(found) > 1:
        size = -(-len(found) // parts)
        chunks = [found[start : start + size] for start in range(0, len(found), size)]
        rests = [[each for other in chunks if other is not one for each in other] for one in chunks]
        tried = [*chunks, *(rests if len(chunks) > 2 else ())]
        smaller = next((one for one in tried if trial.error(one) <= 1.0), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(2, parts - 1)
            found = smaller
        elif size == 1:
            break
        else:
            parts = min(len(found), parts * 2)
    return found
