"""When a thread runs lazily: the `lazy` scope, `enable` and `disable`."""

from __future__ import annotations

import logging
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from snaprt import jaxapi, settings
from snaprt.errors import UsageError
from snaprt.host.collector import collect_again
from snaprt.runtime.step import left_with, run_effects, thread_trace
from snaprt.trace.lazy_trace import LazyTrace
from snaprt.trace.modes import choose_eager, current_modes
from snaprt.trace.steady import follow_transform

_log = logging.getLogger("snaprt.lazy")


class lazy(ContextDecorator):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Run eager JAX code lazily inside: ``with snaprt.lazy(): ...`` or ``@snaprt.lazy()``.

    Operations are recorded and run together at `mark_step`, or when a value is read. At the end of
    the scope, pending effects (`jax.debug.print`, callbacks) run. Other pending work stays pending:
    its arrays compute themselves when they are used. Scopes nest, and each thread has its own.

    Args:
        words: No positional arguments are accepted.
        fullgraph: Whether only `mark_step` may end a graph inside. A graph break (reading a value
            that is not computed yet, an operation that cannot be part of a graph) raises before it
            runs.
        steady: Whether functions that `jax.grad`, `jax.vmap`, `jax.lax.scan` and the like transform
            are traced once, as under `jax.jit`, and again only when something that they can be seen
            to depend on changes (docs/explanation/lazy-runtime.md, "Steady scopes").

    Raises:
        GraphBreakError: With ``fullgraph``, at the first graph break, with the line and what to
            write instead.
        UsageError: It was given a function: ``@snaprt.lazy`` instead of ``@snaprt.lazy()``.

    Examples:
        >>> x = jnp.arange(4.0)
        >>> with snaprt.lazy():
        ...     y = x * 2 + 1
        ...     snaprt.mark_step()  # runs both operations as one program
        >>> print(y)
        [1. 3. 5. 7.]
    """

    def __init__(self, *words: object, fullgraph: bool = False, steady: bool = False) -> None:
        if words:
            raise UsageError(
                "snaprt.lazy takes only keyword arguments, not a function",
                hint="write @snaprt.lazy() above a function, or with snaprt.lazy(): ...",
            )
        self._fullgraph = fullgraph
        self._steady = steady
        self._outer: list[tuple[Any, bool, bool]] = []

    def __enter__(self) -> None:
        trace = thread_trace()
        self._outer.append((jaxapi.current_trace(), trace.fullgraph, trace.steady))
        _trace_as_asked()
        trace.fullgraph = trace.fullgraph or self._fullgraph
        if self._steady:
            _make_steady(trace)
        _record_on(trace)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if globals()["thread_trace"] is None:  # Python has cleared its modules: at exit, it closes
            return  # a generator that holds the scope
        trace = thread_trace()
        outer, trace.fullgraph, trace.steady = self._outer.pop()
        _record_on(outer)
        try:
            if not isinstance(outer, LazyTrace):
                collect_again()
                run_effects("scope_end")
        except Exception:
            if error is None:
                raise
            _log.exception("effects that were pending when an error left the scope failed")
        finally:
            if error is not None:
                left_with(error)

    def _recreate_cm(self) -> lazy:
        return type(self)(fullgraph=self._fullgraph, steady=self._steady)


def enable() -> None:
    """Run this thread lazily from here on, until `disable`.

    Examples:
        >>> snaprt.enable()
        >>> y = jnp.arange(4.0) + 1  # recorded
        >>> print(y.sum())  # compiles and runs what the sum needs
        10.0
        >>> snaprt.disable()
    """
    _record_on(_trace_as_asked())


def disable() -> None:
    """Run this thread eagerly again.

    Pending effects run; other pending work runs when its arrays are used.

    Examples:
        >>> snaprt.enable()
        >>> y = jnp.arange(4.0) + 1
        >>> snaprt.disable()
        >>> float(y[0])  # y was pending, and runs now
        1.0
    """
    _record_on(None)
    run_effects("scope_end")


def eager_mode(enable: bool | None = True) -> None:
    """Compile and run each operation as soon as it is recorded, in every lazy scope.

    In this thread it takes effect immediately, in others from their next step or scope on. It
    corresponds to `torch_xla.experimental.eager_mode` of PyTorch/XLA.

    Args:
        enable: Whether to do so; ``None`` follows ``XLA_USE_EAGER_DEBUG_MODE``.

    Examples:
        >>> snaprt.eager_mode()
        >>> with snaprt.lazy():
        ...     y = jnp.arange(3.0) + 1  # has run when the next line begins
        >>> snaprt.eager_mode(None)
    """
    choose_eager(enable)
    _trace_as_asked()


def is_eager_mode() -> bool:
    """Return whether operations in a lazy scope run one by one; see `eager_mode`.

    Examples:
        >>> snaprt.is_eager_mode()
        False
    """
    return current_modes().eager


def _record_on(trace: Any) -> None:
    """Let this thread bind its operations on a trace, and C++ ask about its next call."""
    jaxapi.set_thread_trace(trace)
    jaxapi.watch_closely()


def _trace_as_asked() -> LazyTrace:
    """Return this thread's lazy trace, in the requested modes."""
    trace = thread_trace()
    trace.adopt(current_modes())
    if settings.get("SNAPRT_STEADY"):
        _make_steady(trace)
    return trace


def _make_steady(trace: LazyTrace) -> None:
    jaxapi.intercept_transforms(LazyTrace, follow_transform)
    trace.steady = True
