"""What threads have recorded, as a tree of points that recordings walk.

A recording begins at the root, and each operation leads to a point. A program that does what it did
in its last step walks the same points again, and so pays for comparisons alone: everything that is
known of an operation, and of the program that was cut out at its end, stays with the points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax

from snaprt import jaxapi
from snaprt.graph.operation import Evaluation, Operation
from snaprt.graph.program import Literal, Placement
from snaprt.host.identities import identity
from snaprt.trace.lone_calls import LoneCall

#: A path is looked at each time it has grown by this many operations: see `LazyTrace`.
GRANULARITY = 1024

#: How many shortcuts one point keeps. Calls that record nothing, such as `astype` to the type that
#: an array has, lead to where they began: a step may make one for each of its parameters.
MAX_SHORTCUTS = 4096

#: How many plans one point keeps.
MAX_PLANS = 64

#: How many arrays from outside are known again.
MAX_MET = 4096


class InputKind:
    """What a program depends on in an input beside its values; one object for each kind."""

    __slots__ = ("aval", "committed", "nbytes", "sharding")

    def __init__(self, aval: Any, sharding: Any, committed: bool) -> None:
        self.aval = aval
        self.sharding = sharding
        self.committed = committed
        self.nbytes = aval.size * aval.dtype.itemsize


_kinds: dict[Any, InputKind] = {}


def input_kind(array: jax.Array) -> InputKind:
    """Return the kind of ``array``."""
    description = jaxapi.describe_input(array)
    kind = _kinds.get(description)
    if kind is None:
        kind = _kinds.setdefault(description, InputKind(*description))
    return kind


_met: dict[int, tuple[weakref.ref[jax.Array], InputKind]] = {}


def met_kind(array: jax.Array) -> InputKind:
    """Return the kind of ``array``, which is looked up where the array was met before.

    For arrays that come from outside: describing one takes 4 us.
    """
    entry = _met.get(identity(array))
    if entry is not None and entry[0]() is array:
        return entry[1]
    kind = input_kind(array)
    if type(array) is jaxapi.ArrayImpl:
        if len(_met) >= MAX_MET:
            _met.clear()
        _met[identity(array)] = weakref.ref(array), kind
    return kind


class Result:
    """One result of a recorded operation.

    Attributes:
        number: Counts the results from the root on.
        index: Which of its results it is.
    """

    __slots__ = ("aval", "index", "number", "point")

    def __init__(self, aval: Any, number: int, point: Point, index: int) -> None:
        self.aval = aval
        self.number = number
        self.point = point
        self.index = index

    def known_sharding(self) -> jax.sharding.Sharding | None:
        """Return how it lies, or ``None`` where only the compiler knows."""
        named = self.point.operation.named.results
        if named and named[self.index] is not None:
            return named[self.index]
        if not jaxapi.is_in_default_memory(self.aval):
            return None
        placement = self.point.placement
        return placement.sharding or jaxapi.sharding_of_type(self.aval, placement.devices)


def step_key(
    operation: Operation, wires: tuple[Any, ...], context_number: int, place: Any
) -> tuple[Any, ...]:
    """Return what leads from a point to the one after an operation."""
    key = (operation, wires, context_number)
    return key if place is None else (*key, place)


class Shortcut:
    """Where a call of a function leads from a point, and what it returns.

    Attributes:
        target: The point after the call.
        results: What becomes a lazy array, or the number of the operand that is returned itself.
        hidden: Likewise, what is handed out together as `fast_path.Hidden`, if anything is.
        makes_many: Whether it returns many arrays, no operand itself among them.
        build: Makes the value of the call out of those; ``None`` if it is the only one.
    """

    __slots__ = ("build", "hidden", "literals", "makes_many", "results", "target")

    def __init__(
        self,
        target: Point,
        literals: tuple[Literal, ...],
        results: tuple[Result | int, ...],
        build: Callable[[Any], Any] | None,
        hidden: tuple[Result | int, ...] = (),
    ) -> None:
        self.target = target
        self.hidden = hidden
        self.literals = literals
        self.results = results
        self.makes_many = len(results) > 3 and all(type(result) is Result for result in results)
        self.build = build


class Point:
    """How far a recording has come: its last operation, or the input that it met last.

    ``wires`` says where each operand comes from: ``n`` is the result of that number, ``~n`` the
    input of that number, and an abstract value the next of the literals.

    Attributes:
        before: The point before it; ``None`` at the root.
        depth: How many operations lie on the way from the root.
        inputs: How many inputs do.
        literals: How many literals do.
        count: How many results do.
        effectful: How many operations with effects do.
        weight: How many equations do, those inside of jitted functions and loops counted.
        work: How many floating point operations do, estimated.
        nbytes: How many bytes the results of these operations have.
        symbol: Stands for the operation with the shapes of its operands and results.
        evaluation: What is known of it on operands of these shapes.
        stop: Why a recording that goes on from here is to be cut first; mostly ``None``.
        alone: The calls, by the keys of `snaprt.trace.fast_path`, that cut a recording and begin a
            new one; mostly ``None``.
        lone: What is known of the operation as a call of a small jitted function; mostly ``None``.
        latest: The point that a recording went on to last time.
        after: The points that recordings have gone on to.
        after_inputs: Those that they have gone on to by many inputs at once, and the bytes.
        shortcuts: Where whole calls lead.
        plans: What was run where a recording was cut here.
        steps: The numbers of the results that were alive where an automatic step ended after this
            operation.
    """

    __slots__ = (
        *("before", "depth", "inputs", "literals", "count", "effectful"),
        *("weight", "work", "nbytes", "symbol", "stop", "alone", "lone"),
        *("latest", "after", "after_inputs", "shortcuts", "plans", "steps"),
        *("operation", "primitive", "params", "context", "context_number"),
        *("source", "place", "wires", "results", "placement", "effects", "evaluation"),
    )

    after_inputs: dict[tuple[InputKind, ...], tuple[Point, int]]
    shortcuts: dict[Any, Shortcut]
    plans: dict[Any, Any]
    steps: dict[tuple[int, ...], None]
    operation: Operation
    primitive: Any
    params: dict[str, Any]
    context: Any
    context_number: int
    source: Any
    place: Any
    wires: tuple[Any, ...] | None
    results: tuple[Result, ...]
    placement: Placement
    effects: Any
    symbol: int
    evaluation: Evaluation

    def __init__(self, before: Point | None) -> None:
        self.before = before
        if before is None:
            self.depth = self.inputs = self.literals = self.count = self.effectful = 0
            self.weight = self.nbytes = 0
            self.work = 0.0
        else:
            self.depth = before.depth
            self.inputs = before.inputs
            self.literals = before.literals
            self.count = before.count
            self.effectful = before.effectful
            self.weight = before.weight
            self.work = before.work
            self.nbytes = before.nbytes
        self.stop: str | None = None
        self.alone: set[Any] | None = None
        self.lone: LoneCall | None = None
        self.wires = None
        self.results = ()
        self.latest: Point | None = None
        self.after: dict[Any, Point] = {}
        self.after_inputs = _NOTHING
        self.shortcuts = _NOTHING
        self.plans = _NOTHING
        self.steps = _NOTHING

    def with_input(self, kind: InputKind) -> Point:
        """Return the point after meeting a new input of ``kind``."""
        point = self.after.get(kind)
        if point is None:
            point = self.after[kind] = Point(self)
            point.inputs += 1
            point.stop = self.stop
        return point

    def with_inputs(self, kinds: tuple[InputKind, ...]) -> tuple[Point, int]:
        """Return the point after meeting new inputs of these kinds, and their bytes."""
        entry = self.after_inputs.get(kinds)
        if entry is None:
            point = self
            for kind in kinds:
                point = point.with_input(kind)
            entry = point, sum(kind.nbytes for kind in kinds)
            self.after_inputs = _with(self.after_inputs, kinds, entry, MAX_SHORTCUTS)
        return entry

    def with_operation(
        self,
        operation: Operation,
        primitive: Any,
        params: dict[str, Any],
        context: Any,
        context_number: int,
        wires: tuple[Any, ...],
        evaluation: Evaluation,
        placement: Placement,
        source: Any,
        place: Any,
    ) -> Point:
        """Return the point after a recorded operation, which is made."""
        point = Point(self)
        self.after[step_key(operation, wires, context_number, place)] = point
        point.operation = operation
        point.primitive = primitive
        point.params = params
        point.context = context
        point.context_number = context_number
        point.wires = wires
        avals = evaluation.results
        point.results = tuple(
            [Result(aval, self.count + index, point, index) for index, aval in enumerate(avals)]
        )
        point.placement = placement
        point.evaluation = evaluation
        point.effects = evaluation.effects
        point.symbol = evaluation.symbol
        point.source = source
        point.place = place
        point.depth += 1
        point.literals += sum([type(wire) is not int for wire in wires])
        point.count += len(avals)
        point.effectful += bool(evaluation.effects)
        point.weight += evaluation.weight
        point.work += evaluation.work
        point.nbytes += evaluation.nbytes
        return point

    def operations(self) -> list[Point]:
        """Return the points of all operations from the root to this one."""
        points = [point for point in self._backwards() if point.wires is not None]
        points.reverse()
        return points

    def _backwards(self) -> Iterator[Point]:
        point: Point | None = self
        while point is not None:
            yield point
            point = point.before

    def keep_shortcut(self, key: Any, shortcut: Shortcut) -> None:
        """Remember where the call that ``key`` stands for leads."""
        self.shortcuts = _with(self.shortcuts, key, shortcut, MAX_SHORTCUTS)

    def keep_plan(self, key: Any, plan: Any) -> None:
        """Remember what to run when a recording is cut here, as ``key`` says."""
        self.plans = _with(self.plans, key, plan, MAX_PLANS)

    def keep_step(self, alive: tuple[int, ...]) -> None:
        """Remember that an automatic step ended here with these results alive."""
        self.steps = _with(self.steps, alive, None, MAX_PLANS)


#: What most points have of what they may keep, so that a point is one dictionary and not four.
_NOTHING: Final[dict[Any, Any]] = {}


def _with(table: dict[Any, Any], key: Any, value: Any, most: int) -> dict[Any, Any]:
    if table is _NOTHING or len(table) >= most:
        return {key: value}
    table[key] = value
    return table


def literal_wires(point: Point) -> Iterator[tuple[Any, int]]:
    """Yield each wire of an operation with the number of its literal, -1 where it is none."""
    assert point.wires is not None
    assert point.before is not None
    number = point.before.literals
    for wire in point.wires:
        if type(wire) is int:
            yield wire, -1
        else:
            yield wire, number
            number += 1
