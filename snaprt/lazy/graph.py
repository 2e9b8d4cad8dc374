"""The recorded graph: its nodes, what is alive in it, and the program cut out of it.

It knows nothing of how operations are recorded, compiled or run.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.lazy.operation import Operation


class Literal:
    """A host scalar that stands in a graph as a constant until its value is seen to vary.

    Attributes:
        value: The Python or numpy scalar as JAX handed it over (it may carry a weak type).
        aval: Its abstract value.
        key: Its value in a form that tells 0.0 from -0.0 and equals itself for NaN.
    """

    __slots__ = ("aval", "key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.aval = jaxapi.typeof(value)
        self.key = jaxapi.literal_bytes(value)


class Edge:
    """The use of one result of an earlier node."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.index = index


@dataclass(frozen=True)
class Placement:
    """Where, and under which type rules, a node must run; a program has one placement.

    Attributes:
        committed: Whether an operand pins the node to ``devices``.
        devices: The devices by id; empty for JAX's default.
        default_device: What `jax.default_device` said, for uncommitted nodes.
        x64: Whether 64-bit types were enabled.
    """

    committed: bool
    devices: tuple[Any, ...]
    default_device: Any
    x64: bool

    def known_sharding(self) -> jax.sharding.Sharding | None:
        """Return the sharding of the results, or ``None`` where only the compiler knows it."""
        if not self.committed:
            return jaxapi.single_device_sharding(self.default_device)
        return jaxapi.single_device_sharding(self.devices[0]) if len(self.devices) == 1 else None


class Node:
    """One recorded operation.

    ``values`` is ``None`` while the node is pending; afterwards it maps the index of each result
    that was kept to its `jax.Array`, and the operands are let go.
    """

    __slots__ = (
        "__weakref__",
        "arrays",
        "avals",
        "context",
        "effects",
        "error",
        "number",
        "operands",
        "operation",
        "params",
        "placement",
        "primitive",
        "source",
        "values",
    )

    def __init__(
        self,
        number: int,
        primitive: Any,
        params: dict[str, Any],
        operands: tuple[Edge | Literal | jax.Array, ...],
        avals: tuple[Any, ...],
        effects: Any,
        placement: Placement,
        operation: Operation,
        source: Any,
        context: Any,
    ) -> None:
        self.number = number
        self.primitive = primitive
        self.params = params
        self.operands = operands
        self.avals = avals
        self.effects = effects
        self.placement = placement
        self.operation = operation
        self.source = source
        self.context = context
        self.arrays: tuple[weakref.ref[Any], ...] = ()
        self.values: dict[int, jax.Array] | None = None
        self.error: BaseException | None = None

    def settle(self, values: dict[int, jax.Array]) -> None:
        """Keep the results of an execution and let go of everything upstream."""
        self.values = values
        self.operands = ()
        self.params = {}

    def fail(self, error: BaseException) -> None:
        """Mark the node as failed: every later read of its results raises ``error``."""
        self.error = error
        self.settle({})

    def inherit_failure(self) -> bool:
        """Fail if an operand's node has failed, with its error; say whether that is so."""
        for operand in self.operands:
            if type(operand) is Edge and operand.node.error is not None:
                self.fail(operand.node.error)
                return True
        return False

    def pending_edges(self) -> list[Edge]:
        """Return the uses that this node makes of nodes that are still pending."""
        return [o for o in self.operands if type(o) is Edge and o.node.values is None]


