"""Values drawn from a seed in place of those that were left out.

What is kept of an array is its seed and these numbers, each a share of all elements or a statistic
of those that are finite and not zero:

    seed zeros nans infinities negative_infinities minimum maximum mean deviation

of a bool array ``seed ones``; of PRNG keys the seed alone. Complex numbers count as two. Numbers
are cut to three digits; an array of few elements has them to the next power of two towards zero,
for there the statistics would be the values.

The drawn values follow a beta distribution between minimum and maximum, the one that has the mean
and the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import ml_dtypes
import numpy as np

from snaprt.snapshot.format.arrays import true_dtype
from snaprt.snapshot.format.schema import ArrayRecord

FEW: Final = 32
"""Of an array with fewer elements, statistics are as good as the values."""

_CHUNK = 1 << 20
_TABLE = 1 << 16  # so many different values are drawn at most: enough for 50 million elements


def summarize(values: np.ndarray, seed: int) -> Mapping[str, float]:
    """Return what is kept of an array whose values are left out.

    Args:
        values: Any dtype that a snapshot can hold but PRNG keys.
        seed: For the values that will stand in for them.
    """
    flat = _parts(np.ascontiguousarray(values).reshape(-1))
    if flat.dtype == np.bool_:
        return {"seed": seed, "ones": _shown(float(flat.mean()) if flat.size else 0.0, flat.size)}
    counts = dict.fromkeys(("zeros", "nans", "infinities", "negative_infinities"), 0)
    low, high, total, squares, counted = math.inf, -math.inf, 0.0, 0.0, 0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(np.float64)
        counts["zeros"] += int(np.count_nonzero(chunk == 0))
        counts["nans"] += int(np.count_nonzero(np.isnan(chunk)))
        counts["infinities"] += int(np.count_nonzero(chunk == np.inf))
        counts["negative_infinities"] += int(np.count_nonzero(chunk == -np.inf))
        chunk = chunk[np.isfinite(chunk) & (chunk != 0)]
        if chunk.size:
            low, high = min(low, float(chunk.min())), max(high, float(chunk.max()))
            total += float(chunk.sum())
            with np.errstate(over="ignore"):
                squares += float(np.square(chunk).sum())
            counted += chunk.size
    summary: dict[str, float] = {"seed": seed}
    summary |= {name: count / flat.size for name, count in counts.items() if count}
    if counted:
        mean = total / counted
        deviation = math.sqrt(max(0.0, squares / counted - mean * mean))
        statistics = {"minimum": low, "maximum": high, "mean": mean, "deviation": deviation}
        summary |= {
            name: _shown(value, flat.size) if math.isfinite(value) else 0.0
            for name, value in statistics.items()
        }
    return summary


def _parts(flat: np.ndarray) -> np.ndarray:
    return flat.view(np.dtype(f"f{flat.itemsize // 2}")) if flat.dtype.kind == "c" else flat


def _shown(value: float, size: int) -> float:
    """Return a statistic with as much of it as may be shown, cut towards zero."""
    if value == 0:
        return 0.0
    if size < FEW:
        return math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
    mantissa, exponent = f"{value:.17e}".split("e")
    return float(f"{mantissa[: mantissa.index('.') + 3]}e{exponent}")


def draw(record: ArrayRecord) -> np.ndarray:
    """Draw the values of an array from its seed: the same on every machine and at every call.

    Returns:
        Shape and dtype as recorded; for PRNG keys their data (uint32, one dimension more).

    Raises:
        SnapshotError: ml_dtypes does not know the dtype.
    """
    summary = record.seeded
    generator = np.random.Generator(np.random.PCG64(int(summary["seed"])))
    if record.key_impl:
        return generator.integers(0, 2**32, record.stored_shape, np.uint32)
    dtype = true_dtype(record.dtype)
    size = math.prod(record.shape) * (2 if dtype.kind == "c" else 1)
    if dtype == np.bool_:
        return (generator.random(size) < summary["ones"]).reshape(record.shape)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    table = _table(summary, generator, part)
    flat = table[generator.integers(0, _TABLE, size, np.uint32)]
    _place_specials(flat, summary, table, generator)
    return flat.view(dtype).reshape(record.shape)


def _table(
    summary: Mapping[str, float], generator: np.random.Generator, dtype: np.dtype
) -> np.ndarray:
    """Draw values of the distribution to choose from; to draw each would take ten times longer."""
    low, high = summary.get("minimum", 0.0), summary.get("maximum", 0.0)
    span = high - low
    if span <= 0 or not math.isfinite(span):
        values = np.full(_TABLE, low)
    else:
        mean = min(max((summary["mean"] - low) / span, 1e-6), 1 - 1e-6)
        variance = min((summary["deviation"] / span) ** 2, mean * (1 - mean) * (1 - 1e-6))
        total = mean * (1 - mean) / max(variance, 1e-12) - 1
        values = low + span * generator.beta(mean * total, (1 - mean) * total, _TABLE)
        values[:2] = low, high
    if dtype.name.startswith(("int", "uint")):
        values = np.rint(values)
        limits = ml_dtypes.iinfo(dtype)
        # float64 has no room for the last digits of the largest integers.
        values = np.clip(values, float(limits.min), np.nextafter(float(limits.max), 0))
    return values.astype(dtype)


_SPECIALS: Final = {
    "zeros": 0.0,
    "nans": math.nan,
    "infinities": math.inf,
    "negative_infinities": -math.inf,
}


def _place_specials(
    flat: np.ndarray,
    summary: Mapping[str, float],
    table: np.ndarray,
    generator: np.random.Generator,
) -> None:
    """Put zeros, NaNs and infinities where chance wants them, and the extremes, which are rare."""
    counts = {name: round(summary[name] * flat.size) for name in _SPECIALS if name in summary}
    total = min(flat.size, sum(counts.values()) + 2)
    places = generator.choice(flat.size, total, replace=False)
    start = 0
    for name, count in counts.items():
        flat[places[start : start + count]] = np.array(_SPECIALS[name]).astype(flat.dtype)
        start += count
    extremes = places[start:]
    flat[extremes] = table[: len(extremes)]
