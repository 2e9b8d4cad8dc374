"""Say who is wrong, from what each side gave, a reference, and how far rounding moves the outputs.

The rule is written down in docs/variants.md, with its reasons. It must not know how anything was
run, nor JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.reference_distance import (
    LIMIT,
    OutputDistance,
    Yardstick,
    amplification,
    distances,
)
from snaprt_replay.compare.results import MISMATCH, Comparison, json_ready, to_json
from snaprt_replay.load.case import NamedArray

VerdictKind = Literal[
    "A is wrong",
    "B is wrong",
    "both are wrong",
    "within rounding",
    "ill-conditioned",
    "does not agree with itself",
    "cannot be judged",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What one side gave.

    Args:
        name: What the user calls the side: the variant's text.
        outputs: Of its first run; None where it has none.
        other_runs: Outputs of further runs that differ from it.
        failure: Why it has no outputs, in words.
    """

    name: str
    outputs: tuple[np.ndarray, ...] | None
    other_runs: Sequence[tuple[np.ndarray, ...]] = ()
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class SideJudgement:
    """One side, judged.

    Args:
        name: The side's name.
        failure: Why there is nothing to judge; empty where there is.
        outputs: Its distance to the reference, output by output.
        self_score: The largest distance between two of its own runs, in the same units; None
            where all runs gave the same bits, or it ran once only.
    """

    name: str
    failure: str = ""
    outputs: tuple[OutputDistance, ...] = ()
    self_score: float | None = None

    @property
    def score(self) -> float:
        """Return the largest score of its outputs."""
        return max((output.score for output in self.outputs), default=0.0)

    @property
    def wrong(self) -> bool:
        """Return whether it is further from the reference than rounding explains."""
        return any(output.beyond for output in self.outputs)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Who is wrong.

    Args:
        kind: The verdict.
        sentence: The verdict for a person.
        a: The first side.
        b: The second side.
        reference: The name of what both were measured against; empty where there was none.
        amplification: By how much rounding moves the outputs: the median, over the elements of the
            output where it is largest, of what rounding explains, in units in the last place.
        comparison: Of A (expected) with B (actual), with the default tolerances.
        notes: What else a reader should know.
    """

    kind: VerdictKind
    sentence: str
    a: SideJudgement
    b: SideJudgement
    reference: str
    amplification: float | None
    comparison: Comparison | None
    notes: tuple[str, ...] = ()

    @property
    def found_something(self) -> bool:
        """Return whether there is something for a person to look at."""
        return self.kind not in ("within rounding", "ill-conditioned")

    def to_json(self) -> dict[str, Any]:
        """Return this as JSON data."""
        data = dataclasses.asdict(dataclasses.replace(self, comparison=None))
        for side, judged in (("a", self.a), ("b", self.b)):
            data[side]["score"], data[side]["wrong"] = judged.score, judged.wrong
        data["comparison"] = None if self.comparison is None else to_json(self.comparison)
        ready: dict[str, Any] = json_ready(data)
        return ready


def judge(
    a: Evidence,
    b: Evidence,
    yardstick: Yardstick | None,
    names: Sequence[str],
    notes: Sequence[str] = (),
) -> Judgement:
    """Judge two sides.

    Args:
        a: The first side.
        b: The second side.
        yardstick: None where there is no reference, which leaves most questions open.
        names: What the outputs are called.
        notes: To pass on.
    """
    comparison = None
    if a.outputs is not None and b.outputs is not None:
        expected, actual = (
            [NamedArray(name, value) for name, value in zip(names, side, strict=False)]
            for side in (a.outputs, b.outputs)
        )
        comparison = compare(expected, actual, expected_name=a.name, actual_name=b.name)
    judged_a, judged_b = (_judge_side(side, yardstick, names) for side in (a, b))
    either = (a.outputs if a.outputs is not None else b.outputs) or ()
    kind = _kind(judged_a, judged_b, yardstick, comparison)
    return Judgement(
        kind=kind,
        sentence=_sentence(kind, judged_a, judged_b, yardstick, comparison),
        a=judged_a,
        b=judged_b,
        reference="" if yardstick is None else yardstick.name,
        amplification=None if yardstick is None else amplification(yardstick, either),
        comparison=comparison,
        notes=tuple(notes),
    )


def _kind(
    a: SideJudgement,
    b: SideJudgement,
    yardstick: Yardstick | None,
    comparison: Comparison | None,
) -> VerdictKind:
    if a.failure and b.failure:
        return "cannot be judged"
    if any(side.self_score is not None and side.self_score > LIMIT for side in (a, b)):
        return "does not agree with itself"
    if a.failure or b.failure or yardstick is None:
        return "cannot be judged"
    if a.wrong or b.wrong:
        return "both are wrong" if a.wrong and b.wrong else _WRONG[a.wrong]
    if comparison is not None and comparison.verdict == MISMATCH:
        return "ill-conditioned"
    return "within rounding"


_WRONG: Final[Mapping[bool, VerdictKind]] = {True: "A is wrong", False: "B is wrong"}


def _judge_side(side: Evidence, yardstick: Yardstick | None, names: Sequence[str]) -> SideJudgement:
    if side.outputs is None:
        return SideJudgement(side.name, side.failure or "it has no outputs")
    if yardstick is None:
        differs = float("inf") if side.other_runs else None
        return SideJudgement(side.name, self_score=differs)
    if [value.shape for value in side.outputs] != [value.shape for value in yardstick.outputs]:
        return SideJudgement(side.name, "its outputs have other shapes than the reference's")
    outputs = distances(side.outputs, yardstick.outputs, yardstick, names)
    between = [
        distance.score
        for run in side.other_runs
        for distance in distances(run, side.outputs, yardstick, names)
    ]
    return SideJudgement(side.name, "", outputs, max(between) if between else None)


# --- words ---


def _sentence(
    kind: VerdictKind,
    a: SideJudgement,
    b: SideJudgement,
    yardstick: Yardstick | None,
    comparison: Comparison | None,
) -> str:
    sides = {"A": a, "B": b}
    if kind == "does not agree with itself":
        restless = [
            f"{letter} ({side.name})"
            for letter, side in sides.items()
            if side.self_score is not None and side.self_score > LIMIT
        ]
        return (
            f"{' and '.join(restless)} does not agree with itself: "
            "two of its runs differ by more than rounding explains"
        )
    if kind == "cannot be judged":
        failed = [
            f"{letter} ({side.name}) gave no result: {side.failure}"
            for letter, side in sides.items()
            if side.failure
        ]
        differ = "" if comparison is None else f"; A against B: {comparison.summary}"
        return ("; ".join(failed) or "there is no reference to judge by") + differ
    assert yardstick is not None
    if kind == "within rounding":
        return (
            f"both are within rounding: A is at most {a.score:.2g} times, B at most {b.score:.2g} "
            f"times as far from {yardstick.name} as rounding explains"
        )
    if kind == "ill-conditioned":
        return (
            "the program is ill-conditioned here: A and B differ, and rounding alone explains it "
            f"(A is at most {a.score:.2g} times, B at most {b.score:.2g} times as far from "
            f"{yardstick.name})"
        )
    wrong = [f"{letter} ({side.name}): {_how_wrong(side)}" for letter, side in sides.items()]
    right = [not side.wrong for side in sides.values()]
    if any(right):
        guilty = wrong[right.index(False)]
        other = "AB"[right.index(True)]
        return f"{kind}: {guilty}; {other} is within rounding (score {sides[other].score:.2g})"
    return f"{kind}: {'; '.join(wrong)}"


def _how_wrong(side: SideJudgement) -> str:
    worst = max(side.outputs, key=lambda output: (output.score, output.beyond))
    where = f"[{','.join(map(str, worst.worst))}]" if worst.worst else ""
    if worst.specials:
        return (
            f"{worst.name} has {worst.specials} elements that are NaN or infinite and should not "
            f"be, or the reverse, such as {worst.name}{where}"
        )
    if worst.score == float("inf"):
        return f"{worst.beyond} elements of {worst.name} have another value, such as {where}"
    return (
        f"{worst.name}{where} is off by {worst.error:.3g} where rounding explains "
        f"{worst.explained:.2g}, {worst.score:.3g} times as much "
        f"({worst.beyond} elements are beyond {LIMIT:g} times)"
    )
