"""When a thread runs eagerly for a while: as long as nearly each of its programs is a new one.

Iterations that differ, as of a line search, a tree search or a game, are programs that XLA takes
seconds to compile and that run once. Eager JAX takes milliseconds for the same operations. So a
place whose programs keep being new makes its thread fall back: from there on, JAX runs each
operation as without us, and all that happens here is that it is looked at whether the operations
have come in this order before. When they have, again and again, the thread is lazy again. Each time
it falls back, it takes longer. When it falls back depends on operations alone, not on time, so a
program does so at the same place each time it runs with what its cache holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from snaprt import jaxapi
from snaprt.host.identities import identity

#: A place makes its thread fall back with so many more new programs than known ones ran meanwhile
#: ...
_MOST_NEW: Final = 4
#: ... where no one reads a value but pending work is cut, as that of a first long step ...
_MOST_NEW_BY_SIZE: Final = 16
#: ... or with so many, if known programs have saved less than compiling these took; ...
_MOST_COSTLY: Final = 16
#: ... if they have so many operations together. What of an iteration differs is found before.
_MIN_NEW_OPERATIONS: Final = 300

#: Compiling an operation takes about as long as so many eager ones, which a known program saves.
_COST: Final = 200

#: Programs of fewer operations do not count: eager JAX compiles operations, too.
_MIN_OPERATIONS: Final = 8

#: An operation is known when it, and so many before it, have come in this order so often.
_WINDOW: Final = 16
_OFTEN: Final = 8

#: Looking at an operation takes about as long as running it, so only these are of so many.
_LOOKED_AT: Final = 512
_OUT_OF: Final = 4096

#: The thread is lazy again when operations that are known have taken as long as compiling had,
#: each time so much longer. The time of those that are not known counts so often against it.
_LONGER: Final = 4
_AGAINST: Final = 64

_MAX_SEEN: Final = 1 << 17
_MAX_FUNCTIONS: Final = 128

# The window's hash is that of the one before it, times this, modulo 2**61.
_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 61) - 1
_FACTOR_OF_OLDEST: Final = pow(_FACTOR, _WINDOW, 1 << 61)


@dataclass
class _Place:
    """What is known of a place, by the programs that its cuts led to."""

    new: int = 0
    surplus: int = 0  # of new programs over known ones that ran meanwhile
    operations: int = 0  # how many the new ones have together
    seconds: float = 0.0  # what compiling them took
    saved: int = 0  # how many operations of known ones had run before the first new one
    used: int = 0  # how many known ones had run when it was last looked at

    def surplus_after(self, used: int) -> int:
        """Return the surplus now that so many known ones have run."""
        return max(0, self.surplus - (used - self.used))


class Fallback:
    """Whether a thread that is to run lazily runs eagerly for now.

    Attributes:
        is_on: Whether it does.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._places: dict[Any, _Place] = {}
        self._used = 0
        self._saved = 0
        self._longer = 1
        self._need = 0.0  # how many seconds of known operations it takes to be lazy again
        self._forget()

    def _forget(self) -> None:
        self._window = deque([0] * _WINDOW)
        self._hash = 0
        self._seen: dict[int, int] = {}
        self._ran = 0  # how many operations have, eagerly
        self._is_known: bool | None = None  # whether the last operation was, if it was looked at
        self._score = 0.0
        # By what JAX knows of them, jitted functions as C++ calls them; and what must stay alive.
        self._functions: dict[tuple[int, int], tuple[Callable[..., Any], Any, Any]] = {}

    def used(self, operations: int) -> None:
        """Take note that a program which was known has run."""
        if operations >= _MIN_OPERATIONS:
            self._used += 1
            self._saved += operations

    def compiled(self, place: Any, operations: int, seconds: float) -> None:
        """Take note of a program that was not known and not in the cache.

        Args:
            place: Where the thread's recording was cut.
            operations: How many it has.
            seconds: How long it took to compile.
        """
        if operations < _MIN_OPERATIONS:
            return
        at = self._places.setdefault(place, _Place(saved=self._saved))
        at.new += 1
        at.surplus = at.surplus_after(self._used) + 1
        at.used = self._used
        at.operations += operations
        at.seconds += seconds

    def is_due(self, place: Any, operations: int, *, is_read: bool) -> bool:
        """Return whether the thread is to fall back rather than compile one more program.

        Args:
            place: Where the thread's recording is cut.
            operations: How many the program has.
            is_read: Whether it is cut there because a value is read.
        """
        at = self._places.get(place)
        if at is None or operations < _MIN_OPERATIONS or at.operations < _MIN_NEW_OPERATIONS:
            return False
        most = _MOST_NEW if is_read else _MOST_NEW_BY_SIZE
        saved = self._saved - at.saved
        return at.surplus_after(self._used) >= most or (
            at.new >= _MOST_COSTLY and _COST * at.operations > saved
        )

    def begin(self, place: Any) -> None:
        """Fall back because of a place."""
        self.is_on = True
        self._need = self._longer * self._places[place].seconds
        self._places.clear()

    def end(self) -> None:
        """Be lazy again."""
        self.is_on = False
        self._longer *= _LONGER
        self._forget()

    def function(self, fun: Callable[..., Any], info: Any) -> Callable[..., Any]:
        """Return a jitted function as C++ calls it, of what JAX knows of it."""
        key = identity(fun), identity(info)
        known = self._functions.get(key)
        if known is None:
            if len(self._functions) >= _MAX_FUNCTIONS:
                self._functions.clear()
            known = self._functions[key] = jaxapi.jit_again(fun, info), fun, info
        return known[0]

    def looks(self) -> bool:
        """Return whether the next operation is to be looked at."""
        self._ran += 1
        self._is_known = None
        return self._ran % _OUT_OF < _LOOKED_AT

    def has_repeated(self) -> bool:
        """Return whether what the thread does has come again and again."""
        return self._score > self._need

    def took(self, seconds: float) -> None:
        """Take note of how long the last operation took."""
        if self._is_known is not None:
            seconds *= _OUT_OF / _LOOKED_AT
            gain = seconds if self._is_known else -_AGAINST * seconds
            self._score = max(0.0, self._score + gain)

    def meet(self, what: Any, operands: Sequence[Any]) -> None:
        """Take note of an operation that is about to run.

        Args:
            what: Stands for the operation, as long as it lives.
            operands: What it is given.
        """
        try:
            symbol = hash((what, *[_kind(operand) for operand in operands]))
        except TypeError:  # a parameter that cannot be hashed
            symbol = 0
        window = self._window
        window.append(symbol)
        oldest = window.popleft()
        key = (self._hash * _FACTOR + symbol - oldest * _FACTOR_OF_OLDEST) & _MASK
        self._hash = key
        seen = self._seen
        times = seen.get(key, 0)
        if self._ran % _OUT_OF >= _WINDOW:  # else others were not looked at just before it
            self._is_known = times >= _OFTEN
        if times < _OFTEN:
            if len(seen) >= _MAX_SEEN:
                seen.clear()
            seen[key] = times + 1


def described(primitive: Any, params: Mapping[str, Any]) -> Any:
    """Return what stands for an operation that is no jitted function.

    What JAX makes anew each time, such as the jaxpr of a loop, has no part in it.
    """
    lasting = [value for value in params.values() if not _is_known_by_identity(value)]
    return (primitive, *lasting)


def _is_known_by_identity(value: Any) -> bool:
    if type(value) is tuple and value:
        value = value[0]
    return type(value).__hash__ is object.__hash__


def _kind(operand: Any) -> Any:
    """Return what JAX compiles an operation for, of an operand that has no part in it."""
    shape = getattr(operand, "shape", None)
    return type(operand) if shape is None else (shape, operand.dtype)
