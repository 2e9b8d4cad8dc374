"""Comparing: every kind of difference is found, counted and placed."""

import dataclasses
import json
import math

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from snaprt_replay import floatbits
from snaprt_replay.compare.compare import compare, compare_arrays
from snaprt_replay.compare.results import (
    IDENTICAL,
    MISMATCH,
    WITHIN_TOLERANCE,
    Comparison,
    OutputComparison,
    comparison_from_json,
    to_json,
)
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import NamedArray

from snaprt.errors import UsageError

EXACTLY = ToleranceRequest(rtol=0.0, atol=0.0, max_ulp=0)
FLOAT_TYPES = [
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e3m4,
    ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float6_e2m3fn,
    ml_dtypes.float6_e3m2fn,
    ml_dtypes.float4_e2m1fn,
]
INTEGER_TYPES = [
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2),
]


def compared(
    expected: np.ndarray, actual: np.ndarray, request: ToleranceRequest | None = None
) -> OutputComparison:
    return compare_arrays("out", expected, actual, request or ToleranceRequest())


def normal(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, *INTEGER_TYPES, np.complex64, np.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (7, 11)])
def test_a_copy_is_identical(dtype: type, shape: tuple[int, ...]) -> None:
    values = np.ones(shape).astype(dtype)
    result = compared(values, values.copy())
    assert result.verdict == IDENTICAL
    assert (result.differing, result.beyond, result.max_abs_error) == (0, 0, 0)


def test_one_ulp_in_one_element_is_found_and_placed() -> None:
    expected = normal(300, 500)
    actual = expected.copy()
    actual[123, 45] = np.nextafter(actual[123, 45], np.float32(np.inf))
    result = compared(expected, actual)
    assert result.verdict == WITHIN_TOLERANCE
    assert (result.differing, result.max_ulp, result.p99_ulp) == (1, 1, 0)
    assert result.worst_abs is not None
    assert result.worst_abs.index == (123, 45)
    assert result.worst_abs == result.first_difference == result.worst_ulp == result.worst_rel
    assert result.cosine == pytest.approx(1.0)
    assert compared(expected, actual, EXACTLY).verdict == MISMATCH
    assert compared(expected, actual, ToleranceRequest(max_ulp=1)).verdict == WITHIN_TOLERANCE


def test_a_tolerance_that_is_asked_for_replaces_the_whole_default() -> None:
    expected, actual = np.float32([1.0, 1e-3]), np.float32([1.0, 2e-3])
    assert compared(expected, actual).verdict == MISMATCH
    assert compared(expected, actual, ToleranceRequest(rtol=0.5)).verdict == MISMATCH
    assert compared(expected, actual, ToleranceRequest(atol=1e-2)).verdict == WITHIN_TOLERANCE
    assert compared(expected, actual, ToleranceRequest(rtol=1.1)).verdict == WITHIN_TOLERANCE
    assert compared(expected, actual, ToleranceRequest(max_ulp=100)).verdict == MISMATCH


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_tolerance_that_is_no_tolerance_is_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="rtol must be"):
        ToleranceRequest(rtol=bad)


def test_default_atol_follows_the_size_of_the_output() -> None:
    error = np.zeros(1000, np.float32)
    error[7] = 1e-6
    assert compared(normal(1000), normal(1000) + error).verdict == WITHIN_TOLERANCE
    small = normal(1000) * np.float32(1e-7)
    assert compared(small, small + error).verdict == MISMATCH


def test_the_sign_of_zero_is_a_difference_but_no_mismatch() -> None:
    result = compared(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]), EXACTLY)
    assert result.verdict == WITHIN_TOLERANCE
    assert (result.differing, result.specials.zero_sign, result.max_ulp) == (1, 1, 0)
    assert "signs of zero" in result.reason


def test_the_payload_of_a_nan_is_a_difference_but_no_mismatch() -> None:
    bits = np.array([0x7FC00000, 0x3F800000], np.uint32)
    other = np.array([0x7FC00001, 0x3F800000], np.uint32)
    result = compared(bits.view(np.float32), other.view(np.float32), EXACTLY)
    assert result.verdict == WITHIN_TOLERANCE
    assert (result.specials.nan_both, result.specials.nan_payload) == (1, 1)
    assert result.first_difference is not None
    assert result.first_difference.actual == "nan(0x7fc00001)"


