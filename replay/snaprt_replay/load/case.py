"""One execution to replay, whatever file it came from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from snaprt.snapshot.format.schema import Index
from snaprt_replay.floatbits import is_float

if TYPE_CHECKING:
    from snaprt.jaxapi import Partitioning

CompilerOption = str | bool | int | float


@dataclasses.dataclass(frozen=True, eq=False)
class NamedArray:
    """An input or output of a module.

    Examples:
        >>> from snaprt import replay
        >>> replay.NamedArray("x", np.ones((2, 3), np.float32)).shape
        (2, 3)
    """

    name: str  # what the user or XLA calls it, unique within its side of the case
    value: np.ndarray  # in C order; bfloat16 and the other small types are those of ml_dtypes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """Return the array's dtype."""
        return self.value.dtype


@dataclasses.dataclass(frozen=True)
class Signature:
    """The shape and dtype that a module expects of one parameter; -1 is a dynamic size.

    Examples:
        >>> from snaprt import replay
        >>> str(replay.Signature((2, -1), np.dtype("float32")))
        'float32[2,?]'
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return (
            f"{self.dtype.name}[{','.join('?' if size < 0 else str(size) for size in self.shape)}]"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A module with, if they are known, the inputs it ran on and the outputs it returned.

    If it runs on several devices, inputs and outputs are the whole arrays.

    Examples:
        >>> from snaprt import replay
        >>> case = replay.load("step.inputs.snap")
        >>> case.name, case.devices
        ('step', 1)
    """

    path: Path  # the file it was read from
    format: str  # of that file, one of those in `snaprt_replay.load.sniff`
    name: str  # the module's name
    stablehlo: bytes  # as XLA's parser takes it: text, MLIR bytecode or a portable artifact
    inputs: tuple[NamedArray, ...] | None  # in parameter order; None: the file has none
    outputs: tuple[NamedArray, ...] | None  # as recorded; None: nothing to compare with
    parameters: tuple[Signature, ...] = ()  # what the module expects, in order
    # The recorded environment: versions, platform, device, flags. Text.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The XLA options it was compiled with, beyond the defaults.
    compiler_options: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)
    devices: int = 1  # how many devices one execution runs on
    partitioning: Partitioning | None = None  # how XLA was told to partition the module
    device: int = 0  # whose copies the whole arrays hold, if the devices' copies differ
    # By name, what each device held of an input whose copies differed.
    input_parts: Mapping[str, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict)
    # What each device held of the recorded outputs, if there are several.
    output_parts: tuple[ShardedArray, ...] = ()
    # The outputs of a second run during recording, if they differed from `outputs`.
    second_outputs: tuple[NamedArray, ...] | None = None
    files: tuple[Path, ...] = ()  # all files it was read from; empty if only `path`
    # Whether snaprt wrote the module itself; compiling any other module may end the process with
    # a failed CHECK in XLA.
    trusted: bool = False
    notes: tuple[str, ...] = ()  # for the reader of a comparison: a restored module, a missing file
    # The module as it was recorded, if the calls of Python in its branches were replaced.
    with_branches_that_call: bytes = b""
    graph_id: str = ""  # set if snaprt recorded it
    unfinished: str = ""  # the error that ended the recording of a lazy graph, so nothing ran


def on_one_device(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return a case as one device runs it, and notes on whose copies of the inputs it uses.

    If the devices' copies differ, it has no recorded outputs, since those depend on other copies.
    """
    if not case.input_parts:
        return case, ()
    copies = f"the copies of {', '.join(case.input_parts)} differ between devices"
    notes = [f"{copies}: using those of device {case.device}, which {case.path.name} is of"]
    wrong = {
        number
        for array in case.output_parts
        if is_float(array.parts[0].dtype)
        for number, part in enumerate(array.parts)
        if not np.isfinite(part).all()
    }
    if wrong and case.device not in wrong:
        notes.append(
            f"the recorded outputs of device {', '.join(map(str, sorted(wrong)))} have NaN or "
            f"infinity, those of device {case.device} do not: name a file of device {min(wrong)}"
        )
    alone = dataclasses.replace(case, outputs=None, output_parts=(), second_outputs=None)
    return alone, tuple(notes)


def name_arrays(values: Sequence[np.ndarray], prefix: str) -> tuple[NamedArray, ...]:
    """Name arrays that have no names: ``arg0``, ``arg1``, ..."""
    return tuple(
        NamedArray(f"{prefix}{index}", np.asarray(value)) for index, value in enumerate(values)
    )


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
        """Return the whole array; if copies differ, that of ``device``, or of the first device."""
        if all(part.shape == self.shape for part in self.parts):
            return NamedArray(self.name, self.parts[device])
        value = np.empty(self.shape, self.parts[0].dtype)
        for number in (*reversed(range(len(self.parts))), device):
            value[_slices(self.indices[number])] = self.parts[number]
        return NamedArray(self.name, value)

    def fills_whole(self) -> bool:
        """Return whether each element of the whole lies in one part, and parts fit their indices.

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
            _overlap(first, second) for first, second in itertools.combinations(distinct, 2)
        )


def _overlap(first: Index, second: Index) -> bool:
    pairs = zip(first, second, strict=True)
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


def _slices(index: Index) -> tuple[Any, ...]:
    return (*(slice(*ends) for ends in index), ...)  # the ellipsis makes even a scalar a view


def sharded(
    name: str, shape: tuple[int, ...], parts: Sequence[np.ndarray], indices: Sequence[Index]
) -> ShardedArray:
    """Return a sharded array; equal copies of the same part become one object."""
    distinct_copies: dict[Index, list[np.ndarray]] = {}
    distinct = []
    for part, index in zip(parts, indices, strict=True):
        copies = distinct_copies.setdefault(index, [])
        same = next((copy for copy in copies if same_bits(copy, part)), None)
        if same is None:
            copies.append(part)
        distinct.append(part if same is None else same)
    return ShardedArray(name, shape, tuple(distinct), tuple(indices))


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes."""
    if first is second:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    left, right = (np.ascontiguousarray(value).reshape(-1) for value in (first, second))
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))


def parts_of_device(arrays: Iterable[ShardedArray], number: int) -> tuple[NamedArray, ...]:
    """Return the part of each array that the program's device ``number`` holds."""
    return tuple(NamedArray(array.name, array.parts[number]) for array in arrays)


def all_parts(arrays: Iterable[ShardedArray]) -> tuple[NamedArray, ...]:
    """Return every part of every array, named after the array and the device's number."""
    return tuple(
        NamedArray(f"{array.name} on device {number}", part)
        for array in arrays
        for number, part in enumerate(array.parts)
    )
