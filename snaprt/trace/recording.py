"""What one thread has recorded since its last cut: a walk along a path, and the values on the way.

The operations themselves stand at the points of the path; here are the arrays and scalars that they
work on, and which lazy arrays are still alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from snaprt import jaxapi, metrics
from snaprt.graph.program import Literal
from snaprt.host.identities import identity
from snaprt.trace.trie import (
    InputKind,
    Point,
    Result,
    input_kind,
    literal_wires,
    met_kind,
    step_key,
)

#: Work that nothing needs any more is dropped when the inputs hold this many bytes more.
PRUNE_BYTES = 1 << 28


# The list of the recording's inputs, and the argument of getrefcount.
HELD_BY_THE_RECORDING = 2


class DataHandle:
    """Stands for a value that an execution computed, while a lazy array or a recording holds it.

    Attributes:
        exposed: Whether the value was handed out, so that its memory is not ours to give away.
    """

    __slots__ = ("_index", "_kinds", "exposed")

    def __init__(self, kinds: list[InputKind | None], index: int) -> None:
        self.exposed = False
        self._kinds = kinds
        self._index = index

    def kind(self, value: jax.Array) -> InputKind:
        """Return the kind of the value, which is the same at each run of one program."""
        kind = self._kinds[self._index]
        if kind is None:
            kind = self._kinds[self._index] = input_kind(value)
        return kind

    __del__ = metrics.FinalizerCounter("DestroyDataHandles").add


class CallInputs:
    """The inputs that a call of a jitted function of the user's has taken so far, each once.

    It may be given one array twice, as parameters and their average before the first step, and two
    arrays the next time. So it takes two inputs from the start, as under JAX.

    Attributes:
        has_repeated: Whether it was given an array once more.
    """

    __slots__ = ("_first", "_others", "_used", "has_repeated")

    def __init__(self, recording: Recording) -> None:
        self._first = ~len(recording.inputs)  # the first wire that is new
        self._others = recording.others
        self._used: set[int] = set()  # of those that are not
        self.has_repeated = False

    def wire(self, value: jax.Array, wire: int) -> int | None:
        """Return ``wire``, or another one of an input, which the call has not used; else None."""
        for other in (wire, *self._others.get(identity(value), ())):
            if other > self._first and other not in self._used:
                self._used.add(other)
                return other
            self.has_repeated = True
        return None


class Recording:
    """Where a thread stands on its path, with the inputs and literals met on the way.

    Attributes:
        inputs: The arrays it reads.
        handles: For each of them its handle, ``None`` for what no lazy array computed.
        input_wires: By ``id`` of an input, the wire that stands for it.
        others: By ``id`` of an input, more wires that do: see `CallInputs`.
        arrays: Every lazy array that was handed out and may be alive.
        hidden: Results that were handed out together, of which there are no arrays yet.
        nbytes: What the inputs hold.
        prune_at: How much they may hold before dead work is looked for.
        is_carried: Whether some of it was left pending at an earlier cut.
    """

    __slots__ = (
        *("arrays", "handles", "input_wires", "inputs", "literals", "nbytes", "point", "prune_at"),
        *("hidden", "is_carried", "others"),
    )

    def __init__(self, root: Point) -> None:
        self.point = root
        self.inputs: list[jax.Array] = []
        self.handles: list[DataHandle | None] = []
        self.input_wires: dict[int, int] = {}
        self.others: dict[int, list[int]] = {}
        self.literals: list[Literal] = []
        self.arrays: list[weakref.ref[Any]] = []
        self.hidden: list[weakref.ref[Any]] = []
        self.nbytes = 0
        self.prune_at = PRUNE_BYTES
        self.is_carried = False

    def input_wire(
        self, value: jax.Array, handle: DataHandle | None, call: CallInputs | None = None
    ) -> int:
        """Return the wire of an input, which goes on to another point if it is new.

        Args:
            value: The input.
            handle: Its handle.
            call: What the call has used that takes it; None for what is no such call.

        Raises:
            RuntimeError: If it is new and was deleted.
        """
        wire = self.input_wires.get(identity(value))
        if wire is not None and call is not None:
            wire = call.wire(value, wire)
        if wire is None:
            jaxapi.refuse_deleted(value)
            kind = met_kind(value) if handle is None else handle.kind(value)
            self.point = self.point.with_input(kind)
            wire = self.add_input(value, handle)
            self.nbytes += kind.nbytes
        return wire

    def add_input(self, value: jax.Array, handle: DataHandle | None) -> int:
        """Add an input, of whose kind the point is to be told; return its wire."""
        wire = ~len(self.inputs)
        if self.input_wires.setdefault(identity(value), wire) != wire:
            self.others.setdefault(identity(value), []).append(wire)
        self.inputs.append(value)
        self.handles.append(handle)
        return wire

    def go_back(self, point: Point, nbytes: int) -> None:
        """Go back to a point after which only inputs were met, when they held ``nbytes``."""
        for index in range(point.inputs, len(self.inputs)):
            key = identity(self.inputs[index])
            if self.input_wires.get(key) == ~index:
                del self.input_wires[key]
            else:
                self.others[key].remove(~index)
        del self.inputs[point.inputs :], self.handles[point.inputs :]
        self.point = point
        self.nbytes = nbytes

    def go_on(self, kinds: Sequence[InputKind]) -> None:
        """Go on to the point after new inputs of these kinds, which the caller has added."""
        if len(kinds) == 1:
            self.point = self.point.with_input(kinds[0])
            self.nbytes += kinds[0].nbytes
        else:
            self.point, nbytes = self.point.with_inputs(tuple(kinds))
            self.nbytes += nbytes

    def bytes_held_alone(self) -> int:
        """Return what the inputs hold that nothing else refers to, in bytes."""
        inputs = self.inputs
        return sum(
            inputs[index].nbytes
            for index in range(len(inputs))
            if sys.getrefcount(inputs[index]) == HELD_BY_THE_RECORDING
        )

    def live_arrays(self) -> list[Any]:
        """Return the lazy arrays that the user still holds and that have no value yet."""
        if self.hidden:
            for reference in self.hidden:
                results = reference()
                if results is not None:
                    results.arrays()
            self.hidden = []
        alive = [
            array
            for reference in self.arrays
            if (array := reference()) is not None and array._recording is self
        ]
        if len(alive) != len(self.arrays):
            self.arrays = [weakref.ref(array) for array in alive]
        return alive


def needed(path: list[Point], result_numbers: set[int], effects: bool) -> list[Point]:
    """Return the operations of ``path`` that the results of these numbers need, in order."""
    result_numbers = set(result_numbers)
    points = []
    for point in reversed(path):
        if (effects and point.effects) or any(r.number in result_numbers for r in point.results):
            points.append(point)
            assert point.wires is not None
            result_numbers.update([wire for wire in point.wires if type(wire) is int and wire >= 0])
    points.reverse()
    return points


def is_mostly_dead(recording: Recording) -> bool:
    """Return whether nothing needs the larger part of what was recorded any more."""
    alive = {array._result.number for array in recording.live_arrays()}
    path = recording.point.operations()
    return 2 * len(needed(path, alive, effects=True)) < len(path)


def carry_over(
    old: Recording,
    root: Point,
    done: set[Point],
    values: Mapping[int, tuple[jax.Array, DataHandle]],
    failed: Mapping[int, BaseException],
) -> Recording:
    """Record anew what is still to be done of ``old``, and move its live arrays over.

    Args:
        old: The recording, of which a part was run or is dead.
        root: Where the new one begins.
        done: The operations that were run.
        values: What they computed, by the number of the result.
        failed: The results that will never be there, and why; what needs them fails as well.
    """
    new = Recording(root)
    alive = old.live_arrays()
    failed = dict(failed)
    path = [point for point in old.point.operations() if point not in done]
    new_results: dict[int, Result] = {}
    for point in needed(path, {array._result.number for array in alive}, effects=True):
        wires, literals = [], []
        error = None
        for wire, literal in literal_wires(point):
            if literal >= 0:
                literals.append(old.literals[literal])
            elif wire < 0:
                wire = new.input_wire(old.inputs[~wire], old.handles[~wire])
            elif wire in failed:
                error = failed[wire]
            elif wire in new_results:
                wire = new_results[wire].number
            else:
                wire = new.input_wire(*values[wire])
            wires.append(wire)
        if error is not None:
            failed.update({result.number: error for result in point.results})
            continue
        key = step_key(point.operation, tuple(wires), point.context_number, point.place)
        new.point = new.point.after.get(key) or new.point.with_operation(
            point.operation,
            point.primitive,
            point.params,
            point.context,
            point.context_number,
            tuple(wires),
            point.evaluation,
            point.placement,
            point.source,
            point.place,
        )
        new.literals.extend(literals)
        pairs = zip(point.results, new.point.results, strict=True)
        new_results.update({before.number: after for before, after in pairs})
    for array in alive:
        number = array._result.number
        if number in failed:
            array.fail(failed[number])
        else:
            array._recording, array._result = new, new_results[number]
            new.arrays.append(weakref.ref(array))
    new.prune_at = max(PRUNE_BYTES, 2 * new.nbytes)
    new.is_carried = new.point.depth > 0
    return new
