"""Describes an error raised while a graph was recorded, and raises it again; runs no program.

What failed is an operation: a primitive of JAX's, the abstract values of its operands, and its
parameters. Its shapes and dtypes alone decide, so the error comes again on any machine.

Parameters are JSON. What JSON has no word for is an object with one telling key: ``{"tuple":
[...]}``, ``{"float": "0x1.8p+0"}``. Objects of JAX come from a table, so that a file can name no
other class, and reading runs nothing. What cannot be written stands there as ``{"unencodable":
class, "text": ...}``, and reading it is an error.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.snapshot.format.schema import TraceErrorRecord


@dataclass(frozen=True)
class RaisedAgain:
    """What evaluating a recorded operation again gave."""

    kind: str = ""  # the error's class, with its module; empty where none was raised
    message: str = ""
    obstacle: str = ""  # why the operation could not be evaluated at all


def describe_trace_error(
    error: BaseException, operation: jaxapi.BoundOperation | None, pending: int, left_out: int
) -> TraceErrorRecord:
    """Return what a snapshot says of an error.

    Args:
        error: It, with its traceback.
        operation: The primitive that failed, with its operands; None where none is known.
        pending: How many operations the graph had.
        left_out: How many of them the snapshot's module does not have.
    """
    bare = TraceErrorRecord(
        kind=_class_name(error),
        message=str(error),
        stack=jaxapi.user_stack(error),
        x64=jaxapi.x64_enabled(),
        pending=pending,
        left_out=left_out,
    )
    candidates = [] if operation is None else [_with_operation(bare, operation)]
    candidates += [_with_call(bare, call) for call in jaxapi.failed_calls(error)]
    # What raises the error again when it is read back, is what failed.
    return next(filter(raises_the_same, candidates), (candidates or [bare])[0])


def _with_operation(bare: TraceErrorRecord, operation: jaxapi.BoundOperation) -> TraceErrorRecord:
    operands = tuple(encode_aval(jaxapi.typeof(operand)) for operand in operation.operands)
    return dataclasses.replace(
        bare,
        primitive=operation.primitive.name,
        module=jaxapi.lowering_module(operation.primitive),
        operands=operands,
        **_encoded(operation.params, {"an operand": operands}),
    )


def _with_call(bare: TraceErrorRecord, call: jaxapi.FailedCall) -> TraceErrorRecord:
    return dataclasses.replace(bare, function=call.function, **_encoded(call.arguments))


def _encoded(params: Mapping[str, Any], besides: Mapping[str, Any] = {}) -> dict[str, Any]:
    encoded = {name: encode(value) for name, value in params.items()}
    lost = [
        f"{name} ({kind})"
        for name, data in {**encoded, **besides}.items()
        for kind in unencodable(data)
    ]
    return {"params": encoded, "unencodable": tuple(lost)}


def raises_the_same(record: TraceErrorRecord) -> bool:
    """Return whether what failed raises the same error here, word for word."""
    again = raise_again(record)
    return (again.kind, again.message) == (record.kind, record.message)


def raise_again(record: TraceErrorRecord) -> RaisedAgain:
    """Evaluate what failed on abstract values, as JAX did, and return the error."""
    if not record.primitive and not record.function:
        return RaisedAgain(obstacle="no operation failed: Python code raised the error")
    primitive = jaxapi.primitive_named(record.primitive, record.module)
    if record.primitive and primitive is None:
        whose = record.module or "not a module of JAX"
        return RaisedAgain(
            obstacle=f"this JAX has no primitive {record.primitive} (it was from {whose})"
        )
    if record.function and record.function not in jaxapi.public_functions():
        return RaisedAgain(obstacle=f"this JAX has no function {record.function}")
    try:
        avals = [decode_aval(operand) for operand in record.operands]
        params = {name: decode(value) for name, value in record.params.items()}
    except ValueError as error:
        return RaisedAgain(obstacle=str(error))
    if record.function:
        return _evaluate(record.x64, lambda: jaxapi.call_abstractly(record.function, params))
    return _evaluate(record.x64, lambda: jaxapi.abstract_evaluate(primitive, avals, params))


def _evaluate(x64: bool, evaluate: Callable[[], object]) -> RaisedAgain:
    try:
        with jaxapi.x64(x64), jaxapi.evaluating():
            evaluate()
    except Exception as error:
        return RaisedAgain(kind=_class_name(error), message=str(error))
    return RaisedAgain()


def _class_name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}"


def operation_text(record: TraceErrorRecord) -> str:
    """Return the failed operation as one line, in the way JAX prints it; empty if none failed."""
    params = ", ".join(f"{name}={_shown(value)}" for name, value in record.params.items())
    if record.function:
        return f"{record.function}({params})"
    if not record.primitive:
        return ""
    operands = ", ".join(str(operand.get("text", operand)) for operand in record.operands)
    return f"{record.primitive}({operands})" + (f" with {params}" if params else "")


def _shown(data: Any) -> str:
    try:
        return f"{decode(data)}"
    except ValueError:
        return str(data.get("text", data)) if isinstance(data, dict) else str(data)


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
    if jaxapi.is_array_aval(value):
        return {"aval": encode_aval(value)}
    if isinstance(value, jax.Array):
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
    tuple: lambda value: {"tuple": [encode(item) for item in value]},
    list: lambda value: {"list": [encode(item) for item in value]},
    dict: lambda value: {"dict": [[encode(key), encode(item)] for key, item in value.items()]},
}


def _encode_object(value: Any, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": name, "name": value.name}
    fields = value._asdict() if hasattr(value, "_asdict") else vars(value)
    return {"object": name, "fields": {key: encode(field) for key, field in fields.items()}}


def decode(data: Any) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        NotEncodableError: It could not be written.
        ValueError: It is nothing that `encode` writes.
    """
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{data!r:.80} is not a parameter")
    kind = next(iter(data))
    if kind == _UNENCODABLE:
        raise NotEncodableError(f"a {data[kind]} could not be written to the file")
    try:
        return _DECODERS[kind](data)
    except NotEncodableError:
        raise
    except Exception as error:
        raise ValueError(f"{data!s:.80} is not a parameter: {error}") from error


