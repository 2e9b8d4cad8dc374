"""The program that is cut out of what was recorded, with what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.graph.operation import Operation


class Literal:
    """A host scalar that stands in a graph as a constant until its value is seen to vary.

    Attributes:
        value: The Python or numpy scalar as JAX handed it over (it may carry a weak type).
        key: Its value in a form that tells 0.0 from -0.0 and equals itself for NaN.
    """

    __slots__ = ("aval", "key", "value")

    def __init__(self, value: Any, aval: Any, key: bytes) -> None:
        self.value = value
        self.aval = aval
        self.key = key


_literals: dict[Any, Literal] = {}
_MAX_LITERALS = 8192


def literal(value: Any) -> Literal:
    """Return the literal of a host scalar: the same object for the same scalar, mostly."""
    aval, bits = jaxapi.typeof(value), jaxapi.literal_bytes(value)
    key = (type(value), aval, bits)
    cached = _literals.get(key)
    if cached is None:
        if len(_literals) >= _MAX_LITERALS:
            _literals.clear()
        # A 0-dimensional numpy array can be written to later.
        owned = jaxapi.own(value) if isinstance(value, np.ndarray) else value
        cached = _literals[key] = Literal(owned, aval, bits)
    return cached


@dataclass(frozen=True, eq=False)
class Placement:
    """Where, and under which type rules, a node must run; a program has one placement.

    There is one object for each placement.
    """

    committed: bool  # whether an operand pins the node to ``devices``
    devices: tuple[Any, ...]  # the devices by id; empty for JAX's default
    default_device: Any  # what `jax.default_device` said, for uncommitted nodes
    x64: bool  # whether 64-bit types were enabled
    mesh: jax.sharding.Mesh | None = None  # the mesh to compute under, as `jax.set_mesh` sets it
    # How results lie, where that is known before they are compiled.
    sharding: jax.sharding.Sharding | None = None


class Node(Protocol):
    """A recorded operation, as far as a program needs it: `snaprt.trace.trie.Point` is one."""

    operation: Operation
    primitive: Any
    params: dict[str, Any]
    context: Any
    source: Any
    results: Any
    effects: Any


class Structure:
    """Identifies a program within this process, apart from its literals' values; hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    @property
    def operations(self) -> tuple[int, ...]:
        """The signatures of its operations."""
        return self._parts[0]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self._hash == other._hash
            and self._parts == other._parts
        )


@dataclass(eq=False, slots=True)  # not frozen: that makes it thrice as slow, once a step
class Program:
    """A part of a graph, cut out to be compiled and run as one XLA program."""

    nodes: tuple[Node, ...]  # the operations, in recorded order
    # For each node, where each operand comes from: ``(producer position, result)``, or ``(INPUT,
    # input index)``, or ``(LITERAL, literal index)``.
    wiring: tuple[tuple[tuple[int, int], ...], ...]
    inputs: tuple[jax.Array, ...]
    literals: tuple[Literal, ...]  # the host scalars it holds
    outputs: tuple[tuple[int, int], ...]  # ``(node position, result)`` of each output
    placement: Placement
    # Identifies the program within this process, apart from the literals' values.
    structure: Structure
    # The inputs that nothing else needs any more, whose memory outputs may take.
    donated: tuple[int, ...] = ()
    # These, and the inputs that nothing else needs but whose memory is not ours to give away, for
    # something else computed them: at the next step ours may stand in their place.
    free: tuple[int, ...] = ()
    # All that it could ever donate, if nothing else needed them; empty where it must not donate.
    donatable: tuple[int, ...] = ()

    def shardings(self) -> list[jax.sharding.Sharding | None]:
        """Return the sharding of each output that its operation names, ``None`` of all others."""
        named = [(self.nodes[position].operation.named, i) for position, i in self.outputs]
        return [
            shardings.results[index] if shardings.results else None for shardings, index in named
        ]

    def as_function(self, promoted: frozenset[int]) -> Callable[..., list[Any]]:
        """Return the function that computes the outputs from the inputs and promoted literals.

        Args:
            promoted: The literals that are passed as arguments, after the inputs, because their
                values vary from step to step; the others are constants.
        """
        recipe = _Recipe(
            nodes=self._in_order(),
            wiring=self.wiring,
            literals=tuple(literal.value for literal in self.literals),
            outputs=self.outputs,
            inputs=len(self.inputs),
            promoted=tuple(sorted(promoted)),
        )

        def lazy_graph(*arguments: Any) -> list[Any]:
            return recipe.evaluate(arguments)

        return lazy_graph

    def input_names(self, promoted: frozenset[int]) -> tuple[str, ...]:
        """Return a name of each argument, in the first jitted function of the user's that takes it.

        Others are called ``arg0``, ``arg1``, ..., by their position.
        """
        arguments = [(INPUT, index) for index in range(len(self.inputs))]
        arguments += [(LITERAL, index) for index in sorted(promoted)]
        names: dict[tuple[int, int], str] = {}
        for node, wires in zip(self.nodes, self.wiring, strict=True):
            if jaxapi.is_call_of_users_jit(node.primitive, node.params):
                parameter_names = jaxapi.argument_names(node.params, len(wires))
                for name, wire in zip(parameter_names, wires, strict=True):
                    names.setdefault(wire, name)
        return tuple([names.get(wire, f"arg{n}") for n, wire in enumerate(arguments)])

    def _in_order(self) -> tuple[tuple[Any, Any, Any, dict[str, Any]], ...]:
        """Return the operations; callbacks run in the order of the program, as in eager JAX.

        XLA orders none of its own accord. JAX can order them in programs of one device only, and
        not those inside of jitted functions, which are in no order in eager JAX either.
        """
        nodes = self.nodes
        callbacks = [node for node in nodes if jaxapi.can_be_ordered(node.primitive, node.params)]
        several = len(callbacks) > 1 and len(self.placement.devices) < 2
        ordered = set(map(id, callbacks)) if several else set()
        return tuple(
            [
                (n.source, n.context, n.primitive, jaxapi.ordered(n.params))
                if id(n) in ordered
                else (n.source, n.context, n.primitive, n.params)
                for n in nodes
            ]
        )

    def arguments(self, promoted: frozenset[int]) -> list[jax.Array]:
        """Return what the function is called with: the inputs, then the promoted literals."""
        literals = [jaxapi.to_device(self.literals[i].value) for i in sorted(promoted)]
        return [*self.inputs, *literals]


INPUT = -1
LITERAL = -2


@dataclass(frozen=True)
class _Recipe:
    """What remains of a program once its arrays are let go: enough to trace it again."""

    nodes: tuple[tuple[Any, Any, Any, dict[str, Any]], ...]
    wiring: tuple[tuple[tuple[int, int], ...], ...]
    literals: tuple[Any, ...]
    outputs: tuple[tuple[int, int], ...]
    inputs: int
    promoted: tuple[int, ...] = field(default=())

    def evaluate(self, arguments: Sequence[Any]) -> list[Any]:
        literals = list(self.literals)
        for index, value in zip(self.promoted, arguments[self.inputs :], strict=True):
            literals[index] = value
        sources: dict[int, Sequence[Any]] = {INPUT: arguments, LITERAL: literals}
        for position, (source, context, primitive, params) in enumerate(self.nodes):
            operands = [sources[origin][index] for origin, index in self.wiring[position]]
            result = jaxapi.bind_at(source, context, primitive, operands, params)
            sources[position] = result if primitive.multiple_results else (result,)
        return [sources[position][index] for position, index in self.outputs]
