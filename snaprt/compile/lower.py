"""Lowers recorded programs to StableHLO, with a flag that tells of NaN where one is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp

from snaprt import jaxapi, metrics, settings
from snaprt.compile import times
from snaprt.compile.downcast import names_of, narrowed, narrowings
from snaprt.graph.digest import program_digest
from snaprt.graph.program import INPUT, LITERAL, Node, Placement, Program
from snaprt.host.collector import collecting_seldom

FLAG_NAME = "snaprt_not_finite"
"""The name of the result that says so: the last one, a bool scalar."""


def watched(function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Return ``function`` with one more result: whether another one has a NaN or an infinity."""

    @functools.wraps(function)
    def with_flag(*arguments: Any) -> list[Any]:
        results = list(function(*arguments))
        return [*results, flag_of(results)]

    return with_flag


def flag_of(results: Sequence[Any]) -> jax.Array:
    """Return a bool scalar: whether one of the arrays has a NaN or an infinity; to be traced."""
    # The barrier keeps XLA from computing a result a second time inside the test, and so from
    # computing it in another way: what is tested is what is handed out.
    inexact = [result for result in results if jnp.issubdtype(result.dtype, jnp.inexact)]
    tested = [_is_finite(array) for array in jax.lax.optimization_barrier(inexact)]
    return ~functools.reduce(jnp.logical_and, tested, jnp.ones((), jnp.bool_))


def _is_finite(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _is_finite(array.real) & _is_finite(array.imag)
    if jnp.finfo(array.dtype).bits < 16:  # these cannot all say that a sum is not finite
        array = array.astype(jnp.float32)
    # Only what is not finite has another difference from itself than zero. A sum runs as fast as
    # memory allows, and NaN stays in it; not so in a maximum, from which XLA's CPU code loses it.
    return jnp.sum(array - array) == 0


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Lower and run what is inside as the code that recorded it would have run it."""
    with (
        jaxapi.evaluating_compiled(),
        jaxapi.x64(placement.x64),
        jaxapi.under_mesh(placement.mesh),
    ):
        if placement.default_device is None:
            yield
        else:
            with jax.default_device(placement.default_device):
                yield


def lowering(
    program: Program, promoted: frozenset[int], is_watched: bool = False
) -> Callable[[], jax.stages.Lowered]:
    """Return what traces and lowers ``program``, now or later; it does not hold its arrays."""
    function = program.as_function(promoted)
    if is_watched:
        function = watched(function)
    shapes = jaxapi.shapes_of(program.arguments(promoted))
    placement, donated = program.placement, program.donated
    shardings = [*program.shardings(), *([None] if is_watched else ())]
    requested = narrowings()
    stacks = jaxapi.whole_stacks if settings.get("XLA_HLO_DEBUG") else nullcontext

    def lower() -> jax.stages.Lowered:
        with (
            placed(placement),
            stacks(),
            collecting_seldom(),
            times.stage(times.LOWER),
            metrics.timed("LowerTime"),
        ):
            lowered = jaxapi.lower(function, shapes, donated, shardings)
            return narrowed(lowered, requested) if requested else lowered

    return lower


def digest_of_lowering(program: Program, promoted: frozenset[int], is_watched: bool = False) -> str:
    """Return what stands, in every process, for the module that `lowering` makes.

    Raises:
        Unstable: See `snaprt.graph.digest`.
    """
    digest = program_digest(program, promoted) + names_of(narrowings())
    return f"{digest} watched" if is_watched else digest


def refused(program: Program, error: BaseException) -> Sequence[Node]:
    """Return the operations that cannot be compiled alone either; all, if there are none such.

    Each kind of operation is lowered alone. Where all can be, those that call what is not part of
    XLA are compiled alone as well: of others, XLA refuses at most what many of them add up to.
    """
    failing: list[Node] = []
    foreign: list[tuple[jax.stages.Lowered, list[Node]]] = []
    with placed(program.placement), jaxapi.without_compilation_cache():
        for nodes, lower in _kinds_alone(program):
            try:
                lowered = lower()
            except Exception as alone:
                # Alone, an operation may lack what its neighbors say of its sharding.
                if str(alone) == str(error):
                    failing += nodes
                continue
            if b"custom_call" in jaxapi.stablehlo_without_locations(lowered):
                foreign.append((lowered, nodes))
        for lowered, nodes in () if failing else foreign:
            try:
                lowered.compile()
            except Exception:
                failing += nodes
    return failing or program.nodes


def calling_back(program: Program) -> Sequence[Node]:
    """Return the operations that call Python functions, as their modules say when lowered alone."""
    calling: list[Node] = []
    with placed(program.placement):
        for nodes, lower in _kinds_alone(program):
            with suppress(Exception):  # alone, an operation may lack its neighbors
                if jaxapi.holds_objects(lower()):
                    calling += nodes
    return calling


def _kinds_alone(
    program: Program,
) -> Iterator[tuple[list[Node], Callable[[], jax.stages.Lowered]]]:
    """Yield the operations of each kind, and what lowers one of them alone."""
    by_kind: dict[Any, list[Node]] = {}
    for position, node in enumerate(program.nodes):
        avals = tuple([_aval(program, origin, index) for origin, index in program.wiring[position]])
        by_kind.setdefault((node.operation.signature, avals), []).append(node)
    for (_, avals), nodes in by_kind.items():
        yield nodes, functools.partial(_lowered_alone, nodes[0], avals)


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
