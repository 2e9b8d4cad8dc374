"""Make one program that is ready to run as small as it gets: look, jump, reduce, look again."""

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
from snaprt_replay.load.inputs import random_inputs
from snaprt_replay.localize.nonfinite import Origin, first_origin
from snaprt_replay.localize.program import FlatModule
from snaprt_replay.localize.search import Search, piece_of
from snaprt_replay.localize.session import BudgetSpentError, Session, Side
from snaprt_replay.localize.sides import Frame, frame_of, run_both, run_suspect
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.checks import Check, CheckName, Judge, Patience, Symptom
from snaprt_replay.minify.cutting import Base, Source, Tap, matching_of
from snaprt_replay.minify.views import cuts, simpler
from snaprt_replay.minify.views.shapes import shapes
from snaprt_replay.minify.views.simpler import with_text
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.workers import Outcome

_VIEW = "neighbor"
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


def neighbors(candidate: Candidate) -> Iterator[Candidate]:
    """Yield programs that differ in one thing, nearest first."""
    if candidate.variants and candidate.variants[0].kind == "device":
        plain = with_text(with_options(candidate.variants[0], _UNOPTIMIZED))
        if plain.options != candidate.variants[0].options:
            variants = (plain, *candidate.variants[1:])
            yield changed(candidate, _VIEW, f"side A on {plain.text}", variants=variants)
    if candidate.expected is None:
        for index, array in enumerate(candidate.inputs):
            (drawn,) = random_inputs(index, [Signature(array.shape, array.dtype)])
            for values, what in ((np.ones_like(array), "all one"), (drawn.value, "random")):
                inputs = list(candidate.inputs)
                inputs[index] = values
                yield changed(candidate, _VIEW, f"input {index} {what}", inputs=inputs)
    if len(candidate.modules) > 1:
        what = "side A running the program of side B"
        yield changed(candidate, _VIEW, what, modules=candidate.modules[1:])


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
    programs = [FlatModule(module, {}) for module in candidate.modules]

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


View = Callable[[Base, int], Iterator[Candidate]]

#: What takes most away comes first.
VIEWS: Final[Sequence[View]] = (
    cuts.outputs,
    cuts.prefix,
    cuts.suffix,
    cuts.loops,
    cuts.instructions,
    shapes,
    simpler.dtypes,
    simpler.values,
    simpler.flags,
)
_CLOSEST_FIRST: Final = ("flags", "values", "dtypes", "shapes", "instructions", "outputs")


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """Where a reduction ended.

    Args:
        candidate: The smallest program found that still fails.
        neighbor: The program most like it that passes; None if none did.
        steps: What was done to get there, in words.
        finished: Whether no view makes it smaller; False where the budget was spent before.
    """

    candidate: Candidate
    neighbor: Candidate | None
    steps: tuple[str, ...]
    finished: bool


def reduce(
    candidate: Candidate,
    judge: Judge,
    taps: Callable[[Candidate], Sequence[Tap]],
    tell: Callable[[str], None] = lambda line: None,
) -> Reduced:
    """Make a failing program as small as the views can.

    Args:
        candidate: What fails, with the judge's symptom.
        judge: Says whether it still does.
        taps: Says how a program's values are recorded.
        tell: Called with a line for each step.
    """
    steps: list[str] = []
    finished = True
    try:
        changing = True
        while changing:
            changing = False
            judge.passing.clear()
            for view in VIEWS:
                grain = 0
                while True:
                    found = judge.first(view(Base(candidate, taps(candidate)), grain))
                    if found is None:
                        break
                    candidate, grain, changing = found, found.grain, True
                    steps.append(f"{found.view}: {found.change}")
                    tell(f"{found.instructions} instructions: {found.change}")
    except BudgetSpentError:
        finished = False
    return Reduced(candidate, _neighbor(candidate, judge), tuple(steps), finished)


def _neighbor(candidate: Candidate, judge: Judge) -> Candidate | None:
    if judge.passing:
        return _closest(judge.passing)
    for one in neighbors(candidate):
        if judge.answer(one) == "passes":
            return one
    return None


