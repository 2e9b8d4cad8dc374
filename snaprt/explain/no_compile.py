"""Forbids XLA to compile once a program has warmed up, and says what has changed."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import snaprt
from snaprt import jaxapi, metrics, settings
from snaprt.compile.summaries import difference_lines, summarize, summary_text
from snaprt.errors import NoCompileError, UsageError
from snaprt.explain.recompiles import history
from snaprt.graph.program import Program
from snaprt.runtime.events import Compilation, Cut, Subscriber, subscribe
from snaprt.snapshot.recorder.plan import steps_ended
from snaprt.snapshot.recorder.record import process_recorder

Action = Literal["raise", "warn"]

_MOST_KEPT: Final = 256  # programs of ``jax.jit`` that a later one may be compared with
_RECORDER: Final = str(Path(snaprt.__file__).parent / "snapshot")
_HINT: Final = (
    "Run the program with these shapes, dtypes and constants during warm-up, or use "
    "snaprt.no_compile('warn')."
)
_log = logging.getLogger("snaprt.explain")


class no_compile(ContextDecorator):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Let XLA compile nothing in this thread: ``with snaprt.no_compile(): ...``.

    It holds for lazy graphs and for ``jax.jit``. Executables from the compile cache are loaded as
    always. The message says how the program differs from the last one of its place or name; of
    ``jax.jit``, that is known of programs which first ran after the first call of ``no_compile``,
    so make the object before the warm-up. A call that compiles nothing costs
    nothing. SNAPRT_NO_COMPILE_AFTER does the same for a whole process after so many steps.

    Args:
        action: ``raise`` an error before anything is compiled, or ``warn`` and compile.

    Raises:
        NoCompileError: Inside of it: a program would have to be compiled. Nothing is lost: what
            was pending in a lazy scope stays pending.

    Examples:
        >>> step = jax.jit(lambda x: x * 2)
        >>> guard = snaprt.no_compile()
        >>> y = step(np.ones(8))  # the warm-up
        >>> with guard:
        ...     y = step(np.ones(8))
        ...     step(np.ones(5))
        Traceback (most recent call last):
        ...
        snaprt.errors.NoCompileError: ...
    """

    def __init__(self, action: Action = "raise") -> None:
        if action not in ("raise", "warn"):
            raise UsageError(f"no_compile does not know {action!r}", hint="Use 'raise' or 'warn'.")
        self._action: Action = action
        start()

    def __enter__(self) -> None:
        _of_thread.actions = (*_of_thread.actions, self._action)
        jaxapi.watch_closely()

    def __exit__(self, *error: object) -> None:
        _of_thread.actions = _of_thread.actions[:-1]


class _Pending(NamedTuple):
    """A lazy graph that is about to be loaded or compiled."""

    cut: Cut
    program: Program
    promoted: frozenset[int]


class _OfThread(threading.local):
    actions: tuple[Action, ...] = ()
    pending: _Pending | None = None
    before: str = ""  # a summary of the last ``jax.jit`` program with the name of the one under way


_of_thread = _OfThread()


class _Watch(Subscriber):
    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        _of_thread.pending = _Pending(cut, program, promoted)

    def compiled(self, compilation: Compilation) -> None:
        _of_thread.pending = None

    def forbids_compiling(self) -> bool:
        # Which counts executions, of which JAX's own are none.
        is_to_come = settings.get("SNAPRT_NO_COMPILE_AFTER") is not None
        return is_to_come or _action() is not None


@functools.cache
def start() -> None:
    """Look at each compilation from here on."""
    subscribe(_Watch())
    jaxapi.before_compile_or_load(_about_to_obtain)
    jaxapi.before_compile(_about_to_compile)


_summaries: OrderedDict[str, str] = OrderedDict()  # of ``jax.jit``, the last of each name


def _about_to_obtain(planned: jaxapi.PlannedCompilation) -> None:
    """Keep a program for later comparisons, whether XLA compiles it or a cache has it."""
    if _is_recorders():
        return
    name = planned.name.removeprefix("jit_")
    _of_thread.before = _summaries.pop(name, "")
    _summaries[name] = summarize(planned.module)
    if len(_summaries) > _MOST_KEPT:
        _summaries.popitem(last=False)


def _about_to_compile(module: Any, is_ours: bool) -> None:
    pending, _of_thread.pending = _of_thread.pending, None
    is_users = not is_ours or pending is not None
    action = _action() if is_users else None
    if action is None or _is_recorders():
        return
    metrics.counter_add("CompileAfterWarmUp")
    if is_ours and pending is not None:
        what = "the lazy graph"
        is_watched = process_recorder().wants_flag(pending.program.placement.devices)
        lines = history.reasons_for(*pending, is_watched=is_watched)
    else:
        what = jaxapi.module_name(module).removeprefix("jit_")
        before = summary_text(_of_thread.before)
        now = summary_text(_summaries.get(what, ""))
        lines = list(difference_lines(before, now, "before", "now")) if before else []
    place = jaxapi.place_text(jaxapi.users_place(jaxapi.user_frames()))
    text = "\n  ".join([f"{what} has to be compiled, at {place}, after the warm-up", *lines])
    if action == "raise":
        raise NoCompileError(text, hint=_HINT)
    _log.warning("%s", text)


def _is_recorders() -> bool:
    """Return whether the recorder runs a program of its own."""
    return any(frame.file.startswith(_RECORDER) for frame in jaxapi.all_frames())


def _action() -> Action | None:
    """Return what to do in this thread about a compilation; None where it may be."""
    if _of_thread.actions:
        return _of_thread.actions[-1]
    after: tuple[int, Action] | None = settings.get("SNAPRT_NO_COMPILE_AFTER")
    if after is None:
        return None
    steps, action = after
    return action if max(steps_ended(), process_recorder().most_executions()) >= steps else None
