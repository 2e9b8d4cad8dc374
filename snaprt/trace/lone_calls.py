"""Calls of jitted functions that JAX makes itself, once recording them has cost enough.

A call that is a program of its own, or one with a few others, gains little from being recorded:
what runs is what JAX would run. To record it, to cut there and to find the executable take 200 us,
longer than many a step of a simulation. To make the calls itself, JAX has to compile the functions
once more. So it does when what was lost has come to about what that takes, and a program loses no
more than twice that. How often it has run decides, not time: it does so at the same call each time.

While nothing is recorded between such calls, the thread rests: C++ makes them, as without us.
Python is asked about the next one after whatever may want to see it: an operation that is recorded,
a step, a scope, a subscriber, a variable of the environment. What all of these may change is also
looked at after every few calls that C++ has made.

Where a few operations stand between such calls, as those that split a key, JAX runs them, too, once
recording them has cost as much as compiling each of them does. So the thread rests there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax

from snaprt import jaxapi, metrics
from snaprt.host.identities import identity

if TYPE_CHECKING:
    from snaprt.trace.trie import Point

#: XLA takes for each equation as long as so many recorded calls lose, and for each program ...
_CALLS_AN_EQUATION: Final = 10
_CALLS: Final = 256

#: A function whose operands and results have more bytes goes on to take the memory of those that
#: nobody holds, which JAX does where the user says so. Running it takes long enough.
_MOST_BYTES: Final = 64 << 20

#: One with more equations, or more floating point operations, may take long to compile once more,
#: and takes so long to run that it gains nothing.
_MOST_EQUATIONS: Final = 400
_MOST_WORK: Final = 1e8

#: Whoever can make the calls holds the function, and so what it closes over.
_MOST_CONSTANT_BYTES: Final = 1 << 16

#: With more calls, a program takes less than JAX's way to each of them.
_MOST_CALLS: Final = 4

#: With more operations between two calls, a program takes less than JAX's way to each of them.
_MOST_BETWEEN: Final = 8

#: Where there are more than twice as many after all, the rest of them is recorded, which costs as
#: much as few operations between so many calls save.
_COST_OF_MANY: Final = 64

_MAX_FUNCTIONS: Final = 512


@dataclass
class LoneCall:
    """A call, at one point of a path.

    Attributes:
        info: What JAX knows of the jit, by whose identity the function is known.
        is_large: Whether it is a program of its own whatever stands around it.
        due: How many more programs of such calls are to run before JAX makes it, each counted in
            equal parts for all its calls.
    """

    info: Any
    is_large: bool
    due: float


class LoneCalls:
    """Which functions of a thread are left to JAX.

    Attributes:
        left: A call of each, by the identity of what JAX knows of the jit.
        generation: Changes with ``left``.
        leaves_between: Whether the few operations between calls of these are left to JAX, too.
    """

    def __init__(self) -> None:
        self.left: dict[int, LoneCall] = {}
        self.generation = 0
        self.leaves_between = False
        self._between = 0  # operations since the last call that was left
        self._pending = 0  # those of them that were pending then
        self._lost = 0  # between how many calls few operations were recorded
        self._due = _CALLS  # after so many for each operation, they are left

    def recorded(self, info: Any, point: Point, *, is_large: bool) -> None:
        """Take note of a call, which is recorded as one operation: ``point``."""
        evaluation = point.evaluation
        if (
            point.lone is None
            and jaxapi.is_call_of_users_jit(point.primitive, point.params)
            and point.operation.constant_bytes <= _MOST_CONSTANT_BYTES
            and evaluation.weight <= _MOST_EQUATIONS
            and evaluation.work <= _MOST_WORK
        ):
            due = _CALLS + _CALLS_AN_EQUATION * evaluation.weight
            point.lone = LoneCall(info, is_large, due)

    def ran(
        self, points: Sequence[Point], arrays: Sequence[jax.Array], may_leave: Callable[[], bool]
    ) -> None:
        """Take note of a known program that has run.

        Args:
            points: Its operations.
            arrays: What it took and what it returned.
            may_leave: Returns whether its calls may be left to JAX; asked when they are due.
        """
        if len(points) > _MOST_CALLS + _MOST_BETWEEN:
            self._ran_between(_MOST_BETWEEN + 1)
            return
        calls = [point.lone for point in points if point.lone is not None]
        others = [point for point in points if point.lone is None]
        if not calls:
            if self.left:
                self._ran_between(len(others) if _are_small(others) else _MOST_BETWEEN + 1)
            return
        if len(calls) > _MOST_CALLS or len(others) > _MOST_BETWEEN:
            return
        for call in calls:
            call.due -= 1 / len(calls)
        if (
            all(call.due + self._due * len(others) <= 0 for call in calls)
            and _are_small(others)
            and sum(array.nbytes for array in arrays) <= _MOST_BYTES
            and may_leave()
        ):
            if len(self.left) >= _MAX_FUNCTIONS:
                self.left.clear()
            functions = {identity(call.info): call for call in calls}
            metrics.counter_add("JitLeftToJax", len(functions.keys() - self.left.keys()))
            self.left.update(functions)
            self.generation += 1
            if others:
                self._leave_between()

    def _ran_between(self, operations: int) -> None:
        self._between += max(0, operations - self._pending)
        self._pending = 0

    def comes(self, pending: int) -> None:
        """Take note of a call that Python leaves to JAX.

        Args:
            pending: How many operations are recorded that have not run.
        """
        between = self._between + (pending - self._pending if pending >= self._pending else pending)
        self._between, self._pending = 0, pending
        if self.leaves_between or not between:
            return
        if between > _MOST_BETWEEN:
            self._lost = max(0, self._lost - _COST_OF_MANY)
        else:
            self._lost += 1
            if self._lost >= self._due * between:
                self._leave_between()

    def made(self, function: Any) -> bool:
        """Take note of a call that C++ has made, of a function that is left or of one of JAX's.

        Returns:
            Whether C++ may make the next one of one of JAX's.
        """
        if identity(getattr(function, "_jit_info", None)) in self.left:
            self._between = 0
            if self._lost < self._due:
                self._lost += 1
            return True
        self._between += 1
        if self._between == 2 * _MOST_BETWEEN:
            self._lost -= _COST_OF_MANY
            if self._lost < 0:
                self.record_between()
        return self.takes_one_more()

    def takes_one_more(self) -> bool:
        """Return whether JAX runs the operation that comes next, between two calls."""
        return self.leaves_between and self._between < 2 * _MOST_BETWEEN

    def record_between(self) -> None:
        """Record what stands between calls again, and for longer before it is left once more."""
        self.leaves_between = False
        self._lost = 0
        self._due *= 4

    def _leave_between(self) -> None:
        self.leaves_between = True
        self._lost = self._due
        self._between = 0


def _are_small(points: Sequence[Point]) -> bool:
    """Return whether JAX runs a few operations about as fast as one program of all of them."""
    return not any(
        point.effects
        or point.evaluation.weight > _MOST_EQUATIONS
        or point.evaluation.work > _MOST_WORK
        or not jaxapi.runs_at_once(point.primitive, point.params)
        for point in points
    )