def _closest(passing: Sequence[Candidate]) -> Candidate:
    """Return the program that differs least from the one that all of these were made of."""
    for view in _CLOSEST_FIRST:
        # The last that a view tries are those that change least.
        found = [one for one in passing if one.view == view]
        if found:
            return found[-1]
    return passing[-1]


_JUMP_SHARE = 0.5  # of the budget, for finding where the failure starts


class Start(Protocol):
    """Start a serialized module as a side runs it: with `workers.Workers.submit`, or another."""

    def __call__(
        self, side: int, variant: Variant | None, hlo: bytes, inputs: Sequence[np.ndarray]
    ) -> Future[Outcome]:
        """Return the outcome to come; the variant is None where a candidate has none."""
        ...


Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Shrunk:
    """A program, minified.

    Args:
        original: What it was.
        candidate: The smallest program that still fails.
        neighbor: The program most like it that passes; None if none is known.
        first: What the failure of the original looked like.
        symptom: What the smaller programs were asked for: the same, or where the failure turned
            out to start, what it looks like there.
        steps: What was done, in words.
        asked: How many programs were looked at.
        seconds: How long it took.
        finished: Whether it cannot be made smaller; False where the budget was spent before.
    """

    original: Candidate
    candidate: Candidate
    neighbor: Candidate | None
    first: Symptom
    symptom: Symptom
    steps: tuple[str, ...]
    asked: int
    seconds: float
    finished: bool


def shrink(
    candidate: Candidate,
    check: Check,
    start: Start,
    patience: Patience,
    taps: Callable[[Candidate], Sequence[Tap]],
    tell: Tell = lambda line: None,
) -> Shrunk | None:
    """Make a program as small as it gets while it still fails.

    Args:
        candidate: The program.
        check: What counts as its failure.
        start: Runs a side.
        patience: How long to look.
        taps: Says how a program's intermediate values are recorded.
        tell: Called with a line of progress.

    Returns:
        None if the program does not fail.
    """
    run = functools.partial(_run, start)
    with Judge(check, run, patience) as judge:
        first = judge.look_first(candidate)
        if first is None:
            return None
        tell(f"{candidate.instructions} instructions: {first}")
        judge.adopt(first)
        begin, steps = candidate, []
        jumped = _jump(candidate, judge, start, tell)
        if jumped is not None:
            begin = jumped
            steps.append(f"{jumped.view}: {jumped.change}")
            tell(f"{jumped.instructions} instructions: {jumped.change}")
        reduced = reduce(begin, judge, taps, tell)
        assert judge.symptom is not None
        return Shrunk(
            original=candidate,
            candidate=reduced.candidate,
            neighbor=reduced.neighbor,
            first=first,
            symptom=judge.symptom,
            steps=(*steps, *reduced.steps),
            asked=judge.asked,
            seconds=judge.seconds,
            finished=reduced.finished,
        )


def still_fails(shrunk: Shrunk, check: Check, start: Start, patience: Patience) -> bool:
    """Look at the result once more, as `start` runs it: in processes that have run nothing yet."""
    with Judge(check, functools.partial(_run, start), patience) as judge:
        judge.adopt(shrunk.symptom)
        return judge.answer(shrunk.candidate) == "fails"


def _run(start: Start, candidate: Candidate, side: int) -> Future[Outcome]:
    variant = candidate.variants[side] if candidate.variants else None
    return start(side, variant, candidate.content(side), candidate.inputs)


def _jump(candidate: Candidate, judge: Judge, start: Start, tell: Tell) -> Candidate | None:
    """Return the region where the failure starts, if it fails there alone; ask for that then.

    What goes wrong there on values that are right is the cause, even if it looks otherwise than
    its effect: a wrong sum, of which a later logarithm made a NaN.
    """

    def run_side(side: int, hlo: bytes, inputs: Sequence[np.ndarray]) -> Future[Outcome]:
        variant = candidate.variants[side] if candidate.variants else None
        return start(side, variant, hlo, inputs)

    budget = judge.patience.budget
    share = None if budget is None else budget * _JUMP_SHARE
    found = jump(candidate, judge.check.name, run_side, share, tell)
    if found is None or found.size >= candidate.size:
        return None
    seen = judge.look_first(found)
    if seen is None:
        return None
    judge.adopt(seen)
    return found
