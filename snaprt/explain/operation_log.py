"""Logs each operation of each graph that is about to run, at level DEBUG; must not know files."""

from __future__ import annotations

import logging

from snaprt.explain.nodes import node_text, shown_nodes
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
