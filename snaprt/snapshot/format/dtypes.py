"""How each array dtype lies in a snapshot file; it must not know files or JAX.

NumPy's ``.npy`` format has no name for the dtypes that ml_dtypes adds. Narrow integers are stored
as 8-bit ones of the same value; of floats, the bits are stored under an integer dtype of the same
width. The manifest keeps the true name.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from snaprt.errors import SnapshotError

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""What ``.npy`` can name itself, and XLA has too."""

_STORED_AS = {
    "bfloat16": "uint16",
    "float8_e3m4": "uint8",
    "float8_e4m3": "uint8",
    "float8_e4m3b11fnuz": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    # Narrower than a byte: one element takes one byte, as in ml_dtypes.
    "float4_e2m1fn": "uint8",
    "float6_e2m3fn": "uint8",
    "float6_e3m2fn": "uint8",
}
"""True dtype name to the dtype whose ``.npy`` holds its bits."""

_WIDENED_TO = {
    "int1": "int8",
    "int2": "int8",
    "int4": "int8",
    "uint1": "uint8",
    "uint2": "uint8",
    "uint4": "uint8",
}
"""True dtype name to the dtype whose ``.npy`` holds its values; ml_dtypes leaves the upper half of
each byte undefined, so the bits would not do."""

DTYPE_NAMES = (*_NATIVE, *_STORED_AS, *_WIDENED_TO)
"""Every dtype name that a manifest may hold, PRNG keys aside."""


def storage_dtype(name: str) -> np.dtype:
    """Return the little-endian dtype under which an array of dtype ``name`` is stored.

    Raises:
        SnapshotError: No snapshot can hold an array of that dtype.
    """
    stored = name if name in _NATIVE else (_STORED_AS | _WIDENED_TO).get(name)
    if stored is None:
        raise SnapshotError(
            f"a snapshot cannot hold arrays of dtype {name}",
            hint=f"known dtypes: {', '.join(DTYPE_NAMES)}, and JAX's PRNG keys",
        )
    return np.dtype(stored).newbyteorder("<")


def true_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype called ``name``, from NumPy or from ml_dtypes.

    Raises:
        SnapshotError: Neither knows that name.
    """
    if name in _NATIVE:
        return np.dtype(name)
    scalar = getattr(ml_dtypes, name, None) if name in DTYPE_NAMES else None
    if scalar is None:
        raise SnapshotError(
            f"no dtype is called {name} here",
            hint="a newer ml_dtypes may know it: pip install --upgrade ml_dtypes",
        )
    return np.dtype(scalar)


def to_storage(array: np.ndarray) -> np.ndarray:
    """View ``array`` as it is stored: C order, little-endian, a dtype that ``.npy`` can name.

    Copies only narrow integers, and an array that is not contiguous.

    Raises:
        SnapshotError: No snapshot can hold an array of that dtype.
    """
    stored = storage_dtype(array.dtype.name)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in _STORED_AS:
        array = array.reshape(-1).view(stored.newbyteorder("=")).reshape(array.shape)
    return array.astype(stored, copy=False)


def from_storage(stored: np.ndarray, name: str) -> np.ndarray:
    """Return what ``to_storage`` was given: the same shape and bits, dtype ``name``, native order.

    Raises:
        SnapshotError: ml_dtypes does not know the dtype.
    """
    native = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    dtype = true_dtype(name)
    if name in _NATIVE or name in _WIDENED_TO:
        return native.astype(dtype, copy=False)
    return native.reshape(-1).view(dtype).reshape(stored.shape)
