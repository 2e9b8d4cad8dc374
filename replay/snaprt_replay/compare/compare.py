"""Compare the outputs of two executions.

`compare` takes arrays and returns a `results.Comparison`. It compares exact types (bool, integers)
exactly, and floats by their bits, in ULP, and against a tolerance; a different shape or dtype is a
mismatch like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare import float_errors
from snaprt_replay.compare.float_errors import in_threads
from snaprt_replay.compare.results import (
    IDENTICAL,
    MISMATCH,
    WITHIN_TOLERANCE,
    Comparison,
    OutputComparison,
    Place,
    SpecialCounts,
)
from snaprt_replay.compare.tolerance import EXACT, ToleranceRequest, resolve
from snaprt_replay.load.case import NamedArray, Signature

_EXACT_CHUNK = 1 << 15


def compare(
    expected: Sequence[NamedArray],
    actual: Sequence[NamedArray],
    request: ToleranceRequest | None = None,
    *,
    expected_name: str = "recorded",
    actual_name: str = "replayed",
) -> Comparison:
    """Compare two lists of outputs, the first with the first, and so on.

    Args:
        expected: The side that errors are relative to.
        actual: The other side; an output that only one side has is a mismatch.
        request: The requested tolerance; None for the defaults.
        expected_name: What to call the expected side.
        actual_name: What to call the actual side.

    Examples:
        >>> from snaprt import replay
        >>> expected = replay.NamedArray("loss", np.float32([1.0, 2.0]))
        >>> actual = replay.NamedArray("loss", np.float32([1.0, 2.5]))
        >>> comparison = replay.compare([expected], [actual])
        >>> comparison.verdict, comparison.outputs[0].differing
        ('mismatch', 1)
    """
    request = request or ToleranceRequest()
    pairs = zip(expected, actual, strict=False)
    outputs = [compare_arrays(left.name, left.value, right.value, request) for left, right in pairs]
    sides = ((expected, actual_name), (actual, expected_name))
    for arrays, missing_in in sides:
        outputs += [
            OutputComparison(
                name=array.name,
                shape=array.shape,
                dtype=array.dtype.name,
                verdict=MISMATCH,
                reason=f"missing in {missing_in}",
                elements=array.value.size,
            )
            for array in arrays[len(outputs) :]
        ]
    return Comparison(tuple(outputs), expected_name, actual_name)


def compare_arrays(
    name: str, expected: np.ndarray, actual: np.ndarray, request: ToleranceRequest
) -> OutputComparison:
    """Compare one output; see `compare`."""
    blank = OutputComparison(
        name, expected.shape, expected.dtype.name, IDENTICAL, elements=expected.size
    )
    for what, left, right in (
        ("shape", expected.shape, actual.shape),
        ("dtype", expected.dtype.newbyteorder("="), actual.dtype.newbyteorder("=")),
    ):
        if left != right:
            actual_signature = Signature(actual.shape, actual.dtype)
            expected_signature = Signature(expected.shape, expected.dtype)
            return dataclasses.replace(
                blank,
                verdict=MISMATCH,
                reason=f"different {what}: {actual_signature} instead of {expected_signature}",
            )
    flat_expected, flat_actual = _flat(expected), _flat(actual)
    if floatbits.is_inexact(flat_expected.dtype):
        return _compare_floats(blank, flat_expected, flat_actual, request)
    return _compare_exact(blank, flat_expected, flat_actual)


def _flat(values: np.ndarray) -> np.ndarray:
    """Return the values in one dimension, C order and this machine's byte order."""
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1)


