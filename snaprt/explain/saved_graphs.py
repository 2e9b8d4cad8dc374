"""Appends each graph to the file that XLA_SAVE_TENSORS_FILE names; must not know how it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from snaprt import jaxapi, settings
from snaprt.execute.compile import Executable
from snaprt.explain.appended import AppendedFile
from snaprt.explain.graph_text import as_dot, as_text, block
from snaprt.explain.nodes import ShownNode, root_digests, shown_nodes
from snaprt.explain.origin import is_wanted
from snaprt.explain.watching import Run, Watcher

_FILE: Final = "XLA_SAVE_TENSORS_FILE"


def saved_graphs() -> SavedGraphs | None:
    """Return what appends the graphs, if the environment asks for it.

    Raises:
        UsageError: The file cannot be written to, or there is no such format.
    """
    path, form = settings.get(_FILE), settings.get("XLA_SAVE_TENSORS_FMT")
    return None if path is None else SavedGraphs(AppendedFile(_FILE, path), _FORMATS[form])


class SavedGraphs(Watcher):
    """Appends each graph before it runs, each time it does."""

    def __init__(self, file: AppendedFile, form: Callable[[Run, Sequence[ShownNode]], str]) -> None:
        self._file = file
        self._form = form

    def ready(self, run: Run) -> None:
        """Append the graph that is about to run."""
        if not is_wanted(run.program):
            return
        nodes = shown_nodes(run.program)
        digests = root_digests(run.program, nodes)
        self._file.append(block(run.cut.stack, digests, self._form(run, nodes)))


@functools.lru_cache(maxsize=8)
def _hlo(executable: Executable) -> str:
    return jaxapi.hlo_text(jaxapi.hlo_proto(executable.lowered()))


_FORMATS: Final[dict[str, Callable[[Run, Sequence[ShownNode]], str]]] = {
    "text": lambda run, nodes: as_text(nodes),
    "dot": lambda run, nodes: as_dot(nodes),
    "hlo": lambda run, nodes: _hlo(run.executable),
}
