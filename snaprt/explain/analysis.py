"""Tells of each compilation and execution in the blocks of PyTorch/XLA's ``PT_XLA_DEBUG``.

It is told what happens; what it writes, others append to a file.
Source: PyTorch/XLA's guide, "Compilation & Execution Analysis"; the causes of reads are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

from snaprt import jaxapi, settings
from snaprt.compile.obtain import Executable
from snaprt.explain.appended import AppendedFile
from snaprt.explain.nodes import is_wanted
from snaprt.runtime.events import Compilation, Cut, Run, Watcher
from snaprt.runtime.graph_breaks import describe_break
from snaprt.trace import pacing

#: The variables that `analysis` looks at.
VARIABLES: Final = (
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


class _OfCompilations(Watcher):
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

    def ready(self, run: Run) -> None:
        """Tell why a program runs."""
        if is_wanted(run.program):
            lines = self._lines(run.cut, run.executable, "Execution")
            self._write(_block("Execution", lines))


def analysis() -> Watcher | None:
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
