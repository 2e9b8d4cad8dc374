"""Which operations of a program that cannot be compiled are the reason; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.compile.lower import placed
from snaprt.graph.program import INPUT, LITERAL, Node, Program


def refused(program: Program, error: BaseException) -> Sequence[Node]:
    """Return the operations that cannot be compiled alone either; all, if there are none such.

    Each kind of operation is lowered alone. Where all can be, those that call what is not part of
    XLA are compiled alone as well: of others, XLA refuses at most what many of them add up to.

    Args:
        program: The program, which could not be compiled.
        error: What JAX or XLA raised.
    """
    by_kind: dict[Any, list[Node]] = {}
    for position, node in enumerate(program.nodes):
        avals = tuple([_aval(program, origin, index) for origin, index in program.wiring[position]])
        by_kind.setdefault((node.operation.signature, avals), []).append(node)
    found: list[Node] = []
    foreign: list[tuple[jax.stages.Lowered, list[Node]]] = []
    with placed(program.placement), jaxapi.without_compilation_cache():
        for (_, avals), nodes in by_kind.items():
            try:
                lowered = _lowered_alone(nodes[0], avals)
            except Exception as alone:
                # Alone, an operation may lack what its neighbors say of its sharding.
                if str(alone) == str(error):
                    found += nodes
                continue
            if b"custom_call" in jaxapi.stablehlo_without_locations(lowered):
                foreign.append((lowered, nodes))
        for lowered, nodes in () if found else foreign:
            try:
                lowered.compile()
            except Exception:
                found += nodes
    return found or program.nodes


def _aval(program: Program, origin: int, index: int) -> Any:
    if origin == INPUT:
        return jaxapi.typeof(program.inputs[index])
    if origin == LITERAL:
        return program.literals[index].aval
    return program.nodes[origin].results[index].aval


def _lowered_alone(node: Node, avals: Sequence[Any]) -> jax.stages.Lowered:
    def operation(*operands: Any) -> Any:
        return jaxapi.bind_at(node.source, node.context, node.primitive, operands, node.params)

    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        for aval in avals
    ]
    return jaxapi.lower(operation, shapes)
