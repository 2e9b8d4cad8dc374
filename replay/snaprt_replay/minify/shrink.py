"""Make one program that is ready to run as small as it gets: look, jump, reduce, look again.

A difference, a NaN and an infinity each begin at an instruction, which `localize` finds. It, on the
values that it was given, is as a rule already the smallest program there is. From there on, one
view after the other is tried until none makes the program smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np

from snaprt.errors import SnaprtError
from snaprt_replay.hlo.extract import Piece, Value, arrays_of
from snaprt_replay.load.case import Signature
from snaprt_replay.load.modules import random_inputs
from snaprt_replay.localize.nonfinite import Origin, first_origin
from snaprt_replay.localize.program import FlatModule
from snaprt_replay.localize.search import Search, piece_of
from snaprt_replay.localize.session import BudgetSpentError, Session, Side
from snaprt_replay.localize.sides import ComputationFrame, frame_of, run_both, run_suspect
from snaprt_replay.minify import simpler
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.checks import Check, Judge, Patience, Symptom
from snaprt_replay.minify.cutting import Base, Source, Tap, matching_of
from snaprt_replay.minify.shapes import shapes
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.workers import Outcome

_JUMP_SHARE: Final = 0.5  # of the budget, for finding where the failure starts
_UNOPTIMIZED: Final = {"xla_backend_optimization_level": 0}

Tell = Callable[[str], None]
View = Callable[[Base, int], Iterator[Candidate]]

#: What takes most away comes first.
VIEWS: Final[Sequence[View]] = (
    simpler.outputs,
    simpler.prefix,
    simpler.suffix,
    simpler.loops,
    simpler.instructions,
    shapes,
    simpler.dtypes,
    simpler.values,
    simpler.flags,
)
_CLOSEST_FIRST: Final = ("flags", "values", "dtypes", "shapes", "instructions", "outputs")


class Start(Protocol):
    """Start a serialized module as a side runs it: with `workers.Workers.submit`, or another."""

    def __call__(
        self, side: int, variant: Variant | None, hlo: bytes, inputs: Sequence[np.ndarray]
    ) -> Future[Outcome]:
        """Return the outcome to come; the variant is None where a candidate has none."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Shrunk:
    """A program, minified."""

    original: Candidate  # what it was
    candidate: Candidate  # the smallest program that still fails
    neighbor: Candidate | None  # the program most like it that passes; None if none is known
    first: Symptom  # what the failure of the original looked like
    # What the smaller programs were asked for: the same, or where the failure turned out to start,
    # what it looks like there.
    symptom: Symptom
    steps: tuple[str, ...]  # what was done, in words
    asked: int  # how many programs were looked at
    seconds: float  # how long it took
    finished: bool  # whether it cannot be made smaller; False where the budget was spent before


def shrink(
    candidate: Candidate,
    check: Check,
    start: Start,
    patience: Patience,
    taps: Callable[[Candidate], Sequence[Tap]],
    tell: Tell = lambda line: None,
) -> Shrunk | None:
    """Make a program as small as it gets while it still fails; return None if it does not fail.

    Args:
        candidate: The program.
        check: What counts as its failure.
        start: Runs a side.
        patience: How long to look.
        taps: Gives the ways to record a program's intermediate values.
        tell: Called with a line of progress.
    """
    with Judge(check, functools.partial(_run, start), patience) as judge:
        first = judge.look_first(candidate)
        if first is None:
            return None
        tell(f"{candidate.length}: {first}")
        judge.adopt(first)
        smallest, steps, finished = candidate, [], True

        def adopt(smaller: Candidate) -> None:
            nonlocal smallest
            smallest = smaller
            steps.append(f"{smaller.view}: {smaller.change}")
            tell(f"{smaller.length}: {smaller.change}")

        jumped = _jump(candidate, judge, start, tell)
        if jumped is not None:
            adopt(jumped)
        try:
            for smaller in _reductions(smallest, judge, taps):
                adopt(smaller)
        except BudgetSpentError:
            finished = False
        assert judge.symptom is not None
        return Shrunk(
            original=candidate,
            candidate=smallest,
            neighbor=_neighbor(smallest, judge),
            first=first,
            symptom=judge.symptom,
            steps=tuple(steps),
            asked=judge.asked,
            seconds=judge.seconds,
            finished=finished,
        )


def still_fails(shrunk: Shrunk, check: Check, start: Start, patience: Patience) -> bool:
    """Look at the result once more, as `start` runs it: in processes that have run nothing yet."""
    with Judge(check, functools.partial(_run, start), patience) as judge:
        judge.adopt(shrunk.symptom)
        return judge.answer(shrunk.candidate) == "fails"


def _run(start: Start, candidate: Candidate, side: int) -> Future[Outcome]:
    variant = candidate.variants[side] if candidate.variants else None
    return start(side, variant, candidate.content(side), candidate.inputs)


def _reductions(
    candidate: Candidate, judge: Judge, taps: Callable[[Candidate], Sequence[Tap]]
) -> Iterator[Candidate]:
    """Yield ever smaller programs that still fail, until no view makes one of the last."""
    changing = True
    while changing:
        changing = False
        judge.passing.clear()
        for view in VIEWS:
            grain = 0
            while smaller := judge.first(view(Base(candidate, taps(candidate)), grain)):
                candidate, grain, changing = smaller, smaller.grain, True
                yield candidate


