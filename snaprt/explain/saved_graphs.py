"""Appends each graph to the file that XLA_SAVE_TENSORS_FILE names; must not know how it is run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from snaprt import jaxapi, settings
from snaprt.compile.obtain import Executable
from snaprt.explain.appended import AppendedFile
from snaprt.explain.graph_text import as_dot, as_text, block
from snaprt.explain.nodes import ShownNode, is_wanted, root_digests, shown_nodes
from snaprt.graph.program import Program
from snaprt.runtime.events import Cut, Run, Watcher

_FILE: Final = "XLA_SAVE_TENSORS_FILE"


def saved_graphs() -> SavedGraphs | None:
    """Return what appends the graphs, if the environment asks for it.

    Raises:
        UsageError: The file cannot be written to, or there is no such format.
    """
    path, form = settings.get(_FILE), settings.get("XLA_SAVE_TENSORS_FMT")
    return None if path is None else SavedGraphs(AppendedFile(_FILE, path), _OF_NODES.get(form))


class SavedGraphs(Watcher):
    """Appends each graph each time before it runs, and so before it is compiled, if it must be.

    HLO is appended after that: where an executable comes from the cache, nothing was lowered.
    """

    def __init__(
        self, file: AppendedFile, form: Callable[[Sequence[ShownNode]], str] | None
    ) -> None:
        self._file = file
        self._form = form
        self._of_thread = threading.local()

    def compiling(self, cut: Cut, program: Program) -> None:
        """Append a graph that is about to be compiled: a compiler that crashes leaves it there."""
        if self._form is not None:
            self._append(cut, program, self._form)
            self._of_thread.appended = program.nodes

    def ready(self, run: Run) -> None:
        """Append the graph that is about to run, if it was not appended before it was compiled."""
        if getattr(self._of_thread, "appended", None) is not run.program.nodes:
            executable = run.executable
            self._append(run.cut, run.program, self._form or (lambda nodes: _hlo(executable)))
        self._of_thread.appended = None

    def _append(
        self, cut: Cut, program: Program, form: Callable[[Sequence[ShownNode]], str]
    ) -> None:
        if is_wanted(program):
            nodes = shown_nodes(program)
            self._file.append(block(cut.stack, root_digests(program, nodes), form(nodes)))


@functools.lru_cache(maxsize=8)
def _hlo(executable: Executable) -> str:
    return jaxapi.hlo_text(jaxapi.hlo_proto(executable.lowered()))


#: The formats that need the nodes alone; the other one is HLO.
_OF_NODES: Final = {"text": as_text, "dot": as_dot}
