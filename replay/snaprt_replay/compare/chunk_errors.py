"""Measure one chunk of two float arrays after the other; it must not know what is made of it.

Nearly every chunk takes the dense way: about fifteen passes of NumPy's fastest kinds over what lies
in the core's cache, none of which converts, divides or gathers. Where a bound shows that a chunk
holds no new worst element, nothing looks for it. A chunk whose squares or differences leave the
range of the type takes the careful way, in a wider one.
"""

from __future__ import annotations

import math

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.error_totals import FloatErrors, OpenChunk, add_specials
from snaprt_replay.compare.results import SpecialCounts
from snaprt_replay.compare.tolerance import Tolerance

# Every differing chunk is counted in the histogram of ULP distances up to the first number, and
# one in the second, as so many, from there on.
_COUNTED_CHUNKS, _COUNTED_EVERY = 16, 64
_DOT = 1 << 13  # up to 10,000 elements OpenBLAS takes one thread
# Sums of squares outside of this lost precision to underflow, or overflowed.
SQUARES = {4: (1e-30, 1e37), 8: (1e-290, 1e300)}


class ChunkMeter:
    """Measures the chunks of one thread, in order.

    Args:
        expected: One dimension, C-contiguous, any real float dtype.
        actual: The same shape and dtype.
        largest: Elements of the largest chunk.
    """

    def __init__(self, expected: np.ndarray, actual: np.ndarray, largest: int) -> None:
        self.errors = FloatErrors()
        self._expected = expected
        self._actual = actual
        working = floatbits.working_dtype(expected.dtype)
        self._difference = np.empty(largest, working)
        self._distance = np.empty(largest, working)
        self._size = np.empty(largest, working)
        self._flags = np.empty(largest, np.bool_)
        self._steps = np.empty(largest, np.dtype(f"i{expected.itemsize}"))
        self._dense_chunks = 0

    def measure(self, start: int, stop: int) -> None:
        """Add one chunk, but for what is beyond tolerance in its finite pairs."""
        left, right = self._expected[start:stop], self._actual[start:stop]
        unequal = np.not_equal(
            floatbits.bit_view(left), floatbits.bit_view(right), out=self._flags[: left.size]
        )
        differing = int(np.count_nonzero(unequal))
        if not differing:
            _add_equal(self.errors, floatbits.widen(left))
            return
        self.errors.differing += differing
        if self.errors.first_difference < 0:
            self.errors.first_difference = start + int(unequal.argmax())
        if not self._measure_dense(start, left, right, differing):
            _measure_carefully(self.errors, left, right, start, stop)

    def _measure_dense(
        self, start: int, left: np.ndarray, right: np.ndarray, differing: int
    ) -> bool:
        """Add a chunk whose finite numbers and their squares stay in the working type's range.

        Returns:
            False if they do not; then nothing was added.
        """
        count, errors = left.size, self.errors
        wide, other = floatbits.widen(left), floatbits.widen(right)
        difference = np.subtract(other, wide, out=self._difference[:count])
        distance = np.abs(difference, out=self._distance[:count])
        where = int(distance.argmax())  # NumPy takes a NaN for the largest
        worst_abs = float(distance[where])
        if not math.isfinite(worst_abs):
            return self._measure_the_finite(start, left, right, wide, other)
        if not self._add_dense_squares(wide, other, difference):
            return False
        errors.worst_abs.offer_at(distance, where, None, start)
        self._offer_relative(start, wide, distance)
        worst_ulp = self._measure_ulps(start, left, right, distance, differing)
        stop = start + count
        errors.open_chunks.append(OpenChunk(start, stop, worst_abs, worst_ulp))
        return True

    def _measure_the_finite(
        self,
        start: int,
        left: np.ndarray,
        right: np.ndarray,
        wide: np.ndarray,
        other: np.ndarray,
    ) -> bool:
        """Add a chunk with NaN or Inf: zeros take their places once they are counted."""
        special = np.flatnonzero(~(np.isfinite(wide) & np.isfinite(other)))
        if not special.size or left.itemsize == 1:  # a difference overflowed; there may be no zero
            return False
        left, right = left.copy(), right.copy()
        expected, actual, numbers = left[special], right[special], wide[special]
        left[special] = right[special] = 0
        differing = int(np.count_nonzero(floatbits.bit_view(left) != floatbits.bit_view(right)))
        if not self._measure_dense(start, left, right, differing):
            return False
        errors = self.errors
        _count_specials(errors, expected, actual, special, start)
        numbers = numbers[np.isfinite(numbers)].astype(np.longdouble)
        errors.expected_all_squared += float(np.dot(numbers, numbers))
        errors.finite_expected += numbers.size - special.size
        errors.buckets[0] -= special.size
        return True

    def _add_dense_squares(
        self, wide: np.ndarray, other: np.ndarray, difference: np.ndarray
    ) -> bool:
        """Add the sums of squares; return False, and add nothing, if they left their range.

        Where the sides are close, the difference gives the actual side's sums: their own rounding
        would be larger than what a cosine near 1 is to show.
        """
        low, high = SQUARES[wide.itemsize]
        expected, moved = _dot(wide, wide), _dot(difference, difference)
        if not (low < expected < high and moved < high):
            return False
        if moved < expected / 16:
            product = expected + _dot(wide, difference)
            actual = 2 * product - expected + moved
        else:
            product, actual = _dot(wide, other), _dot(other, other)
        self._add_squares(expected, actual, product, wide.size)
        return True

    def _add_squares(self, expected: float, actual: float, product: float, count: int) -> None:
        errors = self.errors
        errors.finite_expected += count
        errors.expected_all_squared += expected
        errors.expected_squared += expected
        errors.actual_squared += actual
        errors.product += product

    def _offer_relative(self, start: int, wide: np.ndarray, distance: np.ndarray) -> None:
        """Look for a larger relative error among the elements that can have one."""
        count = distance.size
        size = np.abs(wide, out=self._size[:count])
        bound = size.dtype.type(float(self.errors.worst_rel.value) * (1 - 1e-6))
        np.multiply(size, bound, out=size)
        candidates = np.greater(distance, size, out=self._flags[:count])
        if candidates.any():
            offer_relative(self.errors, wide, distance, np.flatnonzero(candidates), start)

    def _measure_ulps(
        self,
        start: int,
        left: np.ndarray,
        right: np.ndarray,
        distance: np.ndarray,
        differing: int,
    ) -> int:
        """Add distances in ULP and return the largest."""
        errors = self.errors
        if differing < left.size // 64:
            return self._measure_few_ulps(start, left, right)
        self._dense_chunks += 1
        weight = 1 if self._dense_chunks <= _COUNTED_CHUNKS else _COUNTED_EVERY
        counted = weight == 1 or self._dense_chunks % _COUNTED_EVERY == 0
        worst = None if counted else self._worst_of_near(start, left, right)
        if worst is None:
            ulps = floatbits.ulp_distance(left, right)
            where = int(ulps.argmax())
            errors.worst_ulp.offer_at(ulps, where, None, start)
            worst = int(ulps[where])
            if counted:
                errors.count_ulps(ulps, weight)
            # Bits that differ without a distance: zeros of two signs.
            if not distance.all():
                unequal = floatbits.bit_view(left) != floatbits.bit_view(right)
                zeros = int(np.count_nonzero(unequal & (distance == 0)))
                errors.specials = add_specials(errors.specials, SpecialCounts(zero_sign=zeros))
        return worst

    def _measure_few_ulps(self, start: int, left: np.ndarray, right: np.ndarray) -> int:
        """Do what `_measure_ulps` does where few elements differ: look at those alone."""
        errors = self.errors
        places = np.flatnonzero(floatbits.bit_view(left) != floatbits.bit_view(right))
        errors.buckets[0] += left.size - places.size
        if not places.size:
            return 0
        ulps = floatbits.ulp_distance(left[places], right[places])
        errors.worst_ulp.offer(ulps, places, start)
        errors.count_ulps(ulps)
        zeros = SpecialCounts(zero_sign=int(np.count_nonzero(ulps == 0)))
        errors.specials = add_specials(errors.specials, zeros)
        return int(ulps.max())

    def _worst_of_near(self, start: int, left: np.ndarray, right: np.ndarray) -> int | None:
        """Return the largest distance in ULP if all are small, which their bits then show."""
        if left.itemsize < 4:
            return None
        kind = np.dtype(f"i{left.itemsize}")
        steps = np.subtract(right.view(kind), left.view(kind), out=self._steps[: left.size])
        above, below = int(steps.argmax()), int(steps.argmin())
        highest, lowest = int(steps[above]), -int(steps[below])
        # Numbers of two signs, zeros too, are further apart than that in their bits.
        if max(highest, lowest) >= 1 << (left.itemsize * 8 - 10):
            return None
        where = above if highest >= lowest else below
        worst = np.abs(steps[where : where + 1])
        self.errors.worst_ulp.offer_at(worst, 0, None, start + where)
        return int(worst[0])