class Graph:
    """What one thread has recorded and not yet run.

    Nodes are held by the arrays and nodes that use them, so dead work goes away by itself; the
    graph holds weak references to the lazy arrays, and holds on to nodes with effects until run.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count()
        self.effectful: list[Node] = []
        self._arrays: list[weakref.ref[Any]] = []
        self._sweep_at = 4096

    def add(self, node: Node, arrays: Sequence[Any]) -> None:
        """Add ``node``, whose results are handed to the user as ``arrays``."""
        node.arrays = tuple(map(weakref.ref, arrays))
        self._arrays.extend(node.arrays)
        if node.effects:
            self.effectful.append(node)
        if len(self._arrays) > self._sweep_at:
            self.live_arrays()
            self._sweep_at = max(4096, 2 * len(self._arrays))

    def live_arrays(self) -> list[Any]:
        """Return the lazy arrays that the user still holds and that have no value yet."""
        alive, kept = [], []
        for reference in self._arrays:
            array = reference()
            if array is not None and array._value is None:
                alive.append(array)
                kept.append(reference)
        self._arrays = kept
        return alive


def ancestors(roots: Iterable[Node]) -> list[Node]:
    """Return the pending nodes that ``roots`` need, themselves included, in recorded order."""
    seen: dict[int, Node] = {}
    stack = [node for node in roots if node.values is None]
    while stack:
        node = stack.pop()
        if node.number in seen:
            continue
        seen[node.number] = node
        stack.extend([edge.node for edge in node.pending_edges()])
    return [seen[number] for number in sorted(seen)]


@dataclass(frozen=True)
class Program:
    """A part of a graph, cut out to be compiled and run as one XLA program.

    Attributes:
        nodes: The operations, in recorded order.
        wiring: For each node, where each operand comes from: ``(producer position, result)``, or
            ``(INPUT, input index)``, or ``(LITERAL, literal index)``.
        inputs: The arrays it reads.
        literals: The host scalars it holds.
        outputs: ``(node position, result)`` of each output.
        placement: Where it runs.
        structure: Identifies the program within this process, apart from the literals' values.
    """

    nodes: tuple[Node, ...]
    wiring: tuple[tuple[tuple[int, int], ...], ...]
    inputs: tuple[jax.Array, ...]
    literals: tuple[Literal, ...]
    outputs: tuple[tuple[int, int], ...]
    placement: Placement
    structure: tuple[Any, ...]

    def as_function(self, promoted: frozenset[int]) -> Callable[..., list[Any]]:
        """Return the function that computes the outputs from the inputs and promoted literals.

        Args:
            promoted: The literals that are passed as arguments, after the inputs, because their
                values vary from step to step; the others are constants.
        """
        recipe = _Recipe(
            nodes=tuple((n.source, n.context, n.primitive, n.params) for n in self.nodes),
            wiring=self.wiring,
            literals=tuple(literal.value for literal in self.literals),
            outputs=self.outputs,
            inputs=len(self.inputs),
            promoted=tuple(sorted(promoted)),
        )

        def lazy_graph(*arguments: Any) -> list[Any]:
            return recipe.evaluate(arguments)

        return lazy_graph

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


def build_program(
    nodes: Sequence[Node], outputs: Sequence[tuple[Node, int]], placement: Placement
) -> Program:
    """Cut ``nodes``, given in recorded order, out of the graph as a program.

    Args:
        nodes: The operations; what they use of other nodes must have a value already.
        outputs: The results to return, as (node, index of the result).
        placement: Where it runs.
    """
    positions = {node.number: position for position, node in enumerate(nodes)}
    inputs: list[jax.Array] = []
    input_index: dict[int, int] = {}
    literals: list[Literal] = []
    wiring = []
    key: list[Any] = []
    for node in nodes:
        wires = []
        for operand in node.operands:
            if type(operand) is Edge:
                position = positions.get(operand.node.number)
                if position is not None and operand.node.values is None:
                    wires.append((position, operand.index))
                    continue
                operand = _value_of(operand)
            if type(operand) is Literal:
                wires.append((LITERAL, len(literals)))
                literals.append(operand)
                key.append(operand.aval)
                continue
            index = input_index.get(id(operand))
            if index is None:
                index = input_index[id(operand)] = len(inputs)
                inputs.append(operand)  # type: ignore[arg-type]
            wires.append((INPUT, index))
        wiring.append(tuple(wires))
        key.append(node.operation.signature)
    output_wires = tuple((positions[node.number], index) for node, index in outputs)
    described = tuple(map(jaxapi.describe_input, inputs))
    return Program(
        nodes=tuple(nodes),
        wiring=tuple(wiring),
        inputs=tuple(inputs),
        literals=tuple(literals),
        outputs=output_wires,
        placement=placement,
        structure=(tuple(key), tuple(wiring), output_wires, described, placement),
    )


def _value_of(edge: Edge) -> jax.Array:
    assert edge.node.values is not None
    return edge.node.values[edge.index]
