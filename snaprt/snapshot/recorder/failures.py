"""Learns how executions and programs end, without making them wait; must not know what follows.

An execution is looked at when a later one begins, which takes 2 us and wakes nobody, and every now
and then by a thread, for the program may not run another. Where it matters how long it takes, that
thread looks when it has taken so long, and waits for it if it has not ended by then: what ends
sooner wakes nobody either. For times too short for that, a thread of its own waits for each.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

from snaprt import metrics
from snaprt.snapshot.recorder.pending import HeldExecution

MAX_WAITING: Final = 64
"""How many executions may be under way before the program waits for the oldest."""

LOOK_SECONDS: Final = 0.05
"""How often the thread looks."""

SHORT_NANOSECONDS: Final = 10e6
"""What a thread cannot look in time for: another may keep Python to itself for 5 ms."""

Outcome = Callable[[HeldExecution, BaseException | None, int], None]
"""``outcome(execution, error, nanoseconds)`` is told how an execution ended, and how long it took
if that is past its limit; else 0 may stand there."""


class OutcomeWatch:
    """Tells how each execution ended, once, in the order in which they began.

    Args:
        outcome: Is told; in a thread of this class, or in one that calls it.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._start_afresh()
        this = weakref.ref(self)

        def after_fork() -> None:
            watch = this()
            if watch is not None:
                watch._start_afresh()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=after_fork)

    def _start_afresh(self) -> None:
        self._changed = threading.Condition()
        self._awaited: deque[HeldExecution] = deque()  # by the waiting thread
        self._waiting: threading.Thread | None = None
        self._quiet: deque[HeldExecution] = deque()  # the others
        self._telling = threading.RLock()  # held by who tells of one of those
        self._looking: threading.Thread | None = None
        self._something_to_see = threading.Event()
        self._shortest = math.inf  # of the limits of those
        self._last_end = 0
        self._is_closed = False

    def add(self, held: HeldExecution) -> None:
        """Watch an execution that has begun and whose outputs are on their way."""
        if self._is_closed:
            self._tell(held, is_timed=True)
            return
        if held.limit >= SHORT_NANOSECONDS:
            if held.limit < time.perf_counter_ns() - held.began and held.is_ready():
                self.look()
                with self._telling:  # it ended before the call of it returned
                    self._tell(held, is_timed=True)
                return
            self._shortest = min(self._shortest, held.limit)
            self._quiet.append(held)
            if not self._something_to_see.is_set():
                self._something_to_see.set()
                if self._looking is None:
                    self._looking = _start(self._look_on, "snaprt-snapshot-look")
            return
        with self._changed:
            if len(self._awaited) >= MAX_WAITING:
                with metrics.timed("SnapshotWatchWait"):
                    self._changed.wait_for(lambda: len(self._awaited) < MAX_WAITING)
            self._awaited.append(held)
            if self._waiting is None:
                self._waiting = _start(self._wait_on, "snaprt-snapshot-wait")
            self._changed.notify_all()

    def look(self) -> None:
        """Tell of those that have ended, as far as no thread waits for them."""
        quiet = self._quiet
        # Another thread that tells of one goes on with the others by itself.
        if quiet and self._telling.acquire(False):
            try:
                while quiet and quiet[0].is_ready():
                    self._tell(quiet.popleft(), is_timed=False)
            finally:
                self._telling.release()

    def settle(self) -> None:
        """Wait until all that were added have ended and were told of."""
        with self._telling:
            while self._quiet:
                self._tell_oldest()
        if threading.current_thread() is not self._waiting:
            with self._changed:
                self._changed.wait_for(lambda: not self._awaited)

    def close(self) -> None:
        """Settle, and leave nothing to a thread from here on.

        A thread that is inside JAX when Python ends takes the whole process down.
        """
        self._is_closed = True
        self.settle()

    def _look_on(self) -> None:
        seen = self._something_to_see
        while True:
            seen.wait()
            time.sleep(self._pause())
            self.look()
            self._wait_for_late()
            if not self._quiet:
                seen.clear()
                if self._quiet:  # added meanwhile, by who saw that it was set
                    seen.set()

    def _pause(self) -> float:
        """Return seconds in which no execution goes past its limit unseen, if any is to."""
        now = time.perf_counter_ns()
        left = [one.began + one.limit - now for one in list(self._quiet)]
        return max(0.0, min(LOOK_SECONDS, min([self._shortest, *left]) / 1e9))

    def _wait_for_late(self) -> None:
        """Wait for the first that has gone past its limit, and so for those before it."""
        now = time.perf_counter_ns()
        late = next((one for one in list(self._quiet) if one.began + one.limit < now), None)
        if late is not None:
            with self._telling:
                while late in self._quiet:
                    self._tell_oldest()

    def _tell_oldest(self) -> None:
        held = self._quiet.popleft()
        self._tell(held, is_timed=not held.is_ready())

    def _wait_on(self) -> None:
        changed = self._changed
        while True:
            with changed:
                changed.wait_for(lambda: bool(self._awaited))
                held = self._awaited[0]
            self._tell(held, is_timed=True)
            del held  # and with it its arrays
            with changed:
                self._awaited.popleft()
                changed.notify_all()

    def _tell(self, held: HeldExecution, *, is_timed: bool) -> None:
        error: Exception | None = None
        try:
            held.wait()
        except Exception as raised:
            error = raised
        now = time.perf_counter_ns()
        # Where executions queue up, one begins when the one before it ends.
        took = now - max(held.began, self._last_end)
        self._last_end = now
        self._outcome(held, error, took if is_timed and held.limit < math.inf else 0)


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


_MARK: Final = "_snaprt_recorded"


def mark_recorded(error: BaseException) -> None:
    """Remember that an error has led to a snapshot, so that it does not lead to another."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _MARK, True)


def is_recorded(error: BaseException) -> bool:
    """Return whether an error, or one that it came of, has led to a snapshot."""
    return any(getattr(one, _MARK, False) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked = False


def listen_for_uncaught_errors(listener: Any) -> None:
    """Call ``listener.program_failed(error)`` for each exception that ends the program or a thread.

    Who had asked to be called before still is, and so says what Python says.
    """
    global _hooked
    _listeners.add(listener)
    if _hooked:
        return
    _hooked = True
    program_hook, thread_hook = sys.excepthook, threading.excepthook

    def of_program(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        _tell_listeners(error)
        program_hook(kind, error, traceback)

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            _tell_listeners(arguments.exc_value)
        thread_hook(arguments)

    sys.excepthook, threading.excepthook = of_program, of_thread


def _tell_listeners(error: BaseException) -> None:
    for listener in list(_listeners):
        listener.program_failed(error)
