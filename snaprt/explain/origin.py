"""Says whether a graph's operations come from one of the user's functions; runs nothing."""

from __future__ import annotations

from snaprt import jaxapi, settings
from snaprt.graph.program import Program


def comes_from(program: Program, function: str) -> bool:
    """Say whether an operation of ``program`` was recorded in ``function``, or in what it called.

    Args:
        program: A graph.
        function: The name of a function, or the end of a qualified name, such as ``Model.loss``.
    """
    ending = f".{function}"
    return any(
        frame.function == function or frame.function.endswith(ending)
        for node in program.nodes
        for frame in jaxapi.frames_of_operation(node.source)
    )


def is_wanted(program: Program) -> bool:
    """Say whether SNAPRT_DEBUG_FUNCTION, where it is set, lets one speak of ``program``."""
    function = settings.get("SNAPRT_DEBUG_FUNCTION")
    return function is None or comes_from(program, function.strip())
