"""What PyTorch/XLA's debug variables ask for: metrics, graphs, and an analysis, in files.

Source: PyTorch/XLA's guide, "Compilation & Execution Analysis"; the causes of reads are ours.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from snaprt import jaxapi, metrics, settings
from snaprt.compile.executable import Executable
from snaprt.explain.nodes import (
    ShownNode,
    as_dot,
    as_text,
    block,
    is_wanted,
    root_digests,
    shown_nodes,
)
from snaprt.graph.program import Program
from snaprt.host.whole_files import going_on_without_room, refused, writing
from snaprt.runtime.events import Compilation, Cut, Execution, Subscriber
from snaprt.runtime.graph_breaks import describe_break
from snaprt.trace import pacing

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: there a file is for one process
    fcntl = None

_log = logging.getLogger("snaprt.explain")
_lock = threading.Lock()


class AppendedFile:
    """A file that a variable names, with the process's RANK at the end of its name.

    Once the disk is full or it cannot be written to any more, that is said once, and the program
    goes on.

    Raises:
        UsageError: It cannot be written to from the start, for another reason than a full disk.
    """

    def __init__(self, variable: str, path: Path) -> None:
        self.path = settings.for_rank(path)
        self._variable = variable
        self._has_complained = False
        elsewhere = "name a file in an existing, writable directory"
        with (
            writing(f"write to {self.path} ({variable})", elsewhere),
            going_on_without_room(self._complain),
        ):
            os.close(self._open())

    def append(self, text: str) -> None:
        """Append ``text`` in one piece."""
        try:
            with _lock:
                self._append(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("%s", refused(self._variable, self.path, error, "file"))

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def _append(self, content: bytes) -> None:
        file = self._open()
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)


_METRICS_FILE: Final = "XLA_METRICS_FILE"


def step_metrics() -> StepMetrics | None:
    """Return what appends the metrics, if the environment asks for it.

    Raises:
        UsageError: The file cannot be written to.
    """
    path = settings.get(_METRICS_FILE)
    if path is None:
        return None
    stream = _STREAMS.get(str(path))
    return StepMetrics(AppendedFile(_METRICS_FILE, path).append if stream is None else stream)


class StepMetrics(Subscriber):
    """Appends the metrics after each step."""

    def __init__(self, append: Callable[[str], object]) -> None:
        self._append = append

    def step_ended(self, step: int) -> None:
        """Append what was counted until now; as in PyTorch/XLA, the first step is step 0."""
        self._append(f"[MetricsData; step={step - 1}]\n{metrics.metrics_report()}\n")


# The streams of the moment, for a program may put others in their place.
_STREAMS: Final[dict[str, Callable[[str], object]]] = {
    "STDERR": lambda text: sys.stderr.write(text),
    "STDOUT": lambda text: sys.stdout.write(text),
}


_GRAPHS_FILE: Final = "XLA_SAVE_TENSORS_FILE"


def saved_graphs() -> SavedGraphs | None:
    """Return what appends the graphs, if the environment asks for it.

    Raises:
        UsageError: The file cannot be written to, or there is no such format.
    """
    path, form = settings.get(_GRAPHS_FILE), settings.get("XLA_SAVE_TENSORS_FMT")
    return (
        None if path is None else SavedGraphs(AppendedFile(_GRAPHS_FILE, path), _OF_NODES.get(form))
    )


class SavedGraphs(Subscriber):
    """Appends each graph each time before it runs, and so before it is compiled, if it must be.

    HLO is appended after that: where an executable comes from the cache, nothing was lowered.
    """

    def __init__(
        self, file: AppendedFile, form: Callable[[Sequence[ShownNode]], str] | None
    ) -> None:
        self._file = file
        self._form = form
        self._of_thread = threading.local()

    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        """Append a graph that is about to be compiled: a compiler that crashes leaves it there."""
        if self._form is not None:
            self._append(cut, program, self._form)
            self._of_thread.appended = program.nodes

    def ready(self, run: Execution) -> None:
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


#: The variables that `analysis` looks at.
ANALYSIS_VARIABLES: Final = (
    *("PT_XLA_DEBUG", "PT_XLA_DEBUG_FILE", "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_MAX_FRAME"),
    *("RANK", "SNAPRT_DEBUG_FUNCTION"),
)

_OF_EXECUTIONS: Final = 2
_WIDTH: Final = 80
_CAUSES: Final = {
    "mark_step": "user mark_step",
    **{cause: f"automatic step: {describe_break(cause).what}" for cause in pacing.CAUSES},
}
_SIZES: Final = (
    ("Graph input size", "argument_size"),
    ("Graph output size", "output_size"),
    ("Aliased Input size", "alias_size"),
    ("Intermediate tensor size", "temp_size"),
    ("Compiled program size", "generated_code_size"),
)


class _OfCompilations(Subscriber):
    """Tells of compilations."""

    def __init__(self, write: Callable[[str], None], frames: int) -> None:
        self._write = write
        self._frames = frames

    def compiled(self, compilation: Compilation) -> None:
        """Tell why a program was compiled, and what memory it takes."""
        if is_wanted(compilation.program):
            executable = compilation.executable
            self._write(
                _block("Compilation", self._lines(compilation.cut, executable, "Compilation"))
                + _block("Post Compilation", _memory(executable))
            )

    def _lines(self, cut: Cut, executable: Executable, kind: str) -> Iterator[str]:
        yield f"{kind} Cause"
        yield f"  {_cause(cut.cause)}"
        yield "Graph Info: "
        yield f"  Graph Hash: {executable.graph_id}"
        yield f"  Number of Graph Inputs: {len(executable.input_names)}"
        yield f"  Number of Graph Outputs: {len(executable.output_names)}"
        yield "Python Frame Triggered Execution: "
        innermost_first = cut.stack[::-1]
        for frame in innermost_first[: self._frames]:
            yield f"  {frame.function} ({frame.file}:{frame.line})"
        if len(innermost_first) > self._frames:
            yield "  .........."


class _OfAll(_OfCompilations):
    """Tells of executions as well."""

    def ready(self, run: Execution) -> None:
        """Tell why a program runs."""
        if is_wanted(run.program):
            lines = self._lines(run.cut, run.executable, "Execution")
            self._write(_block("Execution", lines))


def analysis() -> Subscriber | None:
    """Return who tells of compilations and executions, as ``PT_XLA_DEBUG`` and the others ask.

    Of the processes of a job, that of rank 0 tells on the standard error stream; a file is written
    by each, with the rank in its name.
    """
    level = settings.get("PT_XLA_DEBUG_LEVEL")
    if level is None:
        level = _OF_EXECUTIONS if settings.get("PT_XLA_DEBUG") else 0
    path = settings.get("PT_XLA_DEBUG_FILE")
    if not level or (path is None and settings.get("RANK")):
        return None
    write = _to_stderr if path is None else AppendedFile("PT_XLA_DEBUG_FILE", path).append
    kind = _OfCompilations if level < _OF_EXECUTIONS else _OfAll
    return kind(write, settings.get("PT_XLA_DEBUG_MAX_FRAME"))


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


def _cause(cause: str) -> str:
    # The words that scripts look for in PyTorch/XLA's, with what it cannot say.
    what = describe_break(cause).what
    return _CAUSES.get(cause, f"user code trying to access tensor value before mark_step: {what}")


def _memory(executable: Executable) -> Iterator[str]:
    loaded = jaxapi.loaded_executable(executable.call)
    sizes = {} if loaded is None else jaxapi.executable_memory(loaded)
    for words, name in _SIZES:
        size = f"{sizes[name] / (1 << 30):.6f}" if name in sizes else "Unknown"
        yield f"{words}: {size} GB"


def _block(kind: str, lines: Iterator[str]) -> str:
    every = ["=" * _WIDTH, *lines, "-" * _WIDTH, "=" * _WIDTH]
    return "\n" + "".join(f"{kind} Analysis: {line}\n" for line in every)
