"""Make dimensions smaller, together with all dimensions that must have the same length.

Dimensions that operations tie together form a *tie*: the contracting dimensions of both operands of
a dot, a batch dimension through a chain of elementwise operations. A tie that no operation pins to
its length can be cut; the arrays of inputs and constants are sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from snaprt.hlo.literals import TUPLE, array_to_literal, literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import (
    copy_of,
    declare_parameters,
    entry_computation,
    parameters,
    root_instruction,
)
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.cutting import Base

_FINEST = 64  # the smallest part of a tie that is removed at a time is 1/64

_Place = tuple[int, int]
"""An instruction's id and one of its dimensions."""


def shapes(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with one tie cut to a single element, a half, three quarters, ..."""
    if base.candidate.expected is not None:
        return
    for names, size in _ties_of_pair(base.candidate):
        for start, stop in _ranges(size):
            yield _cut(base.candidate, names, start, stop)


def _ranges(size: int) -> list[tuple[int, int]]:
    """Return the ranges of a tie's elements to try: few first, all but a 64th last.

    Removing one element at a time from millions would take millions of programs.
    """
    ranges = [(0, 1)]
    removed = size // 2
    while removed and removed >= size // _FINEST:
        ranges += [(0, size - removed), (removed, size)]
        removed //= 2
    return [bounds for bounds in dict.fromkeys(ranges) if 0 < bounds[1] - bounds[0] < size]


_Names = tuple[frozenset[tuple[str, int]], ...]
"""The dimensions of a tie in each module, by the instructions' names."""


def _ties_of_pair(candidate: Candidate) -> list[tuple[_Names, int]]:
    """Return the ties that can be cut in all modules, and their lengths; longest first."""
    free = []
    ties = [_Ties(module) for module in candidate.modules]
    for tie, size in ties[0].free():
        names = [frozenset(ties[0].names[place] for place in tie)]
        if len(ties) > 1:
            counterpart = ties[1].like(names[0], size)
            if counterpart is None:
                continue
            names.append(counterpart)
        free.append((tuple(names), size))
    return sorted(free, key=lambda entry: -entry[1])


class _Ties:
    """Which dimensions of a module's entry have the same length, and which must keep theirs."""

    def __init__(self, module: XlaMessage) -> None:
        entry = entry_computation(module)
        self.by_id = {instruction.id: instruction for instruction in entry.instructions}
        self.root = root_instruction(entry).id
        self._parent: dict[_Place, _Place] = {}
        self._pinned: list[_Place] = []
        self.names: dict[_Place, tuple[str, int]] = {}
        for instruction in entry.instructions:
            for dimension in range(len(instruction.shape.dimensions)):
                self._parent[instruction.id, dimension] = (instruction.id, dimension)
                # Parameters of a pair have different names but the same numbers.
                name = (
                    f"#{instruction.parameter_number}"
                    if instruction.opcode == "parameter"
                    else instruction.name
                )
                self.names[instruction.id, dimension] = (name, dimension)
        for instruction in entry.instructions:
            if instruction.id != self.root:
                _RULES.get(instruction.opcode, _pin_all)(self, instruction)

    def free(self) -> list[tuple[list[_Place], int]]:
        """Return the ties that are not pinned and have more than one element."""
        pinned = {self._first(place) for place in self._pinned}
        ties: dict[_Place, list[_Place]] = {}
        for place in self._parent:
            ties.setdefault(self._first(place), []).append(place)
        free = []
        for first, places in ties.items():
            sizes = {self.size(place) for place in places}
            if first not in pinned and len(sizes) == 1 and sizes != {1} and 0 not in sizes:
                free.append((places, sizes.pop()))
        return free

    def like(
        self, names: frozenset[tuple[str, int]], size: int
    ) -> frozenset[tuple[str, int]] | None:
        """Return the names of the ties that share dimensions with a tie of another module."""
        free = {place for tie, length in self.free() if length == size for place in tie}
        roots = {self._first(place) for place, name in self.names.items() if name in names}
        places = [place for place in self._parent if self._first(place) in roots]
        if not places or not free.issuperset(places):
            return None
        return frozenset(self.names[place] for place in places)

    def size(self, place: _Place) -> int:
        """Return a dimension's length."""
        return int(self.by_id[place[0]].shape.dimensions[place[1]])

    def tie(self, first: _Place, second: _Place) -> None:
        """Require two dimensions to have the same length."""
        self._parent[self._first(first)] = self._first(second)

    def pin(self, instruction: XlaMessage) -> None:
        """Require all dimensions of an instruction to keep their lengths."""
        self._pinned += [
            (instruction.id, dimension) for dimension in range(len(instruction.shape.dimensions))
        ]

    def pin_place(self, place: _Place) -> None:
        """Require one dimension to keep its length."""
        self._pinned.append(place)

    def operands(self, instruction: XlaMessage) -> list[XlaMessage]:
        """Return the operands of an instruction."""
        return [self.by_id[operand] for operand in instruction.operand_ids]

    def _first(self, place: _Place) -> _Place:
        while self._parent[place] != place:
            self._parent[place] = self._parent[self._parent[place]]
            place = self._parent[place]
        return place


# --- what each operation ties together ---


def _pin_all(ties: _Ties, instruction: XlaMessage) -> None:
    for pinned in (instruction, *ties.operands(instruction)):
        ties.pin(pinned)


def _nothing(ties: _Ties, instruction: XlaMessage) -> None:
    """Tie nothing: any length is valid."""


def _elementwise(ties: _Ties, instruction: XlaMessage) -> None:
    for operand in ties.operands(instruction):
        if len(operand.shape.dimensions) == len(instruction.shape.dimensions):
            for dimension in range(len(instruction.shape.dimensions)):
                ties.tie((operand.id, dimension), (instruction.id, dimension))


def _broadcast(ties: _Ties, instruction: XlaMessage) -> None:
    (operand,) = ties.operands(instruction)
    for own, dimension in enumerate(instruction.dimensions):
        ties.tie((operand.id, own), (instruction.id, dimension))


def _transpose(ties: _Ties, instruction: XlaMessage) -> None:
    (operand,) = ties.operands(instruction)
    for dimension, own in enumerate(instruction.dimensions):
        ties.tie((operand.id, own), (instruction.id, dimension))


def _reduce(ties: _Ties, instruction: XlaMessage) -> None:
    if instruction.shape.element_type == TUPLE:
        _pin_all(ties, instruction)
        return
    operand = ties.operands(instruction)[0]
    rank = len(operand.shape.dimensions)
    dimensions = [dimension for dimension in range(rank) if dimension not in instruction.dimensions]
    for dimension, own in enumerate(dimensions):
        ties.tie((operand.id, own), (instruction.id, dimension))


def _dot(ties: _Ties, instruction: XlaMessage) -> None:
    left, right = ties.operands(instruction)
    numbers = instruction.dot_dimension_numbers
    contracting = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)
    batch = (numbers.lhs_batch_dimensions, numbers.rhs_batch_dimensions)
    for left_dimension, right_dimension in zip(*contracting, strict=True):
        ties.tie((left.id, left_dimension), (right.id, right_dimension))
    results = 0
    for left_dimension, right_dimension in zip(*batch, strict=True):
        ties.tie((left.id, left_dimension), (right.id, right_dimension))
        ties.tie((left.id, left_dimension), (instruction.id, results))
        results += 1
    for operand, tied in ((left, (contracting[0], batch[0])), (right, (contracting[1], batch[1]))):
        for dimension in range(len(operand.shape.dimensions)):
            if all(dimension not in some for some in tied):
                ties.tie((operand.id, dimension), (instruction.id, results))
                results += 1


