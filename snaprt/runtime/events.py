"""Who looks on while graphs are cut, compiled and run; must not know what they make of it.

Nothing is made for watchers while there are none: a cut asks once.
"""

from __future__ import annotations

import itertools
import pkgutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import jax

from snaprt import jaxapi

if TYPE_CHECKING:
    from snaprt.compile.executable import Executable
    from snaprt.compile.loaded import Ready
    from snaprt.graph.program import Program
    from snaprt.trace.cut import Plan

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Cut:
    """One cut of a thread's recording, which runs what is pending or a part of it.

    Attributes:
        cause: ``mark_step``, one of `snaprt.trace.pacing.CAUSES`, or what read a value: see
            `snaprt.trace.array`.
        step: How many steps the thread had marked before.
        operations: How many operations it is to run.
        stack: The user's frames, innermost last.
        number: Counts the cuts of the process that were watched.
        thread: The thread's name.
    """

    cause: str
    step: int
    operations: int
    stack: tuple[jaxapi.Frame, ...]
    number: int = field(default_factory=_numbers.__next__)
    thread: str = field(default_factory=lambda: threading.current_thread().name)


def cut_here(cause: str, step: int, operations: int) -> Cut:
    """Return the cut that this thread is at."""
    # Not by a default of the class: its constructor is a frame of its own, in no file.
    return Cut(cause, step, operations, jaxapi.user_frames())


@dataclass(frozen=True, eq=False)
class Run:
    """One execution of a program that a cut led to.

    Attributes:
        cut: The cut.
        program: What ran, with its inputs.
        executable: What it was compiled to.
        arguments: What that was called with: the inputs, then the literals that vary.
        is_new: Whether this process had not run the executable before.
    """

    cut: Cut
    program: Program
    executable: Executable
    arguments: Sequence[jax.Array]
    is_new: bool


@dataclass(frozen=True, eq=False)
class Compilation:
    """A program that was not known in this process, and what it became.

    Attributes:
        cut: The cut that led to it.
        program: The program, with its inputs.
        promoted: Which of its literals became arguments, for their values vary.
        executable: What it was compiled to, or loaded as.
        seconds: How long that took.
    """

    cut: Cut
    program: Program
    promoted: frozenset[int]
    executable: Executable
    seconds: float


class Watcher:
    """Is told of what the lazy runtime does, in the thread that does it; override what you want.

    What a watcher raises goes to the user, as if the runtime had raised it.

    Attributes:
        only_compilations: Whether it is told of ``compiling`` and ``compiled`` alone. Then it costs
            nothing where nothing is compiled: for other watchers each cut looks at the stack.
    """

    only_compilations = False

    def cut(self, cut: Cut) -> None:
        """A recording is about to be cut; nothing has happened yet."""

    def compiling(self, cut: Cut, program: Program) -> None:
        """A program is not known in this process: it is about to be loaded or compiled."""

    def compiled(self, compilation: Compilation) -> None:
        """The program that was announced has been loaded or compiled."""

    def ready(self, run: Run) -> None:
        """An executable has been found or made; it runs next."""

    def ran(self, run: Run, results: Sequence[Any]) -> None:
        """It has been started; ``results`` may still be on their way."""

    def cut_done(self, cut: Cut) -> None:
        """All that the cut runs has been started, or one of it has failed."""

    def at_once(self, name: str, cause: str) -> None:
        """An operation is about to run alone, for a graph cannot hold it."""

    def step_ended(self, step: int) -> None:
        """A thread has marked its step of this number, the first being 1."""


_attached: tuple[Watcher, ...] = ()
_of_compilations: tuple[Watcher, ...] = ()
_lock = threading.Lock()


def attach(watcher: Watcher) -> None:
    """Tell ``watcher`` from here on, whatever thread works."""
    global _attached, _of_compilations
    with _lock:
        if watcher.only_compilations:
            _of_compilations = (*_of_compilations, watcher)
        else:
            _attached = (*_attached, watcher)


def detach(watcher: Watcher) -> None:
    """Tell it no more."""
    global _attached, _of_compilations
    with _lock:
        _attached = tuple(one for one in _attached if one is not watcher)
        _of_compilations = tuple(one for one in _of_compilations if one is not watcher)


#: What names more watchers at each cut, as "module:function". A name, for what looks on imports
#: what it looks at, and not the reverse.
_SOURCE: Final = "snaprt.explain.switches:watchers"

_source: Any = None


def watchers() -> tuple[Watcher, ...]:
    """Return who is to be told of a cut: those attached, and those that the environment asks for.

    Raises:
        UsageError: A variable asks for what cannot be.
    """
    global _source
    if _source is None:
        _source = pkgutil.resolve_name(_SOURCE)
    asked_for = _source()
    return (*_attached, *asked_for) if asked_for else _attached


class Watch:
    """The watchers of one cut."""

    def __init__(self, watchers: Sequence[Watcher], cut: Cut) -> None:
        self._watchers = watchers
        self._cut = cut
        self._run: Run | None = None
        for watcher in watchers:
            watcher.cut(cut)

    def compiling(self, program: Program) -> None:
        """Tell that a program is about to be loaded or compiled."""
        for watcher in (*self._watchers, *_of_compilations):
            watcher.compiling(self._cut, program)

    def compiled(
        self, program: Program, promoted: frozenset[int], executable: Executable, seconds: float
    ) -> None:
        """Tell what it became."""
        compilation = Compilation(self._cut, program, promoted, executable, seconds)
        for watcher in (*self._watchers, *_of_compilations):
            watcher.compiled(compilation)

    def ready(self, program: Program, ready: Ready) -> None:
        """Tell what a program runs."""
        executable, arguments, is_new = ready.executable, ready.arguments, ready.is_new
        self._run = Run(self._cut, program, executable, arguments, is_new)
        for watcher in self._watchers:
            watcher.ready(self._run)

    def ran(self, results: Sequence[Any]) -> None:
        """Tell that what was ready last has been started."""
        assert self._run is not None
        for watcher in self._watchers:
            watcher.ran(self._run, results)

    def done(self) -> None:
        """Tell that the cut is done."""
        for watcher in self._watchers:
            watcher.cut_done(self._cut)


def begin_watch(watchers: Sequence[Watcher], cause: str, step: int, plan: Plan) -> Watch | None:
    """Tell of a cut that begins; ``None`` if there is nobody to be told."""
    if not watchers:
        return None
    return Watch(watchers, cut_here(cause, step, plan.operations))
