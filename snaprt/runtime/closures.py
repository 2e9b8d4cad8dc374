"""Functions that run at the end of a thread's step, with arrays of that step as arguments."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from snaprt import settings
from snaprt.errors import UsageError
from snaprt.trace.array import LazyArray

_log: Final = logging.getLogger("snaprt.steps")


@dataclass(frozen=True)
class _Closure:
    """A function with its arguments, and whether it runs in the background."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    run_async: bool

    def lazy_arguments(self) -> list[LazyArray]:
        return [leaf for leaf in jax.tree.leaves(self.arguments) if type(leaf) is LazyArray]

    def __call__(self) -> None:
        self.function(*self.arguments)


@dataclass(eq=False)
class _OfThread:
    """What one thread has queued."""

    # The closures of the step that has not ended.
    pending: list[_Closure] = field(default_factory=list)
    # Those of earlier steps that were handed to the background.
    running: list[Future[None]] = field(default_factory=list)


class _Threads(threading.local):
    queue: _OfThread | None = None


_threads: Final = _Threads()
_all: Final[weakref.WeakSet[_OfThread]] = weakref.WeakSet()
# One thread, so that closures run in order; the interpreter waits for it when the process ends.
_background: Final = ThreadPoolExecutor(1, thread_name_prefix="snaprt-closures")


def add_step_closure(
    closure: Callable[..., object], args: Iterable[Any] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` after this thread's next `mark_step`.

    Use it to print or log values without reading them in the middle of a step: the arrays in
    ``args``, also inside pytrees, are results of the step's program, and reading them is free.
    Closures run in the order in which they were added; a closure that a closure adds belongs to the
    next step.

    If a closure raises, the others still run. Its error is raised by the `mark_step` that ran it;
    further errors are logged. With ``run_async``, the next `mark_step` after the error raises it.

    If a step fails, its closures wait for the next step, except those whose own arrays can no
    longer be computed, which are dropped. Closures of a step that is never marked do not run, and
    a warning says so at exit. Background closures are waited for at exit.

    Args:
        closure: The function; its result is dropped.
        args: Its arguments.
        run_async: Whether to call it in the background, in one thread for the whole process, while
            the program continues. `XLA_MAX_ASYNC_QUEUE` limits how many may wait.

    Raises:
        UsageError: ``closure`` is not a function.

    Examples:
        >>> def log(step, loss):
        ...     print(f"step {step}: loss {loss:.1f}")
        >>> with snaprt.lazy():
        ...     for step in range(2):
        ...         loss = jnp.ones(4).sum() / (step + 1)
        ...         snaprt.add_step_closure(log, args=(step, loss))
        ...         snaprt.mark_step()
        step 0: loss 4.0
        step 1: loss 2.0
    """
    if not callable(closure):
        raise UsageError(
            f"a step closure must be a function, not {closure!r}",
            hint="pass the function and its arguments separately: add_step_closure(print, "
            "args=(loss,))",
        )
    queue = _threads.queue
    if queue is None:
        queue = _threads.queue = _OfThread()
        _all.add(queue)
    queue.pending.append(_Closure(closure, tuple(args), run_async))


def run_step_closures() -> None:
    """Run what this thread has queued; to be called when its step has ended well.

    Raises:
        Exception: What a closure raised.
    """
    queue = _threads.queue
    if queue is None:
        return
    closures, queue.pending = queue.pending, []
    errors = _errors_behind(queue)
    for closure in closures:
        try:
            for array in closure.lazy_arguments():
                array.compute("closure")  # of another thread, whose step may not have ended
            if closure.run_async:
                _send(queue, closure)
            else:
                closure()
        except Exception as error:
            errors.append(error)
    for other in errors[1:]:
        _log.error("another step closure failed", exc_info=other)
    if errors:
        raise errors[0]


def drop_failed_closures() -> None:
    """Drop what this thread has queued of which an argument cannot be computed any more."""
    queue = _threads.queue
    if queue is not None:
        queue.pending = [
            closure
            for closure in queue.pending
            if not any(array.has_failed() for array in closure.lazy_arguments())
        ]


def _send(queue: _OfThread, closure: _Closure) -> None:
    most = settings.get("XLA_MAX_ASYNC_QUEUE")
    waiting = [future for future in queue.running if not future.done()]
    if most and len(waiting) >= most:
        wait(waiting[: len(waiting) - most + 1])
    queue.running.append(_background.submit(closure))


def _errors_behind(queue: _OfThread) -> list[Exception]:
    """Return the errors of the background that this thread has not seen yet."""
    done = [future for future in queue.running if future.done()]
    queue.running = [future for future in queue.running if future not in done]
    errors = [future.exception() for future in done]
    return [error for error in errors if isinstance(error, Exception)]


@atexit.register
def _tell_at_exit() -> None:
    """Warn about closures that never ran, and about errors with no step after them."""
    for queue in list(_all):
        if queue.pending:
            _log.warning(
                "step closures that never ran because no mark_step followed: %d",
                len(queue.pending),
            )
        for error in _errors_behind(queue):
            _log.error("a step closure failed in the background", exc_info=error)
