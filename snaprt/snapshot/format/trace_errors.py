"""Describes an error raised while a graph was recorded, and raises it again; runs no program.

What failed is an operation: a primitive of JAX's, the abstract values of its operands, and its
parameters. Its shapes and dtypes alone decide, so the error comes again on any machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snaprt import jaxapi
from snaprt.snapshot.format import parameters
from snaprt.snapshot.format.schema import TraceErrorRecord


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
    params = {name: parameters.encode(one) for name, one in operation.params.items()}
    operands = tuple(parameters.encode_aval(jaxapi.typeof(one)) for one in operation.operands)
    return dataclasses.replace(
        bare,
        primitive=operation.primitive.name,
        module=jaxapi.lowering_module(operation.primitive),
        operands=operands,
        params=params,
        unencodable=_unencodable({**params, "an operand": operands}),
    )


def _with_call(bare: TraceErrorRecord, call: jaxapi.FailedCall) -> TraceErrorRecord:
    params = {name: parameters.encode(one) for name, one in call.arguments.items()}
    return dataclasses.replace(
        bare, function=call.function, params=params, unencodable=_unencodable(params)
    )


def _unencodable(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{name} ({kind})" for name, data in params.items() for kind in parameters.unencodable(data)
    )


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
        whose = record.module or "no module of JAX"
        return RaisedAgain(
            obstacle=f"this JAX has no primitive {record.primitive} (it was from {whose})"
        )
    if record.function and record.function not in jaxapi.public_functions():
        return RaisedAgain(obstacle=f"this JAX has no function {record.function}")
    try:
        avals = [parameters.decode_aval(one) for one in record.operands]
        params = {name: parameters.decode(one) for name, one in record.params.items()}
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
    if record.function:
        told = ", ".join(f"{name}={_shown(one)}" for name, one in record.params.items())
        return f"{record.function}({told})"
    if not record.primitive:
        return ""
    operands = ", ".join(str(one.get("text", one)) for one in record.operands)
    params = ", ".join(f"{name}={_shown(one)}" for name, one in record.params.items())
    return f"{record.primitive}({operands})" + (f" with {params}" if params else "")


def _shown(data: Any) -> str:
    try:
        return f"{parameters.decode(data)}"
    except ValueError:
        return str(data.get("text", data)) if isinstance(data, dict) else str(data)
