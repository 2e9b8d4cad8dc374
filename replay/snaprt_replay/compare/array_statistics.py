"""Describe the contents of one array in a few numbers."""

from __future__ import annotations

import dataclasses

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.load.case import NamedArray

_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class ArrayStatistics:
    """One array in numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the name of its dtype
    nbytes: int  # its size in memory
    # Smallest finite element (of a complex array, its smallest part); None without one.
    minimum: float | int | None
    maximum: float | int | None  # largest finite element
    mean: float | None  # mean of the finite elements
    nan_count: int  # elements that are NaN
    inf_count: int  # elements that are infinite
    zero_count: int  # elements that are zero


def describe(array: NamedArray) -> ArrayStatistics:
    """Return the statistics of one array."""
    flat = np.ascontiguousarray(array.value).reshape(-1)
    if floatbits.is_complex(flat.dtype):
        flat = flat.view(np.dtype(f"f{flat.itemsize // 2}"))
    is_float = floatbits.is_float(flat.dtype)
    minima: list[float | int] = []
    maxima: list[float | int] = []
    total, finite_count, nan_count, inf_count, zero_count = 0.0, 0, 0, 0, 0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        numbers = floatbits.widen(chunk) if is_float else floatbits.as_integers(chunk)
        if is_float and not np.isfinite(numbers).all():
            nan_count += int(np.isnan(numbers).sum())
            inf_count += int(np.isinf(numbers).sum())
            numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            minima.append(numbers.min().item())
            maxima.append(numbers.max().item())
            total += float(numbers.sum(dtype=np.float64))
            finite_count += numbers.size
            zero_count += int(numbers.size - np.count_nonzero(numbers))
    return ArrayStatistics(
        name=array.name,
        shape=array.shape,
        dtype=array.dtype.name,
        nbytes=array.value.nbytes,
        minimum=min(minima, default=None),
        maximum=max(maxima, default=None),
        mean=total / finite_count if finite_count else None,
        nan_count=nan_count,
        inf_count=inf_count,
        zero_count=zero_count,
    )
