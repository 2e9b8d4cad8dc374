"""How far outputs lie from a reference, in units of what rounding explains; it judges nobody.

The rule is written down in docs/variants.md, with its reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from snaprt_replay import floatbits

LIMIT: Final = 8.0
"""How many times further from the reference than rounding explains makes a side wrong."""


@dataclasses.dataclass(frozen=True)
class OutputDistance:
    """How far one output of a side lies from the reference.

    Args:
        name: The output's name.
        score: The largest error among its elements, in units of what rounding explains there;
            infinite where NaN, Inf or an exact value is not what it should be.
        beyond: Elements whose error is more than `LIMIT` such units.
        specials: Those of them that are NaN or infinite, or are not and should be.
        worst: The index of the element with the largest error in these units.
        error: Its absolute error.
        explained: The error that rounding explains there.
    """

    name: str
    score: float
    beyond: int
    specials: int
    worst: tuple[int, ...]
    error: float
    explained: float


@dataclasses.dataclass(frozen=True, eq=False)
class Yardstick:
    """A reference, and how far rounding moves it.

    Args:
        name: The reference's name.
        outputs: The reference: in float64, or in the program's own types.
        center: The float64 outputs that the samples spread around; often `outputs` itself.
        samples: Outputs of runs that rounded at random.
    """

    name: str
    outputs: tuple[np.ndarray, ...]
    center: tuple[np.ndarray, ...]
    samples: Sequence[tuple[np.ndarray, ...]]


def distances(
    outputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    yardstick: Yardstick,
    names: Sequence[str],
) -> tuple[OutputDistance, ...]:
    """Return the distance of each output from what is expected of it.

    Args:
        outputs: Of one side.
        expected: The reference's outputs, or those of another run.
        yardstick: What rounding explains.
        names: What the outputs are called.
    """
    return tuple(
        _distance(name, value, wanted, center, [sample[index] for sample in yardstick.samples])
        for index, (name, value, wanted, center) in enumerate(
            zip(names, outputs, expected, yardstick.center, strict=True)
        )
    )


def _distance(
    name: str,
    value: np.ndarray,
    wanted: np.ndarray,
    center: np.ndarray,
    samples: Sequence[np.ndarray],
) -> OutputDistance:
    with np.errstate(all="ignore"):
        if floatbits.is_float(value.dtype) or floatbits.is_complex(value.dtype):
            scores, errors, explained, specials = _score_floats(value, wanted, center, samples)
        else:
            settled = np.ones(value.shape, np.bool_)
            for sample in samples:
                settled &= sample == center
            wrong = (value != wanted) & settled
            scores = np.where(wrong, np.inf, 0.0).reshape(-1)
            errors = np.abs(value.astype(np.float64) - wanted.astype(np.float64)).reshape(-1)
            explained = np.zeros(errors.shape)
            specials = np.zeros(errors.shape, np.bool_)
    if not scores.size:
        return OutputDistance(name, 0.0, 0, 0, (), 0.0, 0.0)
    worst = int(scores.argmax())
    # Real and imaginary part of a complex number stand side by side.
    place = worst * value.size // scores.size
    return OutputDistance(
        name=name,
        score=float(scores[worst]),
        beyond=int(np.count_nonzero(scores > LIMIT)),
        specials=int(np.count_nonzero(specials)),
        worst=tuple(int(axis) for axis in np.unravel_index(place, value.shape)),
        error=float(errors[worst]),
        explained=float(explained[worst]),
    )


_Scores = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _score_floats(
    value: np.ndarray, wanted: np.ndarray, center: np.ndarray, samples: Sequence[np.ndarray]
) -> _Scores:
    """Return score, error, explained error, and whether it is a matter of NaN or Inf, flat."""
    own = _own_type(value.dtype)
    actual, expected, middle = _parts(value), _parts(wanted), _parts(center)
    explained, pattern, settled = _explained(middle, [_parts(one) for one in samples], own)
    # Finite in float64 may well be infinite in the program's type, so both patterns will do.
    here, there = _pattern(actual), _pattern(_in_type(expected, own))
    special = (here != there) & (here != pattern) & settled
    finite = (here == 0) & np.isfinite(expected)
    errors = np.where(finite, np.abs(actual - expected), 0.0)
    # A side that is infinite where the reference is only near the type's range is judged above.
    scores = np.where(errors > 0, errors / explained, 0.0)
    return np.where(special, np.inf, scores), errors, explained, special


def _explained(
    center: np.ndarray, samples: Sequence[np.ndarray], own: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the error that rounding explains, the samples' pattern, and where they agree on it."""
    spread = np.zeros(center.shape)
    pattern = _pattern(samples[0] if samples else _in_type(center, own))
    settled = np.ones(center.shape, np.bool_)
    for sample in samples:
        moved = np.abs(sample - center)
        np.maximum(spread, np.where(np.isfinite(moved), moved, 0.0), out=spread)
        settled &= _pattern(sample) == pattern
    size = np.where(np.isfinite(center), np.abs(center), 0.0)
    ulp = np.maximum(size * floatbits.epsilon(own), floatbits.smallest_normal(own))
    typical = float(np.median(spread)) if spread.size else 0.0
    return spread + typical + ulp, pattern, settled


def amplification(yardstick: Yardstick, outputs: Sequence[np.ndarray]) -> float | None:
    """Return the median of what rounding explains, in ULP, for the output with the largest.

    The ULP is that of the output's own type at the element, or at the output's root mean square
    where the element is smaller: near zero a ULP of the element means nothing. All of the output's
    size is the most that is said. None if no output has a size.

    Args:
        yardstick: The reference.
        outputs: Of one side, for their types and shapes.
    """
    found = []
    for index, value in enumerate(outputs):
        inexact = floatbits.is_float(value.dtype) or floatbits.is_complex(value.dtype)
        if inexact and value.size and value.shape == yardstick.center[index].shape:
            own = _own_type(value.dtype)
            center = _parts(yardstick.center[index])
            samples = [_parts(sample[index]) for sample in yardstick.samples]
            with np.errstate(all="ignore"):
                explained, _, _ = _explained(center, samples, own)
                size = np.where(np.isfinite(center), np.abs(center), 0.0)
                size = np.maximum(size, np.sqrt(np.mean(np.square(size))))
                moved = float(np.median(explained / (size * floatbits.epsilon(own))))
            if np.isfinite(moved):
                found.append(min(moved, 1.0 / floatbits.epsilon(own)))
    return max(found) if found else None


def _own_type(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"f{dtype.itemsize // 2}") if floatbits.is_complex(dtype) else dtype


def _parts(values: np.ndarray) -> np.ndarray:
    """Return float64 elements, flat; of complex numbers real and imaginary parts."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if floatbits.is_complex(flat.dtype):
        return flat.astype(np.complex128).view(np.float64)
    return flat.astype(np.float64)


def _in_type(values: np.ndarray, own: np.dtype) -> np.ndarray:
    return values.astype(own).astype(np.float64)


def _pattern(values: np.ndarray) -> np.ndarray:
    """Return 0 for finite, 1 for NaN, 2 for infinite, 3 for infinite and negative."""
    pattern = np.isnan(values).astype(np.int8)
    pattern[values == np.inf] = 2
    pattern[values == -np.inf] = 3
    return pattern
