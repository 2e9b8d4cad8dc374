"""Make the inputs' values simple: zeros, ones, whole numbers, few digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from snaprt_replay import floatbits
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.cutting import Base

_NAME = "values"
_MOST_PARTS: Final = 16


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with simpler values of one input, or of a part of one.

    Each is simpler than what is there, so that this comes to an end.
    """
    if base.candidate.expected is not None:
        return  # the outputs would not be what they are expected to be
    for index, array in enumerate(base.candidate.inputs):
        for rank, (what, simplify) in enumerate(_SIMPLER):
            if rank >= _rank(array):
                break
            yield _with(base, index, simplify(array), f"input {index} {what}")
    for index, array in enumerate(base.candidate.inputs):
        if _rank(array) > _ALL_ONE:
            yield from _parts_zero(base, index, array)


def _parts_zero(base: Base, index: int, array: np.ndarray) -> Iterator[Candidate]:
    parts = 2
    while parts <= min(_MOST_PARTS, array.size):
        for part in np.array_split(np.arange(array.size), parts):
            simpler = array.copy().reshape(-1)
            if np.any(simpler[part]):
                simpler[part] = 0
                what = f"{part.size} elements of input {index} zero"
                yield _with(base, index, simpler.reshape(array.shape), what)
        parts *= 2


def _with(base: Base, index: int, array: np.ndarray, what: str) -> Candidate:
    inputs = list(base.candidate.inputs)
    inputs[index] = array
    return changed(base.candidate, _NAME, what, inputs=inputs)


def _rounded(digits: int) -> Callable[[np.ndarray], np.ndarray]:
    def simplify(array: np.ndarray) -> np.ndarray:
        if not floatbits.is_float(array.dtype):
            return array
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
            size = np.floor(np.log10(np.abs(np.where(wide == 0, 1, wide))))
            unit = 10.0 ** np.maximum(size - digits + 1, -300)
            rounded = np.where(np.isfinite(wide), np.round(wide / unit) * unit, wide)
            return rounded.astype(array.dtype)

    return simplify


def _whole(array: np.ndarray) -> np.ndarray:
    if not floatbits.is_float(array.dtype):
        return array
    with np.errstate(all="ignore"):
        return np.round(array.astype(np.float64)).astype(array.dtype)


# From the simplest on.
_SIMPLER: Final[tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...]] = (
    ("all zero", np.zeros_like),
    ("all one", np.ones_like),
    ("rounded to whole numbers", _whole),
    ("rounded to one digit", _rounded(1)),
    ("rounded to three digits", _rounded(3)),
)
_ALL_ONE: Final = 1


def _rank(array: np.ndarray) -> int:
    """Return the number of the first row of `_SIMPLER` that changes nothing."""
    for rank, (_, simplify) in enumerate(_SIMPLER):
        if simplify(array).tobytes() == array.tobytes():
            return rank
    return len(_SIMPLER)
