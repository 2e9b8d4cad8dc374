"""Where in an array the error sits."""

import ml_dtypes
import numpy as np
import pytest
from snaprt_replay.report import charts
from snaprt_replay.report import grid as grids
from snaprt_replay.report.grid import error_grid
from snaprt_replay.report.model import SPECIALS


def cells(grid, values):
    return np.reshape(values, (grid.rows, grid.columns))


def test_an_error_lands_in_the_cell_of_its_element():
    expected = np.zeros((100, 300), np.float32)
    actual = expected.copy()
    actual[99, 299], actual[0, 0], actual[50, 10] = 1.0, -2.0, 0.25
    grid = error_grid(expected, actual, rows=10, columns=30)
    errors = cells(grid, grid.errors)
    assert {(row, column): errors[row, column] for row, column in np.argwhere(errors).tolist()} == {
        (9, 29): 1.0,
        (0, 0): 2.0,
        (5, 1): 0.25,
    }
    assert grid.box == ((0, 99), (0, 299))


def test_the_grid_does_not_depend_on_the_size_of_the_chunks(monkeypatch):
    rng = np.random.default_rng(1)
    expected = rng.normal(size=(7, 11, 13)).astype(np.float32)
    actual = np.where(rng.random(expected.shape) < 0.1, expected + 1, expected).astype(np.float32)
    whole = error_grid(expected, actual)
    monkeypatch.setattr(grids, "_CHUNK", 17)
    assert error_grid(expected, actual) == whole


def test_the_box_is_where_elements_differ():
    expected = np.zeros((4, 5, 6))
    actual = expected.copy()
    actual[1:3, 2, 3:6] = 7.0
    assert error_grid(expected, actual).box == ((1, 2), (2, 2), (3, 5))
    assert error_grid(expected, expected).box == ()


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_nan_and_inf_are_marked_by_what_they_are(dtype):
    nan, inf = np.nan, np.inf
    expected = np.array([1, nan, inf, 1, inf, nan, 1], dtype)
    actual = np.array([1, nan, inf, inf, -inf, 1, nan], dtype)
    grid = error_grid(expected, actual)
    assert grid.specials == (0, 1, 1, 2, 2, 3, 4)
    assert set(grid.errors) == {0.0}
    assert len(SPECIALS) == 5


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        (np.array([2**63 - 1]), np.array([2**63 - 2]), 1.0),
        (np.array([True]), np.array([False]), 1.0),
        (np.array(3 + 4j), np.array(0j), 5.0),
        (np.array([3], ml_dtypes.int4), np.array([-2], ml_dtypes.int4), 5.0),
    ],
)
def test_every_kind_of_number_has_an_error(expected, actual, error):
    assert error_grid(expected, actual).errors == (error,)


def test_there_is_no_grid_of_nothing_or_of_another_shape():
    assert error_grid(np.zeros((0, 3)), np.zeros((0, 3))) is None
    assert error_grid(np.zeros(3), np.zeros(4)) is None
    assert error_grid(np.zeros(3), np.zeros(3, np.int64)) is None


def test_a_long_vector_is_broken_into_rows():
    grid = error_grid(np.zeros(100_003), np.ones(100_003))
    assert (grid.rows, grid.columns) == (grids.ROWS, grids.COLUMNS)
    assert grid.table_rows * grid.table_columns >= 100_003
    assert set(grid.errors) == {1.0}


def test_the_smallest_error_that_there_is_has_a_shade():
    grid = error_grid(np.zeros(2), np.array([0.0, 5e-324]))
    assert "shade" in str(charts.error_map("map", "loss", grid))
