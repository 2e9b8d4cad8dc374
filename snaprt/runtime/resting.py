"""Leaves to C++ the calls of which nothing is wanted unless they fail, and counts them.

What is to be recorded is often far away: step 40,000, each hundredth execution, a function of
another name. Until then a call need not pass through Python, which is slow where the caches of the
processor hold other things: the thread is relaxed, C++ makes the call as without us, and afterwards
tells us to count it.

A thread is relaxed while nothing may be wanted of the next call of any function that it has left to
C++, whatever is called next. Where failures are wanted, those are calls that cannot fail before
they return: their arrays are held afterwards. It is watched closely again when that changes: with
the last execution that rests, with a step, a scope or a variable of the environment, and where
arrays are held that a call may donate.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any, Protocol

from snaprt import jaxapi, settings
from snaprt.snapshot.recorder.pending import (
    RecordedExecutable,
    donate_unannounced,
    is_anything_held,
)
from snaprt.snapshot.recorder.plan import Plan, current_plan, steps_ended, tell_at_step
from snaprt.snapshot.recorder.progress import is_watched_closely, watched
from snaprt.snapshot.recorder.record import Resting, SameEachTime

#: How many functions a thread leaves to C++.
MAX_FUNCTIONS = 512

_MAX_WAITS = 64  # calls that are seen while others are due: those may never come

_generations = itertools.count()


class Function(Protocol):
    """A jitted function, some of whose calls may rest."""

    @property
    def rests(self) -> RecordedExecutable | None:
        """What they run."""
        ...

    @property
    def resting(self) -> Resting | None:
        """What counts their executions; None where each is to be seen."""
        ...

    def trail(self, trailing: SameEachTime, args: Any, kwargs: Any, results: Any) -> None:
        """Count an execution whose call has returned, where those that fail are wanted."""


class _Generation:
    """What a thread has left to C++, under one plan; C++ finds none of it in another generation."""

    def __init__(self, plan: Plan | None) -> None:
        self.number = next(_generations)
        self.plan = plan
        # Those whose calls rest, or did, by the identity of what JAX knows of them; and what has
        # counted the executions of each since C++ makes its calls.
        self.functions: dict[int, tuple[Function, Resting]] = {}
        self.due: set[int] = set()  # of these, those whose next call is to be seen
        self.donates = False  # whether one of them donates
        self.waits = 0  # calls that were seen since some are due


class _Thread(threading.local):
    generation = _Generation(None)  # of no thread, until one asks for its own
    changes = 0  # of the environment, until its plan was looked for


_thread = _Thread()


def is_left(identity: int) -> bool:
    """Return whether calls of a function of this identity are left to C++, for they may rest."""
    return identity in _thread.generation.functions


def count(identity: int, args: Any, kwargs: Any, results: Any) -> None:
    """Count a call that was left to C++, if that is so.

    Args:
        identity: Of the function.
        args: What it was called with.
        kwargs: And with what else.
        results: What it returned, which may be on its way.
    """
    generation = _thread.generation
    left = generation.functions.get(identity)
    if left is None:  # JAX's own
        return
    function, resting = left
    trailing = resting.trailing
    if trailing is not None:
        function.trail(trailing, args, kwargs, results)
    wants_next = trailing is None and resting.count()
    # This call counts, too, if another thread has called the function: the next is to be seen.
    if wants_next or function.resting is not resting:
        generation.due.add(identity)
        jaxapi.watch_closely()
    elif _changes != _thread.changes or is_watched_closely():
        jaxapi.watch_closely()
    progress = watched()
    if progress is not None and function.rests is not None:
        progress.passed(function.rests, steps_ended())


def judge(identity: int, function: Function, *, donates: bool) -> None:
    """Learn whether the next calls of a function rest, after one that was seen; relax this thread.

    Args:
        identity: Of the function.
        function: The function.
        donates: Whether its calls donate.
    """
    generation = _current_generation()
    resting = function.resting
    if resting is None:
        if identity in generation.functions:
            generation.due.add(identity)
        _relax(generation)
        return
    if len(generation.functions) >= MAX_FUNCTIONS:
        generation = _thread.generation = _Generation(generation.plan)
    generation.functions[identity] = function, resting
    generation.due.discard(identity)
    generation.donates |= donates
    tell_at_step(resting.until.step, see_all)
    _relax(generation)


def relax() -> None:
    """Relax this thread after a call that was seen, if it may be."""
    _relax(_current_generation())


def _relax(generation: _Generation) -> None:
    if not generation.functions:
        return
    if generation.due:
        generation.waits += 1
        if generation.waits > _MAX_WAITS:
            _thread.generation = _Generation(generation.plan)
        return
    generation.waits = 0
    if generation.donates and is_anything_held():
        return
    _listen()
    if jaxapi.relax_watch(generation.number):
        donate_unannounced(jaxapi.watch_closely if generation.donates else None)


def see_all() -> None:
    """Have the next call of each function seen that this thread has left to C++."""
    generation = _thread.generation
    generation.due |= generation.functions.keys()
    jaxapi.watch_closely()


def _current_generation() -> _Generation:
    plan = current_plan()
    generation = _thread.generation
    if plan is not generation.plan or _thread.changes != _changes:
        _thread.changes = _changes
        _thread.generation = generation = _Generation(plan)
    return generation


_changes = 1  # of the environment, since a thread was first relaxed


def _environment_changed() -> None:
    global _changes
    _changes += 1
    jaxapi.watch_closely()


@functools.cache
def _listen() -> None:
    settings.when_changed(_environment_changed)
