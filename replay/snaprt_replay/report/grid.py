"""Find where in an array the error sits, in few cells; it must not know tolerances or drawing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.report.model import ErrorGrid

ROWS, COLUMNS = 24, 48

# Elements looked at in one go: a few MB, whatever the array's size.
_CHUNK = 1 << 18


def error_grid(
    expected: np.ndarray, actual: np.ndarray, rows: int = ROWS, columns: int = COLUMNS
) -> ErrorGrid | None:
    """Return the largest error in each cell of an array laid out as a table.

    Args:
        expected: Any shape and dtype.
        actual: The same shape and dtype.
        rows: At most so many rows of cells.
        columns: At most so many columns of cells.

    Returns:
        The grid, or None where there is nothing to lay out: no elements, or another shape or dtype.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype or not expected.size:
        return None
    table_rows, table_columns = _table(expected.shape, columns)
    cell_rows, cell_columns = min(rows, table_rows), min(columns, table_columns)
    errors = np.zeros(cell_rows * cell_columns)
    specials = np.zeros(cell_rows * cell_columns, np.int8)
    low = np.full(expected.ndim, np.iinfo(np.int64).max)
    high = np.full(expected.ndim, -1)
    left, right = np.ravel(expected), np.ravel(actual)
    for start in range(0, left.size, _CHUNK):
        one, other = left[start : start + _CHUNK], right[start : start + _CHUNK]
        size, mark, unequal = _measure(one, other)
        told = np.flatnonzero(unequal | (mark > 0))
        if not told.size:
            continue
        place = told + start
        row, column = np.divmod(place, table_columns)
        cell = row * cell_rows // table_rows * cell_columns + column * cell_columns // table_columns
        np.maximum.at(errors, cell, size[told])
        np.maximum.at(specials, cell, mark[told])
        if expected.ndim and unequal.any():
            index = np.unravel_index(np.flatnonzero(unequal) + start, expected.shape)
            low = np.minimum(low, [axis.min() for axis in index])
            high = np.maximum(high, [axis.max() for axis in index])
    differs = bool((high >= 0).any())
    return ErrorGrid(
        rows=cell_rows,
        columns=cell_columns,
        table_rows=table_rows,
        table_columns=table_columns,
        errors=tuple(errors.tolist()),
        specials=tuple(specials.tolist()),
        box=tuple(zip(low.tolist(), high.tolist(), strict=True)) if differs else (),
    )


def error_cells(grid: ErrorGrid, rows: int, columns: int) -> ErrorGrid:
    """Return the grid in fewer cells."""
    errors = np.zeros((rows, columns))
    specials = np.zeros((rows, columns), np.int8)
    row, column = np.divmod(np.arange(len(grid.errors)), grid.columns)
    cell = (row * rows // grid.rows, column * columns // grid.columns)
    np.maximum.at(errors, cell, np.asarray(grid.errors))
    np.maximum.at(specials, cell, np.asarray(grid.specials, np.int8))
    return dataclasses.replace(
        grid,
        rows=rows,
        columns=columns,
        errors=tuple(errors.ravel().tolist()),
        specials=tuple(specials.ravel().tolist()),
    )


def _table(shape: tuple[int, ...], columns: int) -> tuple[int, int]:
    """Return rows and columns of the table that an array is laid out as."""
    if len(shape) > 1:
        return math.prod(shape[:-1]), shape[-1]
    elements = math.prod(shape)
    if elements <= columns:
        return 1, elements
    width = max(columns, math.isqrt(elements))
    return math.ceil(elements / width), width


def _measure(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return for each element the absolute error, a mark of `SPECIALS`, and whether it differs."""
    with np.errstate(all="ignore"):
        if floatbits.is_float(expected.dtype) or floatbits.is_complex(expected.dtype):
            left, right = _wide(expected), _wide(actual)
            error = np.abs(left - right)
            mark = _marks(left, right)
            unequal = ((left != right) & ~(np.isnan(left) & np.isnan(right))) | (mark > 1)
            return np.where(np.isfinite(error) & unequal, error, 0.0), mark, unequal
        unequal = expected != actual
        error = np.abs(expected.astype(np.float64) - actual.astype(np.float64))
        # Neighbors beyond 2**53 are the same number in float64.
        error = np.where(unequal, np.maximum(error, 1.0), 0.0)
    return error, np.zeros(expected.shape, np.int8), unequal


def _wide(values: np.ndarray) -> np.ndarray:
    wide = np.complex128 if floatbits.is_complex(values.dtype) else np.float64
    return values.astype(wide)


def _marks(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    mark = np.zeros(left.shape, np.int8)
    nan_left, nan_right = np.isnan(left), np.isnan(right)
    infinite = np.isinf(left) | np.isinf(right)
    mark[infinite | (nan_left & nan_right)] = 1
    mark[infinite & (left != right)] = 2
    mark[nan_left & ~nan_right] = 3
    mark[nan_right & ~nan_left] = 4
    return mark
