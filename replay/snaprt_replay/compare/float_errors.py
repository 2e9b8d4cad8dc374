"""Measure how two float arrays of any size differ.

An array is a table of rows of `ROW` elements. Each row has one record. Fused kernels fill in the
records for blocks of a large array; NumPy fills in all others, and those of rows that contain NaN,
Inf or numbers at the limits of a type's range. Everything else is computed from the records:
totals, the rows that may have the worst elements, and, once the tolerance is known (it depends on
the root mean square), the rows that may have elements beyond it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.fused_kernels import BLOCK, ROW, ROWS, BlockErrors, Kernels, kernels_for
from snaprt_replay.compare.results import OutputComparison, Place, SpecialCounts
from snaprt_replay.compare.tolerance import Tolerance

# Importing JAX and compiling the kernels takes longer than comparing fewer with NumPy alone.
_FUSED_FROM = 4 * BLOCK
# For at most this many rows of a block, NumPy is faster than a kernel.
_FEW_ROWS = ROWS // 16
_ROWS_AT_ONCE = 4
# XLA reads arrays in place if they start at a multiple of this many bytes.
_ALIGNMENT = 64
# Sums of squares outside these limits lost precision to underflow, or overflowed; worst errors
# below `_TINY` may hide larger ones that are subnormal.
_SQUARES = {4: (1e-30, 1e37), 8: (1e-290, 1e300)}
_TINY = {4: 1e-30, 8: 1e-290}
# The histogram of ULP distances counts up to this many differing elements, and a sample of more.
_COUNTED, _COUNTED_EVERY = 1 << 19, 128
_MOST_LOOKED_AT = 8  # rows that may have the worst element
_ELEMENTS_PER_THREAD = 1 << 20
_MOST_THREADS = 8

# The buckets of ULP distances: the distance as float32, truncated to 8 significant bits. This is
# exact up to 256, at most 0.8 % too low above that, and any uint64 fits.
_BUCKET_OFFSET = 126 << 7
_BUCKETS = (65 << 7) + 1

_SPECIALS = tuple(field.name for field in dataclasses.fields(SpecialCounts))
_CONFUSED = _SPECIALS[:5]
_RECORD = np.dtype(
    [
        *((name, np.float64) for name in ("absolute", "relative")),
        ("ulp", np.uint64),
        *((name, np.int64) for name in ("differing", "finite", *_SPECIALS)),
        # Over all finite numbers of the expected side, and over pairs of finite numbers.
        *((name, np.float64) for name in ("all_squared", "expected", "actual", "product")),
    ]
)

Result = TypeVar("Result")


def measure(
    blank: OutputComparison,
    expected: np.ndarray,
    actual: np.ndarray,
    place: Callable[[int], Place | None],
    tolerance_for: Callable[[float], Tolerance],
) -> tuple[OutputComparison, Place | None]:
    """Compare two arrays element by element.

    Counts, places and elements beyond tolerance are exact. Only the histogram of ULP distances uses
    a sample, where more than half a million elements differ.

    Args:
        blank: The comparison with the fields that are already known.
        expected: One dimension, C-contiguous, any real float dtype.
        actual: The same shape and dtype.
        place: Returns an element by its flat index; None for -1.
        tolerance_for: Returns the tolerance for a root mean square of the expected side.

    Returns:
        ``blank`` with all measured fields, and the first element beyond tolerance.
    """
    table = _Table(expected, actual)
    in_threads(table.fill, len(table.blocks), expected.size)
    records = table.records
    rms = _rms(expected, float(records["all_squared"].sum()), int(records["finite"].sum()))
    tolerance = tolerance_for(rms)
    beyond = np.zeros(len(records), np.int64)

    def count_beyond(low: int, high: int) -> None:
        for block in table.blocks[low:high]:
            beyond[block.start : block.stop] = table.count_beyond(block, tolerance)

    in_threads(count_beyond, len(table.blocks), expected.size)
    specials = SpecialCounts(*(int(records[name].sum()) for name in _SPECIALS))
    max_abs, worst_abs = table.worst("absolute", lambda left, right: _errors(left, right)[0])
    max_rel, worst_rel = table.worst("relative", lambda left, right: _errors(left, right)[1])
    max_ulp, worst_ulp = table.worst("ulp", _finite_ulps)
    buckets = table.histogram(expected.size - specials.not_finite)
    measured = dataclasses.replace(
        blank,
        elements=expected.size,
        differing=int(records["differing"].sum()),
        beyond=int(beyond.sum()),
        tolerance=tolerance,
        max_abs_error=max_abs,
        max_rel_error=max_rel,
        max_ulp=int(max_ulp),
        p99_ulp=_percentile(buckets, 0.99),
        ulp_octaves=_octaves(buckets),
        cosine=_cosine(*(float(records[name].sum()) for name in ("expected", "actual", "product"))),
        rms=rms,
        specials=specials,
        first_difference=place(table.first(records["differing"], _unequal)),
        worst_abs=place(worst_abs),
        worst_rel=place(worst_rel),
        worst_ulp=place(worst_ulp),
    )
    return measured, place(table.first(beyond, lambda *sides: _beyond(sides, tolerance)))


def _rms(expected: np.ndarray, squared: float, finite: int) -> float:
    if math.isfinite(squared):
        return math.sqrt(squared / finite) if finite else 0.0
    wide = _as_float64(expected[np.isfinite(floatbits.widen(expected))])  # its squares overflow
    size = float(np.abs(wide).max())
    return size * math.sqrt(float(np.mean(np.square(wide / size))))


def _percentile(buckets: np.ndarray, share: float) -> int:
    """Return the distance in ULP that ``share`` (0 to 1) of the finite pairs do not exceed."""
    cumulated = np.cumsum(buckets)
    if not cumulated[-1]:
        return 0
    bucket = int(np.searchsorted(cumulated, math.ceil(share * int(cumulated[-1]))))
    bits = np.uint32((bucket + _BUCKET_OFFSET) << 16) if bucket else np.uint32(0)
    return int(np.asarray(bits).view(np.float32))


def _octaves(buckets: np.ndarray) -> tuple[int, ...]:
    """Return the number of finite pairs 0, 1, 2-3, 4-7, ... ULP apart."""
    octaves = [int(buckets[0])]
    octaves += [int(octave.sum()) for octave in buckets[128:-1].reshape(-1, 128)]
    octaves[-1] += int(buckets[-1])
    while octaves and not octaves[-1]:
        octaves.pop()
    return tuple(octaves)


def _cosine(expected: float, actual: float, product: float) -> float | None:
    norms = math.sqrt(expected) * math.sqrt(max(0.0, actual))
    if not norms or not math.isfinite(norms):
        return None
    return max(-1.0, min(1.0, product / norms))


def in_threads(work: Callable[[int, int], Result], count: int, elements: int) -> list[Result]:
    """Divide ``count`` items, in ranges, among as many threads as ``elements`` justify.

    NumPy's warnings are off in them. The results have the order of the items.
    """

    def quietly(low: int, high: int) -> Result:
        with np.errstate(all="ignore"):  # each thread has its own
            return work(low, high)

    threads = max(1, min(os.cpu_count() or 1, _MOST_THREADS, elements // _ELEMENTS_PER_THREAD))
    if threads == 1:
        return [quietly(0, count)]
    edges = [count * index // threads for index in range(threads + 1)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(quietly, edges[:-1], edges[1:]))


class _Table:
    """Two arrays and the records of their rows."""

    def __init__(self, expected: np.ndarray, actual: np.ndarray) -> None:
        self.expected = expected
        self.actual = actual
        self.working = floatbits.working_dtype(expected.dtype)
        self.kernels: Kernels | None = None
        lead = 0  # elements of a first row that ends where XLA can read the others in place
        if expected.size >= _FUSED_FROM:
            self.kernels = kernels_for(expected.dtype)
            lead = (-expected.ctypes.data % _ALIGNMENT) // expected.itemsize
        self.begin = lead - ROW if lead else 0
        self.records = np.zeros(-(-(expected.size - self.begin) // ROW), _RECORD)
        count, first = len(self.records), int(lead > 0)
        self.blocks = [range(first)] * first
        self.blocks += [range(row, min(row + ROWS, count)) for row in range(first, count, ROWS)]

    def part(self, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Return both sides of some rows."""
        start, stop = (max(0, self.begin + row * ROW) for row in (rows.start, rows.stop))
        return self.expected[start:stop], self.actual[start:stop]

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return both sides of one row."""
        return self.part(range(number, number + 1))

    def block(self, rows: range) -> tuple[np.ndarray, np.ndarray] | None:
        """Return both sides of a block such that XLA can read them; None for a short block."""
        expected, actual = self.part(rows)
        if self.kernels is None or expected.size < BLOCK:
            return None
        return _aligned(expected), _aligned(actual)

    # --- the records ---

    def fill(self, low: int, high: int) -> None:
        """Fill in the records of the rows of some blocks."""
        for rows in self.blocks[low:high]:
            sides = self.block(rows)
            if sides is None:
                self._fill_by_numpy(rows)
                continue
            assert self.kernels is not None
            # For wider types, measuring both sides costs no more than checking them for equality.
            if sides[0].itemsize == 2 and _are_equal(*sides):
                errors = self.kernels.measure_equal(sides[0])
            else:
                errors = self.kernels.measure(*sides)
            _take(self.records[rows.start : rows.stop], errors)
            for row in rows.start + np.flatnonzero(~_exact_rows(errors)):
                self.records[row] = np.zeros((), _RECORD)
                self._fill_by_numpy(range(row, row + 1))

    def _fill_by_numpy(self, rows: range) -> None:
        for first in range(rows.start, rows.stop, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, rows.stop)
            whole = (
                self.part(range(first, last))[0].size // ROW
            )  # the others: the first or the last row, a short one
            for low, high in ((first, first + whole), (first + whole, last)):
                if low < high:
                    left, right = self.part(range(low, high))
                    left, right = left.reshape(high - low, -1), right.reshape(high - low, -1)
                    _measure(self.records[low:high], left, right, self.working)

    # --- computed from the records ---

    def first(
        self, counts: np.ndarray, test: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> int:
        """Return the first index where a test holds, in rows with a count; -1 if there is none."""
        if not counts.any():
            return -1
        row = int((counts > 0).argmax())
        with np.errstate(all="ignore"):
            return max(0, self.begin + row * ROW) + int(test(*self.row(row)).argmax())

    def worst(
        self, name: str, errors_of: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[float, int]:
        """Return the largest error of a kind, and its first index."""
        worst: tuple[float, int] = (0, -1)
        values = self.records[name]
        if not values.size or not values.max():
            return worst
        least = values.max()
        if values.dtype.kind == "f":
            # The kernels round twice; for types of two bytes once, and quotients are 2^-22 apart.
            slack = 4 if self.expected.itemsize > 2 else 0.8
            least *= 1 - slack * floatbits.epsilon(self.working)
        for row in np.flatnonzero(values >= least)[:_MOST_LOOKED_AT].tolist():
            with np.errstate(all="ignore"):
                errors = errors_of(*self.row(row))
            where = int(errors.argmax())
            if errors[where] > worst[0]:
                worst = (errors[where].item(), max(0, self.begin + row * ROW) + where)
        return worst

    def histogram(self, pairs: int) -> np.ndarray:
        """Count the ULP distances of all pairs of finite numbers."""
        buckets = np.zeros(_BUCKETS, np.int64)
        for row, weight in self._counted_rows():
            left, right = self.row(row)
            if self.records["differing"][row] < ROW // 8:
                places = np.flatnonzero(_unequal(left, right))
                left, right = left[places], right[places]
            ulps = _finite_ulps(left, right)
            bits = (ulps.astype(np.float32).view(np.uint32) >> 16).astype(np.intp)
            numbers = np.maximum(bits, _BUCKET_OFFSET) - _BUCKET_OFFSET
            buckets += np.bincount(numbers, minlength=_BUCKETS) * weight
        buckets[0] = max(0, pairs - int(buckets[1:].sum()))
        return buckets

    def _counted_rows(self) -> Iterator[tuple[int, int]]:
        """Yield the rows to count, and how many rows each represents."""
        differing = np.flatnonzero(self.records["ulp"])
        so_far = np.cumsum(self.records["differing"][differing])
        dense = int(np.searchsorted(so_far, _COUNTED, "right"))
        bounds = [*range(dense), *range(dense, differing.size, _COUNTED_EVERY), differing.size]
        for place, until in itertools.pairwise(bounds):
            yield int(differing[place]), until - place

    def count_beyond(self, block: range, tolerance: Tolerance) -> np.ndarray:
        """Return, for each row of a block, how many elements are beyond tolerance."""
        records = self.records[block.start : block.stop]
        beyond = np.sum([records[name] for name in _CONFUSED], axis=0)
        is_open = records["absolute"] >= tolerance.atol * (1 - 1e-6)
        is_open &= records["ulp"] > tolerance.max_ulp
        rows = np.flatnonzero(is_open)
        sides = self.block(block) if rows.size > _FEW_ROWS else None
        if sides is not None:
            assert self.kernels is not None
            surely, perhaps = self.kernels.beyond(
                *sides, tolerance.rtol, tolerance.atol, tolerance.max_ulp
            )
            settled = (perhaps[rows] == 0) & (beyond[rows] == 0)
            beyond[rows[settled]] = surely[rows[settled]]
            rows = rows[~settled]
        for row in rows:
            beyond[row] = np.count_nonzero(_beyond(self.row(block[row]), tolerance))
        return beyond


def _aligned(values: np.ndarray) -> np.ndarray:
    if values.ctypes.data % _ALIGNMENT == 0:
        return values
    room = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT
    copy = room[first : first + values.nbytes].view(values.dtype)
    np.copyto(copy, values)
    return copy


def _are_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether all bits of two blocks are the same."""
    words = left.view(np.uint64), right.view(np.uint64)
    return np.array_equal(words[0][:ROW], words[1][:ROW]) and np.array_equal(*words)


