"""Apply one view after the other until none makes the program smaller; it must not know files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base, Tap
from snaprt_replay.minify.judge import BudgetSpentError, Judge
from snaprt_replay.minify.neighbors import neighbors
from snaprt_replay.minify.views import (
    dtypes,
    flags,
    instructions,
    loops,
    outputs,
    prefix,
    shapes,
    suffix,
    values,
)

View = Callable[[Base, int], Iterator[Candidate]]

#: What takes most away comes first.
VIEWS: Final[tuple[tuple[str, View], ...]] = (
    ("outputs", outputs.candidates),
    ("prefix", prefix.candidates),
    ("suffix", suffix.candidates),
    ("loops", loops.candidates),
    ("instructions", instructions.candidates),
    ("shapes", shapes.candidates),
    ("dtypes", dtypes.candidates),
    ("values", values.candidates),
    ("flags", flags.candidates),
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
        candidate: What fails, with the judge's signature.
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
            for _, view in VIEWS:
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
