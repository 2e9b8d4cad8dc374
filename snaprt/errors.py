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

    Examples:
        >>> try:
        ...     snaprt.xla_device(1000)
        ... except snaprt.SnaprtError as error:
        ...     print(type(error).__name__)
        DeviceError
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(SnaprtError):
    """A flag, setting or argument that cannot be used as given.

    Examples:
        >>> snaprt.add_step_closure("not a function")
        Traceback (most recent call last):
        ...
        snaprt.errors.UsageError: ...
    """


class GraphBreakError(UsageError):
    """A graph break inside ``snaprt.lazy(fullgraph=True)``.

    Examples:
        >>> with snaprt.lazy(fullgraph=True):
        ...     if jnp.ones(2).sum() > 1:
        ...         pass
        Traceback (most recent call last):
        ...
        snaprt.errors.GraphBreakError: ...
    """


class NoCompileError(UsageError):
    """A program has to be compiled where ``snaprt.no_compile`` allows no compilation.

    Examples:
        >>> with snaprt.no_compile():
        ...     jax.jit(lambda x: x - 5)(np.ones(7))
        Traceback (most recent call last):
        ...
        snaprt.errors.NoCompileError: ...
    """


class CompileError(SnaprtError):
    """XLA could not compile a module.

    Examples:
        >>> from snaprt import replay
        >>> replay.replay("step.inputs.snap", compiler_options={"xla_no_such_option": 1})
        Traceback (most recent call last):
        ...
        snaprt.errors.CompileError: ...
    """


class ExecutionError(SnaprtError):
    """A compiled graph failed to run.

    Examples:
        >>> def fail(x):
        ...     raise OSError("no data")
        >>> scalar = jax.ShapeDtypeStruct((), jnp.float32)
        >>> try:
        ...     with snaprt.lazy():
        ...         float(jax.pure_callback(fail, scalar, jnp.float32(1)))
        ... except snaprt.ExecutionError as error:
        ...     print("no data" in error.message)
        True
    """


class NonFiniteError(ExecutionError, FloatingPointError):
    """A result has a NaN or an infinity that `jax_debug_nans` or `jax_debug_infs` forbids."""


class SnapshotError(SnaprtError):
    """A snapshot file that cannot be read or written.

    Examples:
        >>> from snaprt import replay
        >>> Path("empty.inputs.snap").touch()
        >>> replay.load("empty.inputs.snap")
        Traceback (most recent call last):
        ...
        snaprt.errors.SnapshotError: ...
    """


class ProcessError(SnaprtError):
    """Another process of the job has failed.

    Examples:
        >>> import operator
        >>> snaprt.spawn(operator.truediv, args=(0,))  # rank 0 divides by zero
        Traceback (most recent call last):
        ...
        snaprt.errors.ProcessError: ...
    """


class DeviceError(SnaprtError):
    """A requested device does not exist.

    Examples:
        >>> snaprt.xla_device(1000)
        Traceback (most recent call last):
        ...
        snaprt.errors.DeviceError: ...
    """


class RankError(SnaprtError):
    """The processes of a job are not about to run the same program.

    Examples:
        >>> issubclass(snaprt.RankError, snaprt.SnaprtError)  # snaprt launch --check-ranks
        True
    """