def _reshape(ties: _Ties, instruction: XlaMessage) -> None:
    """Tie the dimensions that a reshape preserves, and pin those that it merges or splits."""
    (operand,) = ties.operands(instruction)
    before, after = list(operand.shape.dimensions), list(instruction.shape.dimensions)
    left = right = 0
    while left < len(before) or right < len(after):
        lefts, rights = [left], [right]
        sizes = [
            before[left] if left < len(before) else 1,
            after[right] if right < len(after) else 1,
        ]
        left, right = left + 1, right + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] and left < len(before):
                lefts.append(left)
                sizes[0] *= before[left]
                left += 1
            elif right < len(after):
                rights.append(right)
                sizes[1] *= after[right]
                right += 1
            else:
                _pin_all(ties, instruction)
                return
        lefts = [dimension for dimension in lefts if dimension < len(before)]
        rights = [dimension for dimension in rights if dimension < len(after)]
        if len(lefts) == len(rights) == 1:
            ties.tie((operand.id, lefts[0]), (instruction.id, rights[0]))
        else:
            for place in (
                *((operand.id, i) for i in lefts),
                *((instruction.id, i) for i in rights),
            ):
                ties.pin_place(place)


def _concatenate(ties: _Ties, instruction: XlaMessage) -> None:
    (along,) = instruction.dimensions
    for operand in ties.operands(instruction):
        for dimension in range(len(instruction.shape.dimensions)):
            if dimension == along:
                ties.pin_place((operand.id, dimension))
                ties.pin_place((instruction.id, dimension))
            else:
                ties.tie((operand.id, dimension), (instruction.id, dimension))


def _slice(ties: _Ties, instruction: XlaMessage) -> None:
    (operand,) = ties.operands(instruction)
    for dimension, bounds in enumerate(instruction.slice_dimensions):
        size = ties.size((operand.id, dimension))
        if (bounds.start, bounds.limit, bounds.stride) == (0, size, 1):
            ties.tie((operand.id, dimension), (instruction.id, dimension))
        else:
            ties.pin_place((operand.id, dimension))
            ties.pin_place((instruction.id, dimension))


