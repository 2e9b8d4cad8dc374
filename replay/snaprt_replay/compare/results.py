"""The result of a comparison, as frozen data that can be saved.

The two sides are called *expected* (recorded, or a reference: errors are relative to it) and
*actual* (replayed). ``to_json`` and ``comparison_from_json`` are inverses of each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from snaprt.errors import UsageError
from snaprt.units import first_names
from snaprt_replay.compare.tolerance import Tolerance

SCHEMA = "snaprt.comparison"
SCHEMA_VERSION = 1

Verdict = Literal["identical", "within tolerance", "mismatch"]
IDENTICAL: Verdict = "identical"
WITHIN_TOLERANCE: Verdict = "within tolerance"
MISMATCH: Verdict = "mismatch"
Saved = TypeVar("Saved")
_SEVERITY: dict[Verdict, int] = {IDENTICAL: 0, WITHIN_TOLERANCE: 1, MISMATCH: 2}


@dataclasses.dataclass(frozen=True)
class Place:
    """One element and its two values.

    Args:
        index: Its index; () for a scalar.
        expected: Its value on the expected side, as text that distinguishes every value.
        actual: Its value on the actual side.

    Examples:
        >>> from snaprt import replay
        >>> expected = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> actual = replay.NamedArray("loss", np.float32([1.0, 2.5]))
        >>> place = replay.compare([expected], [actual]).outputs[0].worst_abs
        >>> place.index, place.expected, place.actual
        ((1,), '2.0', '2.5')
    """

    index: tuple[int, ...]
    expected: str
    actual: str


_MOST_NAMES = 3  # of outputs in one sentence


@dataclasses.dataclass(frozen=True)
class SpecialCounts:
    """Elements where a NaN, an infinity or a negative zero is part of the difference.

    A complex number counts as two elements. The first five counts make an output a mismatch; the
    others do not.

    Examples:
        >>> from snaprt import replay
        >>> expected = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> actual = replay.NamedArray("loss", np.float32([1.0, np.nan]))
        >>> replay.compare([expected], [actual]).outputs[0].specials.nan_only_actual
        1
    """

    nan_only_expected: int = 0
    nan_only_actual: int = 0
    inf_only_expected: int = 0
    inf_only_actual: int = 0
    inf_sign: int = 0
    nan_both: int = 0
    nan_payload: int = 0
    zero_sign: int = 0
    inf_both: int = 0

    @property
    def on_both_sides(self) -> int:
        """Return how many elements are NaN, or the same infinity, on both sides."""
        return self.nan_both + self.inf_both

    @property
    def not_finite(self) -> int:
        """Return how many elements are NaN or infinite on one side or both."""
        return self.confused + self.on_both_sides

    @property
    def confused(self) -> int:
        """Return how many elements are NaN or infinite on one side but not so on the other."""
        return (
            self.nan_only_expected
            + self.nan_only_actual
            + self.inf_only_expected
            + self.inf_only_actual
            + self.inf_sign
        )


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """One output, compared.

    Args:
        name: The output's name.
        shape: Shape on the expected side (on the actual side where nothing was expected).
        dtype: The dtype's name, from the same side.
        verdict: See `Verdict`.
        reason: Why it has this verdict, in one sentence; empty if identical.
        elements: Number of elements.
        differing: Elements whose bits differ.
        beyond: Elements beyond tolerance, NaN and Inf confusion included.
        tolerance: The tolerance that was allowed.
        max_abs_error: Largest difference among pairs of finite numbers; exact for integers.
        max_rel_error: Largest ``|actual - expected| / |expected|`` among those with expected != 0.
        max_ulp: Largest distance in ULP among pairs of finite numbers; None for exact types.
        p99_ulp: Distance in ULP that 99 in 100 pairs of finite numbers do not exceed: exact up to
            256 ULP, above that at most 0.8 % too low. Estimated from a sample where more than half
            a million elements of an output differ.
        ulp_octaves: Number of pairs 0, 1, 2-3, 4-7, 8-15, ... ULP apart, up to the last that
            occurs. Estimated like `p99_ulp`.
        cosine: Cosine similarity over the pairs of finite numbers; None where it is meaningless
            (exact types, a side that is all zero).
        rms: Root mean square of the expected side's finite elements; None for exact types.
        specials: Counts of NaN, Inf and negative zero.
        first_difference: The first element whose bits differ.
        worst_abs: Where the largest absolute error is.
        worst_rel: Where the largest relative error is.
        worst_ulp: Where the largest distance in ULP is.

    Examples:
        >>> from snaprt import replay
        >>> expected = replay.NamedArray("loss", np.float32([1.0]))
        >>> actual = replay.NamedArray("loss", np.nextafter(expected.value, np.float32(2)))
        >>> output = replay.compare([expected], [actual]).outputs[0]
        >>> output.verdict, output.max_ulp
        ('within tolerance', 1)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    verdict: Verdict
    reason: str = ""
    elements: int = 0
    differing: int = 0
    beyond: int = 0
    tolerance: Tolerance | None = None
    max_abs_error: float | int = 0
    max_rel_error: float = 0.0
    max_ulp: int | None = None
    p99_ulp: int | None = None
    ulp_octaves: tuple[int, ...] = ()
    cosine: float | None = None
    rms: float | None = None
    specials: SpecialCounts = SpecialCounts()
    first_difference: Place | None = None
    worst_abs: Place | None = None
    worst_rel: Place | None = None
    worst_ulp: Place | None = None

    @property
    def share_differing(self) -> float:
        """Return the share of elements whose bits differ, from 0 to 1."""
        return self.differing / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All outputs of an execution, compared.

    Args:
        outputs: The comparison of each output, in order.
        expected_name: What the expected side is: "recorded", "first run", ...
        actual_name: What the actual side is: "replayed", ...

    Examples:
        >>> from snaprt import replay
        >>> replay.replay("step.inputs.snap").comparison.summary
        'the output is identical, bit for bit'
    """

    outputs: tuple[OutputComparison, ...]
    expected_name: str = "recorded"
    actual_name: str = "replayed"

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the outputs; without outputs they are identical."""
        return worst_verdict(output.verdict for output in self.outputs)

    @property
    def summary(self) -> str:
        """Return the comparison in one sentence."""
        verdict, nonfinite = self._verdict_in_words(), self.nonfinite_in_words()
        return f"{verdict}; but {nonfinite}" if nonfinite else verdict

    def nonfinite_in_words(self) -> str:
        """Return which outputs are NaN or infinite on both sides, in words; "" if none is."""
        affected = [output for output in self.outputs if output.specials.on_both_sides]
        if not affected:
            return ""
        count = sum(output.specials.on_both_sides for output in affected)
        elements = sum(output.elements for output in affected)
        names = first_names((output.name for output in affected), _MOST_NAMES)
        return f"{count} of {elements} elements of {names} are NaN or infinite on both sides"

    def _verdict_in_words(self) -> str:
        count = len(self.outputs)
        noun = "output" if count == 1 else "outputs"
        if self.verdict == IDENTICAL:
            if count == 1:
                return "the output is identical, bit for bit"
            return f"all {count} outputs are identical, bit for bit" if count else "no outputs"
        bad = [output for output in self.outputs if output.verdict == MISMATCH]
        if not bad:
            inexact = sum(output.verdict == WITHIN_TOLERANCE for output in self.outputs)
            return f"{count} {noun} within tolerance, {inexact} of them not identical bit for bit"
        first = bad[0]
        return f"{len(bad)} of {count} {noun} differ; first: {first.name}, {first.reason}"


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of an iterable of verdicts."""
    candidates: list[Verdict] = [IDENTICAL, *verdicts]
    return max(candidates, key=lambda verdict: _SEVERITY[verdict])


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return ``comparison`` as JSON data, with "Infinity" and "NaN" where JSON has no number.

    Examples:
        >>> from snaprt import replay
        >>> loss = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> replay.to_json(replay.compare([loss], [loss]))["summary"]
        'the output is identical, bit for bit'
    """
    data = dataclasses.asdict(comparison)
    data["verdict"], data["summary"] = comparison.verdict, comparison.summary
    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **json_ready(data)}


def json_ready(value: Any) -> Any:
    """Return ``value`` with tuples as lists and non-finite floats as text."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def comparison_from_json(data: Mapping[str, Any]) -> Comparison:
    """Return the comparison that `to_json` saved.

    Raises:
        UsageError: The data is something else, or is from a newer snaprt.

    Examples:
        >>> from snaprt import replay
        >>> loss = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> saved = replay.to_json(replay.compare([loss], [loss]))
        >>> replay.comparison_from_json(saved).verdict
        'identical'
    """
    if data.get("schema") != SCHEMA:
        raise UsageError("this JSON is not a comparison saved by snaprt")
    if data.get("version") != SCHEMA_VERSION:
        raise UsageError(
            f"this comparison has version {data.get('version')}; this snaprt reads version "
            f"{SCHEMA_VERSION}",
            hint="update snaprt",
        )
    return read_as(Comparison, data)


def read_as(kind: type[Saved], data: Mapping[str, Any]) -> Saved:
    """Return JSON data as a dataclass; raise UsageError where they do not fit."""
    import msgspec  # most results are never read from JSON

    try:
        return msgspec.convert(data, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"this result is damaged: {error}") from error
