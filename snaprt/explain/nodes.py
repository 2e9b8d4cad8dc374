"""A recorded program as numbered nodes, in the words and formats of PyTorch/XLA.

``xla::device_data`` is an input, ``prim::Constant`` a host scalar, and ``xla::`` stands before the
name of each of JAX's primitives.
Source: ``debug_util.cpp`` and ``ir_dump_util.cpp`` of PyTorch/XLA 2.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi, settings
from snaprt.graph.digest import Unstable, node_digest
from snaprt.graph.program import INPUT, LITERAL, Literal, Node, Program
from snaprt.runtime.events import Execution, Subscriber
from snaprt.shown import cut

INPUT_NAME: Final = "xla::device_data"
CONSTANT_NAME: Final = "prim::Constant"

#: Longer attributes are cut here: a line of a file is read by people.
_LONGEST_ATTRIBUTE: Final = 160
#: Of a function that was called, so many operations are named.
_FEW: Final = 3
#: What is worth saying of a call of a jitted function.
_OF_CALLS: Final = ("name", "jaxpr")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class ShownNode:
    """A node of a graph: an input, a host scalar or an operation."""

    name: str
    types: tuple[str, ...]  # XLA's type of each of its results, such as ``f32[2,3]{1,0}``
    # ``(number of a node, which of its results)`` of each operand.
    operands: tuple[tuple[int, int], ...]
    # The name and the text of each parameter that says something.
    attributes: tuple[tuple[str, str], ...]
    location: str  # the user's innermost line, ``function@file.py:12``; empty where there is none
    roots: tuple[int, ...]  # which outputs of the graph its results are
    # 32 hexadecimal digits, equal for nodes that compute the same of the same kinds of inputs and
    # the same scalars; in another process too, if snaprt's cache knows them.
    digest: str

    @property
    def type(self) -> str:
        """The type of its result, a tuple where it has several."""
        return self.types[0] if len(self.types) == 1 else f"({', '.join(self.types)})"


def shown_nodes(program: Program) -> list[ShownNode]:
    """Return the nodes of a program; each stands after its operands, and its number is its place.

    Where XLA_IR_DEBUG is on, an operation has the rest of its Python stack among its attributes.
    """
    nodes: list[ShownNode] = []
    numbers: dict[tuple[int, int], int] = {}
    roots = _roots(program)
    with_stacks = settings.get("XLA_IR_DEBUG")
    for position, (node, wires) in enumerate(zip(program.nodes, program.wiring, strict=True)):
        operands = []
        for origin, index in wires:
            leaf = (origin, index) if origin < 0 else (origin, 0)
            if leaf not in numbers:
                numbers[leaf] = len(nodes)
                nodes.append(_leaf(program, origin, index))
            operands.append((numbers[leaf], 0 if origin < 0 else index))
        numbers[position, 0] = len(nodes)
        outputs = roots.get(position, ())
        nodes.append(_operation(node, tuple(operands), outputs, nodes, with_stacks))
    return nodes


def root_digests(program: Program, nodes: Sequence[ShownNode]) -> tuple[str, ...]:
    """Return the digest of each output of ``program``, in order."""
    by_root = {root: node.digest for node in nodes for root in node.roots}
    return tuple(
        _digest(by_root[root], str(index)) for root, (_, index) in enumerate(program.outputs)
    )


def node_text(number: int, node: ShownNode, nodes: Sequence[ShownNode]) -> str:
    """Return one line about a node: ``%3 = f32[2]{0} xla::add(%1, %2), location=f@a.py:7``."""
    operands = ", ".join(operand_text(operand, nodes) for operand in node.operands)
    text = f"%{number} = {node.type} {node.name}({operands})"
    return ", ".join([text, *(f"{name}={value}" for name, value in notes(node))])


def operand_text(operand: tuple[int, int], nodes: Sequence[ShownNode]) -> str:
    """Return how an operand is written: ``%3``, or ``%3.1`` for one of several results."""
    number, index = operand
    return f"%{number}.{index}" if len(nodes[number].types) > 1 else f"%{number}"


def notes(node: ShownNode) -> Iterator[tuple[str, str]]:
    """Yield what is said of a node beside its type, name and operands, in PyTorch/XLA's order."""
    if len(node.types) > 1:
        yield "num_outputs", str(len(node.types))
    if node.location:
        yield "location", node.location
    yield from node.attributes
    for root in node.roots:
        yield "ROOT", str(root)


