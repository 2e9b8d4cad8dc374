"""The events of graphs that are cut, compiled and run, and who is told of them.

Nothing is made for subscribers while there are none: a cut asks once.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax

from snaprt import jaxapi
from snaprt.snapshot.recorder.plan import steps_ended
from snaprt.snapshot.recorder.progress import is_anyone_told, told, watched

if TYPE_CHECKING:
    from snaprt.compile.executable import Executable
    from snaprt.graph.program import Program
    from snaprt.snapshot.recorder import pending

_Results = TypeVar("_Results")

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Cut:
    """One cut of a thread's recording, which runs what is pending or a part of it."""

    # ``mark_step``, one of `snaprt.trace.pacing.CAUSES`, or what read a value: see
    # `snaprt.trace.array`.
    cause: str
    step: int  # how many steps the thread had marked before
    operations: int  # how many operations it is to run
    stack: tuple[jaxapi.Frame, ...]  # the user's frames, innermost last
    # Counts the cuts of the process that somebody was told of.
    number: int = field(default_factory=_numbers.__next__)
    thread: str = field(default_factory=lambda: threading.current_thread().name)


def cut_here(cause: str, step: int, operations: int) -> Cut:
    """Return the cut that this thread is at."""
    # Not by a default of the class: its constructor is a frame of its own, in no file.
    return Cut(cause, step, operations, jaxapi.user_frames())


@dataclass(frozen=True, eq=False)
class Execution:
    """One execution of a program that a cut led to."""

    cut: Cut
    program: Program  # what ran, with its inputs
    executable: Executable  # what it was compiled to
    # What that was called with: the inputs, then the literals that vary.
    arguments: Sequence[jax.Array]
    is_new: bool  # whether this process had not run the executable before
    promoted: frozenset[int]  # which of the program's literals are arguments, for they vary


@dataclass(frozen=True, eq=False)
class Compilation:
    """A program that was not known in this process, and what it became."""

    cut: Cut
    program: Program
    promoted: frozenset[int]  # which of its literals became arguments, for their values vary
    executable: Executable
    seconds: float  # how long that took
    # Whether it is one operation of a cut that falls back: see `Subscriber.falls_back`.
    is_fallen: bool = False


class Subscriber:
    """Is told of what the lazy runtime does, in the thread that does it: the table of all events.

    Override what you want to know; what nobody overrides is never told and costs nothing. What a
    subscriber raises goes to the user, as if the runtime had raised it. Executions themselves have
    observers, which may hold what runs: see `snaprt.compile.executable.Observer`.
    """

    def cut(self, cut: Cut) -> None:
        """A recording is about to be cut; nothing has happened yet."""

    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        """A program is not known in this process: it is about to be loaded or compiled.

        Of its literals, those that are ``promoted`` become arguments, for their values vary.
        """

    def falls_back(self, cut: Cut, program: Program, is_fallen: bool) -> bool:
        """Whether a program that is not known in this process is to run op by op instead.

        One that ``is_fallen`` is already one operation of such a program.
        """
        return False

    def forbids_compiling(self) -> bool:
        """Whether what could be compiled once more, to run faster, is not to be now."""
        return False

    def compiled(self, compilation: Compilation) -> None:
        """The program that was announced has been loaded or compiled."""

    def ready(self, run: Execution) -> None:
        """An executable has been found or made; it runs next."""

    def ran(self, run: Execution, results: Sequence[Any]) -> None:
        """It has been started; ``results`` may still be on their way."""

    def cut_done(self, cut: Cut) -> None:
        """All that the cut runs has been started, or one of it has failed."""

    def at_once(self, name: str, cause: str) -> None:
        """An operation is about to run alone, for a graph cannot hold it."""

    def step_ended(self, step: int) -> None:
        """A thread has marked its step of this number, the first being 1."""


_Told = tuple[Callable[..., None], ...]


class Listeners:
    """What to call at each event: the methods of the subscribers that override it.

    Attributes:
        sees_cuts: Whether an event of each cut is told, and not only those of compilations.
    """

    cut: _Told
    compiling: _Told
    falls_back: tuple[Callable[[Cut, Program, bool], bool], ...]
    forbids_compiling: tuple[Callable[[], bool], ...]
    compiled: _Told
    ready: _Told
    ran: _Told
    cut_done: _Told
    at_once: _Told
    step_ended: _Told

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        for name, ignored in vars(Subscriber).items():
            if not name.startswith("_"):
                overriding = [s for s in subscribers if getattr(type(s), name) is not ignored]
                setattr(self, name, tuple([getattr(s, name) for s in overriding]))
        self.sees_cuts = bool(self.cut or self.ready or self.ran or self.cut_done)


_lock = threading.Lock()
_subscribed: tuple[Subscriber, ...] = ()
_asked_for: tuple[Subscriber, ...] = ()
_listeners = Listeners(())


def subscribe(subscriber: Subscriber) -> None:
    """Tell ``subscriber`` from here on, whatever thread works."""
    with _lock:
        _renew((*_subscribed, subscriber), _asked_for)


def unsubscribe(subscriber: Subscriber) -> None:
    """Tell it no more."""
    with _lock:
        _renew(tuple(other for other in _subscribed if other is not subscriber), _asked_for)


def _renew(subscribed: tuple[Subscriber, ...], asked_for: tuple[Subscriber, ...]) -> None:
    global _subscribed, _asked_for, _listeners
    _subscribed, _asked_for = subscribed, asked_for
    _listeners = Listeners((*subscribed, *asked_for))
    jaxapi.end_all_rests()


#: What names more subscribers at each cut, as "module:function". A name, for what looks on imports
#: what it looks at, and not the reverse.
_SOURCE: Final = "snaprt.explain.switches:subscribers"

_source: Any = None


def listeners() -> Listeners:
    """Return what to call now: of the subscribers, and of those that the environment asks for.

    Raises:
        UsageError: A variable asks for what cannot be.
    """
    global _source
    if _source is None:
        _source = pkgutil.resolve_name(_SOURCE)
    asked_for = _source()
    if asked_for is not _asked_for:
        with _lock:
            _renew(_subscribed, asked_for)
    return _listeners


def is_followed() -> bool:
    """Return whether `run_followed` has more to do than to run."""
    return is_anyone_told() or jaxapi.is_profiled()


def run_followed(
    executable: pending.RecordedExecutable, run: Callable[..., _Results], args: Any, kwargs: Any
) -> _Results:
    """Return ``run(*args, **kwargs)``, an execution; tell whoever follows them of it."""
    tell = told()
    if tell is not None:
        tell(executable)
    if jaxapi.is_profiled():
        run = functools.partial(_run_shown, executable, run)
    progress = watched()
    if progress is None:
        return run(*args, **kwargs)
    running = progress.begin(executable, steps_ended())
    try:
        results = run(*args, **kwargs)
    except BaseException:
        progress.failed(running)
        raise
    progress.dispatched(running, results)
    return results


def _run_shown(
    executable: pending.RecordedExecutable,
    run: Callable[..., _Results],
    /,
    *args: Any,
    **kwargs: Any,
) -> _Results:
    """Run what a profile is to show, with what joins it with snapshots and metrics."""
    named = {"graph": executable.graph_id, "program": executable.name, "step": steps_ended()}
    with jaxapi.span("execute", **named):
        return run(*args, **kwargs)
