"""A computation as a line of instructions that can be cut, and where to cut it.

A *position* is a place between two instructions of the line. A value that is computed before it
and used after it is *live* there: the live values suffice to continue from that position.
Constants, and values computed from constants alone, are never live: they are computed again
wherever they are used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import (
    bytes_of,
    entry_computation,
    reached,
    root_instruction,
    shape_text,
    source_of,
)
from snaprt_replay.hlo.inline import Scopes, inline_calls
from snaprt_replay.localize.findings import InstructionPlace

_SOURCES = frozenset({"constant", "iota", "after-all", "partition-id", "replica-id"})
_MADE_OF_SOURCES = frozenset({"broadcast", "reshape", "convert", "transpose", "slice"})
NO_WORK = frozenset({"parameter", "tuple", "get-tuple-element", "constant", "after-all"})


@dataclasses.dataclass(frozen=True, eq=False)
class FlatModule:
    """A flattened module."""

    module: XlaMessage  # the HloModuleProto, its calls inlined
    scopes: Scopes  # which calls an inlined instruction was in
    # By the id of a copied instruction: the instruction of a called computation that was copied.
    origins: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def computations(self) -> Mapping[int, XlaMessage]:
        """Return the module's computations by id."""
        return {computation.id: computation for computation in self.module.computations}

    @functools.cached_property
    def entry(self) -> Line:
        """Return the entry computation's line."""
        return Line(self, entry_computation(self.module))

    def line(self, computation_id: int) -> Line:
        """Return the line of any computation."""
        return Line(self, self.computations[computation_id])


def flatten(module: XlaMessage) -> FlatModule:
    """Return a module as a `FlatModule`; edit the module in place."""
    return FlatModule(module, *inline_calls(module))


