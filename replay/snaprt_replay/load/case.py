"""One execution to replay, whatever file it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snaprt_replay.floatbits import is_float

if TYPE_CHECKING:
    from snaprt.jaxapi import Partitioning
    from snaprt_replay.load.shards import ShardedArray

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
    value: np.ndarray  # in C order; bfloat16 and the other small types are ml_dtypes' own

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
    """A module with, where they are known, the inputs it ran on and the outputs it gave.

    Where it runs on several devices, inputs and outputs are the whole arrays.

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
    # What was recorded of where it ran: versions, platform, device, flags. Text.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # XLA options it was compiled with beyond the defaults.
    compiler_options: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)
    devices: int = 1  # how many devices one execution runs on
    partitioning: Partitioning | None = None  # how XLA was told to spread the module over them
    device: int = 0  # whose copies the whole arrays hold, where the devices' copies differ
    # By name, what each device held of an input whose copies differed.
    input_parts: Mapping[str, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict)
    # What each device held of the recorded outputs, where there are several.
    output_parts: tuple[ShardedArray, ...] = ()
    # What a second run gave when it was recorded, where that differed from `outputs`.
    second_outputs: tuple[NamedArray, ...] | None = None
    files: tuple[Path, ...] = ()  # all files it was read from; empty for `path` alone
    # Whether snaprt wrote the module itself; anything else may end a process in one of XLA's
    # CHECKs when it is compiled.
    trusted: bool = False
    notes: tuple[str, ...] = ()  # for the reader of a comparison: a restored module, a missing file
    graph_id: str = ""  # where snaprt recorded it
    unfinished: str = ""  # the error that ended the recording of a lazy graph, so nothing ran


def on_one_device(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return a case as one device runs it, and notes on whose copies of the inputs that takes.

    Where the devices' copies differ, it has no recorded outputs: those came from other copies too.
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
    """Name arrays that have no name of their own: ``arg0``, ``arg1``, ..."""
    return tuple(
        NamedArray(f"{prefix}{index}", np.asarray(value)) for index, value in enumerate(values)
    )