@pytest.mark.parametrize(
    ("expected", "actual", "field"),
    [
        (math.nan, 1.0, "nan_only_expected"),
        (1.0, math.nan, "nan_only_actual"),
        (math.inf, math.nan, "nan_only_actual"),
        (math.inf, 1.0, "inf_only_expected"),
        (1.0, -math.inf, "inf_only_actual"),
        (math.inf, -math.inf, "inf_sign"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_nan_and_infinity_on_one_side_are_counted_each_on_their_own(
    expected: float, actual: float, field: str, dtype: type
) -> None:
    left, right = normal(40000, dtype=dtype), normal(40000, dtype=dtype)
    left[33333], right[33333] = expected, actual
    result = compared(left, right, ToleranceRequest(rtol=1e30, atol=1e30))
    assert result.verdict == MISMATCH
    assert getattr(result.specials, field) == result.specials.confused == result.beyond == 1
    assert "[33333]" in result.reason
    assert result.max_ulp == 0


def test_nan_and_infinity_on_both_sides_are_equal() -> None:
    values = np.float32([math.nan, math.inf, -math.inf, 1.0])
    result = compared(values, values.copy())
    assert result.verdict == IDENTICAL
    assert (result.specials.nan_both, result.specials.inf_both) == (1, 2)
    assert (result.specials.not_finite, result.specials.confused) == (3, 0)
    assert sum(result.ulp_octaves) == 1


@pytest.mark.parametrize("size", [16, 100_000])
@pytest.mark.parametrize("differs", [False, True])
def test_a_comparison_of_nans_says_so(size: int, differs: bool) -> None:
    values = np.full(size, math.nan, np.float32)
    other = values.copy()
    if differs:
        values[-1], other[-1] = 1.0, np.nextafter(np.float32(1.0), np.float32(2.0))
    result = compared(values, other)
    assert result.specials.not_finite == size - differs
    assert f"{size - differs} of {size} elements" in Comparison((result,)).summary


def test_another_shape_or_dtype_is_a_mismatch_and_no_crash() -> None:
    assert "shape: float32[3,2] instead of float32[2,3]" in (
        compared(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)).reason
    )
    result = compared(np.zeros(3, np.float32), np.zeros(3, np.float64))
    assert result.verdict == MISMATCH
    assert "different dtype" in result.reason


def test_a_missing_output_is_a_mismatch() -> None:
    one, two = NamedArray("one", np.zeros(2)), NamedArray("two", np.ones(3))
    shorter, longer = compare([one, two], [one]), compare([one], [one, two])
    assert shorter.verdict == longer.verdict == MISMATCH
    assert shorter.outputs[1].reason == "missing in replayed"
    assert longer.outputs[1].reason == "missing in recorded"


def test_integers_compare_exactly_over_their_whole_range() -> None:
    expected, actual = np.array([0, -(2**63)]), np.array([0, 2**63 - 1])
    result = compared(expected, actual, ToleranceRequest(rtol=1e9, atol=1e30))
    assert result.verdict == MISMATCH
    assert (result.differing, result.max_abs_error) == (1, 2**64 - 1)
    assert result.first_difference is not None
    assert result.first_difference.index == (1,)


def test_the_unused_bits_of_a_small_type_do_not_count() -> None:
    expected = np.array([0x03, 0x04], np.uint8).view(ml_dtypes.uint4)
    actual = np.array([0xF3, 0x05], np.uint8).view(ml_dtypes.uint4)
    assert compared(expected, actual).differing == 1


def test_complex_numbers_compare_by_component() -> None:
    expected = (normal(50) + 1j * normal(50, seed=1)).astype(np.complex64)
    actual = expected.copy()
    actual[17] += np.complex64(3j)
    result = compared(expected, actual)
    assert (result.elements, result.differing, result.verdict) == (100, 1, MISMATCH)
    assert result.worst_abs is not None
    assert result.worst_abs.index == (17,)


def test_byte_order_and_strides_do_not_matter() -> None:
    values = normal(6, 5)
    turned = np.asfortranarray(values.astype(">f4"))
    assert compared(values, turned).verdict == IDENTICAL


def test_float32_differences_that_overflow_float32_are_measured() -> None:
    result = compared(np.float32([3e38, 1.0]), np.float32([-3e38, 1.0]))
    assert result.max_abs_error == pytest.approx(6e38)
    assert result.specials.confused == 0


def test_cosine_works_for_tiny_and_for_huge_numbers() -> None:
    for scale in (1e-30, 1e30):
        left, right = normal(100) * np.float32(scale), normal(100, seed=1) * np.float32(scale)
        wide_left, wide_right = left.astype(np.float64), right.astype(np.float64)
        norms = np.linalg.norm(wide_left) * np.linalg.norm(wide_right)
        assert compared(left, right).cosine == pytest.approx(wide_left @ wide_right / norms)


def test_numbers_whose_squares_overflow_have_a_tolerance() -> None:
    result = compared(normal(100, dtype=np.float64) * 1e200, np.ones(100) * 1e200)
    assert result.rms == pytest.approx(1e200, rel=0.5)
    assert result.verdict == MISMATCH


@pytest.mark.parametrize("columns", [1_000_017, 3_000_017])  # without and with fused kernels
def test_large_arrays_are_cut_for_threads_and_put_together_again(columns: int) -> None:
    expected = normal(3, columns)
    actual = expected.copy()
    places = [(0, 5), (1, columns - 17), (2, columns - 1)]
    for steps, place in enumerate(places, start=1):
        actual.view(np.int32)[place] += steps
    actual[1, 7] = math.nan
    result = compared(expected, actual)
    assert result.differing == 4
    assert result.first_difference is not None
    assert result.first_difference.index == (0, 5)
    assert result.worst_ulp is not None
    assert (result.worst_ulp.index, result.max_ulp) == ((2, columns - 1), 3)
    assert result.ulp_octaves == (expected.size - 4, 1, 2)
    assert (result.specials.nan_only_actual, result.beyond) == (1, 1)


def test_large_arrays_of_integers_are_cut_for_threads_and_put_together_again() -> None:
    expected = np.arange(1, 3_000_001, dtype=np.int32).reshape(3, -1)
    actual = expected.copy()
    actual[0, 5] += 1
    actual[1, 999_999] -= 7
    actual[2, 999_998] += 7
    result = compared(expected, actual)
    assert result.differing == 3
    assert result.first_difference is not None
    assert result.first_difference.index == (0, 5)
    assert result.worst_abs is not None
    assert (result.worst_abs.index, result.max_abs_error) == ((1, 999_999), 7)
    assert result.max_rel_error == 1 / 6


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_fused_kernels_find_what_numpy_finds_in_small_pieces(kind: type) -> None:
    generator = np.random.default_rng(7)
    pieces, size = 36, 1 << 18
    expected = generator.standard_normal(pieces * size, dtype=np.float32)
    noise = 1 + generator.standard_normal(expected.size, dtype=np.float32) * np.float32(1e-2)
    noise[: 6 * size] = 1
    actual = expected * noise
    strange = np.array([0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -3e38, 1e-33], np.float32)
    for side in (expected, actual):
        side[generator.integers(7 * size, 9 * size, 500)] = generator.choice(strange, 500)
        side[20 * size : 22 * size] = np.maximum(side[20 * size : 22 * size], 0)
    same = slice(24 * size, 34 * size)  # a block that is the same on both sides is in it
    expected[generator.integers(25 * size, 27 * size, 500)] = generator.choice(strange, 500)
    actual[same] = expected[same]
    with np.errstate(over="ignore"):
        expected, actual = expected.astype(kind), actual.astype(kind)
    request = ToleranceRequest(rtol=1e-2, atol=1e-3)
    whole = compared(expected, actual, request)
    parts = [
        compared(one, other, request)
        for one, other in zip(
            expected.reshape(pieces, size), actual.reshape(pieces, size), strict=True
        )
    ]
    for count in ("differing", "beyond"):
        assert getattr(whole, count) == sum(getattr(part, count) for part in parts)
    for worst in ("max_abs_error", "max_rel_error", "max_ulp"):
        assert getattr(whole, worst) == max(getattr(part, worst) for part in parts)
    for worst, error in (
        ("worst_abs", "max_abs_error"),
        ("worst_rel", "max_rel_error"),
        ("worst_ulp", "max_ulp"),
    ):
        values = [getattr(part, error) for part in parts]
        piece = values.index(max(values))
        within = getattr(parts[piece], worst).index[0]
        assert getattr(whole, worst).index == (piece * size + within,)
    counts = [dataclasses.astuple(part.specials) for part in parts]
    assert dataclasses.astuple(whole.specials) == tuple(map(sum, zip(*counts, strict=True)))
    assert sum(whole.ulp_octaves) == pytest.approx(expected.size, rel=0.1)  # a sample


def test_a_comparison_survives_json() -> None:
    left = np.float32([1.0, math.nan, 3.0])
    pairs = [
        (left, np.float32([2.0, 1.0, math.inf])),
        (left, left[:2]),
        (np.arange(3), np.arange(3) + 1),
        (np.float64([1e308]), np.float64([-1e308])),
    ]
    sides = [[NamedArray(f"out{i}", pair[side]) for i, pair in enumerate(pairs)] for side in (0, 1)]
    comparison = compare(sides[0], sides[1])
    text = json.dumps(to_json(comparison), allow_nan=False)
    assert comparison_from_json(json.loads(text)) == comparison
    with pytest.raises(UsageError, match="version 99"):
        comparison_from_json({**to_json(comparison), "version": 99})


# Against slow, obvious references.


def steps_between(left: np.ndarray, right: np.ndarray) -> list[int]:
    """Count the values between two arrays by the definition: positions in the list of all."""
    bits = np.dtype(f"u{left.dtype.itemsize}")
    every = np.arange(2 ** (8 * left.dtype.itemsize), dtype=np.uint32).astype(bits)
    values = every.view(left.dtype).astype(np.float64)
    order = {value: step for step, value in enumerate(np.unique(values[~np.isnan(values)]))}
    wide = (left.astype(np.float64).tolist(), right.astype(np.float64).tolist())
    return [abs(order[one] - order[other]) for one, other in zip(*wide, strict=True)]


SMALL_ENOUGH_TO_LIST = [kind for kind in FLOAT_TYPES if np.dtype(kind).itemsize <= 2]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("dtype", SMALL_ENOUGH_TO_LIST)
def test_ulp_distance_counts_the_values_between(dtype: type) -> None:
    kind = np.dtype(dtype)
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 256**kind.itemsize, (2, 2000)).astype(f"u{kind.itemsize}")
    left, right = (side.view(kind) for side in bits)
    known = ~(np.isnan(left.astype(np.float64)) | np.isnan(right.astype(np.float64)))
    left, right = left[known], right[known]
    assert floatbits.ulp_distance(left, right).tolist() == steps_between(left, right)


def ordered(bits: int, width: int) -> int:
    sign = 1 << (width - 1)
    return -(bits - sign) if bits & sign else bits


@pytest.mark.parametrize("width", [32, 64])
@hypothesis.given(data=st.data())
def test_ulp_distance_of_wide_types_is_the_distance_of_their_ordered_bits(
    width: int, data: st.DataObject
) -> None:
    pattern = st.integers(0, 2**width - 1)
    one, other = data.draw(pattern), data.draw(pattern)
    left, right = (
        np.array([bits], f"u{width // 8}").view(f"f{width // 8}") for bits in (one, other)
    )
    hypothesis.assume(not np.isnan(left).any() and not np.isnan(right).any())
    assert int(floatbits.ulp_distance(left, right)[0]) == abs(
        ordered(one, width) - ordered(other, width)
    )


def finite_or_special(dtype: type) -> st.SearchStrategy[np.ndarray]:
    elements = npst.from_dtype(np.dtype(dtype), allow_nan=True, allow_infinity=True)
    return npst.arrays(dtype, 12, elements=elements)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_measures_equal_a_loop_over_the_elements(dtype: type, data: st.DataObject) -> None:
    expected, actual = data.draw(finite_or_special(dtype)), data.draw(finite_or_special(dtype))
    keep = data.draw(npst.arrays(np.bool_, 12))
    actual = np.where(keep, expected, actual).astype(dtype)
    rtol, atol = (
        data.draw(st.sampled_from([0.0, 1e-3, 1.0])),
        data.draw(st.sampled_from([0.0, 1.0])),
    )
    max_ulp = data.draw(st.sampled_from([0, 3]))
    result = compared(expected, actual, ToleranceRequest(rtol, atol, max_ulp))

    beyond, distances, errors = 0, [], []
    for one, other in zip(expected, actual, strict=True):
        if np.isfinite(one) and np.isfinite(other):
            error = abs(float(other) - float(one))
            ulps = int(floatbits.ulp_distance(np.array([one]), np.array([other]))[0])
            errors.append(error)
            distances.append(ulps)
            beyond += not (error <= atol + rtol * abs(float(one)) or ulps <= max_ulp)
        else:
            beyond += not (one == other or (np.isnan(one) and np.isnan(other)))
    assert result.beyond == beyond
    assert result.differing == sum(
        a.tobytes() != b.tobytes() for a, b in zip(expected, actual, strict=True)
    )
    assert result.max_abs_error == pytest.approx(max(errors, default=0.0))
    assert result.max_ulp == max(distances, default=0)
    assert sum(result.ulp_octaves) == len(distances)
    rank = sorted(distances)[math.ceil(0.99 * len(distances)) - 1] if distances else 0
    assert result.p99_ulp is not None
    assert rank * 0.992 <= result.p99_ulp <= rank * (1 + 1e-7)


def test_p99_is_exact_up_to_256_ulp() -> None:
    expected, actual = np.ones(1000, np.float32), np.ones(1000, np.float32)
    actual.view(np.int32)[:] += np.arange(1000, dtype=np.int32) // 4
    assert compared(expected, actual).p99_ulp == 247