# --- the program most like it that passes ---


def _neighbor(candidate: Candidate, judge: Judge) -> Candidate | None:
    """Return a program that passes and differs least.

    What makes a failure go says more about it than what does not: an option of the compiler, other
    values. Where nothing does, the program that it is compared with is the nearest there is.
    """
    for view in _CLOSEST_FIRST:
        # The last that a view tries are those that change least.
        passing = [one for one in judge.passing if one.view == view]
        if passing:
            return passing[-1]
    if judge.passing:
        return judge.passing[-1]
    return next((one for one in _nearest(candidate) if judge.answer(one) == "passes"), None)


def _nearest(candidate: Candidate) -> Iterator[Candidate]:
    """Yield programs that differ in one thing, nearest first."""
    if candidate.variants and candidate.variants[0].kind == "device":
        plain = simpler.with_text(with_options(candidate.variants[0], _UNOPTIMIZED))
        if plain.options != candidate.variants[0].options:
            variants = (plain, *candidate.variants[1:])
            yield changed(candidate, "neighbor", f"side A on {plain.text}", variants=variants)
    if candidate.expected is None:
        for index, array in enumerate(candidate.inputs):
            (drawn,) = random_inputs(index, [Signature(array.shape, array.dtype)])
            for values, what in ((np.ones_like(array), "all ones"), (drawn.value, "random")):
                inputs = list(candidate.inputs)
                inputs[index] = values
                yield changed(candidate, "neighbor", f"input {index} {what}", inputs=inputs)
    if len(candidate.modules) > 1:
        what = "side A running the program of side B"
        yield changed(candidate, "neighbor", what, modules=candidate.modules[1:])


# --- straight to where the failure starts ---


def _jump(candidate: Candidate, judge: Judge, start: Start, tell: Tell) -> Candidate | None:
    """Return the region where the failure starts, if it fails there alone; ask for that then.

    What goes wrong there on values that are right is the cause, even if it looks otherwise than
    its effect: a wrong sum, of which a later logarithm made a NaN.
    """
    find = _FINDERS.get(judge.check.name)
    if find is None or candidate.expected is not None:
        return None
    budget = judge.patience.budget
    session = Session(None, None if budget is None else budget * _JUMP_SHARE, tell)
    try:
        found = find(session, _frame(candidate, start))
    except SnaprtError as error:
        told = f"cannot tell where it starts: {error.message}"
        tell(f"{candidate.length}: {told}")
        return None
    except BudgetSpentError:
        return None
    if found is None or found.size >= candidate.size:
        return None
    change = "only the region that goes wrong"
    found = dataclasses.replace(found, variants=candidate.variants, view="jump", change=change)
    seen = judge.look_first(found)
    if seen is None:
        return None
    judge.adopt(seen)
    return found


def _frame(candidate: Candidate, start: Start) -> ComputationFrame:
    programs = [FlatModule(module, {}) for module in candidate.modules]

    def side(number: int, name: str) -> Side:
        variant = candidate.variants[number] if number < len(candidate.variants) else None
        run = functools.partial(start, number, variant)
        return Side(name, programs[min(number, len(programs) - 1)], run)

    sides = (side(0, "A"), side(1, "B"))
    entries = [one.program.module.entry_computation_id for one in sides]
    arguments = [{Value(0): one} for one in candidate.inputs]
    frame = frame_of(sides, (entries[0], entries[1]), arguments)
    return dataclasses.replace(frame, matching=matching_of(frame.lines))


def _difference(session: Session, frame: ComputationFrame) -> Candidate | None:
    (outputs,) = run_both(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    search = Search(session)
    found = search.whole(frame, outputs)
    if found.kind not in ("instruction", "interaction") or search.innermost is None:
        return None
    inner, region, known = search.innermost
    is_one_program = inner.sides[0].program is inner.sides[1].program
    source = Source(inner.lines[:1] if is_one_program else inner.lines, inner.matching)
    return source.cut(piece_of(inner, region, [region]), {**inner.arguments, **known})


def _not_finite(session: Session, frame: ComputationFrame) -> Candidate | None:
    (outputs,) = run_suspect(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    origin = first_origin(session, frame, outputs)
    return None if origin is None else _around(frame, origin)


def _around(frame: ComputationFrame, origin: Origin) -> Candidate | None:
    """Return the instruction of an origin, on what it read."""
    program = frame.sides[0].program
    for computation in program.module.computations:
        for instruction in computation.instructions:
            if instruction.name == origin.place.name:
                line = program.line(computation.id)
                arrays = iter(array for _, array in origin.operands)
                values = {
                    value: next(arrays)
                    for operand in instruction.operand_ids
                    for value, _ in arrays_of(line.by_id[operand])
                }
                given = [
                    operand
                    for operand in instruction.operand_ids
                    if line.by_id[operand].opcode != "constant"
                ]
                piece = Piece((instruction.id,), frozenset(given))
                return Source((line,), {each: each for each in line.by_id}).cut(piece, values)
    return None


_FINDERS: Final = {"mismatch": _difference, "nan": _not_finite}
