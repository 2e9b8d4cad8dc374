"""Small arrays that travel as parts of one, which is one argument of a program instead of many.

Each argument and result costs the host some microseconds, however small it is. So gradients that
nobody has asked for, and the state of optimizers, are packed; who reads one gets it unpacked.
Recording changes none of this, so that what is recorded is the program that runs otherwise.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax
import jax.numpy as jnp

from snaprt import jaxapi, settings
from snaprt.trace.array import LazyArray
from snaprt.trace.fast_path import follow_function

#: Larger arrays stay alone: copying them would cost the device more than the host saves.
MOST_ELEMENTS: Final = 4096

#: Fewer arrays than these stay alone.
FEWEST: Final = 4


def is_packing() -> bool:
    """Return whether arrays are packed: unless ``SNAPRT_TORCH_PACK`` is off."""
    return bool(settings.get("SNAPRT_TORCH_PACK"))


def is_small(array: Any) -> bool:
    """Return whether an array may be packed: a small one with values, on one device."""
    return _has_value(array) and array.size <= MOST_ELEMENTS and len(array.devices()) == 1


def _has_value(array: Any) -> bool:
    return type(array) is LazyArray or type(array) is jaxapi.ArrayImpl


def packable(kinds: Sequence[Hashable | None]) -> list[bool]:
    """Return which arrays are packed, given what each must have in common with the others."""
    counts = Counter(kinds)
    return [kind is not None and counts[kind] >= FEWEST for kind in kinds]


class Layout:
    """Where arrays lie in packed ones.

    Args:
        shapes: The shapes of the arrays.
        names: For each, the name of the packed array that it lies in; it may be alone there.

    Attributes:
        names: The names of the packed arrays, in their order.
        count: How many arrays lie in them.
        kind: What a trace depends on: equal for equal layouts.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
        counts = Counter(names)
        self.names = [*counts]
        number = {name: index for index, name in enumerate(self.names)}
        ends = [0] * len(self.names)
        self._places: list[tuple[int, int, int]] = []  # number of the packed array, start, end
        self._shapes = [*shapes]
        self.count = len(self._shapes)
        for shape, name in zip(shapes, names, strict=True):
            at = number[name]
            start, ends[at] = ends[at], ends[at] + math.prod(shape)
            self._places.append((at, start, ends[at]))
        self.kind = (*names, *self._shapes)
        self._is_alone = [counts[name] == 1 for name in names]
        functions = {"pack": self.join, "unpack": self.split}
        self._jitted = {name: jax.jit(_named(f, name)) for name, f in functions.items()}

    def flat(self, packed: Sequence[Any], index: int) -> Any:
        """Return an array, of one dimension if it is not alone, where a function is traced."""
        at, start, end = self._places[index]
        return packed[at] if self._is_alone[index] else packed[at][start:end]

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the packed arrays, as one operation."""
        return [*arrays] if all(self._is_alone) else self._call("pack", arrays)

    def unpack(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays, as one operation."""
        return [*packed] if all(self._is_alone) else self._call("unpack", packed)

    def _call(self, name: str, operands: Sequence[Any]) -> list[Any]:
        def call() -> tuple[Any, list[Any]]:
            return self._jitted[name]([*operands]), []

        return follow_function((weakref.ref(self), name), operands, call)[0]

    def split(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays, where a function is traced."""
        return [self.flat(packed, index).reshape(shape) for index, shape in enumerate(self._shapes)]

    def join(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the packed arrays, where a function is traced."""
        inside: list[list[Any]] = [[] for _ in self.names]
        for (at, _, _), array in zip(self._places, arrays, strict=True):
            inside[at].append(array)
        return [joined(arrays) for arrays in inside]


def _named(function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def call(arrays: Any) -> Any:
        return function(arrays)

    call.__name__ = call.__qualname__ = f"torch_{name}"
    return call


def joined(arrays: Sequence[Any]) -> Any:
    """Return arrays as one of one dimension; one that is alone keeps its shape."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([array.ravel() for array in arrays])


class Pack:
    """Packed arrays of one layout, which are replaced all at once.

    Attributes:
        layout: Where the parts are.
        packed: The packed arrays.
        writes: Counts the times that they were replaced.
        is_broken: Whether a part has got a value of its own since, see `tensors.PackedBox`.
    """

    __slots__ = ("_parts", "is_broken", "layout", "packed", "writes")

    def __init__(self, layout: Layout, packed: Sequence[Any]) -> None:
        self.layout = layout
        self.packed = packed
        self.writes = 0
        self.is_broken = False
        self._parts: list[Any] | None = None

    def parts(self) -> list[Any]:
        """Return the parts, as arrays of their own."""
        if self._parts is not None:
            return self._parts
        parts = self.layout.unpack(self.packed)
        if all(map(_has_value, parts)):  # not where a function is traced
            self._parts = parts
        return parts

    def write(self, packed: Sequence[Any]) -> None:
        """Put other packed arrays in the place of the present ones."""
        self.packed = packed
        self.writes += 1
        self._parts = None

    @contextmanager
    def holding(self, packed: Sequence[Any]) -> Iterator[None]:
        """Let it have other packed arrays, where a function is traced, and then those of before."""
        before, parts_before = self.packed, self._parts
        self.packed, self._parts = packed, None
        try:
            yield
        finally:
            self.packed, self._parts = before, parts_before
            self.is_broken = False


class Leaves:
    """Leaves of autograd whose gradients are packed.

    Args:
        layout: Where the gradients are.
        leaves: All leaves of a function.
        is_packed: Which of their gradients are packed.
    """

    __slots__ = ("_position", "is_packed", "layout")

    def __init__(self, layout: Layout, leaves: Sequence[Any], is_packed: Sequence[bool]) -> None:
        self.layout = layout
        self.is_packed = is_packed
        chosen = itertools.compress(leaves, is_packed)
        # By ``id``, for a leaf lives while somebody asks for its gradient.
        self._position = {id(leaf): index for index, leaf in enumerate(chosen)}

    def position(self, leaf: Any) -> int:
        """Return the number of a leaf's gradient among the parts."""
        return self._position[id(leaf)]

    def find(self, leaf: Any) -> int | None:
        """Return the number likewise, or None for a tensor that is none of the leaves."""
        return self._position.get(id(leaf))


class Gradients(Pack):
    """What a backward pass has left for some leaves.

    Attributes:
        leaves: The leaves.
    """

    __slots__ = ("leaves",)

    def __init__(self, leaves: Leaves, packed: Sequence[Any]) -> None:
        super().__init__(leaves.layout, packed)
        self.leaves = leaves

    def of(self, leaf: Any) -> Any:
        """Return the gradient of one of the leaves."""
        return self.parts()[self.leaves.position(leaf)]