def offer_relative(
    errors: FloatErrors,
    wide: np.ndarray,
    distance: np.ndarray,
    candidates: np.ndarray,
    start: int,
) -> None:
    """Offer the relative errors of candidates."""
    size = np.abs(wide[candidates].astype(np.float64))
    relative = np.divide(
        distance[candidates].astype(np.float64), size, out=np.zeros(size.shape), where=size > 0
    )
    errors.worst_rel.offer(relative, candidates, start)


def _dot(left: np.ndarray, right: np.ndarray) -> float:
    """Return the scalar product, cut so that BLAS does not start threads beside ours."""
    return sum(
        float(np.dot(left[start : start + _DOT], right[start : start + _DOT]))
        for start in range(0, left.size, _DOT)
    )


def _add_equal(errors: FloatErrors, wide: np.ndarray) -> None:
    """Add a chunk that is the same on both sides."""
    square = _dot(wide, wide)
    finite = wide.size
    low, high = SQUARES[wide.itemsize]
    if not low < square < high:  # zeros, underflow, overflow, or something not finite
        numbers = wide[np.isfinite(wide)].astype(np.float64)
        finite = numbers.size
        square = _dot(numbers, numbers)
        _count_both(errors, wide)
    errors.finite_expected += finite
    errors.buckets[0] += finite
    errors.expected_all_squared += square
    errors.expected_squared += square
    errors.actual_squared += square
    errors.product += square


