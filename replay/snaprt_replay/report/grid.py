"""Find where in an array the error is, at the resolution of a few cells."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.report.model import ErrorGrid

ROWS, COLUMNS = 24, 48

# Elements processed at a time: a few MB, whatever the array's size.
_CHUNK = 1 << 18


def error_grid(
    expected: np.ndarray, actual: np.ndarray, rows: int = ROWS, columns: int = COLUMNS
) -> ErrorGrid | None:
    """Return the largest error in each cell of an array laid out as a table.

    Args:
        expected: Any shape and dtype.
        actual: The same shape and dtype.
        rows: The maximum number of rows of cells.
        columns: The maximum number of columns of cells.

    Returns:
        The grid, or None if there are no elements, or the shapes or dtypes differ.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype or not expected.size:
        return None
    table_rows, table_columns = _table(expected.shape, columns)
    cell_rows, cell_columns = min(rows, table_rows), min(columns, table_columns)
    errors = np.zeros((cell_rows, cell_columns))
    specials = np.zeros((cell_rows, cell_columns), np.int8)
    low = np.full(expected.ndim, np.iinfo(np.int64).max)
    high = np.full(expected.ndim, -1)
    left, right = np.ravel(expected), np.ravel(actual)
    # Whole rows of the table at a time, or a part of one.
    some_rows, some_columns = max(1, _CHUNK // table_columns), min(table_columns, _CHUNK)
    for row, column in itertools.product(
        range(0, table_rows, some_rows), range(0, table_columns, some_columns)
    ):
        start = row * table_columns + column
        row_numbers = np.arange(row, min(row + some_rows, table_rows))
        column_numbers = np.arange(column, min(column + some_columns, table_columns))
        ends = slice(start, start + row_numbers.size * column_numbers.size)
        measured = _measure(left[ends], right[ends])
        # The last row of a single axis may be short.
        missing = row_numbers.size * column_numbers.size - measured[0].size
        size, mark, unequal = (
            np.pad(values, (0, missing)).reshape(row_numbers.size, column_numbers.size)
            for values in measured
        )
        if not (unequal.any() or mark.any()):
            continue
        cells = column_numbers * cell_columns // table_columns
        firsts = np.flatnonzero(np.diff(cells, prepend=-1))
        place = np.ix_(row_numbers * cell_rows // table_rows, cells[firsts])
        np.maximum.at(errors, place, np.maximum.reduceat(size, firsts, axis=1))
        np.maximum.at(specials, place, np.maximum.reduceat(mark, firsts, axis=1))
        if expected.ndim and unequal.any():
            index: tuple[np.ndarray, ...] = (start + np.flatnonzero(unequal),)
            if expected.ndim > 1:
                leading = np.unravel_index(row_numbers[unequal.any(axis=1)], expected.shape[:-1])
                index = (*leading, column_numbers[unequal.any(axis=0)])
            low = np.minimum(low, [axis.min() for axis in index])
            high = np.maximum(high, [axis.max() for axis in index])
    differs = bool((high >= 0).any())
    return ErrorGrid(
        rows=cell_rows,
        columns=cell_columns,
        table_rows=table_rows,
        table_columns=table_columns,
        errors=tuple(errors.ravel().tolist()),
        specials=tuple(specials.ravel().tolist()),
        box=tuple(zip(low.tolist(), high.tolist(), strict=True)) if differs else (),
    )


def error_cells(grid: ErrorGrid, rows: int, columns: int) -> ErrorGrid:
    """Return the grid with fewer cells."""
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
    """Return the rows and columns of the table that an array is laid out as."""
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
        if floatbits.is_inexact(expected.dtype):
            left, right = _wide(expected), _wide(actual)
            error = np.abs(left - right)
            mark = _marks(left, right)
            unequal = ((left != right) & ~(np.isnan(left) & np.isnan(right))) | (mark > 1)
            return np.where(np.isfinite(error) & unequal, error, 0.0), mark, unequal
        unequal = expected != actual
        error = np.abs(expected.astype(np.float64) - actual.astype(np.float64))
        # Adjacent integers beyond 2**53 are the same number in float64.
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
