"""What the errors of a cut say: the program or operation that failed, and where it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax

from snaprt import jaxapi
from snaprt.errors import CompileError, ExecutionError, NonFiniteError
from snaprt.graph.program import Node

_MOST_OPERATIONS: Final = 20
_MOST_FRAMES: Final = 4

_OPERATION_BY_OPERATION: Final = (
    "set SYNC_TENSORS_OPBYOP=1 and GET_TENSORS_OPBYOP=1 to run operations one by one and name "
    "the failing one"
)
_LISTED: Final = "set XLA_IR_DEBUG=1 to list its operations and their lines"


class FailedOnDevice(ExecutionError, jax.errors.JaxRuntimeError):  # noqa: N818 - bases say it
    """An `ExecutionError` that programs which know only JAX catch as well."""


def describe_operation(node: Node) -> str:
    """Return ``add at train.py:41 (loss_of), from train.py:60 (main)``: an operation's stack."""
    frames = jaxapi.frames_of_operation(node.source)[: -_MOST_FRAMES - 1 : -1]
    places = [f"{frame.file}:{frame.line} ({frame.function})" for frame in frames]
    called = node.params.get("name")  # of a jitted function
    name = f"{node.primitive.name}({called})" if called else node.primitive.name
    return f"{name} at {', from '.join(places)}" if places else name


def list_operations(nodes: Sequence[Node]) -> str:
    """Return the operations of a program in lines of their own, to follow a message."""
    lines = [f"  {describe_operation(node)}" for node in nodes[:_MOST_OPERATIONS]]
    omitted = len(nodes) - len(lines)
    return "\n".join(
        ["", "its operations:", *lines, *([f"  and {omitted} more"] if omitted else [])]
    )


def uncompiled(error: CompileError, nodes: Sequence[Node]) -> CompileError:
    """Return the error of a program that could not be compiled, with the operations it has."""
    if not nodes:
        return CompileError(error.message, hint=f"{error.hint}; {_LISTED}")
    return CompileError(error.message + list_operations(nodes), hint=error.hint)


def failed_run(
    error: Exception, graph: str, nodes: Sequence[Node], cause: str, *, by_operation: bool
) -> ExecutionError:
    """Return the error of a program that failed while it ran."""
    what = f"graph {graph}"
    if by_operation:
        what = describe_operation(nodes[0])
    special = jaxapi.forbidden_value(error)
    listed = "" if by_operation or not nodes else list_operations(nodes)
    if special is not None:
        return NonFiniteError(
            f"invalid value ({special}) in a result of {what} ({cause}){listed}",
            hint="jax_debug_nans or jax_debug_infs is set"
            + ("" if by_operation else f"; {_OPERATION_BY_OPERATION}"),
        )
    return FailedOnDevice(
        f"{what} failed to run ({cause}): {error}{listed}",
        hint="its arrays cannot be used any more; the error above comes from the device"
        + ("" if by_operation or nodes else f"; {_LISTED}"),
    )


def failed_later(error: Exception, what: str) -> ExecutionError:
    """Return the error of a program that failed after the call that started it had returned."""
    return FailedOnDevice(
        f"{what} failed to run: {error}",
        hint=f"the arrays that it should have computed cannot be used any more; {_LISTED}",
    )
