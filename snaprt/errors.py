"""The errors that snaprt raises on purpose.

Each says what happened, with the file, flag or graph, and has a ``hint`` that says what to do. The
command line prints both and exits with status 2; a traceback there means a bug in snaprt.
"""

from __future__ import annotations


class SnaprtError(Exception):
    """Base of all errors that snaprt raises on purpose.

    Args:
        message: What happened, in one sentence that names the file, flag or graph.
        hint: What the user can do about it; empty if there is nothing to do.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(SnaprtError):
    """A flag, setting or argument that cannot be used as given."""


class GraphBreakError(UsageError):
    """A graph break inside ``snaprt.lazy(fullgraph=True)``."""


class NoCompileError(UsageError):
    """A program has to be compiled where ``snaprt.no_compile`` allows no compilation."""


class CompileError(SnaprtError):
    """XLA could not compile a module."""


class ExecutionError(SnaprtError):
    """A compiled graph failed to run."""


class NonFiniteError(ExecutionError, FloatingPointError):
    """A result has a NaN or an infinity that `jax_debug_nans` or `jax_debug_infs` forbids."""


class SnapshotError(SnaprtError):
    """A snapshot file that cannot be read or written."""


class ProcessError(SnaprtError):
    """Another process of the job has failed."""


class DeviceError(SnaprtError):
    """A requested device does not exist."""


class RankError(SnaprtError):
    """The processes of a job are not about to run the same program."""
