"""Cut a smaller program out of one, with recorded values in place of what is cut off.

Where the two sides run different programs, both are cut in the same places, so that the pair stays
one. What does nothing any more goes too: tuples taken apart again, parameters never read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from snaprt.hlo.literals import dtype_of
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.extract import Extract, Piece, Value, arrays_of, extract
from snaprt_replay.hlo.hlo_module import (
    Editor,
    drop_uncalled,
    entry_computation,
    instructions,
    parameters,
    reached,
    root_instruction,
)
from snaprt_replay.load.case import Signature
from snaprt_replay.load.modules import random_inputs
from snaprt_replay.localize.matching import Matching, match
from snaprt_replay.localize.program import FlatModule, Line
from snaprt_replay.localize.session import Values, typed
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.run.workers import Outcome


def tidy(modules: Sequence[XlaMessage], inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Tidy modules that take the same inputs, in place, and return the inputs still read."""
    for module in modules:
        _fold_tuples(module)
    read = set().union(*(_read_parameters(module) for module in modules))
    kept = [number for number in range(len(inputs)) if number in read]
    numbers = {old: new for new, old in enumerate(kept)}
    for module in modules:
        _keep(module, numbers)
        _name_parameters(module)
    return tuple(inputs[number] for number in kept)


def _fold_tuples(module: XlaMessage) -> None:
    entry = entry_computation(module)
    by_id = {instruction.id: instruction for instruction in entry.instructions}
    folded: dict[int, int] = {}
    for instruction in entry.instructions:
        instruction.operand_ids[:] = [
            folded.get(operand, operand) for operand in instruction.operand_ids
        ]
        if instruction.opcode == "get-tuple-element":
            source = by_id[instruction.operand_ids[0]]
            if source.opcode == "tuple":
                folded[instruction.id] = source.operand_ids[instruction.tuple_index]


def _used(entry: XlaMessage) -> set[int]:
    by_id = {instruction.id: instruction for instruction in entry.instructions}
    return reached([entry.root_id], lambda one: by_id[one].operand_ids)


def _read_parameters(module: XlaMessage) -> set[int]:
    entry = entry_computation(module)
    used = _used(entry)
    return {parameter.parameter_number for parameter in parameters(entry) if parameter.id in used}


def _keep(module: XlaMessage, numbers: Mapping[int, int]) -> None:
    """Keep what the root depends on and the parameters of these numbers, numbered anew."""
    entry = entry_computation(module)
    used = _used(entry)

    def replace(one: XlaMessage) -> list[XlaMessage]:
        if one.opcode != "parameter":
            return [one] if one.id in used else []
        if one.parameter_number not in numbers:
            return []
        one.parameter_number = numbers[one.parameter_number]
        return [one]

    Editor(module).replace_each(entry, replace)
    shapes = [parameter.shape for parameter in parameters(entry)]
    for signature in (entry.program_shape, module.host_program_shape):
        signature.ClearField("parameters")
        signature.parameters.extend(shapes)
        signature.ClearField("parameter_names")
        signature.parameter_names.extend(f"p{number}" for number in range(len(shapes)))
    drop_uncalled(module)


def _name_parameters(module: XlaMessage) -> None:
    """Give parameters short names: theirs grow with every cut."""
    entry = entry_computation(module)
    taken = {instruction.name for instruction in instructions(module)}
    for one in (*parameters(entry), root_instruction(entry)):
        name = f"arg{one.parameter_number}" if one.opcode == "parameter" else "outputs"
        while name in taken and name != one.name:
            name += "_"
        taken.add(name)
        one.name = name


_TAPPED_AT_ONCE = 64
"""From so few instructions on all values are recorded in one run; more taps slow compiling down."""

_MOSTLY_NAMED = 0.9

