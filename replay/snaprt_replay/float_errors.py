"""Measure how two float arrays of any size differ; it must not know verdicts, names or files.

The work is done in chunks that stay in a core's cache, over several threads (NumPy lets the others
run), in two passes: the first finds which chunks differ at all and sums the squares, because the
tolerance depends on the expected side's root mean square; the second measures those chunks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.results import SpecialCounts
from snaprt_replay.tolerance import Tolerance

_CHUNK_BYTES = 1 << 17
_ELEMENTS_PER_THREAD = 1 << 21
_MOST_THREADS = 8
# ULP distances are counted in buckets: a distance as float32, cut to 8 significant bits. Up to 256
# that is exact, above it at most 0.8 % low, and any uint64 fits.
_BUCKET_OFFSET = 126 << 7
_BUCKETS = (65 << 7) + 1


@dataclasses.dataclass
class Worst:
    """The largest value seen and its flat index; the first one wins."""

    value: float | int = 0
    index: int = -1

    def offer(self, values: np.ndarray, positions: np.ndarray | None, start: int) -> None:
        """Take the largest of ``values`` if it beats what was seen."""
        if not values.size:
            return
        where = int(values.argmax())
        value = values[where].item()
        if value > self.value:
            self.value = value
            self.index = start + (where if positions is None else int(positions[where]))

    def merge(self, later: Worst) -> None:
        """Take over what was seen further on in the array, if it is larger."""
        if later.value > self.value:
            self.value, self.index = later.value, later.index


@dataclasses.dataclass
class FloatErrors:
    """What `measure` found; indices are flat."""

    tolerance: Tolerance
    rms: float
    cosine: float | None
    differing: int = 0
    beyond: int = 0
    first_difference: int = -1
    first_beyond: int = -1
    worst_abs: Worst = dataclasses.field(default_factory=Worst)
    worst_rel: Worst = dataclasses.field(default_factory=Worst)
    worst_ulp: Worst = dataclasses.field(default_factory=Worst)
    specials: SpecialCounts = dataclasses.field(default_factory=SpecialCounts)
    buckets: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))

    def merge(self, later: FloatErrors) -> None:
        """Add what was found further on in the array."""
        self.differing += later.differing
        self.beyond += later.beyond
        if self.first_difference < 0:
            self.first_difference = later.first_difference
        if self.first_beyond < 0:
            self.first_beyond = later.first_beyond
        self.worst_abs.merge(later.worst_abs)
        self.worst_rel.merge(later.worst_rel)
        self.worst_ulp.merge(later.worst_ulp)
        self.specials = add_specials(self.specials, later.specials)
        self.buckets += later.buckets

    def percentile_ulp(self, share: float) -> int:
        """Return the distance that ``share`` (0 to 1) of the finite pairs do not exceed."""
        cumulated = np.cumsum(self.buckets)
        if not cumulated[-1]:
            return 0
        bucket = int(np.searchsorted(cumulated, math.ceil(share * int(cumulated[-1]))))
        bits = np.uint32((bucket + _BUCKET_OFFSET) << 16) if bucket else np.uint32(0)
        return int(np.asarray(bits).view(np.float32))

    def ulp_octaves(self) -> tuple[int, ...]:
        """Return the number of finite pairs 0, 1, 2-3, 4-7, ... ULP apart."""
        octaves = [int(self.buckets[0])]
        octaves += [int(octave.sum()) for octave in self.buckets[128:-1].reshape(-1, 128)]
        octaves[-1] += int(self.buckets[-1])
        while octaves and not octaves[-1]:
            octaves.pop()
        return tuple(octaves)


def add_specials(left: SpecialCounts, right: SpecialCounts) -> SpecialCounts:
    """Add two counts field by field."""
    pairs = zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)
    return SpecialCounts(*(one + other for one, other in pairs))


def measure(
    expected: np.ndarray, actual: np.ndarray, tolerance_for: Callable[[float], Tolerance]
) -> FloatErrors:
    """Compare two arrays element by element.

    Args:
        expected: One dimension, C-contiguous, any real float dtype.
        actual: The same shape and dtype.
        tolerance_for: Gives the tolerance for a root mean square of the expected side.
    """
    step = _CHUNK_BYTES // max(4, expected.itemsize)
    chunks = [(start, min(start + step, expected.size)) for start in range(0, expected.size, step)]
    with np.errstate(all="ignore"):
        total = _Sums()
        for sums in _in_threads(lambda part: _sum_squares(expected, actual, part), chunks):
            total.merge(sums)
        tolerance = tolerance_for(total.rms)
        result = FloatErrors(tolerance, total.rms, total.cosine)
        result.specials = SpecialCounts(nan_both=total.nan_in_equal_chunks)
        result.buckets[0] = total.finite_in_equal_chunks
        for errors in _in_threads(
            lambda part: _measure_chunks(expected, actual, tolerance, part),
            total.differing_chunks,
        ):
            result.merge(errors)
    return result


_Chunk = tuple[int, int]
_Part = TypeVar("_Part")


def _in_threads(work: Callable[[list[_Chunk]], _Part], chunks: list[_Chunk]) -> list[_Part]:
    """Deal chunks to as many threads as are worth starting; results come in array order."""
    elements = sum(stop - start for start, stop in chunks)
    count = max(1, min(os.cpu_count() or 1, _MOST_THREADS, elements // _ELEMENTS_PER_THREAD))
    if count == 1:
        return [work(chunks)]
    edges = [len(chunks) * index // count for index in range(count + 1)]
    parts = [chunks[low:high] for low, high in itertools.pairwise(edges)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, parts))


@dataclasses.dataclass
class _Sums:
    """What the first pass finds; the sums run over elements that are finite on both sides."""

    expected_squared: float = 0.0
    actual_squared: float = 0.0
    product: float = 0.0
    expected_all_squared: float = 0.0
    finite_expected: int = 0
    finite_in_equal_chunks: int = 0
    nan_in_equal_chunks: int = 0
    differing_chunks: list[_Chunk] = dataclasses.field(default_factory=list)

    def merge(self, later: _Sums) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(later, field.name))

    @property
    def rms(self) -> float:
        if not self.finite_expected:
            return 0.0
        return math.sqrt(self.expected_all_squared / self.finite_expected)

    @property
    def cosine(self) -> float | None:
        norms = math.sqrt(self.expected_squared) * math.sqrt(self.actual_squared)
        if not norms or not math.isfinite(norms):
            return None
        return max(-1.0, min(1.0, self.product / norms))


def _sum_squares(expected: np.ndarray, actual: np.ndarray, chunks: list[_Chunk]) -> _Sums:
    sums = _Sums()
    for start, stop in chunks:
        left, right = expected[start:stop], actual[start:stop]
        wide = floatbits.widen(left)
        if (floatbits.bit_view(left) == floatbits.bit_view(right)).all():
            _sum_equal_chunk(sums, wide)
            continue
        sums.differing_chunks.append((start, stop))
        # longdouble where the squares of float64 could leave its range; float64 holds all others.
        big = np.float64 if wide.itemsize == 4 else np.longdouble
        wide, other = wide.astype(big), floatbits.widen(right).astype(big)
        finite_left = wide[np.isfinite(wide)]
        sums.finite_expected += finite_left.size
        sums.expected_all_squared += float(np.dot(finite_left, finite_left))
        both = np.isfinite(wide) & np.isfinite(other)
        if not both.all():
            wide, other = wide[both], other[both]
        sums.expected_squared += float(np.dot(wide, wide))
        sums.actual_squared += float(np.dot(other, other))
        sums.product += float(np.dot(wide, other))
    return sums


def _sum_equal_chunk(sums: _Sums, wide: np.ndarray) -> None:
    """Add a chunk that is the same on both sides."""
    square = float(np.dot(wide, wide))
    finite = wide.size
    if not 1e-30 < square < math.inf:  # zeros, underflow, overflow, or something not finite
        numbers = wide[np.isfinite(wide)].astype(np.float64)
        finite = numbers.size
        square = float(np.dot(numbers, numbers))
        sums.nan_in_equal_chunks += int(np.isnan(wide).sum())
    sums.finite_expected += finite
    sums.finite_in_equal_chunks += finite
    sums.expected_all_squared += square
    sums.expected_squared += square
    sums.actual_squared += square
    sums.product += square


def _measure_chunks(
    expected: np.ndarray, actual: np.ndarray, tolerance: Tolerance, chunks: list[_Chunk]
) -> FloatErrors:
    errors = FloatErrors(tolerance, 0.0, None)
    for start, stop in chunks:
        _measure_chunk(errors, expected[start:stop], actual[start:stop], start)
    return errors


def _measure_chunk(
    errors: FloatErrors, expected: np.ndarray, actual: np.ndarray, start: int
) -> None:
    """Add one chunk that begins at flat index ``start``."""
    unequal = floatbits.bit_view(expected) != floatbits.bit_view(actual)
    differing = int(np.count_nonzero(unequal))
    if not differing:
        _count_equal(errors, expected)
        return
    errors.differing += differing
    if errors.first_difference < 0:
        errors.first_difference = start + int(unequal.argmax())
    positions = None
    if differing < expected.size // 4:  # few differ: measure those alone
        positions = np.flatnonzero(unequal)
        _count_equal(errors, expected[~unequal])
        expected, actual = expected[positions], actual[positions]
        unequal = np.ones(positions.size, np.bool_)
    distance = np.abs(floatbits.widen(actual) - floatbits.widen(expected))
    if not math.isfinite(distance.max()):
        finite = _count_specials(errors, expected, actual, positions, start)
        positions = np.flatnonzero(finite) if positions is None else positions[finite]
        expected, actual, unequal = expected[finite], actual[finite], unequal[finite]
        # float32 may have overflowed in the difference of two numbers that it holds.
        distance = np.abs(_as_float64(actual) - _as_float64(expected))
    if expected.size:
        _measure_finite(errors, expected, actual, distance, positions, start)
        zero_sign = int(np.count_nonzero(unequal & (distance == 0)))
        errors.specials = dataclasses.replace(
            errors.specials, zero_sign=errors.specials.zero_sign + zero_sign
        )


def _as_float64(values: np.ndarray) -> np.ndarray:
    return floatbits.widen(values).astype(np.float64)


def _count_equal(errors: FloatErrors, values: np.ndarray) -> None:
    """Count elements whose bits are equal on both sides."""
    wide = floatbits.widen(values)
    finite = int(np.count_nonzero(np.isfinite(wide)))
    errors.buckets[0] += finite
    if finite < values.size:
        equal_nans = SpecialCounts(nan_both=int(np.count_nonzero(np.isnan(wide))))
        errors.specials = add_specials(errors.specials, equal_nans)


def _count_specials(
    errors: FloatErrors,
    expected: np.ndarray,
    actual: np.ndarray,
    positions: np.ndarray | None,
    start: int,
) -> np.ndarray:
    """Count NaN and Inf, and return where both sides are finite."""
    left, right = floatbits.widen(expected), floatbits.widen(actual)
    left_nan, right_nan = np.isnan(left), np.isnan(right)
    left_inf, right_inf = np.isinf(left), np.isinf(right)
    both_nan = left_nan & right_nan
    payload = both_nan & (floatbits.bit_view(expected) != floatbits.bit_view(actual))
    confusions = (
        left_nan & ~right_nan,
        right_nan & ~left_nan,
        left_inf & np.isfinite(right),
        right_inf & np.isfinite(left),
        left_inf & right_inf & (left != right),
    )
    counts = [int(np.count_nonzero(mask)) for mask in (*confusions, both_nan, payload)]
    errors.specials = add_specials(errors.specials, SpecialCounts(*counts))
    confused = np.logical_or.reduce(confusions)
    _count_beyond(errors, confused, positions, start)
    return np.isfinite(left) & np.isfinite(right)


def _count_beyond(
    errors: FloatErrors, beyond: np.ndarray, positions: np.ndarray | None, start: int
) -> None:
    count = int(np.count_nonzero(beyond))
    if not count:
        return
    errors.beyond += count
    where = int(beyond.argmax())
    found = start + (where if positions is None else int(positions[where]))
    # One chunk may call this twice: for what is not finite, then for the rest.
    if errors.first_beyond < 0 or found < errors.first_beyond:
        errors.first_beyond = found


def _measure_finite(
    errors: FloatErrors,
    expected: np.ndarray,
    actual: np.ndarray,
    distance: np.ndarray,
    positions: np.ndarray | None,
    start: int,
) -> None:
    """Add pairs of finite numbers; ``distance`` is ``|actual - expected|``."""
    errors.worst_abs.offer(distance, positions, start)
    size = np.abs(floatbits.widen(expected))
    relative = np.divide(distance, size, out=np.zeros_like(distance), where=size > 0)
    if not math.isfinite(relative.max()):
        relative = np.divide(
            distance, size, out=np.zeros(size.shape), where=size > 0, dtype=np.float64
        )
    errors.worst_rel.offer(relative, positions, start)

    ulps = floatbits.ulp_distance(expected, actual)
    errors.worst_ulp.offer(ulps, positions, start)
    buckets = (ulps.astype(np.float32).view(np.uint32) >> 16).astype(np.intp)
    np.maximum(buckets, _BUCKET_OFFSET, out=buckets)
    buckets -= _BUCKET_OFFSET
    errors.buckets += np.bincount(buckets, minlength=_BUCKETS)

    # A cheap sieve first, in the working precision and a little too strict; what it holds back is
    # then judged in float64.
    tolerance = errors.tolerance
    allowed = size * float(tolerance.rtol) + float(tolerance.atol)
    held = np.flatnonzero(~(distance < allowed * (1 - 1e-6)) & (ulps > tolerance.max_ulp))
    if held.size:
        left, right = _as_float64(expected[held]), _as_float64(actual[held])
        beyond = np.abs(right - left) > tolerance.atol + tolerance.rtol * np.abs(left)
        held_positions = held if positions is None else positions[held]
        _count_beyond(errors, beyond, held_positions, start)