def _compare_floats(
    blank: OutputComparison, expected: np.ndarray, actual: np.ndarray, request: ToleranceRequest
) -> OutputComparison:
    left, right, components = expected, actual, 1
    if floatbits.is_complex(expected.dtype):  # compare real and imaginary parts
        part = np.dtype(f"f{expected.itemsize // 2}")
        left, right, components = expected.view(part), actual.view(part), 2

    def place(index: int) -> Place | None:
        return _place(blank.shape, expected, actual, index // components) if index >= 0 else None

    result, first_beyond = float_errors.measure(
        blank, left, right, place, lambda rms: resolve(request, left.dtype, rms)
    )
    if result.beyond:
        reason = _why_beyond(result, first_beyond)
        return dataclasses.replace(result, verdict=MISMATCH, reason=reason)
    if result.differing:
        reason = _why_within(result)
        return dataclasses.replace(result, verdict=WITHIN_TOLERANCE, reason=reason)
    return result


def _compare_exact(
    blank: OutputComparison, expected: np.ndarray, actual: np.ndarray
) -> OutputComparison:
    def measure(low: int, high: int) -> list[_ExactErrors]:
        starts = range(low * _EXACT_CHUNK, min(high * _EXACT_CHUNK, expected.size), _EXACT_CHUNK)
        worst_relative, measured = 0.0, []
        for start in starts:
            chunk = slice(start, start + _EXACT_CHUNK)
            errors = _measure_exact(expected[chunk], actual[chunk], start, worst_relative)
            if errors is not None:
                worst_relative = max(worst_relative, errors.relative)
                measured.append(errors)
        return measured

    parts = in_threads(measure, -(-expected.size // _EXACT_CHUNK), expected.size)
    errors = [error for part in parts for error in part]
    result = dataclasses.replace(blank, tolerance=EXACT)
    if not errors:
        return result
    differing = sum(error.differing for error in errors)
    worst = max(errors, key=lambda error: error.distance)  # the first of them
    first = _place(blank.shape, expected, actual, errors[0].first)
    return dataclasses.replace(
        result,
        verdict=MISMATCH,
        reason=f"{_share(differing, blank.elements)} differ, the first at {_at(first)}",
        differing=differing,
        beyond=differing,
        max_abs_error=worst.distance,
        max_rel_error=max(error.relative for error in errors),
        first_difference=first,
        worst_abs=_place(blank.shape, expected, actual, worst.index),
    )


@dataclasses.dataclass(frozen=True)
class _ExactErrors:
    """How a chunk of exact numbers differs: the count, the first, the worst and its index."""

    differing: int
    first: int
    distance: int
    index: int
    relative: float


def _measure_exact(
    expected: np.ndarray, actual: np.ndarray, start: int, worst_relative: float
) -> _ExactErrors | None:
    """Measure a chunk; a relative error up to ``worst_relative`` need not be the chunk's worst."""
    unequal = floatbits.bit_view(expected) != floatbits.bit_view(actual)
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return None
    left, right = floatbits.as_integers(expected), floatbits.as_integers(actual)
    # The distance of two integers always fits the unsigned type of their size: let it wrap.
    distance = np.maximum(left, right)
    distance -= np.minimum(left, right)
    distance = distance.view(np.dtype(f"u{distance.itemsize}"))
    where = int(distance.argmax())
    relative = 0.0
    least = int(np.abs(left).min())  # negative for the smallest number: then no bound is known
    if int(distance[where]) >= worst_relative * (1 - 1e-6) * least:
        # Compute exactly only for the elements that, by a bound in float32, may exceed the worst.
        bound = np.abs(left.astype(np.float32))
        bound *= np.float32(worst_relative * (1 - 1e-6))
        candidates = np.flatnonzero(distance.astype(np.float32) > bound)
        size = np.abs(left[candidates].astype(np.float64))
        quotients = distance[candidates].astype(np.float64)
        np.divide(quotients, size, out=quotients, where=size > 0)
        relative = float(quotients.max(initial=0.0, where=size > 0))
    first = start + int(unequal.argmax())
    return _ExactErrors(differing, first, int(distance[where]), start + where, relative)


def _place(shape: tuple[int, ...], expected: np.ndarray, actual: np.ndarray, index: int) -> Place:
    where = tuple(int(axis) for axis in np.unravel_index(index, shape)) if shape else ()
    left, right = expected[index : index + 1], actual[index : index + 1]
    return Place(where, value_text(left), value_text(right))


def value_text(element: np.ndarray) -> str:
    """Return the one element of an array as the shortest text that identifies its value."""
    dtype, value = element.dtype, element[0]
    if floatbits.is_float(dtype):
        if np.isnan(floatbits.widen(element)[0]):
            return f"nan(0x{int(floatbits.bit_view(element)[0]):x})"
        # Six digits identify any number of up to 16 bits.
        return str(value) if dtype.itemsize > 2 else f"{float(value):.6g}"
    if floatbits.is_complex(dtype) or dtype.kind == "b":
        return str(value)
    return str(int(value))


def _share(count: int, elements: int) -> str:
    return f"{count} of {elements} elements"


def _at(place: Place) -> str:
    index = f"[{','.join(map(str, place.index))}]" if place.index else "the scalar"
    return f"{index}: {place.actual} instead of {place.expected}"


_CONFUSIONS = (
    ("nan_only_expected", "NaN on the expected side only"),
    ("nan_only_actual", "NaN on the actual side only"),
    ("inf_only_expected", "infinite on the expected side only"),
    ("inf_only_actual", "infinite on the actual side only"),
    ("inf_sign", "infinite with the opposite sign"),
)
_HARMLESS = (
    ("zero_sign", "signs of zero"),
    ("nan_payload", "bits of NaNs"),
)


def _counts(specials: SpecialCounts, table: Sequence[tuple[str, str]]) -> list[str]:
    return [
        f"{getattr(specials, field)} {words}" for field, words in table if getattr(specials, field)
    ]


def _why_beyond(result: OutputComparison, first: Place | None) -> str:
    share = _share(result.beyond, result.elements)
    details = _counts(result.specials, _CONFUSIONS)
    where = f", the first at {_at(first)}" if first else ""
    return f"{share} beyond tolerance" + (f" ({', '.join(details)})" if details else "") + where


def _why_within(result: OutputComparison) -> str:
    share = _share(result.differing, result.elements)
    if not result.max_ulp:  # only zeros' signs and NaNs' bits
        return f"{share} differ, only in {' and '.join(_counts(result.specials, _HARMLESS))}"
    return f"{share} differ, by at most {result.max_ulp} ulp"