_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda data: float.fromhex(data["float"]),
    "complex": lambda data: complex(*map(float.fromhex, data["complex"])),
    "bytes": lambda data: bytes.fromhex(data["bytes"]),
    "tuple": lambda data: tuple(map(decode, data["tuple"])),
    "list": lambda data: list(map(decode, data["list"])),
    "dict": lambda data: {decode(key): decode(value) for key, value in data["dict"]},
    "aval": lambda data: decode_aval(data["aval"]),
    "dtype": lambda data: jaxapi.dtype_of_name(data["dtype"]),
    "scalar_type": lambda data: jaxapi.dtype_of_name(data["scalar_type"]).type,
    "array": lambda data: np.frombuffer(
        bytes.fromhex(data["hex"]), jaxapi.dtype_of_name(data["array"])
    ).reshape(data["shape"]),
    "enum": lambda data: _CLASSES[data["enum"]][data["name"]],  # type: ignore[index]
    "object": lambda data: _CLASSES[data["object"]](
        **{key: decode(value) for key, value in data["fields"].items()}
    ),
}


def unencodable(data: Any) -> Iterator[str]:
    """Yield the classes of what could not be written, inside of what `encode` returned."""
    if isinstance(data, Mapping):
        if _UNENCODABLE in data:
            yield str(data[_UNENCODABLE])
        else:
            for value in data.values():
                yield from unencodable(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from unencodable(item)


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
        raise NotEncodableError(f"an operand, {data.get('text')}, could not be written to the file")
    try:
        shape = tuple(map(int, data["shape"]))
        dtype = jaxapi.dtype_of_name(data["dtype"])
        return jaxapi.ShapedArray(shape, dtype, weak_type=bool(data["weak_type"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{data!s:.80} is not an abstract value: {error}") from error
