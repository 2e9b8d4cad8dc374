"""Prepare a program for the StableHLO reference interpreter.

Python reads the interpreter's results only where they are real numbers of an ordinary type. So the
program is made to return other types in parts of such a type, which are put together again here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from snaprt.hlo.literals import TUPLE, array_shape, dtype_of
from snaprt.hlo.proto import ShapeProto, XlaMessage
from snaprt_replay import floatbits
from snaprt_replay.hlo import hlo_module


@dataclasses.dataclass(frozen=True, eq=False)
class Readable:
    """A program that returns real numbers of ordinary types only."""

    module: XlaMessage  # the HloModuleProto
    dtypes: tuple[np.dtype, ...]  # the dtypes of the program's own results

    def assemble(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the program's own results from those of `module`."""
        left = iter(results)
        assembled = []
        for dtype in self.dtypes:
            value = np.asarray(next(left))
            if floatbits.is_complex(dtype):
                whole = np.empty(value.shape, dtype)
                whole.real, whole.imag = value, next(left)
                value = whole
            assembled.append(value.astype(dtype))
        return assembled


def make_readable(module: XlaMessage) -> Readable:
    """Return a program with the same results in types that Python can read.

    Args:
        module: An HloModuleProto whose result is an array or a flat tuple; it is not changed.
    """
    readable = hlo_module.copy_of(module)
    for field in ("input_output_alias", "buffer_donor", "schedule"):
        readable.ClearField(field)
    entry = hlo_module.entry_computation(readable)
    root = hlo_module.root_instruction(entry)
    steps = hlo_module.Steps(hlo_module.Editor(readable), root)
    results: list[XlaMessage] = [root]
    if root.shape.element_type == TUPLE:
        results = []
        for index, shape in enumerate(root.shape.tuple_shapes):
            results.append(steps.add("get-tuple-element", shape, root))
            results[-1].tuple_index = index
    dtypes = tuple(dtype_of(value.shape) for value in results)
    parts: list[XlaMessage] = []
    for value, dtype in zip(results, dtypes, strict=True):
        dimensions = tuple(value.shape.dimensions)
        if floatbits.is_complex(dtype):
            part = array_shape(np.dtype(f"f{dtype.itemsize // 2}"), dimensions)
            parts += [steps.add("real", part, value), steps.add("imag", part, value)]
        elif dtype.kind not in "biuf" or dtype == np.float16:
            parts.append(steps.add("convert", array_shape(_ordinary(dtype), dimensions), value))
        else:
            parts.append(value)
    shape = ShapeProto(element_type=TUPLE, tuple_shapes=[part.shape for part in parts])
    result = steps.add("tuple", shape, *parts)
    entry.instructions.extend(steps.made)
    entry.root_id = result.id
    entry.program_shape.result.CopyFrom(shape)
    readable.host_program_shape.result.CopyFrom(shape)
    return Readable(readable, dtypes)


def _ordinary(dtype: np.dtype) -> np.dtype:
    """Return an ordinary type that holds every value of a dtype that Python's buffers lack."""
    return np.dtype(np.float32) if floatbits.is_float(dtype) else np.dtype(np.int32)