_MOST_DRAWN = 1 << 28  # bytes of random values: the program may fail because it needs too many


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """A way to get the values of a program's instructions."""

    side: int  # whose program: 0 the suspect's, 1 the reference's
    run: Callable[[bytes, Sequence[np.ndarray]], Future[Outcome]]  # runs a serialized module


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Two computations to cut a pair from, or one."""

    lines: tuple[Line, ...]  # the suspect's, and the reference's if that is of another program
    matching: Matching  # which instruction of the one is which of the other

    def cut(self, piece: Piece, values: Values) -> Candidate | None:
        """Return a piece as a program of its own.

        Args:
            piece: By the suspect's instructions.
            values: The values that it takes, likewise; in any precision.

        Returns:
            None if the two sides have not the same instructions there.
        """
        line = self.lines[0]
        piece = dataclasses.replace(piece, results=_without_tuples(line, piece.results))
        made = extract(line.program.module, line.computation, [piece])
        modules = [made.module]
        taken = made.parameters[0]
        if len(self.lines) > 1:
            other = self._cut_other(piece, made)
            if other is None:
                return None
            modules.append(other)
        try:
            inputs = typed(made.module, [values[one] for one in taken])
        except KeyError:
            return None
        return Candidate(tuple(modules), tidy(modules, inputs))

    def _cut_other(self, piece: Piece, made: Extract) -> XlaMessage | None:
        """Cut the same piece out of the reference's program, with its parameters in our order."""
        there, line = self.matching, self.lines[1]
        if not all(one in there for one in (*piece.results, *piece.given)):
            return None
        given = frozenset(there[one] for one in piece.given)
        results = tuple(there[result] for result in piece.results)
        other = extract(line.program.module, line.computation, [Piece(results, given)])
        here = {there[one.instruction]: one.instruction for one in made.parameters[0]}
        order = [Value(here.get(one.instruction, -1), one.path) for one in other.parameters[0]]
        if sorted(order) != sorted(made.parameters[0]):
            return None
        numbers = {value: number for number, value in enumerate(made.parameters[0])}
        entry = entry_computation(other.module)
        shapes = {}
        for parameter, value in zip(parameters(entry), order, strict=True):
            parameter.parameter_number = numbers[value]
            shapes[numbers[value]] = parameter.shape
        for signature in (entry.program_shape, other.module.host_program_shape):
            signature.ClearField("parameters")
            signature.parameters.extend(shapes[number] for number in range(len(shapes)))
        return other.module


class Base:
    """A program to make smaller ones of.

    Args:
        candidate: The program.
        taps: How to get its instructions' values, best first.
    """

    def __init__(self, candidate: Candidate, taps: Sequence[Tap]) -> None:
        self.candidate = candidate
        self.taps = taps
        self._recorded: dict[Value, np.ndarray] = {}
        self._refused: set[int] = set()

    @functools.cached_property
    def source(self) -> Source:
        """Return the entry computations."""
        lines = tuple(FlatModule(module, {}).entry for module in self.candidate.modules)
        return Source(lines, matching_of(lines))

    @property
    def line(self) -> Line:
        """Return the suspect's entry computation."""
        return self.source.lines[0]

    @property
    def results(self) -> tuple[int, ...]:
        """Return the instructions whose values are the outputs, none twice."""
        return tuple(dict.fromkeys(self.line.root.operand_ids))

    @functools.cached_property
    def computed(self) -> tuple[int, ...]:
        """Return the instructions between parameters, constants and the root, in order."""
        without = ("parameter", "constant")
        root = self.line.root.id
        return tuple(
            one.id for one in self.line.order if one.opcode not in without and one.id != root
        )

    def cut(
        self,
        results: Iterable[int],
        given: Iterable[int],
        view: str,
        change: str,
        grain: int = 0,
    ) -> Iterator[Candidate]:
        """Yield the program that computes ``results``, given the recorded values of ``given``.

        Nothing if that cannot be made, such as where an output's expected value is not known, or
        would not be smaller.
        """
        piece = Piece(tuple(results), frozenset(given))
        if not piece.results:
            return
        expected = None
        if self.candidate.expected is not None:
            expected = self._expected(piece.results)
            if expected is None:
                return
        values = self._values(piece)
        made = self.source.cut(piece, values) if values is not None else None
        # Every cut takes something away, so that cutting comes to an end.
        if made is not None and made.size < self.candidate.size:
            variants = self.candidate.variants
            yield dataclasses.replace(
                made, variants=variants, expected=expected, view=view, change=change, grain=grain
            )

    def _expected(self, results: Sequence[int]) -> tuple[np.ndarray, ...] | None:
        assert self.candidate.expected is not None
        known = dict(zip(self.line.root.operand_ids, self.candidate.expected, strict=True))
        found = tuple(known[result] for result in results if result in known)
        return found if len(found) == len(results) else None

    def _values(self, piece: Piece) -> Values | None:
        taken = parameters(self.line.computation)
        known = {
            Value(one.id): array for one, array in zip(taken, self.candidate.inputs, strict=True)
        }
        wanted = self._reached(piece)
        self.record(wanted)
        if wanted & self._refused:
            return None
        return {**known, **self._recorded}

    def _reached(self, piece: Piece) -> set[int]:
        """Return the given instructions that the results depend on."""
        found = reached(
            piece.results,
            lambda one: () if one in piece.given else self.line.by_id[one].operand_ids,
        )
        return {one for one in found if one in piece.given}

    def record(self, instructions: Iterable[int]) -> None:
        """Record the values of instructions, in one run, if they are not known yet."""
        known = {one.instruction for one in self._recorded} | self._refused
        missing = set(instructions) - known
        if not missing:
            return
        if len(self.computed) <= _TAPPED_AT_ONCE:
            missing |= set(self.computed) - known
        ordered = [one.id for one in self.line.order if one.id in missing]
        for tap in self.taps:
            found = self._tapped(tap, ordered)
            if found is not None:
                self._recorded.update(found)
                break
        else:  # a compiler that fails does so before anything has a value
            self._recorded.update(_drawn(self.line, ordered))
        self._refused |= missing - {one.instruction for one in self._recorded}

    def _tapped(self, tap: Tap, instructions: Sequence[int]) -> Values | None:
        """Run the program once with taps; None if that fails."""
        index = min(tap.side, len(self.source.lines) - 1)
        line, there = self.source.lines[index], self.source.matching
        here = {
            there[instruction] if index else instruction: instruction
            for instruction in instructions
            if instruction in there
        }
        made = extract(line.program.module, line.computation, [Piece(tuple(here))])
        numbers = {
            parameter.id: parameter.parameter_number for parameter in parameters(line.computation)
        }
        inputs = [self.candidate.inputs[numbers[one.instruction]] for one in made.parameters[0]]
        outcome = tap.run(made.module.SerializeToString(), inputs).result()
        if outcome.outputs is None:
            return None
        pairs = zip(made.results[0], outcome.outputs, strict=True)
        return {Value(here[one.instruction], one.path): array for one, array in pairs}


