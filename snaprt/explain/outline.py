"""The outline of a program: what the next one at its place is compared with; it holds no arrays.

It keeps what a program is told apart by: operations with their parameters, the kinds of the inputs,
host scalars, outputs, and what it runs under.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from snaprt import jaxapi
from snaprt.graph.program import INPUT, Literal, Node, Placement
from snaprt.runtime.events import Compilation
from snaprt.runtime.graph_breaks import users_place

# Of what a program's input is told apart by.
Kind = tuple[Any, Any, bool]


@dataclass(frozen=True, eq=False)
class OutlinedOperation:
    """An operation of a program.

    Attributes:
        name: Its primitive's name, with that of the function where it calls one: ``jit(relu)``.
        signature: Equal for operations that compute the same of the same operands.
        params: Its parameters.
        source: What `place` looks at.
    """

    name: str
    signature: int
    params: dict[str, Any]
    source: Any

    @property
    def place(self) -> jaxapi.Frame | None:
        """The user's line."""
        return users_place(jaxapi.frames_of_operation(self.source))


@dataclass(frozen=True, eq=False)
class Outline:
    """What a program is told apart by.

    Attributes:
        operations: In recorded order.
        names: Their names.
        wiring: See `snaprt.graph.program.Program`.
        inputs: Abstract value, sharding and whether it is committed, of each.
        literals: The host scalars.
        promoted: Those that are arguments, for their values vary.
        outputs: ``(operation, result)`` of each.
        donated: The inputs whose memory it takes.
        placement: Where it runs.
        is_watched: Whether it tells of NaN, for the recorder.
    """

    operations: tuple[OutlinedOperation, ...]
    names: tuple[str, ...]
    wiring: tuple[tuple[tuple[int, int], ...], ...]
    inputs: tuple[Kind, ...]
    literals: tuple[Literal, ...]
    promoted: frozenset[int]
    outputs: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    placement: Placement
    is_watched: bool

    def first_use(self, index: int, origin: int = INPUT) -> OutlinedOperation | None:
        """Return the operation that uses an input, or a literal, first."""
        wire = (origin, index)
        pairs = zip(self.operations, self.wiring, strict=True)
        return next((operation for operation, wires in pairs if wire in wires), None)


def outline_of(compilation: Compilation) -> Outline:
    """Return the outline of a program that has been compiled."""
    program = compilation.program
    operations = tuple(
        OutlinedOperation(
            _name(node),
            node.operation.signature,
            jaxapi.without_constants(node.params),  # which may be large
            node.source,
        )
        for node in program.nodes
    )
    return Outline(
        operations=operations,
        names=tuple([one.name for one in operations]),
        wiring=program.wiring,
        inputs=tuple([jaxapi.describe_input(array) for array in program.inputs]),
        literals=program.literals,
        promoted=compilation.promoted,
        outputs=program.outputs,
        donated=compilation.executable.donated,
        placement=program.placement,
        is_watched=compilation.executable.is_watched,
    )


def _name(node: Node) -> str:
    function = node.params.get("name")
    called = f"({function})" if isinstance(function, str) else ""
    return f"{node.primitive.name}{called}"


def nearest(outlines: Sequence[Outline], to: Outline) -> Outline:
    """Return which of some outlines, the latest last, is most like another."""
    return max(reversed(outlines), key=lambda one: _likeness(one, to))


def _likeness(one: Outline, other: Outline) -> tuple[int, ...]:
    same_operations = one.names == other.names
    start, end = (0, 0) if same_operations else common_ends(one.names, other.names)
    return (
        same_operations,
        start + end,
        one.wiring == other.wiring,
        one.outputs == other.outputs,
        -sum(a != b for a, b in zip(one.inputs, other.inputs, strict=False)),
        -sum(a.key != b.key for a, b in zip(one.literals, other.literals, strict=False)),
    )


def common_ends(one: Sequence[Any], other: Sequence[Any]) -> tuple[int, int]:
    """Return how many elements two sequences begin with alike, and end with alike after those."""
    shorter = min(len(one), len(other))
    start = _alike(one, other)
    end = _alike(reversed(one), reversed(other))
    return start, min(end, shorter - start)


def _alike(one: Iterable[Any], other: Iterable[Any]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)
