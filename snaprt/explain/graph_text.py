"""A graph as PyTorch/XLA writes it to XLA_SAVE_TENSORS_FILE, and in the log of operations.

Source: ``debug_util.cpp`` and ``ir_dump_util.cpp`` of PyTorch/XLA 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from snaprt import jaxapi
from snaprt.explain.nodes import ShownNode, node_text, notes, shown_nodes
from snaprt.runtime.events import Run, Watcher

LOGGER = logging.getLogger("snaprt.operations")


class OperationLog(Watcher):
    """Logs what was recorded when it is cut: recording itself costs the same, logged or not."""

    def ready(self, run: Run) -> None:
        """Log the operations of a graph, with its inputs and constants."""
        cut, executable = run.cut, run.executable
        LOGGER.debug(
            "graph %s of %d operations, cut by %s", executable.graph_id, cut.operations, cut.cause
        )
        nodes = shown_nodes(run.program)
        for number, node in enumerate(nodes):
            LOGGER.debug("%s", node_text(number, node, nodes))


#: Attributes of a node are cut here in a drawing.
_LONGEST_NOTE = 64


def block(stack: Sequence[jaxapi.Frame], digests: Sequence[str], graph: str) -> str:
    """Return what the file has of one graph.

    Args:
        stack: The user's frames where the graph was cut, innermost last.
        digests: Of each of its outputs.
        graph: The graph, in one of the formats.
    """
    frames = "".join(f"  {one.function} ({one.file}:{one.line})\n" for one in reversed(stack))
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
    lines = [node.name, node.type, *(f"{name}={_shortened(text)}" for name, text in notes(node))]
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}..."


def _arrow_label(nodes: Sequence[ShownNode], node: ShownNode, position: int) -> str:
    """Say which operand it is where there are several, and which result where there are several."""
    operand, index = node.operands[position]
    parts = [f"i={position}"] * (len(node.operands) > 1)
    parts += [f"o={index}"] * (len(nodes[operand].types) > 1)
    return f' [label="{",".join(parts)}"]' if parts else ""