# --- the careful way ------------------------------------------------------------------------------


def _measure_carefully(
    errors: FloatErrors, expected: np.ndarray, actual: np.ndarray, start: int, stop: int
) -> None:
    """Add a chunk that may hold anything."""
    _add_squares_carefully(errors, expected, actual)
    positions = np.flatnonzero(floatbits.bit_view(expected) != floatbits.bit_view(actual))
    equal = np.ones(expected.size, np.bool_)
    equal[positions] = False
    _count_equal(errors, expected[equal])
    expected, actual = expected[positions], actual[positions]
    finite = _count_specials(errors, expected, actual, positions, start)
    expected, actual, positions = expected[finite], actual[finite], positions[finite]
    if not expected.size:
        return
    # float32 may overflow in the difference of two numbers that it holds.
    distance = np.abs(_as_float64(actual) - _as_float64(expected))
    errors.worst_abs.offer(distance, positions, start)
    size = np.abs(_as_float64(expected))
    relative = np.divide(distance, size, out=np.zeros(size.shape), where=size > 0)
    errors.worst_rel.offer(relative, positions, start)
    ulps = floatbits.ulp_distance(expected, actual)
    errors.worst_ulp.offer(ulps, positions, start)
    errors.count_ulps(ulps)
    zeros = SpecialCounts(zero_sign=int(np.count_nonzero(distance == 0)))
    errors.specials = add_specials(errors.specials, zeros)
    worst_abs, worst_ulp = float(distance.max()), int(ulps.max())
    errors.open_chunks.append(OpenChunk(start, stop, worst_abs, worst_ulp))


def _add_squares_carefully(errors: FloatErrors, expected: np.ndarray, actual: np.ndarray) -> None:
    wide, other = floatbits.widen(expected), floatbits.widen(actual)
    # longdouble where the squares of float64 could leave its range; float64 holds all others.
    big = np.float64 if wide.itemsize == 4 else np.longdouble
    wide, other = wide.astype(big), other.astype(big)
    finite_left = wide[np.isfinite(wide)]
    errors.finite_expected += finite_left.size
    errors.expected_all_squared += _dot(finite_left, finite_left)
    both = np.isfinite(wide) & np.isfinite(other)
    if not both.all():
        wide, other = wide[both], other[both]
    errors.expected_squared += _dot(wide, wide)
    errors.actual_squared += _dot(other, other)
    errors.product += _dot(wide, other)


def _as_float64(values: np.ndarray) -> np.ndarray:
    return floatbits.widen(values).astype(np.float64)