def matching_of(lines: Sequence[Line]) -> Matching:
    """Return which instruction of the first line is which of the last.

    By name, where nearly all have one of the same name, shape and scope: an edited module, and
    every pair that was cut before. Else by structure, which one wrong operation can mislead.
    """
    suspect, reference = lines[0], lines[-1]
    there = {_identity(one): one.id for one in reference.order if one.opcode != "parameter"}
    named = {one.id: there[_identity(one)] for one in suspect.order if _identity(one) in there}
    takes = zip(parameters(suspect.computation), parameters(reference.computation), strict=False)
    named.update((one.id, other.id) for one, other in takes)
    named[suspect.root.id] = reference.root.id
    is_most = len(named) >= _MOSTLY_NAMED * max(len(suspect.order), len(reference.order))
    return named if is_most else match(suspect, reference)


def _identity(instruction: XlaMessage) -> tuple[str, str, bytes]:
    shape = instruction.shape.SerializeToString(deterministic=True)
    return instruction.name, instruction.metadata.op_name, shape


def normalized(
    modules: Sequence[XlaMessage], inputs: Sequence[np.ndarray]
) -> tuple[Candidate, tuple[int, ...]] | None:
    """Return flat modules as a candidate, and which of their outputs are its own, none twice.

    Returns:
        None if two modules are not the same program.
    """
    lines = tuple(FlatModule(module, {}).entry for module in modules)
    root = lines[0].root
    results = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
    taken = parameters(lines[0].computation)
    values = {Value(one.id): array for one, array in zip(taken, inputs, strict=True)}
    piece = Piece(tuple(dict.fromkeys(results)))
    made = Source(lines, matching_of(lines)).cut(piece, values)
    if made is None:
        return None
    arrays = [value for result in results for value, _ in arrays_of(lines[0].by_id[result])]
    return made, tuple(arrays.index(value) for value in dict.fromkeys(arrays))


def _without_tuples(line: Line, results: Iterable[int]) -> tuple[int, ...]:
    """Return what a tuple is made of in place of each tuple; no value twice."""
    found: dict[int, None] = {}
    for result in results:
        instruction = line.by_id[result]
        if instruction.opcode == "tuple":
            found.update(dict.fromkeys(_without_tuples(line, instruction.operand_ids)))
        else:
            found[result] = None
    return tuple(found)


def _drawn(line: Line, instructions: Iterable[int]) -> Values:
    """Return random values of the instructions whose arrays together are not too large."""
    drawn: dict[Value, np.ndarray] = {}
    room = _MOST_DRAWN
    for instruction in instructions:
        arrays = list(arrays_of(line.by_id[instruction]))
        kinds = [Signature(tuple(shape.dimensions), dtype_of(shape)) for _, shape in arrays]
        nbytes = sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds)
        if nbytes <= room:
            room -= nbytes
            values = (array.value for array in random_inputs(0, kinds))
            drawn.update(zip((value for value, _ in arrays), values, strict=True))
    return drawn