def _take(records: np.ndarray, errors: BlockErrors) -> None:
    """Fill in the records from a kernel's results for a block."""
    for name in ("absolute", "relative", "ulp", "differing", "zero_sign"):
        records[name] = getattr(errors, name)
    records["finite"] = ROW
    records["all_squared"] = errors.expected_squared
    _take_sums(
        records,
        errors.expected_squared,
        errors.actual_squared,
        errors.product,
        errors.difference_squared,
        errors.expected_difference,
    )


def _take_sums(
    records: np.ndarray,
    expected: np.ndarray,
    actual: np.ndarray,
    product: np.ndarray,
    moved: np.ndarray,
    across: np.ndarray,
) -> None:
    """Record sums of squares and products of both sides and of the difference (moved, across).

    Where the sides are close, compute the actual side's sums from the difference: their own
    rounding would be larger than the deviation of a cosine near 1.
    """
    expected, moved, across = (sums.astype(np.float64) for sums in (expected, moved, across))
    near = moved < expected / 16
    records["expected"] = expected
    records["actual"] = np.where(near, expected + 2 * across + moved, actual)
    records["product"] = np.where(near, expected + across, product)


def _exact_rows(errors: BlockErrors) -> np.ndarray:
    """Return for which rows a kernel's results are exact."""
    tiny = _TINY[errors.expected_squared.itemsize]
    exact = ~errors.odd
    exact &= _in_range(errors.expected_squared, errors.actual_squared, errors.difference_squared)
    exact &= (errors.differing == 0) | ((errors.absolute > tiny) & (errors.relative > tiny))
    return exact