class Line:
    """The instructions of one computation that its result depends on, in order."""

    def __init__(self, program: FlatModule, computation: XlaMessage) -> None:
        self.program = program
        self.computation = computation
        self.by_id: dict[int, XlaMessage] = {
            instruction.id: instruction for instruction in computation.instructions
        }
        self.root = root_instruction(computation)
        reachable = reached(
            [self.root.id], lambda instruction_id: self.by_id[instruction_id].operand_ids
        )
        needed = [
            instruction for instruction in computation.instructions if instruction.id in reachable
        ]
        #: The elements of an instruction's tuple that are read. A function need not compute others:
        #: LAPACK's svd leaves the vectors as they were in memory if only the values are requested.
        self.elements = self._elements_of(needed)
        self.order = self._elements_moved(needed)
        self.free = self._free()
        self.position = {instruction.id: index for index, instruction in enumerate(self.order)}
        self._last_use = self._last_uses()

    def _elements_of(self, instructions: Sequence[XlaMessage]) -> dict[int, list[XlaMessage]]:
        elements: dict[int, list[XlaMessage]] = {}
        for instruction in instructions:
            if instruction.opcode == "get-tuple-element":
                source = self.by_id[instruction.operand_ids[0]]
                if source.opcode not in NO_WORK:
                    elements.setdefault(source.id, []).append(instruction)
        return elements

    def _elements_moved(self, instructions: Sequence[XlaMessage]) -> list[XlaMessage]:
        """Put the elements of a tuple behind what computes it, so that no cut comes between."""
        moved = {element.id for elements in self.elements.values() for element in elements}
        return [
            each
            for instruction in instructions
            if instruction.id not in moved
            for each in (instruction, *self.elements.get(instruction.id, ()))
        ]

    def values_of(self, instruction: XlaMessage) -> tuple[int, ...]:
        """Return the ids of an instruction's elements that are read, or its own if it has none."""
        return tuple(each.id for each in self.elements.get(instruction.id, (instruction,)))

    def end_of(self, instruction_id: int) -> int:
        """Return the position behind an instruction and its elements."""
        return self.position[instruction_id] + 1 + len(self.elements.get(instruction_id, ()))

    def _free(self) -> set[int]:
        free: set[int] = set()
        for instruction in self.order:
            of_free = instruction.opcode in _MADE_OF_SOURCES and all(
                i in free for i in instruction.operand_ids
            )
            if instruction.opcode in _SOURCES or of_free:
                free.add(instruction.id)
        return free

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for index, instruction in enumerate(self.order):
            # The operands of a free value are free, so they are live nowhere.
            for operand in () if instruction.id in self.free else instruction.operand_ids:
                last[operand] = index
        last[self.root.id] = len(self.order)
        return last

    def live(self, position: int) -> tuple[int, ...]:
        """Return the ids of the values that are live at a position, without parameters."""
        return tuple(
            instruction.id
            for instruction in self.order[:position]
            if self._last_use.get(instruction.id, -1) >= position
            and instruction.id not in self.free
            and instruction.opcode != "parameter"
        )

    def results(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the values of the instructions from `start` to `stop` that later ones use."""
        inside = {instruction.id for instruction in self.order[start:stop]}
        results = tuple(value for value in self.live(stop) if value in inside)
        return results or ((self.root.id,) if stop == len(self.order) else ())

    def taken(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the values live at `start` that the instructions from there to `stop` read."""
        read = {
            operand for instruction in self.order[start:stop] for operand in instruction.operand_ids
        }
        return tuple(value for value in self.live(start) if value in read)

    def live_totals(self, weigh: Callable[[XlaMessage], int]) -> list[int]:
        """Return, for each position, the sum of `weigh` over the values that are live there."""
        changes = [0] * (len(self.order) + 2)
        for index, instruction in enumerate(self.order):
            if (
                instruction.id in self._last_use
                and instruction.id not in self.free
                and instruction.opcode != "parameter"
            ):
                weight = weigh(instruction)
                changes[index + 1] += weight
                changes[self._last_use[instruction.id] + 1] -= weight
        return list(itertools.accumulate(changes[:-1]))

    def work(self, start: int = 0, stop: int | None = None) -> list[XlaMessage]:
        """Return the instructions of a range that compute something, and so can be at fault."""
        return [
            instruction
            for instruction in self.order[start:stop]
            if instruction.opcode not in NO_WORK and instruction.id not in self.free
        ]

    def sources(self, start: int, stop: int) -> list[XlaMessage]:
        """Return the instructions computed from constants alone that a range uses, in order."""

        def free_operands(instructions: Iterable[XlaMessage]) -> Iterator[int]:
            for instruction in instructions:
                yield from self.free.intersection(instruction.operand_ids)

        source_ids = reached(
            free_operands(self.order[start:stop]),
            lambda source_id: free_operands([self.by_id[source_id]]),
        )
        return [
            instruction
            for instruction in self.order
            if instruction.id in source_ids and instruction.opcode not in NO_WORK
        ]

    def needed_for(self, instruction_id: int) -> list[XlaMessage]:
        """Return the instructions that a value is computed from, and its own, in any order."""
        needed = reached([instruction_id], lambda needed_id: self.by_id[needed_id].operand_ids)
        return [self.by_id[needed_id] for needed_id in needed]

    def depends_on_inputs(self, instruction_id: int) -> bool:
        """Return whether a value is computed from a parameter, and not from constants alone."""
        needed = self.needed_for(instruction_id)
        return any(instruction.opcode == "parameter" for instruction in needed)

    def place(self, instruction: XlaMessage, frame: Sequence[str] = ()) -> InstructionPlace:
        """Describe an instruction for a person."""
        operands = [self.by_id[operand_id] for operand_id in instruction.operand_ids]
        return InstructionPlace(
            name=instruction.name,
            opcode=instruction.opcode,
            shape=shape_text(instruction.shape),
            operands=tuple(f"{operand.name} {shape_text(operand.shape)}" for operand in operands),
            op_name=instruction.metadata.op_name,
            source=source_of(self.program.module, instruction),
            calls=tuple(self.program.scopes.get(instruction.id, ())),
            frame=tuple(frame),
        )


@dataclasses.dataclass(frozen=True)
class Region:
    """The instructions of a line from position `start` to before `stop`."""

    start: int
    stop: int


def choose_cuts(line: Line, matched: Container[int], region: Region, most: int) -> list[int]:
    """Return the positions at which to cut a region into at most ``most`` regions.

    Each region has about the same number of instructions that compute something, and at least one.
    Prefer cuts where few bytes are live, and between two named scopes or calls to cuts within one.
    Never cut where a value is live that the other side does not have.
    """
    work = {instruction.id for instruction in line.work(region.start, region.stop)}
    unmatched = line.live_totals(lambda instruction: instruction.id not in matched)
    # Cut only right after an instruction that computes something, and the elements of its tuple:
    # other instructions after it that compute nothing belong to its users.
    behind = sorted(end for end in map(line.end_of, work) if end < region.stop)
    ranks = {position: rank for rank, position in enumerate(behind, 1) if not unmatched[position]}
    ranks = {position: rank for position, rank in ranks.items() if rank < len(work)}
    if len(ranks) < most:
        return list(ranks)
    live_bytes = line.live_totals(lambda instruction: bytes_of(instruction.shape))

    def cost(position: int) -> float:
        scopes = {_scope(line, line.order[index]) for index in (position - 1, position)}
        return (live_bytes[position] + 1) / len(scopes)

    cuts = []
    step = len(work) / most
    for number in range(1, most):
        near = [position for position, rank in ranks.items() if -0.5 < rank / step - number <= 0.5]
        if near:
            cuts.append(min(near, key=cost))
    return cuts


def between(region: Region, cuts: Sequence[int]) -> list[Region]:
    """Return the regions into which cuts divide a region."""
    bounds = [region.start, *cuts, region.stop]
    return [Region(*pair) for pair in itertools.pairwise(bounds)]


def _scope(line: Line, instruction: XlaMessage) -> tuple[str, ...]:
    calls = line.program.scopes.get(instruction.id, ())
    return (*calls, instruction.metadata.op_name.rpartition("/")[0])