def location_text(frame: jaxapi.Frame) -> str:
    """Return how a line of the user's is written: ``step@train.py:12``."""
    return f"{frame.function}@{PurePath(frame.file).name}:{frame.line}"


def type_text(aval: Any) -> str:
    """Return XLA's text of an array's type, such as ``bf16[8,128]{1,0}``."""
    order = ",".join(str(dimension) for dimension in reversed(range(len(aval.shape))))
    shape = ",".join(map(str, aval.shape))
    return f"{_element_type(aval.dtype)}[{shape}]" + (f"{{{order}}}" if order else "")


_KINDS: Final = {"i": "s", "u": "u", "f": "f", "c": "c"}


def _element_type(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):  # such as a PRNG key, which has no type of XLA's own
        return str(dtype)
    if dtype.kind in _KINDS:
        return f"{_KINDS[dtype.kind]}{dtype.itemsize * 8}"
    name = dtype.name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return name.replace(long, short, 1).replace("_", "")
    return "pred" if name == "bool" else name


def _roots(program: Program) -> dict[int, tuple[int, ...]]:
    roots: dict[int, tuple[int, ...]] = {}
    for number, (position, _) in enumerate(program.outputs):
        roots[position] = (*roots.get(position, ()), number)
    return roots


def _leaf(program: Program, origin: int, index: int) -> ShownNode:
    if origin == LITERAL:
        return _constant(program.literals[index])
    assert origin == INPUT
    return _input(program.inputs[index], index)


def _constant(literal: Literal) -> ShownNode:
    kind, value = type_text(literal.aval), repr(np.asarray(literal.value).item())
    digest = _digest(CONSTANT_NAME, kind, literal.key.hex())
    return ShownNode(CONSTANT_NAME, (kind,), (), (("value", value),), "", (), digest)


def _input(array: jax.Array, index: int) -> ShownNode:
    kind = type_text(array)
    devices = sorted(jaxapi.devices_of_sharding(array.sharding), key=lambda device: device.id)
    where = ",".join(f"{device.platform.upper()}:{device.id}" for device in devices)
    attributes = [("device", where)]
    if len(devices) > 1:
        attributes.append(("sharding", jaxapi.hlo_sharding_text(array.sharding, array.ndim)))
    digest = _digest(INPUT_NAME, kind, str(index), repr(attributes))
    return ShownNode(INPUT_NAME, (kind,), (), tuple(attributes), "", (), digest)


def _operation(
    node: Node,
    operands: tuple[tuple[int, int], ...],
    roots: tuple[int, ...],
    nodes: Sequence[ShownNode],
    with_stacks: bool,
) -> ShownNode:
    name = f"xla::{node.primitive.name}"
    types = tuple(type_text(result.aval) for result in node.results)
    attributes = tuple(_attributes(node))
    frames = jaxapi.frames_of_operation(node.source)
    if with_stacks and len(frames) > 1:
        callers = " < ".join(location_text(frame) for frame in reversed(frames[:-1]))
        attributes = (("from", callers), *attributes)
    below = [f"{nodes[number].digest}.{index}" for number, index in operands]
    return ShownNode(
        name=name,
        types=types,
        operands=operands,
        attributes=attributes,
        location=location_text(frames[-1]) if frames else "",
        roots=roots,
        digest=_digest(name, *types, _identity(node), *below),
    )


def _identity(node: Node) -> str:
    try:
        return node_digest(node).hex()
    except Unstable:  # a function among its parameters: this process alone can tell it from others
        return str(node.operation.signature)


def _attributes(node: Node) -> Iterator[tuple[str, str]]:
    params = node.params
    for name in _OF_CALLS if node.primitive.name == "jit" else params:
        if not _says_nothing(params[name]):
            yield name, _attribute(params[name])


