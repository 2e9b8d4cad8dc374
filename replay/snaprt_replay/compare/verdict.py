"""Judge which side is wrong, by a reference and how far rounding moves the outputs.

docs/how-to/devices-differ.md gives the rule and its reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import MISMATCH, Comparison, json_ready, to_json
from snaprt_replay.load.case import NamedArray

LIMIT: Final = 8.0
"""A side is wrong if it is this many times further from the reference than rounding explains."""

VerdictKind = Literal[
    "A is wrong",
    "B is wrong",
    "both are wrong",
    "within rounding",
    "ill-conditioned",
    "does not agree with itself",
    "cannot be judged",
]


@dataclasses.dataclass(frozen=True)
class OutputDistance:
    """How far one output of a side lies from the reference."""

    name: str  # the output's name
    # The largest error among its elements, in units of what rounding explains there; infinite where
    # NaN, Inf or an exact value is not what it should be.
    score: float
    beyond: int  # elements whose error is more than `LIMIT` such units
    specials: int  # those of them that are wrongly NaN or infinite, or wrongly not
    worst: tuple[int, ...]  # the index of the element with the largest error in these units
    error: float  # its absolute error
    explained: float  # the error that rounding explains there


@dataclasses.dataclass(frozen=True, eq=False)
class Yardstick:
    """A reference, and how far rounding moves it."""

    name: str  # the reference's name
    outputs: tuple[np.ndarray, ...]  # the reference: in float64, or in the program's own types
    # The float64 outputs that the samples spread around; often `outputs` itself.
    center: tuple[np.ndarray, ...]
    samples: Sequence[tuple[np.ndarray, ...]]  # outputs of runs that rounded at random


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """The results of one side."""

    name: str  # the user's name for the side: the variant's text
    outputs: tuple[np.ndarray, ...] | None  # of its first run; None where it has none
    other_runs: Sequence[tuple[np.ndarray, ...]] = ()  # outputs of further runs that differ from it
    failure: str = ""  # why it has no outputs, in words


@dataclasses.dataclass(frozen=True)
class SideJudgement:
    """One side, judged."""

    name: str  # the side's name
    failure: str = ""  # why there is nothing to judge; empty where there is
    outputs: tuple[OutputDistance, ...] = ()  # its distance to the reference, output by output
    # The largest distance between two of its own runs, in the same units; None where all runs gave
    # the same bits, or it ran only once.
    self_score: float | None = None

    @property
    def score(self) -> float:
        """Return the largest score of its outputs."""
        return max((output.score for output in self.outputs), default=0.0)

    @property
    def wrong(self) -> bool:
        """Return whether the side is further from the reference than rounding explains."""
        return any(output.beyond for output in self.outputs)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on two sides, with its reasons."""

    kind: VerdictKind  # the verdict
    sentence: str  # the verdict in one sentence
    a: SideJudgement  # the first side
    b: SideJudgement  # the second side
    reference: str  # the name of the reference for both; empty where there was none
    # How much rounding moves the outputs, in units in the last place: the median, over the elements
    # of an output, of the error that rounding explains, for the output where it is largest.
    amplification: float | None
    comparison: Comparison | None  # of A (expected) and B (actual), with the default tolerances
    notes: tuple[str, ...] = ()  # what else a reader should know

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
        yardstick: The reference; None where there is none, which leaves most questions open.
        names: The names of the outputs.
        notes: Notes for the judgement.
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
        return SideJudgement(side.name, "the shapes of its outputs differ from the reference's")
    outputs = distances(side.outputs, yardstick.outputs, yardstick, names)
    between = [
        distance.score
        for run in side.other_runs
        for distance in distances(run, side.outputs, yardstick, names)
    ]
    return SideJudgement(side.name, "", outputs, max(between) if between else None)


# --- how far from the reference ---


def distances(
    outputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    yardstick: Yardstick,
    names: Sequence[str],
) -> tuple[OutputDistance, ...]:
    """Return the distance of each output from its expected value.

    Args:
        outputs: The outputs of one side.
        expected: The outputs of the reference, or of another run.
        yardstick: How far rounding moves the outputs.
        names: The names of the outputs.
    """
    return tuple(
        _distance(name, value, reference, center, [sample[index] for sample in yardstick.samples])
        for index, (name, value, reference, center) in enumerate(
            zip(names, outputs, expected, yardstick.center, strict=True)
        )
    )


def _distance(
    name: str,
    value: np.ndarray,
    reference: np.ndarray,
    center: np.ndarray,
    samples: Sequence[np.ndarray],
) -> OutputDistance:
    with np.errstate(all="ignore"):
        if floatbits.is_inexact(value.dtype):
            scores, errors, explained, specials = _score_floats(value, reference, center, samples)
        else:
            settled = np.ones(value.shape, np.bool_)
            for sample in samples:
                settled &= sample == center
            wrong = (value != reference) & settled
            scores = np.where(wrong, np.inf, 0.0).reshape(-1)
            errors = np.abs(value.astype(np.float64) - reference.astype(np.float64)).reshape(-1)
            explained = np.zeros(errors.shape)
            specials = np.zeros(errors.shape, np.bool_)
    if not scores.size:
        return OutputDistance(name, 0.0, 0, 0, (), 0.0, 0.0)
    worst = int(scores.argmax())
    # The real and the imaginary part of a complex number are adjacent.
    place = worst * value.size // scores.size
    return OutputDistance(
        name=name,
        score=float(scores[worst]),
        beyond=int(np.count_nonzero(scores > LIMIT)),
        specials=int(np.count_nonzero(specials)),
        worst=tuple(int(axis) for axis in np.unravel_index(place, value.shape)),
        error=float(errors[worst]),
        explained=float(explained[worst]),
    )


