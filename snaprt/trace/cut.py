"""What a cut runs of a recording: which operations, as which programs, with which results.

It is found once for each place where a path is cut and each set of arrays that are alive there, and
stays with the place.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.graph.program import INPUT, LITERAL, Literal, Placement, Program, Structure
from snaprt.trace.recording import HELD_BY_THE_RECORDING, Recording, needed
from snaprt.trace.trie import InputKind, Point, input_kind, literal_wires

#: Inputs smaller than this are not donated: there is nothing to save.
MIN_DONATED_BYTES = 1 << 14

# Without the interpreter lock, counts of references are estimates.
_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()


@dataclass
class Part:
    """One program of a plan."""

    nodes: tuple[Point, ...]
    wiring: tuple[tuple[tuple[int, int], ...], ...]  # see `snaprt.graph.program.Program`
    # The wire that each input comes from: an input of the recording (``~n``), or the result of that
    # number of an earlier part.
    sources: tuple[int, ...]
    literals: tuple[int, ...]
    numbers: tuple[int, ...]  # the number of the result that each output is
    # Which of the arrays that are alive takes each output; -1 where none does.
    takers: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    placement: Placement
    donatable: tuple[int, ...] = ()  # the inputs that an output could take the memory of
    # Where its operations stand in the source, if its module is to say so for sure.
    places: tuple[Any, ...] = ()
    spent: tuple[int, ...] = ()  # the results of earlier parts that nothing needs after it
    _kinds: dict[int, list[InputKind | None]] = field(default_factory=dict)
    _structure: Structure | None = None
    _primitives: tuple[tuple[str, int], ...] | None = None

    def primitives(self) -> tuple[tuple[str, int], ...]:
        """Return how often each primitive is in it, inside of jitted functions and loops as well.

        Returns:
            Pairs of ``xla::NAME``, the counter's name, and the number.
        """
        if self._primitives is None:
            names = (
                name for n in self.nodes for name in jaxapi.names_within(n.primitive, n.params)
            )
            self._primitives = tuple(Counter(f"xla::{name}" for name in names).items())
        return self._primitives

    @cached_property
    def has_effects(self) -> bool:
        """Whether one of its operations has effects."""
        return any(node.effects for node in self.nodes)

    @cached_property
    def typed_within(self) -> tuple[tuple[int, Any], ...]:
        """The outputs that `snaprt.jaxapi.with_axes_of_type` is for, and their types."""
        mesh = self.placement.mesh
        avals = (self.nodes[position].results[index].aval for position, index in self.outputs)
        return tuple([at for at in enumerate(avals) if jaxapi.is_typed_within(at[1], mesh)])

    def kinds_of(self, executable: int) -> list[InputKind | None]:
        """Return the kinds of the results of that executable, to be filled in as they are learnt.

        What XLA may choose of a result, as its sharding, may differ between two of one program.
        """
        kinds = self._kinds.get(executable)
        if kinds is None:
            kinds = self._kinds[executable] = [None] * len(self.numbers)
        return kinds

    def program(
        self, recording: Recording, results: Mapping[int, tuple[jax.Array, Any]], donate: bool
    ) -> Program:
        """Return the program with the inputs and literals of this time."""
        # Before anything else holds the arrays.
        free = self._free(recording) if donate else ()
        handles, sources = recording.handles, self.sources
        donated = tuple([index for index in free if handles[~sources[index]] is not None])
        arrays = recording.inputs
        inputs = tuple([arrays[~w] if w < 0 else results[w][0] for w in self.sources])
        literals = tuple([recording.literals[number] for number in self.literals])
        return Program(
            nodes=self.nodes,
            wiring=self.wiring,
            inputs=inputs,
            literals=literals,
            outputs=self.outputs,
            placement=self.placement,
            structure=self._structure_for(inputs, literals),
            donated=donated,
            free=free,
            donatable=self.donatable if donate else (),
        )

    def _free(self, recording: Recording) -> tuple[int, ...]:
        """Return the inputs that nothing but ``recording`` holds.

        A lazy array that is alive, another recording, a snapshot being written and whoever else
        has the array are seen as references to it; who may have only its memory got it exposed.
        """
        if not _COUNTS_ARE_EXACT:
            return ()
        inputs, handles, sources = recording.inputs, recording.handles, self.sources
        return tuple(
            [
                index
                for index in self.donatable
                if ((handle := handles[~sources[index]]) is None or not handle.exposed)
                and sys.getrefcount(inputs[~sources[index]]) == HELD_BY_THE_RECORDING
            ]
        )

    def _structure_for(self, inputs: Sequence[jax.Array], literals: Sequence[Literal]) -> Structure:
        if self._structure is not None:
            return self._structure
        structure = Structure(
            (
                tuple([node.operation.signature for node in self.nodes]),
                tuple([literal.aval for literal in literals]),
                self.wiring,
                self.outputs,
                tuple(map(input_kind, inputs)),
                self.placement,
                self.places,
            )
        )
        if all(wire < 0 for wire in self.sources):  # what the path alone determines
            self._structure = structure
        return structure


@dataclass(frozen=True)
class CutPlan:
    """What a cut runs."""

    parts: tuple[Part, ...]
    complete: bool  # whether nothing is left to do afterwards
    left: int = 0  # how many equations are
    in_pieces: bool = False  # whether it runs once: the next cut here is to run another plan

    @cached_property
    def is_all(self) -> bool:
        """Whether all that is pending runs as one program."""
        return self.complete and len(self.parts) == 1

    @cached_property
    def operations(self) -> int:
        """How many operations run."""
        return sum(len(part.nodes) for part in self.parts)

    @cached_property
    def may_donate(self) -> bool:
        """Whether an input could give its memory to an output."""
        return any(part.donatable for part in self.parts)


def plan_cut(
    recording: Recording,
    targets: Iterable[int],
    alive: Sequence[int],
    *,
    effects: bool = True,
    by_operation: bool = False,
    places: bool = False,
    ends: Sequence[int] = (),
) -> CutPlan:
    """Return what to run so that the results of some numbers are there.

    Effects that are pending run as well. What else is kept are results that the user holds, and
    those that pending work will use: without the latter, reading the loss in the middle of a step
    would compute the forward pass twice.

    Args:
        recording: What was recorded.
        targets: The results to compute.
        alive: All results that the user holds.
        effects: Whether effects that are pending run as well.
        by_operation: Whether each operation is a program of its own.
        places: Whether programs differ where their operations stand elsewhere in the source.
        ends: The depths after which a program ends in any case.
    """
    path = recording.point.operations()
    iterated = _handed_out_by_the_last(path, ends, alive) if ends else set()
    nodes = needed(path, iterated.union(targets), effects=effects)
    inside = set(nodes)
    produced = {result.number for node in nodes for result in node.results}
    later = [point for point in path if point not in inside]
    later = needed(later, set(alive) - produced, effects=False)
    output_numbers = produced & set(alive)
    for point in later:
        output_numbers.update([w for w in point.wires or () if type(w) is int and w in produced])
    retained = set(output_numbers)
    output_numbers |= iterated
    split = _split_by_operation if by_operation else _split_by_placement
    takers = {number: taker for taker, number in enumerate(alive)}
    ends = sorted({*ends, *_ends_between_effects(nodes)})
    groups = _split_at(nodes, ends, output_numbers) if ends else [nodes]
    split_groups = [part for group in groups for part in split(group, output_numbers)]
    parts = [_part(part, at, output_numbers, takers, recording) for part, at in split_groups]
    for part in reversed(parts):
        used = {wire for wire in part.sources if wire >= 0}
        part.spent = tuple(used.union(part.numbers) - retained)
        retained |= used
        if places:
            part.places = tuple([node.place for node in part.nodes])
    return CutPlan(
        tuple(parts), complete=not later, left=sum(point.evaluation.weight for point in later)
    )


def _handed_out_by_the_last(
    path: Sequence[Point], ends: Sequence[int], alive: Collection[int]
) -> set[int]:
    """Return what iterations before the last one hand out if they hand out the same.

    The last has results that the user holds, as a loss, of which those before it are dead. One
    program does for all of them, where they all compute it.
    """
    *earlier, last = [list(g) for _, g in groupby(path, lambda p: bisect_left(ends, p.depth))]
    wanted = [
        (place - len(last), result.index)
        for place, point in enumerate(last)
        for result in point.results
        if result.number in alive
    ]
    symbols = [point.symbol for point in last]
    same = [p for p in earlier if [point.symbol for point in p] == symbols[-len(p) :]]
    return {
        points[place].results[index].number
        for points in same
        for place, index in wanted
        if -place <= len(points)
    }


def _ends_between_effects(nodes: Sequence[Point]) -> list[int]:
    """Return the depths after which effects of another kind follow.

    Checked with jaxlib 0.12.0: XLA keeps the order of effects of one kind in a program, but runs
    what `jax.debug.callback` calls before an `io_callback` that precedes it.
    """
    ends: list[int] = []
    latest: set[type] = set()
    for node in nodes:
        if node.effects:
            kinds = {type(effect) for effect in node.effects}
            if latest and kinds != latest:
                ends.append(node.depth - 1)
            latest = kinds
    return ends


def _split_at(
    nodes: Sequence[Point], ends: Sequence[int], output_numbers: set[int]
) -> list[Sequence[Point]]:
    """Return ``nodes`` in groups that end at these depths, and want what one hands to another."""
    grouped = groupby(nodes, lambda node: bisect_left(ends, node.depth))
    groups: list[Sequence[Point]] = [list(group) for _, group in grouped]
    for group in groups:
        own = {result.number for node in group for result in node.results}
        used = {w for node in group for w in node.wires or () if type(w) is int and w >= 0}
        output_numbers |= used - own
    return groups


#: Operations that become one program, and where that runs, in an order in which they can run.
_Split = list[tuple[Sequence[Point], Placement]]


def _split_by_operation(nodes: Sequence[Point], output_numbers: set[int]) -> _Split:
    """Return each of ``nodes`` as a part of its own, and want what hands results from one on."""
    producers = {result.number: node for node in nodes for result in node.results}
    for node in nodes:
        output_numbers.update(_pending_wires(node, producers))
    return [([node], node.placement) for node in nodes]


def _split_by_placement(nodes: Sequence[Point], output_numbers: set[int]) -> _Split:
    """Return ``nodes`` in parts of one placement each, in an order in which they can run.

    Nearly always there is one part. Otherwise committed work on the same devices becomes one, and
    uncommitted work that only committed work uses joins it, as under `jax.jit`; the rest is
    layered, so that a part uses earlier parts alone. Effects keep their order.
    """
    if not nodes:
        return []
    first = nodes[0].placement
    if all(node.placement is first and not node.operation.named.ends_program for node in nodes):
        return [(nodes, first)]
    producers = {result.number: node for node in nodes for result in node.results}
    joined = _joined(nodes)
    placement = {node: joined[node.placement] for node in nodes}
    users: dict[Point, set[Placement]] = {node: set() for node in nodes}
    for node in reversed(nodes):
        uses = users[node]
        is_wanted = any(result.number in output_numbers for result in node.results)
        if not placement[node].committed and not is_wanted and len(uses) == 1:
            (only,) = uses
            if only.x64 == placement[node].x64:
                placement[node] = only
        for wire in _pending_wires(node, producers):
            users[producers[wire]].add(placement[node])
    levels: dict[Point, int] = {}
    parts: dict[tuple[int, int], tuple[list[Point], Placement]] = {}
    latest_effect: list[Point] = []
    for node in nodes:
        own = placement[node]
        before = [(producers[wire], wire) for wire in _pending_wires(node, producers)]
        level = max(
            (
                levels[earlier]
                + (placement[earlier] is not own or earlier.operation.named.ends_program)
                for earlier in [
                    *(producer for producer, _ in before),
                    *(latest_effect if node.effects else ()),
                ]
            ),
            default=0,
        )
        levels[node] = level
        if node.effects:
            latest_effect = [node]
        output_numbers.update(wire for producer, wire in before if levels[producer] != level)
        parts.setdefault((level, id(own)), ([], own))[0].append(node)
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]


def _joined(nodes: Sequence[Point]) -> dict[Placement, Placement]:
    """Return for the placement of each node the one at which it can run just as well.

    What was recorded under no mesh runs under that of the other work on its devices.
    """
    groups: dict[Any, dict[Any, Placement]] = {}
    placements = dict.fromkeys(node.placement for node in nodes)
    for placement in placements:
        groups.setdefault(_group(placement), {}).setdefault(placement.mesh, placement)
    for group in groups.values():
        if len(group) == 2:
            group.pop(None, None)
    return {
        placement: group.get(placement.mesh) or next(iter(group.values()))
        for placement in placements
        for group in (groups[_group(placement)],)
    }


def _group(placement: Placement) -> Any:
    return (placement.devices, placement.x64) if placement.committed else placement


def _pending_wires(node: Point, producers: Mapping[int, Point]) -> list[int]:
    return [w for w in node.wires or () if type(w) is int and w in producers]


def _part(
    nodes: Sequence[Point],
    placement: Placement,
    output_numbers: set[int],
    takers: Mapping[int, int],
    recording: Recording,
) -> Part:
    where = {
        result.number: (position, result.index)
        for position, node in enumerate(nodes)
        for result in node.results
    }
    sources: dict[int, int] = {}
    literals: list[int] = []
    wiring = []
    for node in nodes:
        wires = []
        for wire, literal in literal_wires(node):
            if literal >= 0:
                wires.append((LITERAL, len(literals)))
                literals.append(literal)
            elif wire in where:
                wires.append(where[wire])
            else:
                wires.append((INPUT, sources.setdefault(wire, len(sources))))
        wiring.append(tuple(wires))
    numbers = tuple(sorted(output_numbers & where.keys()))
    return Part(
        nodes=tuple(nodes),
        wiring=tuple(wiring),
        sources=tuple(sources),
        literals=tuple(literals),
        numbers=numbers,
        takers=tuple([takers.get(number, -1) for number in numbers]),
        outputs=tuple([where[number] for number in numbers]),
        placement=placement,
        donatable=_donatable(nodes, tuple(sources), numbers, recording),
    )


def _donatable(
    nodes: Sequence[Point], sources: Sequence[int], numbers: Sequence[int], recording: Recording
) -> tuple[int, ...]:
    """Return the inputs for which there is an output of the same shape and dtype."""
    avals = {result.number: result.aval for node in nodes for result in node.results}
    shapes = {(avals[number].shape, avals[number].dtype) for number in numbers}
    indices = []
    for index, wire in enumerate(sources):
        array: Any = None if wire >= 0 else recording.inputs[~wire]
        if (
            type(array) is jaxapi.ArrayImpl
            and array.nbytes >= MIN_DONATED_BYTES
            and (array.shape, array.dtype) in shapes
        ):
            indices.append(index)
    return tuple(indices)