def _convolution(ties: _Ties, instruction: XlaMessage) -> None:
    """Tie the batch and feature dimensions, and pin the spatial ones."""
    if instruction.feature_group_count > 1 or instruction.batch_group_count > 1:
        _pin_all(ties, instruction)
        return
    values, kernel = ties.operands(instruction)
    numbers = instruction.convolution_dimension_numbers
    ties.tie(
        (values.id, numbers.input_batch_dimension), (instruction.id, numbers.output_batch_dimension)
    )
    ties.tie(
        (values.id, numbers.input_feature_dimension),
        (kernel.id, numbers.kernel_input_feature_dimension),
    )
    ties.tie(
        (kernel.id, numbers.kernel_output_feature_dimension),
        (instruction.id, numbers.output_feature_dimension),
    )
    for array, spatial in (
        (values, numbers.input_spatial_dimensions),
        (kernel, numbers.kernel_spatial_dimensions),
        (instruction, numbers.output_spatial_dimensions),
    ):
        for dimension in spatial:
            ties.pin_place((array.id, dimension))


def _dynamic_slice(ties: _Ties, instruction: XlaMessage) -> None:
    _tie_equal(ties, ties.operands(instruction)[0], instruction)


def _dynamic_update_slice(ties: _Ties, instruction: XlaMessage) -> None:
    whole, update = ties.operands(instruction)[:2]
    _tie_equal(ties, whole, update)
    _tie_equal(ties, whole, instruction)


def _tie_equal(ties: _Ties, whole: XlaMessage, part: XlaMessage) -> None:
    for dimension in range(len(whole.shape.dimensions)):
        places = ((whole.id, dimension), (part.id, dimension))
        if ties.size(places[0]) == ties.size(places[1]):
            ties.tie(*places)
        else:
            for place in places:
                ties.pin_place(place)


_ELEMENTWISE: Final = (
    *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert"),
    *("copy", "cosine", "count-leading-zeros", "divide", "erf", "exponential"),
    *("exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic"),
    *("maximum", "minimum", "multiply", "negate", "not", "optimization-barrier", "or", "popcnt"),
    *("power", "real", "reduce-precision", "remainder", "reverse", "round-nearest-afz"),
    *("round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic"),
    *("shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"),
)
_RULES: Final[Mapping[str, Callable[[_Ties, XlaMessage], None]]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("parameter", "constant", "iota"), _nothing),
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "reduce": _reduce,
    "reshape": _reshape,
    "slice": _slice,
    "transpose": _transpose,
}


# --- the cut ---


def _cut(candidate: Candidate, names: _Names, start: int, stop: int) -> Candidate:
    modules = []
    inputs = list(candidate.inputs)
    for index, (module, places) in enumerate(zip(candidate.modules, names, strict=True)):
        copy = copy_of(module)
        ties = _Ties(copy)
        by_name = {name: place for place, name in ties.names.items()}
        for name in places:
            number, dimension = by_name[name]
            _shorten(ties.by_id[number], dimension, start, stop)
        for parameter in parameters(entry_computation(copy)):
            for dimension in range(len(parameter.shape.dimensions)):
                if index == 0 and ties.names[parameter.id, dimension] in places:
                    array = inputs[parameter.parameter_number]
                    inputs[parameter.parameter_number] = np.ascontiguousarray(
                        array.take(range(start, stop), dimension)
                    )
        _declare(copy)
        modules.append(copy)
    named = ", ".join(sorted({name for name, _ in names[0] if not name.startswith("#")})[:3])
    what = f"only elements {start} to {stop} of a dimension of {named or 'an input'}"
    return changed(candidate, "shapes", what, modules=modules, inputs=inputs)


def _shorten(instruction: XlaMessage, dimension: int, start: int, stop: int) -> None:
    instruction.shape.dimensions[dimension] = stop - start
    if instruction.opcode == "constant":
        array = literal_to_array(instruction.literal).take(range(start, stop), dimension)
        instruction.literal.CopyFrom(array_to_literal(np.ascontiguousarray(array)))
    if instruction.opcode == "dynamic-slice":
        instruction.dynamic_slice_sizes[dimension] = stop - start
    if instruction.opcode == "slice":
        instruction.slice_dimensions[dimension].limit = stop - start


def _declare(module: XlaMessage) -> None:
    """Update the declared parameters and result of the module."""
    entry = entry_computation(module)
    root = root_instruction(entry)
    by_id = {instruction.id: instruction for instruction in entry.instructions}
    for element, operand in zip(root.shape.tuple_shapes, root.operand_ids, strict=True):
        element.CopyFrom(by_id[operand].shape)
    declare_parameters(module)
    for signature in (entry.program_shape, module.host_program_shape):
        signature.result.CopyFrom(root.shape)