def _in_range(expected: np.ndarray, actual: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return where sums of squares neither overflowed nor lost precision to underflow."""
    low, high = _SQUARES[expected.itemsize]
    return np.asarray((expected > low) & (expected < high) & (actual < high) & (moved < high))


# --- with NumPy -----------------------------------------------------------------------------------


def _measure(records: np.ndarray, left: np.ndarray, right: np.ndarray, working: np.dtype) -> None:
    """Fill in the records of the rows of two matrices, in a wide enough type."""
    unequal = _unequal(left, right)
    is_equal = not unequal.any()
    records["differing"] = 0 if is_equal else np.count_nonzero(unequal, axis=1)
    records["finite"] = left.shape[1]
    records["all_squared"] = 0
    wide_left = floatbits.widen(left).astype(working, copy=False)
    wide_right = wide_left if is_equal else floatbits.widen(right).astype(working, copy=False)
    squared = np.vecdot(wide_left, wide_left)
    actual_squared = squared if is_equal else np.vecdot(wide_right, wide_right)
    ulp_left = left
    if not np.isfinite(squared + actual_squared).all():
        places = np.nonzero(~(np.isfinite(wide_left) & np.isfinite(wide_right)))
        _count_specials(records, places, left[places], right[places])
        # Elements that are the same on both sides and zero do not count anywhere else.
        wide_left, wide_right, ulp_left = wide_left.copy(), wide_right.copy(), left.copy()
        wide_left[places], wide_right[places], ulp_left[places] = 0, 0, right[places]
        unequal[places] = False
        is_equal = not unequal.any()
        squared, actual_squared = np.vecdot(wide_left, wide_left), np.vecdot(wide_right, wide_right)
    records["all_squared"] += squared
    difference, moved = wide_left, squared
    if is_equal:
        is_exact = _in_range(squared, squared, squared)
    else:
        difference = wide_right - wide_left
        moved = np.vecdot(difference, difference)
        absolute, relative = _errors_of(wide_left, difference)
        records["absolute"], records["relative"] = absolute.max(axis=1), relative.max(axis=1)
        is_exact = _in_range(squared, actual_squared, moved) & np.isfinite(records["relative"])
    if working.itemsize == 4 and not is_exact.all():
        _measure(records, left, right, np.dtype(np.float64))
    elif is_equal:
        for name in ("expected", "actual", "product"):
            records[name] = squared
    else:
        products = np.vecdot(wide_left, wide_right), moved, np.vecdot(wide_left, difference)
        _take_sums(records, squared, actual_squared, *products)
        _measure_ulps(records, ulp_left, right)


def _measure_ulps(records: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Record the largest distances, and how many zeros have the opposite sign."""
    if left.itemsize >= 4:
        kind = np.dtype(f"i{left.itemsize}")
        steps = right.view(kind) - left.view(kind)
        highest, lowest = steps.max(axis=1), steps.min(axis=1)
        # The bits of numbers with opposite signs, including zeros, are further apart than that.
        limit = 1 << (left.itemsize * 8 - 10)
        if highest.max() < limit and lowest.min() > -limit:
            records["ulp"] = np.maximum(highest, -lowest)
            return
    ulps = floatbits.ulp_distance(left, right)
    records["ulp"] = ulps.max(axis=1)
    if not ulps.all():
        records["zero_sign"] = np.count_nonzero((ulps == 0) & _unequal(left, right), axis=1)


def _count_specials(
    records: np.ndarray, places: tuple[np.ndarray, ...], left: np.ndarray, right: np.ndarray
) -> None:
    """Count NaN and Inf, given all pairs that contain one, and their places."""
    wide_left, wide_right = _as_float64(left), _as_float64(right)
    both_nan = np.isnan(wide_left) & np.isnan(wide_right)
    counts = {
        **dict(zip(_CONFUSED, _confused(wide_left, wide_right), strict=True)),
        "nan_both": both_nan,
        "nan_payload": both_nan & _unequal(left, right),
        "inf_both": np.isinf(wide_left) & (wide_left == wide_right),
    }
    rows, size = places[0], len(records)
    for name, mask in counts.items():
        records[name] = np.bincount(rows[mask], minlength=size)
    alone = np.isfinite(wide_left)
    records["finite"] -= np.bincount(rows[~alone], minlength=size)
    records["all_squared"] = np.bincount(rows[alone], np.square(wide_left[alone]), minlength=size)


def _confused(wide_left: np.ndarray, wide_right: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return, for each kind, which elements are NaN or infinite on one side but not the other."""
    left_nan, right_nan = np.isnan(wide_left), np.isnan(wide_right)
    left_inf, right_inf = np.isinf(wide_left), np.isinf(wide_right)
    return (
        left_nan & ~right_nan,
        right_nan & ~left_nan,
        left_inf & np.isfinite(wide_right),
        right_inf & np.isfinite(wide_left),
        left_inf & right_inf & (wide_left != wide_right),
    )


def _unequal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return floatbits.bit_view(left) != floatbits.bit_view(right)


def _as_float64(values: np.ndarray) -> np.ndarray:
    return floatbits.widen(values).astype(np.float64, copy=False)


def _errors(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute and relative errors of pairs; 0 where a number is not finite."""
    wide_left, wide_right = _as_float64(left), _as_float64(right)
    by_kind = _errors_of(wide_left, wide_right - wide_left)
    finite = np.isfinite(wide_left) & np.isfinite(wide_right)
    if not finite.all():
        for errors in by_kind:
            errors[~finite] = 0
    return by_kind


def _errors_of(wide: np.ndarray, difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    absolute = np.abs(difference)
    relative = absolute / np.abs(wide)
    relative[wide == 0] = 0
    return absolute, relative


def _finite_ulps(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    ulps = floatbits.ulp_distance(left, right)
    finite = np.isfinite(floatbits.widen(left)) & np.isfinite(floatbits.widen(right))
    return ulps if finite.all() else np.where(finite, ulps, 0)


def _beyond(sides: tuple[np.ndarray, ...], tolerance: Tolerance) -> np.ndarray:
    """Return which elements are beyond tolerance, including NaN and Inf on only one side."""
    left, right = sides
    wide_left, wide_right = _as_float64(left), _as_float64(right)
    distance = np.abs(wide_right - wide_left)
    beyond = distance > tolerance.atol + tolerance.rtol * np.abs(wide_left)
    places = np.flatnonzero(beyond)
    beyond[places] = floatbits.ulp_distance(left[places], right[places]) > tolerance.max_ulp
    if not np.isfinite(distance).all():
        beyond &= np.isfinite(wide_left) & np.isfinite(wide_right)
        beyond = np.logical_or.reduce([beyond, *_confused(wide_left, wide_right)])
    return beyond
