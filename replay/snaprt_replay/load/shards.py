"""Arrays that are spread over devices: their parts, and the whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from snaprt.snapshot.format.schema import Index
from snaprt_replay.load.case import NamedArray


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedArray:
    """An array as the devices of one program hold it."""

    name: str  # as in `NamedArray`
    shape: tuple[int, ...]  # of the whole
    parts: tuple[np.ndarray, ...]  # by device, in the program's order; equal copies are one object
    indices: tuple[Index, ...]  # where each part lies in the whole

    @property
    def copies_differ(self) -> bool:
        """Return whether two devices hold the same part of the whole with different bits."""
        return len({id(part) for part in self.parts}) > len(set(self.indices))

    def whole(self, device: int = 0) -> NamedArray:
        """Return the whole array; of copies that differ, that of a device, else the first one's."""
        if all(part.shape == self.shape for part in self.parts):
            return NamedArray(self.name, self.parts[device])
        value = np.empty(self.shape, self.parts[0].dtype)
        for number in (*reversed(range(len(self.parts))), device):
            value[_slices(self.indices[number])] = self.parts[number]
        return NamedArray(self.name, value)

    def fills_whole(self) -> bool:
        """Return whether each element of the whole lies in one part, which is as large as it says.

        Copies of one part count once.
        """
        for part, index in zip(self.parts, self.indices, strict=True):
            expected = tuple(end - begin for begin, end in index) + self.shape[len(index) :]
            inside = all(end <= size for (_, end), size in zip(index, self.shape, strict=False))
            if part.shape != expected or not inside:
                return False
        distinct = dict(zip(self.indices, self.parts, strict=True))
        elements = sum(part.size for part in distinct.values())
        return elements == math.prod(self.shape) and not any(
            _overlap(one, other) for one, other in itertools.combinations(distinct, 2)
        )


def _overlap(one: Index, other: Index) -> bool:
    pairs = zip(one, other, strict=True)
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


def _slices(index: Index) -> tuple[Any, ...]:
    return (*(slice(*ends) for ends in index), ...)  # with the last one even a scalar is a view


def sharded(
    name: str, shape: tuple[int, ...], parts: Sequence[np.ndarray], indices: Sequence[Index]
) -> ShardedArray:
    """Return a sharded array; equal copies of the same part are made one object."""
    known: dict[Index, list[np.ndarray]] = {}
    distinct = []
    for part, index in zip(parts, indices, strict=True):
        copies = known.setdefault(index, [])
        same = next((copy for copy in copies if same_bits(copy, part)), None)
        if same is None:
            copies.append(part)
        distinct.append(part if same is None else same)
    return ShardedArray(name, shape, tuple(distinct), tuple(indices))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes."""
    if one is other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = (np.ascontiguousarray(value).reshape(-1) for value in (one, other))
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))


def parts_of_device(arrays: Iterable[ShardedArray], number: int) -> tuple[NamedArray, ...]:
    """Return what the program's device of this number holds of each array."""
    return tuple(NamedArray(array.name, array.parts[number]) for array in arrays)


def all_parts(arrays: Iterable[ShardedArray]) -> tuple[NamedArray, ...]:
    """Return every part of every array, named after the array and the device's number."""
    return tuple(
        NamedArray(f"{array.name} on device {number}", part)
        for array in arrays
        for number, part in enumerate(array.parts)
    )
