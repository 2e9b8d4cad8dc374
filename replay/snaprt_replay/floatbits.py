"""Floating-point numbers as bits: ULP distance and bit equality for every dtype XLA has.

A distance in ULPs ("units in the last place") is the number of representable values one passes on
the way from one number to the other: neighbors are 1 apart, whatever their size, and -0.0 and 0.0
are the same place.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

_BITS_OF_SMALL_TYPES = {
    ml_dtypes.float4_e2m1fn: 4,
    ml_dtypes.float6_e2m3fn: 6,
    ml_dtypes.float6_e3m2fn: 6,
    ml_dtypes.int2: 2,
    ml_dtypes.uint2: 2,
    ml_dtypes.int4: 4,
    ml_dtypes.uint4: 4,
}
_BITS_OF_SMALL_DTYPES = {np.dtype(kind): bits for kind, bits in _BITS_OF_SMALL_TYPES.items()}
_REGISTERED_BY_OTHERS = 2  # NumPy's number for it
_SIGN_SHIFT = {2: 15, 4: 31, 8: 63}


def is_builtin(dtype: np.dtype) -> bool:
    """Return True for one of NumPy's own numeric dtypes, which ``.npy`` files can hold."""
    # The kind alone does not tell: ml_dtypes registers float8_e5m2 as a float.
    return dtype.kind in "biufc" and dtype.isbuiltin != _REGISTERED_BY_OTHERS


def is_float(dtype: np.dtype) -> bool:
    """Return True for a real floating-point dtype, NumPy's or ml_dtypes'."""
    if dtype.kind == "f":
        return True
    return dtype.kind == "V" and dtype.name.startswith(("float", "bfloat"))


def is_complex(dtype: np.dtype) -> bool:
    """Return True for a complex dtype."""
    return dtype.kind == "c"


def is_inexact(dtype: np.dtype) -> bool:
    """Return True for a real or complex floating-point dtype."""
    return is_float(dtype) or is_complex(dtype)


def bit_view(values: np.ndarray) -> np.ndarray:
    """Return the bits of ``values`` as unsigned integers of the same size, equal iff the bits are.

    Types that fill only a part of their byte (int4, float6, ...) are masked to that part.
    """
    bits = values.view(np.dtype(f"u{values.dtype.itemsize}"))
    bit_count = _BITS_OF_SMALL_DTYPES.get(values.dtype)
    return bits if bit_count is None else bits & np.uint8((1 << bit_count) - 1)


def working_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype to calculate in: f64 for f64, f32 (which holds every smaller one) else."""
    return np.dtype(np.float64) if dtype.itemsize == 8 else np.dtype(np.float32)


def widen(values: np.ndarray) -> np.ndarray:
    """Return ``values`` in `working_dtype`, exactly."""
    if values.dtype == ml_dtypes.bfloat16:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(working_dtype(values.dtype), copy=False)


def as_integers(values: np.ndarray) -> np.ndarray:
    """Return bools and ml_dtypes' narrow integers as ordinary ones that hold them."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values if values.dtype.kind in "iu" else values.astype(np.int16)


@functools.cache
def _ranks(dtype: np.dtype) -> np.ndarray:
    """Return the rank of each of a one-byte type's 256 patterns among its values, 0.0 at rank 0.

    Asking the type itself is the one way that serves all of them: some have no infinity, some no
    negative zero, one (float8_e8m0fnu) neither sign nor zero.
    """
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    steps = np.unique(values[~np.isnan(values)])
    ranks = np.searchsorted(steps, values) - np.searchsorted(steps, 0.0)
    return np.where(np.isnan(values), 0, ranks).astype(np.int16)


def ulp_distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Count the representable values between two arrays of one float dtype.

    Infinity counts as the neighbor of the largest finite number. Where either side is NaN the
    result means nothing.

    Args:
        left: Any float dtype, any shape, C-contiguous.
        right: The same dtype and shape.

    Returns:
        Unsigned integers: uint16 for types of one or two bytes, uint32 and uint64 for wider ones.
    """
    dtype = left.dtype
    if dtype.itemsize == 1:
        ranks = _ranks(dtype)
        left_ranks, right_ranks = ranks[left.view(np.uint8)], ranks[right.view(np.uint8)]
        return np.abs(left_ranks - right_ranks).view(np.uint16)
    left_steps, right_steps = _ordered(left), _ordered(right)
    # The distance of two signed integers always fits the unsigned type of their size: let it wrap.
    distance = np.maximum(left_steps, right_steps)
    distance -= np.minimum(left_steps, right_steps, out=left_steps)
    return distance.view(np.dtype(f"u{dtype.itemsize}"))


def _ordered(values: np.ndarray) -> np.ndarray:
    """Map sign and magnitude to signed integers in the numbers' own order, both zeros at 0."""
    bits = values.view(np.dtype(f"i{values.dtype.itemsize}"))
    sign = bits >> _SIGN_SHIFT[values.dtype.itemsize]
    steps = bits & np.iinfo(bits.dtype).max
    steps ^= sign
    steps -= sign
    return steps


def smallest_normal(dtype: np.dtype) -> float:
    """Return the smallest positive normal number; what lies below it may be flushed to zero."""
    return float(ml_dtypes.finfo(dtype).smallest_normal)


def epsilon(dtype: np.dtype) -> float:
    """Return the distance from 1.0 to the next larger number."""
    return float(ml_dtypes.finfo(dtype).eps)


def mantissa_bits(dtype: np.dtype) -> int:
    """Return how many bits of the mantissa a float dtype stores."""
    return int(ml_dtypes.finfo(dtype).nmant)


def exponent_bits(dtype: np.dtype) -> int:
    """Return how many bits the exponent of a float dtype has."""
    return int(ml_dtypes.finfo(dtype).nexp)


def largest_integer(dtype: np.dtype) -> int:
    """Return the largest value of an integer dtype, NumPy's or ml_dtypes'."""
    return int(ml_dtypes.iinfo(dtype).max)


def dtype_named(name: str) -> np.dtype:
    """Return the dtype of that name, from ml_dtypes or from NumPy."""
    return np.dtype(getattr(ml_dtypes, name, name))
