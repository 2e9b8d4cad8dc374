"""One number for how far two arrays are apart; it must not know where they come from.

The unit is the default tolerance of the suspect's dtype: an element's error over what `tolerance`
allows for it. 1 and below is what correct executions differ by, whatever the dtype, so that errors
of different values can be compared with each other.
"""

from __future__ import annotations

import math

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare import compare_arrays
from snaprt_replay.localise.findings import ValueDifference
from snaprt_replay.tolerance import ToleranceRequest, default_for

# A wrong integer or bool is no rounding: it counts as much as a float that is wrong by its whole
# size, in proportion to how many of them are wrong, and never as within tolerance.
_ALL_WRONG = 1 / (128 * 2.0**-23)
_LEAST_WRONG = 2.0


def error_between(reference: np.ndarray, suspect: np.ndarray) -> float:
    """Return the largest error of any element, in tolerances; infinite for a misplaced NaN or Inf.

    Args:
        reference: Any dtype of the suspect's kind; float64 for a reference of higher precision.
        suspect: The same shape.
    """
    if not suspect.size:
        return 0.0
    if floatbits.is_complex(suspect.dtype):
        parts = ((getattr(reference, part), getattr(suspect, part)) for part in ("real", "imag"))
        return max(error_between(one, other) for one, other in parts)
    if not floatbits.is_float(suspect.dtype):
        wrong = np.count_nonzero(reference.astype(suspect.dtype) != suspect)
        return max(_LEAST_WRONG, wrong / suspect.size * _ALL_WRONG) if wrong else 0.0
    return _float_error(reference, suspect)


def _float_error(reference: np.ndarray, suspect: np.ndarray) -> float:
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
        return float(np.max(np.abs(got - right) / allowed))


def difference(name: str, reference: np.ndarray, suspect: np.ndarray) -> ValueDifference:
    """Return `error_between` with words for it."""
    rounded = reference.astype(suspect.dtype)
    compared = compare_arrays(name, rounded, suspect, ToleranceRequest())
    return ValueDifference(name, error_between(reference, suspect), compared.reason)
