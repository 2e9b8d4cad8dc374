"""One execution to replay, whatever file it came from; it must not know formats or devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from snaprt.jaxapi import Partitioning
    from snaprt_replay.load.shards import ShardedArray

CompilerOption = str | bool | int | float


@dataclasses.dataclass(frozen=True, eq=False)
class NamedArray:
    """An input or output of a module.

    Args:
        name: What the user or XLA calls it, unique within its side of the case.
        value: Its elements, in C order; bfloat16 and the other small types are ml_dtypes' own.
    """

    name: str
    value: np.ndarray

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
    """The shape and dtype that a module expects of one parameter."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A module with, where they are known, the inputs it ran on and the outputs it gave.

    Args:
        path: The file it was read from.
        format: The name of that file's format, one of those in `snaprt_replay.load.sniff`.
        name: The module's name.
        stablehlo: The module in any form that XLA's StableHLO parser takes: text, MLIR bytecode or
            a portable artifact.
        inputs: In parameter order; None where the file has none and none were given.
        outputs: The recorded results in order; None where there are none to compare with.
        parameters: What the module expects, in order.
        environment: What was recorded of where it ran: versions, platform, device, flags. Text.
        compiler_options: XLA options it was compiled with beyond the defaults.
        devices: How many devices one execution of the module runs on. Inputs and outputs are
            the whole arrays.
        partitioning: How XLA was told to spread the module over them.
        input_parts: By name, what each device held of an input whose copies differed.
        output_parts: What each device held of the recorded outputs, where there are several.
        files: All files it was read from; empty for ``path`` alone.
        trusted: True if snaprt wrote the module itself; anything else may end a process in one of
            XLA's CHECKs when it is compiled.
        notes: What the reader of a comparison should know: a restored module, a missing file.
        unfinished: The error that ended the recording of a lazy graph: there is no execution then.
    """

    path: Path
    format: str
    name: str
    stablehlo: bytes
    inputs: tuple[NamedArray, ...] | None
    outputs: tuple[NamedArray, ...] | None
    parameters: tuple[Signature, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)
    devices: int = 1
    partitioning: Partitioning | None = None
    input_parts: Mapping[str, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict)
    output_parts: tuple[ShardedArray, ...] = ()
    files: tuple[Path, ...] = ()
    trusted: bool = False
    notes: tuple[str, ...] = ()
    unfinished: str = ""


def name_arrays(values: Sequence[np.ndarray], prefix: str) -> tuple[NamedArray, ...]:
    """Name arrays that have no name of their own: ``arg0``, ``arg1``, ..."""
    return tuple(
        NamedArray(f"{prefix}{index}", np.asarray(value)) for index, value in enumerate(values)
    )
