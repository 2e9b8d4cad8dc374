"""A single number for the distance between two arrays.

The unit is the default tolerance of the suspect's dtype: an element's error divided by what
`tolerance` allows for it. Correct executions differ by at most 1, whatever the dtype, so errors of
different values can be compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.tolerance import ToleranceRequest, default_for
from snaprt_replay.localize.findings import ValueDifference

# A wrong integer or bool is not a rounding error: it counts as much as a float that is wrong by its
# whole size, in proportion to the share of wrong elements, and never as within tolerance.
_ALL_WRONG = 1 / (128 * 2.0**-23)
_LEAST_WRONG = 2.0


# An error is still rounding up to this many times the change of the result when the inputs move by
# one rounding: an operation rounds a few times, and its operands may be rounded the same way often.
_NOISE = 32.0
_FLIPS = 4.0


def error_between(
    reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None = None
) -> float:
    """Return the largest error of any element, in tolerances; infinite for a misplaced NaN or Inf.

    Args:
        reference: Any dtype of the suspect's kind; float64 for a reference of higher precision.
        suspect: The same shape.
        moved: The reference's result for inputs that are moved by one rounding each (`move`). Its
            distance from `reference` is the result's own uncertainty, for example where terms
            cancel, and is allowed in addition.
    """
    if not suspect.size:
        return 0.0
    if floatbits.is_complex(suspect.dtype):
        return max(
            error_between(part(reference), part(suspect), None if moved is None else part(moved))
            for part in (np.real, np.imag)
        )
    if not floatbits.is_float(suspect.dtype):
        wrong = _share(reference, suspect)
        if moved is not None and wrong <= _FLIPS * _share(reference, moved):
            return 0.0
        return max(_LEAST_WRONG, wrong * _ALL_WRONG) if wrong else 0.0
    return _float_error(reference, suspect, moved)


def largest_error(references: Iterable[np.ndarray], suspects: Iterable[np.ndarray]) -> float:
    """Return the largest `error_between` arrays and their counterparts."""
    pairs = zip(references, suspects, strict=True)
    return max((error_between(*pair) for pair in pairs), default=0.0)


def _share(reference: np.ndarray, actual: np.ndarray) -> float:
    return float(np.mean(reference.astype(actual.dtype) != actual))


def _float_error(reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None) -> float:
    with np.errstate(all="ignore"):
        rounded = reference.astype(suspect.dtype)  # an overflow here is allowed in the suspect too
        expected, actual = reference.astype(np.float64), suspect.astype(np.float64)
        finite = np.isfinite(actual) & np.isfinite(rounded.astype(np.float64))
        same = (rounded == suspect) | (np.isnan(expected) & np.isnan(actual))
        if not np.all(finite | same):
            return math.inf
        if not finite.any():
            return 0.0
        expected, actual = expected[finite], actual[finite]
        row = default_for(suspect.dtype)
        relative = row.epsilons * floatbits.epsilon(suspect.dtype)
        size = math.sqrt(float(np.mean(expected * expected)))
        allowed = relative * (np.abs(expected) + size) + floatbits.smallest_normal(suspect.dtype)
        if moved is not None:
            noise = np.abs(moved.astype(np.float64)[finite] - expected)
            allowed = allowed + _NOISE * np.max(noise[np.isfinite(noise)], initial=0.0)
        return float(np.max(np.abs(actual - expected) / allowed))


def move(value: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return an array with each float element moved up or down by a rounding, at random."""
    if not floatbits.is_inexact(value.dtype):
        return value
    part = np.real(value).dtype if floatbits.is_complex(value.dtype) else value.dtype
    steps = floatbits.epsilon(part) * generator.choice((-1.0, 1.0), value.shape)
    wide = np.complex128 if floatbits.is_complex(value.dtype) else np.float64
    with np.errstate(all="ignore"):
        return (value.astype(wide) * (1.0 + steps)).astype(value.dtype)


def difference(
    name: str, reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None = None
) -> ValueDifference:
    """Return the `error_between` two arrays, with the reason in words."""
    with np.errstate(over="ignore"):  # what overflows there is compared as an infinity
        rounded = reference.astype(suspect.dtype)
    compared = compare_arrays(name, rounded, suspect, ToleranceRequest())
    return ValueDifference(name, error_between(reference, suspect, moved), compared.reason)
