"""Where to cut a recording that nobody cuts: automatic steps, for programs without `mark_step`.

It looks at each point when a path first comes to it, and marks those after which a recording is to
be cut. The marks stay with the paths, so a program that repeats is cut at the same places and runs
the same programs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

import jax

from snaprt import jaxapi, settings
from snaprt.graph.operation import Evaluation
from snaprt.trace.trie import Point

#: A call of a jitted function of the user's that has so many equations is a program of its own.
MIN_CALL: Final = 16

#: Any other operation with so many is, as a loop, or one that draws random numbers.
MIN_ALONE: Final = 100

#: Less than so many equations are not worth a program of their own ...
MIN_STEP: Final = 128

#: ... unless they have so many floating point operations, for each that is allowed to be pending.
_MIN_WORK: Final = 1e-2

#: What may be pending in floating point operations: a fraction of a second, on most devices.
_MAX_WORK: Final = {"cpu": 1e10}
_MAX_WORK_ELSEWHERE: Final = 1e12

#: What repeats must do so over so many operations, or a quarter of those pending; twice at least.
_MIN_RUN: Final = 256

#: A read leaves no more than this pending, where steps are automatic.
_MAX_LEFT: Final = 32

#: An operation that would be a program of its own is one where it was compiled in so many others.
_MAX_WITHIN: Final = 2

#: How far back repetitions are looked for, in operations; and how many are known again.
_MAX_HISTORY: Final = 1 << 15
_MAX_ENDS: Final = 256

#: After so many cuts around operations of JAX's own that stand alone, an iteration becomes one
#: program: by then, running it in pieces has cost about what XLA takes to compile it whole.
_JOIN_AFTER: Final = 1024

#: How many more cuts are looked at to find the iteration.
_JOIN_LOOK: Final = 128

#: With more programs than these, what was joined does not repeat, and is cut as before.
_MAX_JOINED: Final = 8

#: What has so often come in a row before anything was cut is one program from the start.
_MIN_ITERATIONS: Final = 4

#: A loop of so many iterations is not compiled whole, for which XLA may take a time that grows with
#: the square of its length. Each time so many more equations are pending, one is looked for.
_MIN_LOOP: Final = 16
_LOOP_LOOK: Final = 256

#: Where so many programs that had to be compiled differed from known ones by what an operation does
#: that is new (a static index, an exponent), that runs by itself from there on, as in eager JAX. It
#: is new work for XLA in any case, but so is what stands around it in one program; that must have
#: so many times the equations for it to pay.
_MAX_DIFFERENT: Final = 2
_MIN_SHARE: Final = 3

#: A line that has taken so many slices of one shape, or others in an earlier program, takes them by
#: indices that are operands: nothing runs by itself, so this costs nothing.
_MAX_SLICES: Final = 4

#: A thread that marks steps may have so much more than its largest step pending, and this at least.
#: Before its first step, it may have so much more pending than between automatic steps.
#: Before one that it is expected to mark, it may have more.
_MARKED_STEPS: Final = 4
_MIN_MARKED: Final = 10_000
_MAX_FIRST: Final = 40_000

#: Code that uses one of these names is expected to mark steps, PyTorch/XLA's names included; of the
#: second row, only where it is a name of ours.
_MARK_STEPS: Final = frozenset({"mark_step", "MpDeviceLoader"})
_MAY_MARK_STEPS: Final = frozenset({"optimizer_step", "sync"})

#: How an operation runs that is another one each time.
APART: Final = "static"
BY_INDICES: Final = "indices"

#: Why what is pending runs before an array that it takes is donated or deleted.
GIVEN_AWAY: Final = "donation"

#: The causes of automatic cuts, as they are counted under ``cut::CAUSE``.
ALONE: Final = "own_program"
REPEATS: Final = "repeats"
SIZE: Final = "graph_size"
BYTES: Final = "graph_bytes"
WORK: Final = "graph_work"
CAUSES: Final = frozenset({ALONE, REPEATS, SIZE, BYTES, WORK})


class Pacer:
    """Cuts the recordings of one thread where the thread does not.

    Attributes:
        is_on: Whether steps are automatic: the thread seems to mark none, or has not for long.
        has_marked: Whether a point of the thread's paths may be marked.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.has_marked = False
        self._has_stepped = False
        self._is_expected = False
        # The last symbols of iterations, by the last one, with how long an iteration is.
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}
        self._history: list[int] = []
        self._wait_until = 0
        self._largest = 0
        self._so_far = 0
        # Operations that would stand alone, but belong to an iteration that is one program; those
        # that had been compiled alone before; and how many programs have been made with them.
        self._joined: set[tuple[Any, Any]] = set()
        self._compiled_alone: set[tuple[Any, Any]] = set()
        self._programs_joined = 0
        self._begins_anew = False
        # How many programs hold an operation that would stand alone if steps were automatic.
        self._within: Counter[tuple[Any, Any]] = Counter()
        # Cuts around operations that stand alone, when to look at them, and what was seen of each.
        self._alone = 0
        self._join_after = _JOIN_AFTER
        self._cuts: list[tuple[list[Point], int]] = []
        # What is another operation again and again: where, and in how many programs; slices by what
        # they result in; and how those run. Symbols that are not known are new to this recording.
        self._different: Counter[_Variable] = Counter()
        self._varying: set[_Variable] = set()
        self._slices: dict[_Slices, set[int]] = {}
        self._apart: dict[int, str] = {}
        self._known: set[int] = set()

    def look(self, point: Point) -> None:
        """Mark ``point``, which has just been made, if a recording is to be cut after it."""
        limits = _limits()
        if not limits.automatic:
            cause = SIZE if limits.graph and point.weight >= limits.graph else None
        elif self.is_on:
            cause = self._cause_to_cut(point)
        else:
            cause = self._cause_to_begin(point)
        if cause is not None:
            point.stop = cause
            self.has_marked = True

    @property
    def cuts_for_calls(self) -> bool:
        """Whether a call may be a program of its own: until the thread marks its first step."""
        return self.is_on or not self._has_stepped

    def stands_alone(self, primitive: Any, params: Mapping[str, Any]) -> bool:
        """Return whether an operation is compiled by itself, so once, whatever stands around it.

        Of a thread that may yet mark steps, only calls of the user's own are.
        """
        if not self.cuts_for_calls:  # first: it is asked for each operation that JAX binds
            return False
        is_of_user = jaxapi.is_call_of_users_jit(primitive, params)
        if not (is_of_user or self.is_on):
            return False
        least = MIN_CALL if is_of_user else MIN_ALONE
        return (
            jaxapi.equations_within(primitive, params) >= least
            and _identity(primitive, params) not in self._joined
        )

    def apart(
        self, evaluation: Evaluation, primitive: Any, params: Mapping[str, Any]
    ) -> str | None:
        """Return how an operation runs that is another one each time its line runs.

        Returns:
            `APART`, `BY_INDICES`, or ``None`` where it is part of the graph as any other.
        """
        if evaluation.effects:  # they keep their order
            return None
        symbol = evaluation.symbol
        # Under explicit axes, more must agree than the indices.
        has_indices = (
            evaluation.runs_anywhere
            and jaxapi.with_indices_as_operands(primitive, params) is not None
        )
        may_be_apart = bool(self._varying) and self.cuts_for_calls and is_asked_for()
        if not (has_indices or may_be_apart):
            return None
        if symbol in self._apart or symbol in self._known:
            how = self._apart.get(symbol)
            return how if how == BY_INDICES or may_be_apart else None
        variable = _variable(primitive, params, jaxapi.source_info())
        if (
            may_be_apart
            and variable in self._varying
            and not self.stands_alone(primitive, params)
            and not self.is_expected_to_mark()
        ):
            self._apart[symbol] = APART
            return APART
        if has_indices and self._varies_in_indices((variable, evaluation.results), symbol):
            return BY_INDICES
        return None

    def _varies_in_indices(self, slices: _Slices, symbol: int) -> bool:
        """Take note of a slice; return whether its line takes others of that shape, too.

        What a program begins with as it is stays so: an unrolled network takes the same again.
        """
        symbols = self._slices.setdefault(slices, set())
        if not symbols.isdisjoint(self._known):
            self._apart.update(dict.fromkeys((*symbols, symbol), BY_INDICES))
            return True
        if len(symbols) < _MAX_SLICES or symbol in symbols:
            symbols.add(symbol)
            return False
        self._apart[symbol] = BY_INDICES
        return True

    def _note_different(self, path: Sequence[Point]) -> None:
        """Take note of what of a program, which has to be compiled, is new."""
        new = [point for point in path if point.symbol not in self._known and not point.effects]
        self._known.update([point.symbol for point in path])
        if _is_small_share(new, path):
            different = {_variable(point.primitive, point.params, point.source) for point in new}
            self._different.update(different)
            self._varying |= {v for v in different if self._different[v] >= _MAX_DIFFERENT}

    def _part_from_loop(self, path: Sequence[Point], iterations: int, least: int) -> bool:
        """Find a loop of which some operations differ in each iteration; say whether there is one.

        They run apart from here on.
        """
        numbers: dict[Any, int] = {}
        names = [(point.primitive, point.params.get("name")) for point in path]
        kinds = [numbers.setdefault(name, len(numbers)) for name in names]
        period = _period(kinds, least)
        if not (period and _repeats(kinds, period, max(iterations, _MIN_ITERATIONS))):
            return False
        iterations = 1 + _run_of(kinds, period) // period
        last = path[-iterations * period :]
        rounds = [last[place::period] for place in range(period)]
        varying = [
            points
            for points in rounds
            if not points[-1].effects and len({p.symbol for p in points}) > iterations // 2
        ]
        new = [points[-1] for points in varying]
        if not _is_small_share(new, path[-period:]):
            return False
        self._varying |= {_variable(point.primitive, point.params, point.source) for point in new}
        fixed = {points[-1].symbol for points in rounds} - {point.symbol for point in new}
        self._apart |= {
            point.symbol: APART
            for points in varying
            for point in points
            if point.symbol not in fixed  # as `x ** 2` elsewhere, of `x ** i`
        }
        return True

    def begins(self, cause: str, point: Point, alive: int) -> bool:
        """Take note that a cut is due; return whether the thread's paths are to begin anew.

        They are when steps become automatic, and where an iteration is cut changes.

        Args:
            cause: Why the cut is due.
            point: How far the recording has come.
            alive: How many arrays of the recording the user holds.
        """
        if self.is_on:
            anew, self._begins_anew = self._begins_anew, False
            return anew or (cause == ALONE and self._joins(point, alive))
        if cause == ALONE and not self._has_stepped:
            return False
        self.is_on = True
        return True

    def _joins(self, point: Point, alive: int) -> bool:
        """Take note of a cut around what stands alone; return whether it no longer does."""
        self._alone += 1
        if self._alone <= self._join_after:
            return False
        self._cuts.append((point.operations(), alive))
        if len(self._cuts) < _JOIN_LOOK:
            return False
        cuts, self._cuts = self._cuts, []
        self._alone, self._join_after = 0, 2 * self._join_after
        symbols = [point.symbol for path, _ in cuts for point in path]
        period = _period(symbols, len(symbols) // 2)
        iteration: list[Point] = []
        ends: list[tuple[int, int]] = []
        for path, alive in reversed(cuts):
            if len(iteration) < period:
                ends.append((alive, len(iteration)))
                iteration += path
        joined = self._join(iteration)
        if not joined:
            return False
        self._compiled_alone |= joined
        for point in iteration:  # where its pieces were cut
            self._ends.pop(point.symbol, None)
        _, back = min(ends)
        self._remember_end(symbols, period, back)
        return True

    def _join(self, iteration: Sequence[Point]) -> set[tuple[Any, Any]]:
        """Let an iteration be one program; return those of its operations that stood alone."""
        joined = _large_operations(iteration) - self._joined
        if sum(point.evaluation.weight for point in iteration) > _limits().automatic:
            return set()
        self._joined |= joined
        self._programs_joined = 0
        return joined

    def _cause_to_begin(self, point: Point) -> str | None:
        """Return why to cut after ``point`` though the thread may yet mark a step."""
        if self._has_stepped:
            limit = max(_MIN_MARKED, _MARKED_STEPS * self._largest)
            return SIZE if point.weight >= min(_limits().graph or limit, limit) else None
        if self.stands_alone(point.primitive, point.params):
            return ALONE
        if point.depth < self._wait_until:
            return REPEATS if self._ends_repetition(point) else None
        cause = _exceeded(point, _MARKED_STEPS)
        assert point.before is not None
        if cause is None and point.weight // _LOOP_LOOK == point.before.weight // _LOOP_LOOK:
            return None
        is_small = point.weight < min(_limits().graph or _MAX_FIRST, _MAX_FIRST)
        if is_small and self.is_expected_to_mark():
            return None  # the next steps will not be cut either, and are to find its program
        iterations = _MIN_LOOP if cause is None else 2
        return None if self._find_repetition(point, iterations) else cause

    def begins_at_read(self, point: Point) -> str | None:
        """Return why steps become automatic at a read, as of every tenth loss; else ``None``.

        Fewer iterations are pending there than where nothing is read, but most of it is a loop; or
        it is one more program with an operation that would be compiled once if it stood alone.
        """
        if self.is_on or self._has_stepped or point.weight < MIN_ALONE:
            return None
        if not is_asked_for() or self.is_expected_to_mark():
            return None
        path = point.operations()
        least = 3 * len(path) // 4
        if point.weight >= _LOOP_LOOK and self._find_repetition(point, _MIN_ITERATIONS, least):
            return REPEATS
        if all(self._within[operation] < _MAX_WITHIN for operation in _large_operations(path)):
            return None
        self.is_on = self._begins_anew = True
        return ALONE

    def may_fall_back(self) -> bool:
        """Return whether the thread may run eagerly for a while: until it marks its first step."""
        limits = _limits()
        return limits.may_fall_back and bool(limits.automatic) and not self._has_stepped

    def is_expected_to_mark(self) -> bool:
        """Return whether the thread is expected to mark steps; once it is, it stays so."""
        if not self._is_expected:
            self._is_expected = jaxapi.user_code_names(_MARK_STEPS, _MAY_MARK_STEPS)
        return self._is_expected

    def _cause_to_cut(self, point: Point) -> str | None:
        if self.stands_alone(point.primitive, point.params):
            return ALONE
        if self._ends_repetition(point) and (
            _is_worth_running(point, point.weight, point.work) or self._begins_loop(point)
        ):
            return REPEATS
        limit = _limits().automatic
        assert point.before is not None
        if point.before.weight < limit // 2 <= point.weight:
            self._find_repetition(point)  # early: what is short is cut before much is pending
        cause = _exceeded(point)
        if cause is None or point.depth < self._wait_until:
            return None
        return None if self._find_repetition(point) else cause

    def ends_of(self, path: Sequence[Point]) -> list[int]:
        """Return where ``path`` is cut into programs: the depths after which one ends.

        They are found from its end on, which is where the cuts to come end, too: so what is left
        over, as half of what becomes a program, stands at its beginning.
        """
        limit = _limits().automatic
        places = [len(path)]
        for place in range(len(path) - 1, 0, -1):
            point, end = path[place - 1], path[places[-1] - 1]
            weight = end.weight - point.weight
            if weight >= limit or (
                self._ends_repetition(point)
                and _is_worth_running(point, weight, end.work - point.work)
            ):
                places.append(place)
        places = [*self._end_before_loop(path, places[:-3:-1]), *places[:0:-1]]
        alone = [
            self._apart.get(point.symbol) == APART
            or self.stands_alone(point.primitive, point.params)
            for point in path
        ]
        return sorted(_around(path, alone) | {path[place - 1].depth for place in places})

    def _end_before_loop(self, path: Sequence[Point], places: Sequence[int]) -> list[int]:
        """Return where what precedes a loop ends, which is no part of its first iteration.

        Args:
            path: Of which the loop is part.
            places: Where its first two programs end. The second is of the loop.
        """
        if len(places) < 2:
            return []
        first, second = places
        shared = 0
        while shared < min(first, second - first) and (
            path[first - 1 - shared].symbol == path[second - 1 - shared].symbol
        ):
            shared += 1
        if shared == first:
            return []
        ends = (n for n in range(shared, 0, -1) if self._ends_repetition(path[second - 1 - n]))
        return [first - n for n in ends][:1]

    def ends_of_pieces(self, path: Sequence[Point]) -> list[int]:
        """Return where ``path`` was cut before its iteration became one program, as `ends_of`."""
        pieces = self._joined & self._compiled_alone
        joined = [_identity(point.primitive, point.params) in pieces for point in path]
        return sorted(_around(path, joined))

    def runs_all(self, left: int, is_carried: bool) -> bool:
        """Return whether a read runs all that is pending, and not only what it needs."""
        if not is_asked_for():
            return False
        if self.is_on:
            return left > (0 if is_carried else _MAX_LEFT)
        if self._has_stepped or left <= MIN_STEP:
            return False
        return is_carried or not self.is_expected_to_mark()

    def was_cut(self, cause: str, path: Sequence[Point] | None, weight: int) -> None:
        """Take note of a cut.

        Args:
            cause: Why.
            path: The operations that were pending, of which no cut was known yet; ``None`` where it
                had been cut so before.
            weight: How many equations were pending.
        """
        self._so_far += weight
        if cause == APART:
            return
        self._wait_until = 0
        if path is not None:
            self._note_different(path)
            if not (self.is_on or self._has_stepped):
                self._within.update(_large_operations(path))
        if path is not None and self._joined:
            self._programs_joined += any(
                _identity(point.primitive, point.params) in self._joined for point in path
            )
            if self._programs_joined > _MAX_JOINED:
                self._joined.clear()
                self._join_after *= 8
                self._begins_anew = True
        if path is None or cause not in (SIZE, WORK, BYTES):
            self._history.clear()
        else:
            self._history += [point.symbol for point in path if point.symbol not in self._apart]
            del self._history[:-_MAX_HISTORY]

    def step_marked(self) -> bool:
        """Take note that the thread marks steps; say whether its paths are to begin anew."""
        self._largest = max(self._largest, self._so_far)
        self._so_far = 0
        self._has_stepped = True
        self.is_on = False
        self._joined.clear()
        self._alone = 0
        marked, self.has_marked = self.has_marked, False
        return marked

    def _ends_repetition(self, point: Point) -> bool:
        return self._period_ending(point) > 0

    def _period_ending(self, point: Point) -> int:
        """Return how long an iteration is that ends with ``point``; 0 where none does."""
        ends = self._ends.get(point.symbol, {})
        return max((n for end, n in ends.items() if self._ends_with(point, end)), default=0)

    def _begins_loop(self, point: Point) -> bool:
        """Return whether the iteration that ends with ``point`` comes after something else.

        There a loop within another is cut each time, so that its programs are always the same.
        """
        *before, _ = point.operations()
        own = takewhile(lambda at: not self._ends_repetition(at), reversed(before))
        length = 1 + sum(at.symbol not in self._apart for at in own)
        return length > self._period_ending(point)

    def _ends_with(self, point: Point, symbols: tuple[int, ...]) -> bool:
        """Return whether the last operations are those of ``symbols``, the last one first."""
        at: Point | None = point
        for symbol in symbols:
            while at is not None and (at.wires is None or at.symbol in self._apart):
                at = at.before
            if at is None or at.symbol != symbol:
                return False
            at = at.before
        return True

    def _find_repetition(self, point: Point, iterations: int = 2, least: int = 0) -> bool:
        """Look whether what was recorded last repeats; say whether it will soon end once more.

        Args:
            point: What was recorded last.
            iterations: How often it must have come in a row.
            least: Over how many operations it must repeat; 0 for as many as anywhere.
        """
        path = [
            operation for operation in point.operations() if operation.symbol not in self._apart
        ]
        symbols = self._history + [at.symbol for at in path]
        least = least or min(_MIN_RUN, len(path) // 4)
        period = _period(symbols, least)
        if not (period and _repeats(symbols, period, iterations)):
            is_parted = self._part_from_loop(path, iterations, least)
            return is_parted and self._find_repetition(point, iterations)
        if 2 * period <= len(path):
            back = _narrowest(path, period)
            is_near = True
            if not self.is_on and _repeats(symbols, period, _MIN_ITERATIONS):
                self._join(path[-period:])
        else:  # nearly all of what is pending is one round: any place of it is as good
            back, is_near = 0, False
        self._remember_end(symbols, period, back)
        if is_near:
            self._wait_until = point.depth + period + 1
        return is_near

    def _remember_end(self, symbols: Sequence[int], period: int, back: int) -> None:
        """Cut from here on where what repeats ends, ``back`` operations before the last one."""
        end = _telling_end(symbols[: len(symbols) - back][-period:])
        ends = self._ends.setdefault(end[0], {})
        if end not in ends and len(self._ends) > _MAX_ENDS:
            self._ends = {end[0]: ends}
        ends[end] = period


def _large_operations(path: Sequence[Point]) -> set[tuple[Any, Any]]:
    """Return the operations that stand alone where steps are automatic, but calls of the user's."""
    return {
        _identity(point.primitive, point.params)
        for point in path
        if jaxapi.equations_within(point.primitive, point.params) >= MIN_ALONE
        and not jaxapi.is_call_of_users_jit(point.primitive, point.params)
    }


def _around(path: Sequence[Point], alone: Sequence[bool]) -> set[int]:
    """Return the depths before and after the operations of a path that are ``alone``."""
    depths = [point.depth for point, is_alone in zip(path, alone, strict=True) if is_alone]
    return {*depths, *(depth - 1 for depth in depths)}


#: Where an operation stands that may be another each time: the line, and its name.
_Variable = tuple[Any, Any, Any]

#: Slices of a line, with the abstract values of what they result in.
_Slices = tuple[_Variable, tuple[Any, ...]]


def _variable(primitive: Any, params: Mapping[str, Any], source: Any) -> _Variable:
    place = jaxapi.users_place(jaxapi.frames_of_operation(source))
    return place, primitive, params.get("name")


def _is_small_share(new: Sequence[Point], path: Sequence[Point]) -> bool:
    weight = sum(point.evaluation.weight for point in new)
    return 0 < weight * _MIN_SHARE <= sum(point.evaluation.weight for point in path)


def _identity(primitive: Any, params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what an operation that stands alone is known by: its primitive and what it calls."""
    return primitive, params.get("jaxpr")


class _Limits(NamedTuple):
    """What the environment says of pending work."""

    graph: int  # equations of a graph, at most; 0 where there is no limit
    automatic: int  # equations of an automatic step, at most; 0 where there are none
    nbytes: int
    may_fall_back: bool  # whether a thread whose programs keep being new may run eagerly


_texts: Final = settings.Texts(
    "SNAPRT_MAX_GRAPH_SIZE",
    "SNAPRT_AUTO_STEP_SIZE",
    "SNAPRT_AUTO_STEP_BYTES",
    "SNAPRT_AUTO_EAGER",
)
_last: tuple[list[Any], _Limits] | None = None


def _limits() -> _Limits:
    """Return the limits that hold now; they are asked for at each operation that is recorded."""
    global _last
    now = _texts.now()
    last = _last
    if last is None or now != last[0]:
        graph = int(settings.get("SNAPRT_MAX_GRAPH_SIZE"))
        automatic = int(settings.get("SNAPRT_AUTO_STEP_SIZE"))
        limits = _Limits(
            graph,
            min(automatic, graph or automatic),
            int(settings.get("SNAPRT_AUTO_STEP_BYTES")),
            settings.get("SNAPRT_AUTO_EAGER"),
        )
        last = _last = now, limits
    return last[1]


def most_bytes() -> int:
    """Return how many bytes may be pending."""
    return _limits().nbytes


def is_asked_for() -> bool:
    """Return whether steps may be automatic."""
    return bool(_limits().automatic)


def _max_work() -> float:
    return _MAX_WORK.get(jax.default_backend(), _MAX_WORK_ELSEWHERE)


def _exceeded(point: Point, times: int = 1) -> str | None:
    """Return which bound on pending work is exceeded; of bytes there may never be more."""
    limits = _limits()
    if point.weight >= times * limits.automatic:
        return SIZE
    if point.work >= times * _max_work():
        return WORK
    return BYTES if point.nbytes >= limits.nbytes else None


def _is_worth_running(point: Point, weight: int, work: float) -> bool:
    return weight >= min(MIN_STEP, _limits().automatic) or work >= _MIN_WORK * _max_work()


def _matches(symbols: Sequence[int]) -> list[int]:
    """Return for each place how many symbols from there on are those from the first on.

    Source: the Z algorithm, D. Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997.
    """
    size = len(symbols)
    lengths = [0] * size
    left = right = 0
    for place in range(1, size):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < size and symbols[length] == symbols[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths


def _period(symbols: Sequence[int], least: int) -> int:
    """Return after how many symbols the last ones repeat, ``least`` or more; 0 if they do not."""
    matches = _matches(symbols[::-1])
    for period in range(1, len(symbols) // 2 + 1):
        if matches[period] >= period and matches[period] + period >= least:
            return period
    return 0


def _run_of(symbols: Sequence[int], period: int) -> int:
    """Return how many of the last symbols are those ``period`` before them."""
    pairs = zip(reversed(symbols), reversed(symbols[:-period]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _repeats(symbols: Sequence[int], period: int, times: int) -> bool:
    """Return whether the last ``period`` symbols have come so many times in a row."""
    return _run_of(symbols, period) >= (times - 1) * period


def _telling_end(period: Sequence[int]) -> tuple[int, ...]:
    """Return the last symbols of a period, the last one first, that stand nowhere else in it."""
    matches = _matches([*period, *period][::-1])
    most = max((min(matches[place], len(period)) for place in range(1, len(period))), default=0)
    return tuple(period[::-1][: most + 1])


def _narrowest(path: Sequence[Point], period: int) -> int:
    """Return how far back, in operations, the fewest bytes go from one to the next.

    There a loop ends: what its rounds hand on is less than what lies within one.
    """
    last_use: dict[int, int] = {}
    for place, point in enumerate(path):
        for wire in point.wires or ():
            if type(wire) is int and wire >= 0:
                last_use[wire] = place
    changes = [0] * (len(path) + 1)
    for place, point in enumerate(path):
        for result in point.results:
            last_place = last_use.get(result.number, place)
            nbytes = result.aval.size * result.aval.dtype.itemsize
            changes[place] += nbytes
            changes[last_place] -= nbytes
    alive, best = 0, None
    first, end = len(path) - 2 * period, len(path) - period
    for place, change in enumerate(changes[:end]):
        alive += change
        if place >= first and (best is None or alive <= best[0]):
            best = alive, place
    assert best is not None
    return len(path) - 1 - best[1] - period