def _count_equal(errors: FloatErrors, values: np.ndarray) -> None:
    """Count elements whose bits are equal on both sides."""
    wide = floatbits.widen(values)
    finite = int(np.count_nonzero(np.isfinite(wide)))
    errors.buckets[0] += finite
    if finite < values.size:
        _count_both(errors, wide)


def _count_both(errors: FloatErrors, wide: np.ndarray) -> None:
    """Count NaN and Inf that are the same on both sides."""
    nans, infinities = (int(np.count_nonzero(test(wide))) for test in (np.isnan, np.isinf))
    found = SpecialCounts(nan_both=nans, inf_both=infinities)
    errors.specials = add_specials(errors.specials, found)


def _count_specials(
    errors: FloatErrors,
    expected: np.ndarray,
    actual: np.ndarray,
    positions: np.ndarray,
    start: int,
) -> np.ndarray:
    """Count NaN and Inf, and return where both sides are finite."""
    left, right = floatbits.widen(expected), floatbits.widen(actual)
    left_nan, right_nan = np.isnan(left), np.isnan(right)
    left_inf, right_inf = np.isinf(left), np.isinf(right)
    both_nan = left_nan & right_nan
    other_bits = floatbits.bit_view(expected) != floatbits.bit_view(actual)
    confusions = (
        left_nan & ~right_nan,
        right_nan & ~left_nan,
        left_inf & np.isfinite(right),
        right_inf & np.isfinite(left),
        left_inf & right_inf & (left != right),
    )
    masks = (*confusions, both_nan, both_nan & other_bits)
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    both_inf = int(np.count_nonzero(left_inf & right_inf & (left == right)))
    errors.specials = add_specials(errors.specials, SpecialCounts(*counts))
    errors.specials = add_specials(errors.specials, SpecialCounts(inf_both=both_inf))
    _note_beyond(errors, np.logical_or.reduce(confusions), positions, start)
    return np.isfinite(left) & np.isfinite(right)


def _note_beyond(
    errors: FloatErrors, beyond: np.ndarray, positions: np.ndarray | None, start: int
) -> None:
    count = int(np.count_nonzero(beyond))
    if count:
        where = int(beyond.argmax())
        first = start + (where if positions is None else int(positions[where]))
        errors.note_beyond(count, first)


# --- what is beyond tolerance ---------------------------------------------------------------------


def count_beyond(
    errors: FloatErrors,
    expected: np.ndarray,
    actual: np.ndarray,
    tolerance: Tolerance,
    chunk: OpenChunk,
) -> None:
    """Count the pairs of finite numbers of a chunk that are beyond tolerance."""
    left, right = expected[chunk.start : chunk.stop], actual[chunk.start : chunk.stop]
    wide = floatbits.widen(left)
    distance = np.abs(floatbits.widen(right) - wide)
    size = np.abs(wide)
    # First in the working precision, and a little too strict or too lax: what lies between, or
    # may have overflowed, is then judged in float64.
    allowed = size * float(tolerance.rtol) + float(tolerance.atol)
    far = _certainly_far(distance, size, tolerance, left.dtype)
    far &= distance > allowed * (1 + 1e-6)
    far &= np.isfinite(distance)
    _note_beyond(errors, far, None, chunk.start)
    held = np.flatnonzero(~far & ~(distance < allowed * (1 - 1e-6)))
    if not held.size:
        return
    one, other = left[held], right[held]
    exact_left, exact_right = _as_float64(one), _as_float64(other)
    beyond = np.abs(exact_right - exact_left) > tolerance.atol + tolerance.rtol * np.abs(exact_left)
    beyond &= floatbits.ulp_distance(one, other) > tolerance.max_ulp
    beyond &= np.isfinite(exact_left) & np.isfinite(exact_right)
    _note_beyond(errors, beyond, held, chunk.start)


def _certainly_far(
    distance: np.ndarray, size: np.ndarray, tolerance: Tolerance, dtype: np.dtype
) -> np.ndarray:
    """Return where the distance alone shows that it is more than ``max_ulp``.

    A unit in the last place of the larger number is at most epsilon times it.
    """
    share = (tolerance.max_ulp + 1) * floatbits.epsilon(dtype)
    if share > 0.25:
        return np.zeros(distance.shape, np.bool_)
    # |a - e| > 2s|e| is more than s max(|a|, |e|), for s up to a quarter.
    return distance > size * (2 * share) + floatbits.smallest_normal(dtype)
