"""Writes what SNAPRT_TRACE asks for, graph by graph as the program runs; must not know how."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from snaprt import settings
from snaprt.errors import UsageError
from snaprt.explain.nodes import ShownNode, is_wanted, shown_nodes
from snaprt.explain.trace.drawing import draw
from snaprt.explain.trace.forms import FORMS
from snaprt.explain.trace.page import page
from snaprt.explain.trace.told import TracedGraph, traced_graph
from snaprt.runtime.events import Run, Watcher
from snaprt.whole_files import write_whole

INDEX: Final = "index.html"
ORDER: Final = "executions.jsonl"
ANALYSIS: Final = "analysis.json"

#: Larger graphs, and those after so many, have their drawings in files alone.
_MOST_NODES_IN_PAGE: Final = 60
_MOST_DRAWINGS_IN_PAGE: Final = 24

#: A page with many graphs is written anew so many seconds after it was written last.
_SECONDS_BETWEEN_PAGES: Final = 2.0

#: How many changes from one graph to another the page tells.
_MOST_TURNS: Final = 1000

_log = logging.getLogger("snaprt.explain")


class TraceFolder(Watcher):
    """Writes a folder for each graph before it first runs, and a page that links them.

    Raises:
        UsageError: Nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self._path = settings.for_rank(path)
        self._lock = threading.Lock()
        self._has_complained = False
        self._begin()
        atexit.register(self._finish)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._graphs: dict[int, TracedGraph] = {}
        self._turns: list[tuple[TracedGraph, int]] = []
        self._written = 0.0
        self.folder = _claim(self._path, page((), ()))

    def ready(self, run: Run) -> None:
        """Write the folder of a graph that runs for the first time."""
        if not is_wanted(run.program):
            return
        with self._lock:
            if os.getpid() != self._process:  # a fork has a folder of its own
                self._begin()
            if run.executable.number in self._graphs:
                return
            try:
                self._write_graph(run)
                self._write_page()
            except OSError as error:
                self._complain(error)

    def ran(self, run: Run, results: Sequence[object]) -> None:
        """Count the execution, and append it to the list of all."""
        graph = self._graphs.get(run.executable.number)
        if graph is None:
            return
        cut = run.cut
        place = cut.stack[-1]._asdict() if cut.stack else None
        row = {"graph": graph.folder, "cut": cut.number, "step": cut.step, "thread": cut.thread}
        line = json.dumps({**row, "cause": cut.cause, "at": place}) + "\n"
        with self._lock:
            graph.executions += 1
            self._turn(graph)
            try:
                with (self.folder / ORDER).open("a", encoding="utf-8") as file:
                    file.write(line)
                self._write_page(often=False)
            except OSError as error:
                self._complain(error)

    def _turn(self, graph: TracedGraph) -> None:
        if self._turns and self._turns[-1][0] is graph:
            self._turns[-1] = graph, self._turns[-1][1] + 1
        elif len(self._turns) < _MOST_TURNS:
            self._turns.append((graph, 1))

    def _write_graph(self, run: Run) -> None:
        nodes = shown_nodes(run.program)
        name = f"{len(self._graphs) + 1:04d}-{run.executable.graph_id}"
        folder = self.folder / name
        folder.mkdir()
        graph = self._graphs[run.executable.number] = traced_graph(name, run, nodes)
        for form in FORMS:
            try:
                text = form.make(run, nodes)
            except Exception as error:  # of JAX or XLA, which may not have it on a platform
                graph.missing[form.file] = str(error) or type(error).__name__
            else:
                _write(folder / form.file, text)
        graph.drawing = self._drawing(nodes)
        _write(folder / ANALYSIS, json.dumps(graph.to_json(), indent=1))

    def _drawing(self, nodes: Sequence[ShownNode]) -> str:
        number = len(self._graphs)
        if len(nodes) > _MOST_NODES_IN_PAGE or number > _MOST_DRAWINGS_IN_PAGE:
            return ""
        return draw(nodes, f"Graph {number}", identity=f"g{number}-")

    def _write_page(self, *, often: bool = True) -> None:
        few = often and len(self._graphs) <= _MOST_DRAWINGS_IN_PAGE
        if few or time.monotonic() - self._written > _SECONDS_BETWEEN_PAGES:
            _write(self.folder / INDEX, page(list(self._graphs.values()), self._turns))
            self._written = time.monotonic()

    def _finish(self) -> None:
        """Write once more what has changed since, when the process ends."""
        if os.getpid() != self._process:
            return
        try:
            for graph in self._graphs.values():
                text = json.dumps(graph.to_json(), indent=1)
                _write(self.folder / graph.folder / ANALYSIS, text)
            _write(self.folder / INDEX, page(list(self._graphs.values()), self._turns))
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("SNAPRT_TRACE: cannot write to %s: %s", self.folder, error)


def trace_folder() -> TraceFolder | None:
    """Return what writes the trace, if the environment asks for it.

    Raises:
        UsageError: Nothing can be written to the folder.
    """
    path = settings.get("SNAPRT_TRACE")
    return None if path is None else TraceFolder(path)


def _claim(path: Path, index: str) -> Path:
    """Return the folder for this process: ``path``, or one in it where another has been before.

    Args:
        path: The folder that is asked for.
        index: The page to begin with; where there is one, another process has been.
    """
    folders = itertools.chain([path], (path / f"run-{number}" for number in itertools.count(2)))
    try:
        return next(folder for folder in folders if _is_first_in(folder, index))
    except OSError as error:
        raise UsageError(
            f"cannot write to {path}, which SNAPRT_TRACE names: {error.strerror or error}",
            hint="Name a directory that is writable, or one that can be made.",
        ) from error


def _is_first_in(folder: Path, index: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / INDEX).open("x", encoding="utf-8") as file:
            file.write(index)
    except FileExistsError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    write_whole(path, (text.rstrip("\n") + "\n").encode("utf-8", "backslashreplace"))
