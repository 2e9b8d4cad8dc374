"""Describes an error raised while a graph was recorded, and raises it again; runs no program.

What failed is an operation: a primitive of JAX's, the abstract values of its operands, and its
parameters. Its shapes and dtypes alone decide, so the error comes again on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snaprt import jaxapi
from snaprt.snapshot import parameters
from snaprt.snapshot.layout import TraceErrorRecord


@dataclass(frozen=True)
class RaisedAgain:
    """What evaluating a recorded operation again gave.

    Attributes:
        kind: The error's class, with its module; empty where none was raised.
        message: What it says.
        obstacle: Why the operation could not be evaluated at all; else empty.
    """

    kind: str = ""
    message: str = ""
    obstacle: str = ""


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
    what: dict[str, Any] = {}
    if operation is not None:
        encoded = {name: parameters.encode(one) for name, one in operation.params.items()}
        avals = tuple(parameters.encode_aval(jaxapi.typeof(one)) for one in operation.operands)
        what = {
            "primitive": operation.primitive.name,
            "module": jaxapi.lowering_module(operation.primitive),
            "operands": avals,
            "params": encoded,
            "unencodable": tuple(
                f"{name} ({kind})"
                for name, data in (*encoded.items(), *(("an operand", one) for one in avals))
                for kind in parameters.unencodable(data)
            ),
        }
    return TraceErrorRecord(
        kind=_class_name(error),
        message=str(error),
        stack=jaxapi.user_stack(error),
        x64=jaxapi.x64_enabled(),
        pending=pending,
        left_out=left_out,
        **what,
    )


def raise_again(record: TraceErrorRecord) -> RaisedAgain:
    """Evaluate the operation that failed, as JAX did, and return the error."""
    if not record.primitive:
        return RaisedAgain(obstacle="no operation failed: Python code raised the error")
    primitive = jaxapi.primitive_named(record.primitive, record.module)
    if primitive is None:
        whose = f"{record.module or 'no module of JAX'}"
        return RaisedAgain(
            obstacle=f"this JAX has no primitive {record.primitive} (it was from {whose})"
        )
    try:
        avals = [parameters.decode_aval(one) for one in record.operands]
        params = {name: parameters.decode(one) for name, one in record.params.items()}
    except ValueError as error:
        return RaisedAgain(obstacle=str(error))
    return _evaluate(primitive, avals, params, record.x64)


def _evaluate(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any], x64: bool
) -> RaisedAgain:
    try:
        with jaxapi.x64(x64), jaxapi.evaluating():
            jaxapi.abstract_evaluate(primitive, avals, params)
    except Exception as error:
        return RaisedAgain(kind=_class_name(error), message=str(error))
    return RaisedAgain()


def _class_name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}"


def operation_text(record: TraceErrorRecord) -> str:
    """Return the failed operation as one line, in the way JAX prints it."""
    operands = ", ".join(str(one.get("text", one)) for one in record.operands)
    params = ", ".join(f"{name}={_shown(one)}" for name, one in record.params.items())
    return f"{record.primitive}({operands})" + (f" with {params}" if params else "")


def _shown(data: Any) -> str:
    try:
        return f"{parameters.decode(data)}"
    except ValueError:
        return str(data.get("text", data)) if isinstance(data, dict) else str(data)
