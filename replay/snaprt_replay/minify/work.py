"""Minify one program that is ready to run: look, jump, reduce, look again; it knows no files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check, Signature
from snaprt_replay.minify.cutting import Tap
from snaprt_replay.minify.judge import Judge, Patience
from snaprt_replay.minify.jump import jump
from snaprt_replay.minify.reduce import reduce
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Outcome

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
        signature: What the smaller programs were asked for: the same, or where the failure turned
            out to start, what it looks like there.
        steps: What was done, in words.
        asked: How many programs were looked at.
        seconds: How long it took.
        finished: Whether it cannot be made smaller; False where the budget was spent before.
    """

    original: Candidate
    candidate: Candidate
    neighbor: Candidate | None
    first: Signature
    signature: Signature
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
        assert judge.signature is not None
        return Shrunk(
            original=candidate,
            candidate=reduced.candidate,
            neighbor=reduced.neighbor,
            first=first,
            signature=judge.signature,
            steps=(*steps, *reduced.steps),
            asked=judge.asked,
            seconds=judge.seconds,
            finished=reduced.finished,
        )


def still_fails(shrunk: Shrunk, check: Check, start: Start, patience: Patience) -> bool:
    """Look at the result once more, as `start` runs it: in processes that have run nothing yet."""
    with Judge(check, functools.partial(_run, start), patience) as judge:
        judge.adopt(shrunk.signature)
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
