"""Go straight to where the failure starts, as `localize` finds it; it must not know files.

A difference, a NaN and an infinity each begin at an instruction. That instruction on the values
that it was given is, as a rule, already the smallest program there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from snaprt.errors import SnaprtError
from snaprt_replay.hlo.extract import Piece, Value, arrays_of
from snaprt_replay.localize.nonfinite import Origin, first_origin
from snaprt_replay.localize.program import Program
from snaprt_replay.localize.search import Search, piece_of
from snaprt_replay.localize.session import BudgetSpentError, Session, Side
from snaprt_replay.localize.sides import Frame, frame_of, run_both, run_suspect
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import CheckName
from snaprt_replay.minify.cutting import Source, matching_of
from snaprt_replay.run.workers import Outcome

RunSide = Callable[[int, bytes, Sequence[np.ndarray]], Future[Outcome]]
"""Run a serialized module as the suspect (0) or the reference (1) does."""


def jump(
    candidate: Candidate,
    check: CheckName,
    run: RunSide,
    budget: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Candidate | None:
    """Return the region at which a failure starts as a program of its own.

    Args:
        candidate: What fails.
        check: Which check says so.
        run: Runs either side.
        budget: Seconds that looking for it may take.
        tell: Called with a line of progress.

    Returns:
        None if it starts nowhere in particular, or was not found.
    """
    find = _FINDERS.get(check)
    if find is None or candidate.expected is not None:
        return None
    programs = [Program(module, {}) for module in candidate.modules]

    def side(number: int, name: str) -> Side:
        def start(hlo: bytes, inputs: Sequence[np.ndarray]) -> Future[Outcome]:
            return run(number, hlo, inputs)

        return Side(name, programs[min(number, len(programs) - 1)], start)

    sides = (side(0, "A"), side(1, "B"))
    entries = [one.program.module.entry_computation_id for one in sides]
    arguments = [{Value(0): one} for one in candidate.inputs]
    frame = frame_of(sides, (entries[0], entries[1]), arguments)
    frame = dataclasses.replace(frame, matching=matching_of(frame.lines))
    try:
        made = find(Session(None, budget, tell), frame)
    except SnaprtError as error:
        told = f"where it starts cannot be told: {error.message}"
        tell(f"{candidate.instructions} instructions: {told}")
        return None
    except BudgetSpentError:
        return None
    if made is None:
        return None
    return dataclasses.replace(
        made, variants=candidate.variants, view="jump", change="the region that goes wrong alone"
    )


def _difference(session: Session, frame: Frame) -> Candidate | None:
    (outputs,) = run_both(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    search = Search(session)
    found = search.whole(frame, outputs)
    if found.kind not in ("instruction", "interaction") or search.innermost is None:
        return None
    inner, region, known = search.innermost
    source = _source(inner)
    return source.cut(piece_of(inner, region, [region]), {**inner.arguments, **known})


def _not_finite(session: Session, frame: Frame) -> Candidate | None:
    (outputs,) = run_suspect(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    origin = first_origin(session, frame, outputs)
    return None if origin is None else _around(frame, origin)


def _around(frame: Frame, origin: Origin) -> Candidate | None:
    """Return the instruction of an origin, on what it read."""
    program = frame.sides[0].program
    for computation in program.module.computations:
        for one in computation.instructions:
            if one.name == origin.place.name:
                line = program.line(computation.id)
                arrays = iter(array for _, array in origin.operands)
                values = {
                    value: next(arrays)
                    for operand in one.operand_ids
                    for value, _ in arrays_of(line.by_id[operand])
                }
                given = [
                    operand
                    for operand in one.operand_ids
                    if line.by_id[operand].opcode != "constant"
                ]
                piece = Piece((one.id,), frozenset(given))
                return Source((line,), {each: each for each in line.by_id}).cut(piece, values)
    return None


def _source(frame: Frame) -> Source:
    same = frame.sides[0].program is frame.sides[1].program
    return Source(frame.lines[:1] if same else frame.lines, frame.matching)


_FINDERS = {"mismatch": _difference, "nan": _not_finite}