_Scores = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _score_floats(
    value: np.ndarray, reference: np.ndarray, center: np.ndarray, samples: Sequence[np.ndarray]
) -> _Scores:
    """Return score, error, explained error, and whether NaN or Inf is the cause, flat."""
    own = _own_type(value.dtype)
    actual, expected, middle = _parts(value), _parts(reference), _parts(center)
    explained, pattern, settled = _explained(middle, [_parts(sample) for sample in samples], own)
    # A number that is finite in float64 may be infinite in the program's type: allow both patterns.
    actual_pattern, expected_pattern = _pattern(actual), _pattern(_in_type(expected, own))
    special = (actual_pattern != expected_pattern) & (actual_pattern != pattern) & settled
    finite = (actual_pattern == 0) & np.isfinite(expected)
    errors = np.where(finite, np.abs(actual - expected), 0.0)
    # A side that is infinite where the reference is only near the type's limit is judged above.
    scores = np.where(errors > 0, errors / explained, 0.0)
    return np.where(special, np.inf, scores), errors, explained, special


def _explained(
    center: np.ndarray, samples: Sequence[np.ndarray], own: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the error that rounding explains, the samples' pattern, and where they agree."""
    spread = np.zeros(center.shape)
    pattern = _pattern(samples[0] if samples else _in_type(center, own))
    settled = np.ones(center.shape, np.bool_)
    for sample in samples:
        moved = np.abs(sample - center)
        np.maximum(spread, np.where(np.isfinite(moved), moved, 0.0), out=spread)
        settled &= _pattern(sample) == pattern
    size = np.where(np.isfinite(center), np.abs(center), 0.0)
    ulp = np.maximum(size * floatbits.epsilon(own), floatbits.smallest_normal(own))
    typical = float(np.median(spread)) if spread.size else 0.0
    return spread + typical + ulp, pattern, settled


def amplification(yardstick: Yardstick, outputs: Sequence[np.ndarray]) -> float | None:
    """Return the median error that rounding explains, in ULP, for the output with the largest.

    The ULP is that of the output's own type at the element, or at the output's root mean square
    where the element is smaller: near zero, a ULP of the element means nothing. The result is at
    most the output's whole size. None if no output has a size.

    Args:
        yardstick: The reference.
        outputs: The outputs of one side, for their types and shapes.
    """
    medians = []
    for index, value in enumerate(outputs):
        if (
            floatbits.is_inexact(value.dtype)
            and value.size
            and value.shape == yardstick.center[index].shape
        ):
            own = _own_type(value.dtype)
            center = _parts(yardstick.center[index])
            samples = [_parts(sample[index]) for sample in yardstick.samples]
            with np.errstate(all="ignore"):
                explained, _, _ = _explained(center, samples, own)
                size = np.where(np.isfinite(center), np.abs(center), 0.0)
                size = np.maximum(size, np.sqrt(np.mean(np.square(size))))
                moved = float(np.median(explained / (size * floatbits.epsilon(own))))
            if np.isfinite(moved):
                medians.append(min(moved, 1.0 / floatbits.epsilon(own)))
    return max(medians) if medians else None


def _own_type(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"f{dtype.itemsize // 2}") if floatbits.is_complex(dtype) else dtype


def _parts(values: np.ndarray) -> np.ndarray:
    """Return flat float64 elements; for complex numbers, their real and imaginary parts."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if floatbits.is_complex(flat.dtype):
        return flat.astype(np.complex128).view(np.float64)
    return flat.astype(np.float64)


def _in_type(values: np.ndarray, own: np.dtype) -> np.ndarray:
    return values.astype(own).astype(np.float64)


def _pattern(values: np.ndarray) -> np.ndarray:
    """Return 0 for finite, 1 for NaN, 2 for positive and 3 for negative infinity."""
    pattern = np.isnan(values).astype(np.int8)
    pattern[values == np.inf] = 2
    pattern[values == -np.inf] = 3
    return pattern


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
            f"{' and '.join(restless)} is non-deterministic: two runs differ by more than "
            "rounding explains"
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
            f"both are within rounding: their distance from {yardstick.name} is at most "
            f"{a.score:.2g} (A) and {b.score:.2g} (B) times what rounding explains"
        )
    if kind == "ill-conditioned":
        return (
            "the program is ill-conditioned here: A and B differ, but rounding explains it "
            f"(their distance from {yardstick.name} is at most {a.score:.2g} (A) and "
            f"{b.score:.2g} (B) times what rounding explains)"
        )
    wrong = [f"{letter} ({side.name}): {_how_wrong(side)}" for letter, side in sides.items()]
    right = [not side.wrong for side in sides.values()]
    if any(right):
        guilty = wrong[right.index(False)]
        correct = "AB"[right.index(True)]
        return f"{kind}: {guilty}; {correct} is within rounding (score {sides[correct].score:.2g})"
    return f"{kind}: {'; '.join(wrong)}"


def _how_wrong(side: SideJudgement) -> str:
    worst = max(side.outputs, key=lambda output: (output.score, output.beyond))
    where = f"[{','.join(map(str, worst.worst))}]" if worst.worst else ""
    if worst.specials:
        return (
            f"{worst.specials} elements of {worst.name} are NaN or infinite but should not be, "
            f"or the reverse, such as {worst.name}{where}"
        )
    if worst.score == float("inf"):
        return f"{worst.beyond} elements of {worst.name} have wrong values, such as {where}"
    return (
        f"{worst.name}{where} is off by {worst.error:.3g}, {worst.score:.3g} times the "
        f"{worst.explained:.2g} that rounding explains ({worst.beyond} elements are beyond "
        f"{LIMIT:g} times)"
    )
