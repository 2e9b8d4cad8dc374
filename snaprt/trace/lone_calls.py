"""Calls of jitted functions that JAX makes itself, once recording them has cost enough.

A call that is a program of its own, or one with a few others, gains little from being recorded:
what runs is what JAX would run. To record it, to cut there and to find the executable take 200 us,
longer than many a step of a simulation. To make the calls itself, JAX has to compile the functions
once more. So it does when what was lost has come to about what that takes, and a program loses no
more than twice that. How often it has run decides, not time: it does so at the same call each time.

While nothing is recorded between such calls, the thread rests: C++ makes them, as without us.
Python is asked about the next one after whatever may want to see it: an operation that is recorded,
a step, a scope, a subscriber, a variable of the environment. What all of these may change is also
looked at after each call that C++ has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax

from snaprt import jaxapi, metrics

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
MOST_CALLS: Final = 4

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
    """

    def __init__(self) -> None:
        self.left: dict[int, LoneCall] = {}
        self.generation = 0

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
        calls = [point.lone for point in points if point.lone is not None]
        if len(calls) < len(points):
            return
        for call in calls:
            call.due -= 1 / len(calls)
        if (
            all(call.due <= 0 for call in calls)
            and sum(array.nbytes for array in arrays) <= _MOST_BYTES
            and may_leave()
        ):
            if len(self.left) >= _MAX_FUNCTIONS:
                self.left.clear()
            functions = {id(call.info): call for call in calls}
            metrics.counter_add("JitLeftToJax", len(functions.keys() - self.left.keys()))
            self.left.update(functions)
            self.generation += 1
