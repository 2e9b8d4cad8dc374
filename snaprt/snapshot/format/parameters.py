"""Writes the parameters of an operation of JAX's as JSON and reads them; never runs what is in it.

What JSON has no word for is an object with one telling key: ``{"tuple": [...]}``, ``{"float":
"0x1.8p+0"}``. Objects of JAX come from a table, so that a file can name no other class. What cannot
be written stands there as ``{"unencodable": class, "text": ...}``, and reading it is an error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi

_MAX_ARRAY_BYTES = 1 << 16
_LONGEST_TEXT = 500
_UNENCODABLE = "unencodable"

_CLASSES: dict[str, type] = {
    name: getattr(module, name)
    for module, names in (
        (
            jax.lax,
            (
                *("AccuracyMode", "ConvDimensionNumbers", "DotAlgorithm", "DotAlgorithmPreset"),
                *("FftType", "GatherDimensionNumbers", "GatherScatterMode", "Precision"),
                *("RaggedDotDimensionNumbers", "RandomAlgorithm", "RoundingMethod"),
                *("ScatterDimensionNumbers", "Tolerance"),
            ),
        ),
        (jax.sharding, ("AxisType",)),
    )
    for name in names
    if hasattr(module, name)
}
"""JAX's classes that parameters may be of, by their public names: making one does nothing."""
_NAMES = {kind: name for name, kind in _CLASSES.items()}


class NotEncodableError(ValueError):
    """Raised when a parameter is read that could not be written."""


def encode(value: Any) -> Any:
    """Return ``value`` as JSON data; of an array of JAX's, the abstract value alone."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if kind in _NAMES:
        return _encode_object(value, _NAMES[kind])
    if isinstance(value, jax.Array) or jaxapi.is_array_aval(value):
        return {"aval": encode_aval(jaxapi.typeof(value))}
    if isinstance(value, np.dtype) or jaxapi.is_extended_dtype(value):
        return {"dtype": str(value)}
    if jaxapi.is_scalar_type(value):
        return {"dtype": np.dtype(value).name}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"scalar_type": value.__name__}
    if isinstance(value, (np.ndarray, np.generic)) and value.nbytes <= _MAX_ARRAY_BYTES:
        bits = np.asarray(value)
        return {"array": bits.dtype.name, "shape": list(bits.shape), "hex": bits.tobytes().hex()}
    text = f"{value}"
    return {_UNENCODABLE: f"{kind.__module__}.{kind.__qualname__}", "text": text[:_LONGEST_TEXT]}


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    float: lambda value: {"float": value.hex()},
    complex: lambda value: {"complex": [value.real.hex(), value.imag.hex()]},
    bytes: lambda value: {"bytes": value.hex()},
    tuple: lambda value: {"tuple": [encode(one) for one in value]},
    list: lambda value: {"list": [encode(one) for one in value]},
    dict: lambda value: {"dict": [[encode(key), encode(one)] for key, one in value.items()]},
}


def _encode_object(value: Any, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": name, "name": value.name}
    fields = value._asdict() if hasattr(value, "_asdict") else vars(value)
    return {"object": name, "fields": {key: encode(one) for key, one in fields.items()}}


def decode(data: Any) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        NotEncodableError: It could not be written.
        ValueError: It is nothing that `encode` writes.
    """
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{data!r:.80} is no parameter")
    kind = next(iter(data))
    if kind == _UNENCODABLE:
        raise NotEncodableError(f"a {data[kind]} could not be written into the file")
    try:
        return _DECODERS[kind](data)
    except NotEncodableError:
        raise
    except Exception as error:
        raise ValueError(f"{data!s:.80} is no parameter: {error}") from error


_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda data: float.fromhex(data["float"]),
    "complex": lambda data: complex(*map(float.fromhex, data["complex"])),
    "bytes": lambda data: bytes.fromhex(data["bytes"]),
    "tuple": lambda data: tuple(map(decode, data["tuple"])),
    "list": lambda data: list(map(decode, data["list"])),
    "dict": lambda data: {decode(key): decode(one) for key, one in data["dict"]},
    "aval": lambda data: decode_aval(data["aval"]),
    "dtype": lambda data: jaxapi.dtype_of_name(data["dtype"]),
    "scalar_type": lambda data: jaxapi.dtype_of_name(data["scalar_type"]).type,
    "array": lambda data: np.frombuffer(
        bytes.fromhex(data["hex"]), jaxapi.dtype_of_name(data["array"])
    ).reshape(data["shape"]),
    "enum": lambda data: _CLASSES[data["enum"]][data["name"]],  # type: ignore[index]
    "object": lambda data: _CLASSES[data["object"]](
        **{key: decode(one) for key, one in data["fields"].items()}
    ),
}


def unencodable(data: Any) -> Iterator[str]:
    """Yield the classes of what could not be written, inside of what `encode` returned."""
    if isinstance(data, Mapping):
        if _UNENCODABLE in data:
            yield str(data[_UNENCODABLE])
        else:
            for one in data.values():
                yield from unencodable(one)
    elif isinstance(data, (list, tuple)):
        for one in data:
            yield from unencodable(one)


def encode_aval(aval: Any) -> dict[str, Any]:
    """Return the abstract value of an operand as JSON data."""
    if not jaxapi.is_array_aval(aval):
        return {_UNENCODABLE: type(aval).__qualname__, "text": str(aval)[:_LONGEST_TEXT]}
    data = {
        "shape": list(aval.shape),
        "dtype": str(aval.dtype),
        "weak_type": bool(aval.weak_type),
        "text": str(aval),
    }
    if jaxapi.is_placed_aval(aval):
        data[_UNENCODABLE] = "the mesh that its type names"
    return data


def decode_aval(data: Mapping[str, Any]) -> Any:
    """Return the abstract value that `encode_aval` wrote.

    Raises:
        NotEncodableError: It is of no ordinary array.
        ValueError: It is nothing that `encode_aval` writes.
    """
    if _UNENCODABLE in data:
        raise NotEncodableError(
            f"an operand, {data.get('text')}, could not be written into the file"
        )
    try:
        shape = tuple(map(int, data["shape"]))
        dtype = jaxapi.dtype_of_name(data["dtype"])
        return jaxapi.ShapedArray(shape, dtype, weak_type=bool(data["weak_type"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{data!s:.80} is no abstract value: {error}") from error
