"""Compare the outputs of two executions; it must not know how either was run, nor JAX.

`compare` takes arrays and gives a `results.Comparison`. Exact types (bool, integers) compare
exactly, floats by their bits, in ULP, and against a tolerance; a different shape or dtype is a
mismatch like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare import float_errors
from snaprt_replay.compare.error_totals import Worst
from snaprt_replay.compare.results import (
    IDENTICAL,
    MISMATCH,
    WITHIN_TOLERANCE,
    Comparison,
    OutputComparison,
    Place,
    SpecialCounts,
)
from snaprt_replay.compare.threads import in_threads
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
    """Compare two lists of outputs, the first with the first and so on.

    Args:
        expected: The side that errors are relative to.
        actual: The other side; an output that only one side has is a mismatch.
        request: The tolerance asked for; None for the defaults.
        expected_name: What to call the expected side.
        actual_name: What to call the actual side.
    """
    request = request or ToleranceRequest()
    pairs = zip(expected, actual, strict=False)
    outputs = [compare_arrays(one.name, one.value, other.value, request) for one, other in pairs]
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
    for what, one, other in (
        ("shape", expected.shape, actual.shape),
        ("dtype", expected.dtype.newbyteorder("="), actual.dtype.newbyteorder("=")),
    ):
        if one != other:
            there = Signature(actual.shape, actual.dtype)
            here = Signature(expected.shape, expected.dtype)
            return dataclasses.replace(
                blank, verdict=MISMATCH, reason=f"another {what}: {there} instead of {here}"
            )
    flat_expected, flat_actual = _flat(expected), _flat(actual)
    if floatbits.is_float(flat_expected.dtype):
        return _compare_floats(blank, flat_expected, flat_actual, request)
    if floatbits.is_complex(flat_expected.dtype):
        return _compare_floats(blank, flat_expected, flat_actual, request)
    return _compare_exact(blank, flat_expected, flat_actual)


def _flat(values: np.ndarray) -> np.ndarray:
    """Return one dimension, C order, this machine's byte order."""
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1)


def _compare_floats(
    blank: OutputComparison, expected: np.ndarray, actual: np.ndarray, request: ToleranceRequest
) -> OutputComparison:
    left, right, components = expected, actual, 1
    if floatbits.is_complex(expected.dtype):  # compare real and imaginary parts
        part = np.dtype(f"f{expected.itemsize // 2}")
        left, right, components = expected.view(part), actual.view(part), 2
    errors = float_errors.measure(left, right, lambda rms: resolve(request, left.dtype, rms))

    def place(index: int) -> Place | None:
        return _place(blank.shape, expected, actual, index // components) if index >= 0 else None

    result = dataclasses.replace(
        blank,
        elements=blank.elements * components,
        differing=errors.differing,
        beyond=errors.beyond,
        tolerance=errors.tolerance,
        max_abs_error=float(errors.worst_abs.value),
        max_rel_error=float(errors.worst_rel.value),
        max_ulp=int(errors.worst_ulp.value),
        p99_ulp=errors.percentile_ulp(0.99),
        ulp_octaves=errors.ulp_octaves(),
        cosine=errors.cosine,
        rms=errors.rms,
        specials=errors.specials,
        first_difference=place(errors.first_difference),
        worst_abs=place(errors.worst_abs.index),
        worst_rel=place(errors.worst_rel.index),
        worst_ulp=place(errors.worst_ulp.index),
    )
    if errors.beyond:
        reason = _why_beyond(result, place(errors.first_beyond))
        return dataclasses.replace(result, verdict=MISMATCH, reason=reason)
    if errors.differing:
        reason = _why_within(result)
        return dataclasses.replace(result, verdict=WITHIN_TOLERANCE, reason=reason)
    return result


def _compare_exact(
    blank: OutputComparison, expected: np.ndarray, actual: np.ndarray
) -> OutputComparison:
    def measure_part(low: int, high: int) -> _ExactErrors:
        errors = _ExactErrors()
        for start in range(low, high, _EXACT_CHUNK):
            stop = min(start + _EXACT_CHUNK, high)
            _measure_exact(errors, expected[start:stop], actual[start:stop], start)
        return errors

    errors = _ExactErrors()
    for part in in_threads(measure_part, expected.size, expected.size):
        errors.merge(part)
    result = dataclasses.replace(blank, tolerance=EXACT)
    if not errors.differing:
        return result
    first = _place(blank.shape, expected, actual, errors.first_difference)
    share = _share(errors.differing, blank.elements)
    return dataclasses.replace(
        result,
        verdict=MISMATCH,
        reason=f"{share} differ, the first at {_at(first)}",
        differing=errors.differing,
        beyond=errors.differing,
        max_abs_error=errors.worst.value,
        max_rel_error=errors.worst_relative,
        first_difference=first,
        worst_abs=_place(blank.shape, expected, actual, errors.worst.index),
    )


@dataclasses.dataclass
class _ExactErrors:
    differing: int = 0
    first_difference: int = -1
    worst: Worst = dataclasses.field(default_factory=Worst)
    worst_relative: float = 0.0

    def merge(self, later: _ExactErrors) -> None:
        """Add what was found further on in the array."""
        self.differing += later.differing
        if self.first_difference < 0:
            self.first_difference = later.first_difference
        self.worst.merge(later.worst)
        self.worst_relative = max(self.worst_relative, later.worst_relative)


def _measure_exact(
    errors: _ExactErrors, expected: np.ndarray, actual: np.ndarray, start: int
) -> None:
    unequal = floatbits.bit_view(expected) != floatbits.bit_view(actual)
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return
    errors.differing += differing
    if errors.first_difference < 0:
        errors.first_difference = start + int(unequal.argmax())
    left, right = _as_integers(expected), _as_integers(actual)
    # The distance of two integers always fits the unsigned type of their size: let it wrap.
    distance = np.maximum(left, right)
    distance -= np.minimum(left, right)
    distance = distance.view(np.dtype(f"u{distance.itemsize}"))
    where = int(distance.argmax())
    errors.worst.offer_at(distance, where, None, start)
    if int(distance[where]) < errors.worst_relative * (1 - 1e-6) * int(np.abs(left).min()):
        return  # the smallest number, of which abs is negative, is looked at below
    # Only an element that beats the worst so far, by a bound in float32, is looked at exactly.
    bound = np.float32(errors.worst_relative * (1 - 1e-6))
    size = np.abs(left.astype(np.float32))
    size *= bound
    candidates = np.flatnonzero(distance.astype(np.float32) > size)
    if candidates.size:
        exact = np.abs(left[candidates].astype(np.float64))
        relative = np.divide(
            distance[candidates].astype(np.float64),
            exact,
            out=np.zeros(exact.shape),
            where=exact > 0,
        )
        errors.worst_relative = max(errors.worst_relative, float(relative.max()))


def _as_integers(values: np.ndarray) -> np.ndarray:
    """Return bools and ml_dtypes' narrow integers as ordinary ones of the same size."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values if values.dtype.kind in "iu" else values.astype(np.int16)


def _place(shape: tuple[int, ...], expected: np.ndarray, actual: np.ndarray, index: int) -> Place:
    where = tuple(int(axis) for axis in np.unravel_index(index, shape)) if shape else ()
    one, other = expected[index : index + 1], actual[index : index + 1]
    return Place(where, value_text(one), value_text(other))


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
    ("inf_sign", "infinite with another sign"),
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
        return f"{share} differ in {' and '.join(_counts(result.specials, _HARMLESS))} alone"
    return f"{share} differ, by at most {result.max_ulp} ulp"
