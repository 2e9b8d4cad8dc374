"""Measure large float arrays by blocks, with fused kernels; it must not know what is made of it.

A kernel gives the counts, sums and worst errors of each row of a block. What it cannot give is
looked up with NumPy, in few rows: where a new worst element is, the histogram's sample, and all of
a row whose numbers leave the range in which the kernel is exact.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.compare.chunk_errors import SQUARES, ChunkMeter, count_beyond, offer_relative
from snaprt_replay.compare.error_totals import FloatErrors, OpenBlock, OpenChunk, add_specials
from snaprt_replay.compare.fused_kernels import BLOCK, ROW, ROWS, BlockErrors, Kernels
from snaprt_replay.compare.results import SpecialCounts
from snaprt_replay.compare.tolerance import Tolerance

# A row whose worst errors are smaller may have larger ones, that are subnormal.
_TINY: Final = {4: 1e-30, 8: 1e-290}
# As in chunk_errors: the rows that are counted in the histogram, then one in as many.
_COUNTED_ROWS, _COUNTED_EVERY = 64, 128
# In at most so many rows NumPy is faster than a kernel over the block.
_FEW_ROWS = ROWS // 16
# XLA reads arrays in place that start at a multiple of it.
_ALIGNMENT = 64


class Sides:
    """Two arrays, of which a kernel can take blocks in place, or from a copy that is aligned."""

    def __init__(self, expected: np.ndarray, actual: np.ndarray) -> None:
        self.expected = expected
        self.actual = actual
        self._copies: dict[int, np.ndarray] = {}

    def first_aligned(self, start: int) -> int:
        """Return the first index from ``start`` on at which the expected side is aligned."""
        place = self.expected.ctypes.data + start * self.expected.itemsize
        return start + (-place % _ALIGNMENT) // self.expected.itemsize

    def block(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return both sides of a block; the next call may overwrite them."""
        sides = [side[start : start + BLOCK] for side in (self.expected, self.actual)]
        expected, actual = (self._aligned(index, side) for index, side in enumerate(sides))
        return expected, actual

    def _aligned(self, index: int, values: np.ndarray) -> np.ndarray:
        if values.ctypes.data % _ALIGNMENT == 0:
            return values
        if index not in self._copies:
            room = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
            first = -room.ctypes.data % _ALIGNMENT
            self._copies[index] = room[first : first + values.nbytes].view(values.dtype)
        np.copyto(self._copies[index], values)
        return self._copies[index]