def _says_nothing(value: Any) -> bool:
    """Return whether a parameter is as JAX has it where nobody asked for something."""
    if isinstance(value, (tuple, list)):
        return all(item is False or _says_nothing(item) for item in value)
    if isinstance(value, jax.sharding.Mesh):
        return value.empty
    return value is None or type(value).__name__ == "UnspecifiedValue"


def _attribute(value: Any) -> str:
    if isinstance(value, (jaxapi.Jaxpr, jaxapi.ClosedJaxpr)):
        return _operations_inside(value)
    if type(value).__name__ == "PRNGImpl":  # made of functions that its name stands for
        return str(value.name)
    if isinstance(value, np.dtype):
        return value.name
    text = value if isinstance(value, str) else _ADDRESS.sub("", repr(value))
    return cut(" ".join(text.split()), _LONGEST_ATTRIBUTE)


def _operations_inside(jaxpr: Any) -> str:
    names = [equation.primitive.name for equation in jaxpr.eqns]
    return f"<{', '.join(names)}>" if len(names) <= _FEW else f"<{len(names)} operations>"


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def comes_from(program: Program, function: str) -> bool:
    """Return whether an operation of ``program`` was recorded in ``function`` or what it called.

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
    """Return whether SNAPRT_DEBUG_FUNCTION, where it is set, lets one speak of ``program``."""
    function = settings.get("SNAPRT_DEBUG_FUNCTION")
    return function is None or comes_from(program, function.strip())


LOGGER = logging.getLogger("snaprt.operations")


class OperationLog(Subscriber):
    """Logs what was recorded when it is cut: recording itself costs the same, logged or not."""

    def ready(self, run: Execution) -> None:
        """Log the operations of a graph, with its inputs and constants."""
        cut, executable = run.cut, run.executable
        LOGGER.debug(
            "graph %s of %d operations, ended by %s", executable.graph_id, cut.operations, cut.cause
        )
        nodes = shown_nodes(run.program)
        for number, node in enumerate(nodes):
            LOGGER.debug("%s", node_text(number, node, nodes))


#: Attributes of a node are cut here in a drawing.
_LONGEST_NOTE = 64


def block(stack: Sequence[jaxapi.Frame], digests: Sequence[str], graph: str) -> str:
    """Return what the file has of one graph."""
    frames = "".join(
        f"  {frame.function} ({frame.file}:{frame.line})\n" for frame in reversed(stack)
    )
    hashes = ", ".join(digests)
    return (
        f"[ScheduleSyncTensorsGraph]\nTensorsGraphInfo:\n{frames}\nHashes: ({hashes})\n"
        f"\n## BEGIN_GRAPH\n{graph}\n## END_GRAPH\n\n\n"
    )


def as_text(nodes: Sequence[ShownNode]) -> str:
    """Return the graph in PyTorch/XLA's own format, one line a node."""
    lines = (f"  {node_text(number, node, nodes)}\n" for number, node in enumerate(nodes))
    return f"IR {{\n{''.join(lines)}}}\n"


def as_dot(nodes: Sequence[ShownNode]) -> str:
    """Return the graph as Graphviz reads it."""
    boxes = (f'  node{number} [label="{_label(node)}"]\n' for number, node in enumerate(nodes))
    arrows = (
        f"  node{operand} -> node{number}{_arrow_label(nodes, node, position)}\n"
        for number, node in enumerate(nodes)
        for position, (operand, _) in enumerate(node.operands)
    )
    return f"digraph G {{\n{''.join(boxes)}{''.join(arrows)}}}\n"


def _label(node: ShownNode) -> str:
    shortened = (f"{name}={cut(text, _LONGEST_NOTE)}" for name, text in notes(node))
    lines = [node.name, node.type, *shortened]
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _arrow_label(nodes: Sequence[ShownNode], node: ShownNode, position: int) -> str:
    """Say which operand it is where there are several, and which result where there are several."""
    operand, index = node.operands[position]
    parts = [f"i={position}"] * (len(node.operands) > 1)
    parts += [f"o={index}"] * (len(nodes[operand].types) > 1)
    return f' [label="{",".join(parts)}"]' if parts else ""
