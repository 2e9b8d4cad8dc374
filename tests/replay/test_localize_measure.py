"""One number for how far two arrays are apart, in tolerances."""

import ml_dtypes
import numpy as np
import pytest
from snaprt_replay.localize.measure import error_between, move


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.complex64])
def test_a_rounding_is_within_tolerance_and_a_wrong_value_is_not(dtype: type) -> None:
    right = np.linspace(0.5, 2.0, 20).astype(dtype)
    assert error_between(right, right) == 0
    assert 0 < error_between(right, move(right, np.random.default_rng(0))) <= 1
    assert error_between(right, -right) > 30


def test_a_reference_of_higher_precision_is_taken_as_it_is() -> None:
    right = np.linspace(0.5, 2.0, 20)
    assert error_between(right, right.astype(np.float32)) < 0.1


def test_what_cancels_is_uncertain_by_the_rounding_of_its_inputs() -> None:
    right, got = np.asarray([1e-17]), np.asarray([1e-6], np.float32)
    assert error_between(right, got) > 1000
    assert error_between(right, got, moved=np.asarray([2e-7])) < 1
    assert error_between(right, got * 1000, moved=np.asarray([2e-7])) > 1


def test_integers_differ_exactly_and_in_proportion() -> None:
    right = np.arange(100)
    one, all_wrong = right.copy(), right + 1
    one[3] = 0
    assert 1 < error_between(right, one) < error_between(right, all_wrong)
    assert error_between(right, one, moved=one) == 0


def test_a_nan_or_infinity_on_one_side_is_an_infinite_error() -> None:
    right = np.ones(4, np.float32)
    for wrong in (np.nan, np.inf):
        got = right.copy()
        got[2] = wrong
        assert error_between(right, got) == np.inf
        assert error_between(got, got) == 0
