"""Make a program that is ready to run as small as possible: look, jump, reduce, look again.

A difference, a NaN and an infinity each start at an instruction, which `localize` finds. That
instruction with its operands' values is usually already the smallest failing program. From there,
one view after the other is tried until none makes the program smaller.
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
from snaprt_replay.localize.search import Search
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

#: The views that remove most come first.
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
        """Return the future outcome; the variant is None if a candidate has none."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Shrunk:
    """A program, minified."""

    original: Candidate  # the program before
    candidate: Candidate  # the smallest program that still fails
    neighbor: Candidate | None  # the most similar program that passes; None if none is known
    first: Symptom  # what the failure of the original looked like
    # The failure that was searched for in the smaller programs: the same, or what it looks like
    # where it turned out to start.
    symptom: Symptom
    steps: tuple[str, ...]  # what was done, in words
    asked: int  # how many programs were looked at
    seconds: float  # how long it took
    finished: bool  # whether it cannot be made smaller; False if the budget was spent first


def shrink(
    candidate: Candidate,
    check: Check,
    start: Start,
    patience: Patience,
    taps: Callable[[Candidate], Sequence[Tap]],
    tell: Tell = lambda line: None,
) -> Shrunk | None:
    """Make a program as small as possible while it still fails; return None if it does not fail.

    Args:
        candidate: The program.
        check: What counts as its failure.
        start: Runs a side.
        patience: How long to look.
        taps: Returns the ways to record a program's intermediate values.
        tell: Called with a line of progress.

    Raises:
        DeviceError: There is no such device or interpreter as a side runs on.
        UsageError: A side cannot run such a program.
    """
    with Judge(check, functools.partial(_run, start), patience) as judge:
        first = judge.look_first(candidate)
        if first is None:
            if judge.obstacle is not None:
                raise judge.obstacle
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
    """Look at the result once more, as `start` runs it: in new processes."""
    with Judge(check, functools.partial(_run, start), patience) as judge:
        judge.adopt(shrunk.symptom)
        return judge.answer(shrunk.candidate) == "fails"


def _run(start: Start, candidate: Candidate, side: int) -> Future[Outcome]:
    variant = candidate.variants[side] if candidate.variants else None
    return start(side, variant, candidate.content(side), candidate.inputs)


def _reductions(
    candidate: Candidate, judge: Judge, taps: Callable[[Candidate], Sequence[Tap]]
) -> Iterator[Candidate]:
    """Yield ever smaller programs that still fail, until no view makes a smaller one."""
    changing = True
    while changing:
        changing = False
        judge.passing.clear()
        for view in VIEWS:
            grain = 0
            while smaller := judge.first(view(Base(candidate, taps(candidate)), grain)):
                candidate, grain, changing = smaller, smaller.grain, True
                yield candidate


# --- the most similar program that passes ---


def _neighbor(candidate: Candidate, judge: Judge) -> Candidate | None:
    """Return the program that passes and differs least.

    A change that makes a failure disappear, such as another compiler option or other values, says
    more about it than a change that does not. If there is none, the nearest program is the one that
    the suspect is compared with.
    """
    for view in _CLOSEST_FIRST:
        # The last candidates of a view change least.
        passing = [neighbor for neighbor in judge.passing if neighbor.view == view]
        if passing:
            return passing[-1]
    if judge.passing:
        return judge.passing[-1]
    for neighbor in _nearest(candidate):
        if judge.is_out_of_time:
            return None
        if judge.answer(neighbor) == "passes":
            return neighbor
    return None


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
    """Return the region where the failure starts, if it fails in isolation; adopt its symptom then.

    What fails there on correct values is the cause, even if it looks different from its effect: a
    wrong sum, which a later logarithm turned into a NaN.
    """
    find = _FINDERS.get(judge.check.name)
    if find is None or candidate.expected is not None:
        return None
    budget = judge.patience.budget
    session = Session(None, None if budget is None else budget * _JUMP_SHARE, tell)
    try:
        region = find(session, _frame(candidate, start))
    except SnaprtError as error:
        reason = f"cannot tell where it starts: {error.message}"
        tell(f"{candidate.length}: {reason}")
        return None
    except BudgetSpentError:
        return None
    if region is None or region.size >= candidate.size:
        return None
    change = "only the region that goes wrong"
    region = dataclasses.replace(region, variants=candidate.variants, view="jump", change=change)
    symptom = judge.look_first(region)
    if symptom is None:
        return None
    judge.adopt(symptom)
    return region


def _frame(candidate: Candidate, start: Start) -> ComputationFrame:
    programs = [FlatModule(module, {}) for module in candidate.modules]

    def side(number: int, name: str) -> Side:
        variant = candidate.variants[number] if number < len(candidate.variants) else None
        run = functools.partial(start, number, variant)
        return Side(name, programs[min(number, len(programs) - 1)], run)

    sides = (side(0, "A"), side(1, "B"))
    entries = [side.program.module.entry_computation_id for side in sides]
    arguments = [{Value(0): array} for array in candidate.inputs]
    frame = frame_of(sides, (entries[0], entries[1]), arguments)
    return dataclasses.replace(frame, matching=matching_of(frame.lines))


def _difference(session: Session, frame: ComputationFrame) -> Candidate | None:
    (outputs,) = run_both(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    search = Search(session)
    culprit = search.whole(frame, outputs)
    if culprit.kind not in ("instruction", "interaction") or search.innermost is None:
        return None
    stretch = search.innermost
    inner = stretch.frame
    is_one_program = inner.sides[0].program is inner.sides[1].program
    source = Source(inner.lines[:1] if is_one_program else inner.lines, inner.matching)
    return source.cut(stretch.piece(), {**inner.arguments, **stretch.known_values})


def _not_finite(session: Session, frame: ComputationFrame) -> Candidate | None:
    (outputs,) = run_suspect(session, frame, [Piece((frame.line.root.id,))], [frame.arguments])
    origin = first_origin(session, frame, outputs)
    return None if origin is None else _around(frame, origin)


def _around(frame: ComputationFrame, origin: Origin) -> Candidate | None:
    """Return the instruction of an origin as a program, with its operands' values as inputs."""
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
                boundary = [
                    operand
                    for number, operand in enumerate(instruction.operand_ids)
                    if line.by_id[operand].opcode != "constant" and number != origin.constant
                ]
                piece = Piece(line.values_of(instruction), frozenset(boundary))
                return Source((line,), {number: number for number in line.by_id}).cut(piece, values)
    return None


_FINDERS: Final = {"mismatch": _difference, "nan": _not_finite}
