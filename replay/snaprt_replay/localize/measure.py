"""One number for how far two arrays are apart.

The unit is the default tolerance of the suspect's dtype: an element's error over what `tolerance`
allows for it. 1 and below is what correct executions differ by, whatever the dtype, so that errors
of different values can be compared with each other.
"""

from __future__ import annotations

import math

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.tolerance import ToleranceRequest, default_for
from snaprt_replay.localize.findings import ValueDifference

# A wrong integer or bool is no rounding: it counts as much as a float that is wrong by its whole
# size, in proportion to how many of them are wrong, and never as within tolerance.
_ALL_WRONG = 1 / (128 * 2.0**-23)
_LEAST_WRONG = 2.0


# How much of the result's change under inputs that are moved by one rounding is still rounding: an
# operation rounds a few times, and its operands may be rounded the same way many times over.
_NOISE = 32.0
_FLIPS = 4.0


def error_between(
    reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None = None
) -> float:
    """Return the largest error of any element, in tolerances; infinite for a misplaced NaN or Inf.

    Args:
        reference: Any dtype of the suspect's kind; float64 for a reference of higher precision.
        suspect: The same shape.
        moved: What the reference gives for inputs that are moved by one rounding each (`move`). So
            much the result is uncertain by itself, where terms cancel for instance, and so much
            more is allowed.
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


def _share(reference: np.ndarray, actual: np.ndarray) -> float:
    return float(np.mean(reference.astype(actual.dtype) != actual))


def _float_error(reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None) -> float:
    with np.errstate(all="ignore"):
        rounded = reference.astype(suspect.dtype)  # what overflows there may overflow
        right, got = reference.astype(np.float64), suspect.astype(np.float64)
        finite = np.isfinite(got) & np.isfinite(rounded.astype(np.float64))
        same = (rounded == suspect) | (np.isnan(right) & np.isnan(got))
        if not np.all(finite | same):
            return math.inf
        if not finite.any():
            return 0.0
        right, got = right[finite], got[finite]
        row = default_for(suspect.dtype)
        relative = row.epsilons * floatbits.epsilon(suspect.dtype)
        size = math.sqrt(float(np.mean(right * right)))
        allowed = relative * (np.abs(right) + size) + floatbits.smallest_normal(suspect.dtype)
        if moved is not None:
            noise = np.abs(moved.astype(np.float64)[finite] - right)
            allowed = allowed + _NOISE * np.max(noise[np.isfinite(noise)], initial=0.0)
        return float(np.max(np.abs(got - right) / allowed))


def move(value: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return an array whose float elements are up or down by a rounding each, at random."""
    if not (floatbits.is_float(value.dtype) or floatbits.is_complex(value.dtype)):
        return value
    part = np.real(value).dtype if floatbits.is_complex(value.dtype) else value.dtype
    steps = floatbits.epsilon(part) * generator.choice((-1.0, 1.0), value.shape)
    wide = np.complex128 if floatbits.is_complex(value.dtype) else np.float64
    with np.errstate(all="ignore"):
        return (value.astype(wide) * (1.0 + steps)).astype(value.dtype)


def difference(
    name: str, reference: np.ndarray, suspect: np.ndarray, moved: np.ndarray | None = None
) -> ValueDifference:
    """Return `error_between` with words for it."""
    compared = compare_arrays(name, reference.astype(suspect.dtype), suspect, ToleranceRequest())
    return ValueDifference(name, error_between(reference, suspect, moved), compared.reason)
