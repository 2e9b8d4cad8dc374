"""Writes an execution's arrays for NumPy and for safetensors; it must not know modules."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay.load.case import Case
from snaprt_replay.load.contents import storable


def named_arrays(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Yield ``inputs/NAME`` and ``outputs/NAME`` with their values, in C order."""
    for side, arrays in (("inputs", case.inputs), ("outputs", case.outputs)):
        for array in arrays or ():
            yield f"{side}/{array.name}", np.ascontiguousarray(array.value).reshape(array.shape)


def write_npz(case: Case, path: Path) -> None:
    """Write an ``.npz``, not compressed; bfloat16 and the like as unsigned integers."""
    write_members(named_arrays(case), path)


def write_members(
    arrays: Iterable[tuple[str, np.ndarray]], path: Path, *, bits: bool = True
) -> None:
    """Write named arrays as ``numpy.savez`` does, which takes not every name.

    Args:
        arrays: Names and values.
        path: The file.
        bits: Write bfloat16 and the like as unsigned integers, not as bytes without a type.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                written = storable(value) if bits else value
                np.lib.format.write_array(member, written, allow_pickle=False)


def write_safetensors(case: Case, path: Path) -> None:
    """Write a ``.safetensors``.

    Raises:
        UsageError: The package safetensors is not installed, or has no name for a dtype.
    """
    try:
        safetensors: Any = importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UsageError(
            "--to safetensors needs the package safetensors",
            hint="pip install 'snaprt[safetensors]'",
        ) from error
    arrays = dict(named_arrays(case))
    notes = {"format": "np", "snaprt": case.name}
    try:
        safetensors.save_file(arrays, path, metadata=notes)
    except OSError:
        raise
    except Exception as error:  # of its own kind, which changed between versions
        raise UsageError(
            f"safetensors cannot hold all arrays of {case.path}: {error}", hint="--to npz can"
        ) from error