class BlockMeter:
    """Measures blocks of one thread, in order.

    Args:
        sides: One dimension each, C-contiguous, of the kernels' float type.
        kernels: The compiled programs.
        chunks: Measures what is not a block; it has the totals.
    """

    def __init__(self, sides: Sides, kernels: Kernels, chunks: ChunkMeter) -> None:
        self._sides = sides
        self._kernels = kernels
        self._chunks = chunks
        self._errors = chunks.errors
        self._dense_rows = 0

    def measure(self, start: int) -> None:
        """Add the block that starts at a flat index."""
        expected, actual = self._sides.block(start)
        # Of wider types, measuring both sides costs no more than looking whether they are equal.
        if expected.itemsize == 2 and _are_equal(expected, actual):
            found = self._kernels.measure_equal(expected)
        else:
            found = self._kernels.measure(expected, actual)
        exact = _exact_rows(found)
        errors, differing = self._errors, found.differing > 0
        errors.differing += int(found.differing[exact].sum())
        zeros = SpecialCounts(zero_sign=int(found.zero_signs[exact].sum()))
        errors.specials = add_specials(errors.specials, zeros)
        _add_squares(errors, found, exact)
        few = differing & (found.differing < ROW // 64)
        errors.buckets[0] += ROW * int(np.count_nonzero(exact & ~differing))
        dense = np.flatnonzero(exact & differing & ~few)
        self._count_sample(start, dense)
        for row in np.flatnonzero(~exact | few | self._may_be_worse(found, exact)).tolist():
            if exact[row]:
                self._look(start, row, found, bool(few[row]))
            else:
                self._chunks.measure(start + row * ROW, start + (row + 1) * ROW)
        if (exact & differing).any():
            rows = OpenBlock(start, exact & differing, found.absolute, found.ulp)
            errors.open_blocks.append(rows)

    def _count_sample(self, start: int, rows: np.ndarray) -> None:
        """Count the ULP distances of some rows for all."""
        each = max(0, _COUNTED_ROWS - self._dense_rows)
        self._dense_rows += rows.size
        chosen = [*range(min(each, rows.size)), *range(each, rows.size, _COUNTED_EVERY)]
        for place, until in itertools.pairwise([*chosen, rows.size]):
            ulps = floatbits.ulp_distance(*self._row(start, rows[place]))
            self._errors.count_ulps(ulps, until - place)

    def _row(self, start: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(start + row * ROW, start + (row + 1) * ROW)
        return self._sides.expected[part], self._sides.actual[part]

    def _may_be_worse(self, found: BlockErrors, exact: np.ndarray) -> np.ndarray:
        """Return the rows with an error that may be worse than all before, or the first one."""
        errors = self._errors
        at_all = exact & (found.differing > 0)
        worse = _above_all_before(found.absolute, at_all, errors.worst_abs.value)
        worse |= _above_all_before(found.ulp, at_all, errors.worst_ulp.value)
        relative = np.where(at_all, found.relative, 0)
        worst = relative.dtype.type(errors.worst_rel.value)
        highest = np.maximum.accumulate(np.append(worst, relative))
        # The quotients of two pairs of numbers with up to 11 bits each are equal, or 2^-22 apart:
        # rounding to 24 bits keeps them apart. Up to a half, the difference has no more bits.
        if self._sides.expected.itemsize == 2 and highest[-1] <= 0.5:
            worse |= relative > highest[:-1]
        else:
            worse |= relative >= highest[:-1]
        worse &= at_all
        if errors.first_difference < 0 and at_all.any():
            worse[int(at_all.argmax())] = True
        return worse

    def _look(self, start: int, row: int, found: BlockErrors, few: bool) -> None:
        """Look for what the kernel cannot tell of a row."""
        errors = self._errors
        left, right = self._row(start, row)
        first = start + row * ROW
        if errors.first_difference < 0:
            unequal = floatbits.bit_view(left) != floatbits.bit_view(right)
            errors.first_difference = first + int(unequal.argmax())
        wide = floatbits.widen(left)
        distance = np.abs(floatbits.widen(right) - wide)
        if found.absolute[row] > errors.worst_abs.value:
            errors.worst_abs.offer(distance, None, first)
        if found.relative[row] >= distance.dtype.type(errors.worst_rel.value):
            bound = distance.dtype.type(float(errors.worst_rel.value) * (1 - 1e-6))
            candidates = np.flatnonzero(distance > np.abs(wide) * bound)
            offer_relative(errors, wide, distance, candidates, first)
        if few or found.ulp[row] > errors.worst_ulp.value:
            ulps = floatbits.ulp_distance(left, right)
            errors.worst_ulp.offer(ulps, None, first)
            if few:
                errors.count_ulps(ulps)


def _are_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether all bits of two blocks are the same."""
    words = left.view(np.uint64), right.view(np.uint64)
    return np.array_equal(words[0][:ROW], words[1][:ROW]) and np.array_equal(*words)


def _above_all_before(values: np.ndarray, rows: np.ndarray, worst: float) -> np.ndarray:
    """Return where a row's value is above those of the rows before it, and above ``worst``."""
    values = np.where(rows, values, 0).astype(np.float64 if values.dtype.kind == "f" else np.uint64)
    highest = np.maximum.accumulate(np.append(values.dtype.type(worst), values))
    return np.asarray(values > highest[:-1])


def _exact_rows(found: BlockErrors) -> np.ndarray:
    """Return for which rows the kernel's answers are exact."""
    low, high = SQUARES[found.absolute.itemsize]
    tiny = _TINY[found.absolute.itemsize]
    exact = ~found.odd
    exact &= (found.expected_squared > low) & (found.expected_squared < high)
    exact &= (found.difference_squared < high) & (found.actual_squared < high)
    exact &= (found.differing == 0) | ((found.absolute > tiny) & (found.relative > tiny))
    return exact


def _add_squares(errors: FloatErrors, found: BlockErrors, exact: np.ndarray) -> None:
    """Add the sums of squares as `chunk_errors` does."""
    expected, moved, across, product, actual = (
        sums[exact].astype(np.float64)
        for sums in (
            found.expected_squared,
            found.difference_squared,
            found.expected_difference,
            found.product,
            found.actual_squared,
        )
    )
    near = moved < expected / 16
    errors.finite_expected += ROW * expected.size
    errors.expected_all_squared += float(expected.sum())
    errors.expected_squared += float(expected.sum())
    errors.product += float(np.where(near, expected + across, product).sum())
    errors.actual_squared += float(np.where(near, expected + 2 * across + moved, actual).sum())


def count_beyond_in_block(
    errors: FloatErrors, sides: Sides, kernels: Kernels, tolerance: Tolerance, block: OpenBlock
) -> None:
    """Count the elements of a block that are beyond tolerance."""
    rows = block.open_rows(tolerance)
    if rows.size > _FEW_ROWS:
        expected, actual = sides.block(block.start)
        surely, perhaps = kernels.beyond(
            expected, actual, tolerance.rtol, tolerance.atol, tolerance.max_ulp
        )
        settled = perhaps[rows] == 0
        if errors.first_beyond < 0:  # NumPy finds the place
            settled[np.flatnonzero(surely[rows])[:1]] = False
        errors.beyond += int(surely[rows[settled]].sum())
        rows = rows[~settled]
    for row in rows:
        first = block.start + int(row) * ROW
        worst = float(block.absolute[row]), int(block.ulp[row])
        chunk = OpenChunk(first, first + ROW, *worst)
        count_beyond(errors, sides.expected, sides.actual, tolerance, chunk)
