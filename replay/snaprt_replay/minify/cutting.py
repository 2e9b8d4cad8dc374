"""Cut a smaller program out of a program, with recorded values in place of what is removed.

If the two sides run different programs, both are cut in the same places, so that they remain a
pair. What has become useless is removed too: tuples that are only unpacked, parameters never read.
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
    declare_parameters,
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
    """Tidy modules that take the same inputs, in place; return the inputs that are still read."""
    for module in modules:
        _fold_tuples(module)
    read = set().union(*(_read_parameters(module) for module in modules))
    read_inputs = [number for number in range(len(inputs)) if number in read]
    numbers = {old: new for new, old in enumerate(read_inputs)}
    for module in modules:
        _keep(module, numbers)
        _name_parameters(module)
    return tuple(inputs[number] for number in read_inputs)


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
    return reached([entry.root_id], lambda instruction: by_id[instruction].operand_ids)


def _read_parameters(module: XlaMessage) -> set[int]:
    entry = entry_computation(module)
    used = _used(entry)
    return {parameter.parameter_number for parameter in parameters(entry) if parameter.id in used}


def _keep(module: XlaMessage, numbers: Mapping[int, int]) -> None:
    """Keep what the root depends on and the parameters with these numbers, and renumber them."""
    entry = entry_computation(module)
    used = _used(entry)

    def replace(instruction: XlaMessage) -> list[XlaMessage]:
        if instruction.opcode != "parameter":
            return [instruction] if instruction.id in used else []
        if instruction.parameter_number not in numbers:
            return []
        instruction.parameter_number = numbers[instruction.parameter_number]
        return [instruction]

    Editor(module).replace_each(entry, replace)
    declare_parameters(module)
    drop_uncalled(module)


def _name_parameters(module: XlaMessage) -> None:
    """Give parameters short names, because their names grow with every cut."""
    entry = entry_computation(module)
    names = {instruction.name for instruction in instructions(module)}
    for instruction in (*parameters(entry), root_instruction(entry)):
        name = (
            f"arg{instruction.parameter_number}" if instruction.opcode == "parameter" else "outputs"
        )
        while name in names and name != instruction.name:
            name += "_"
        names.add(name)
        instruction.name = name


_TAPPED_AT_ONCE = 64
"""With at most this many instructions, one run records all values; more taps slow compilation."""

_MOSTLY_NAMED = 0.9

_MOST_DRAWN = 1 << 28  # bytes of random values: the program may fail because it is too large


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """A way to get the values of a program's instructions."""

    side: int  # whose program: 0 the suspect's, 1 the reference's
    run: Callable[[bytes, Sequence[np.ndarray]], Future[Outcome]]  # runs a serialized module


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One computation to cut a program from, or two to cut a pair from."""

    lines: tuple[Line, ...]  # the suspect's, and the reference's if it runs a different program
    matching: Matching  # maps the suspect's instructions to those of the reference

    def cut(self, piece: Piece, values: Values) -> Candidate | None:
        """Return a piece as a separate program.

        Args:
            piece: The piece, in terms of the suspect's instructions.
            values: The values that it reads, in the same terms; in any precision.

        Returns:
            None if the two sides do not have the same instructions there.
        """
        line = self.lines[0]
        piece = dataclasses.replace(piece, results=_without_tuples(line, piece.results))
        extracted = extract(line.program.module, line.computation, [piece])
        modules = [extracted.module]
        boundary = extracted.parameters[0]
        if len(self.lines) > 1:
            reference = self._cut_other(piece, extracted)
            if reference is None:
                return None
            modules.append(reference)
        try:
            inputs = typed(extracted.module, [values[value] for value in boundary])
        except KeyError:
            return None
        return Candidate(tuple(modules), tidy(modules, inputs))

    def _cut_other(self, piece: Piece, extracted: Extract) -> XlaMessage | None:
        """Cut the same piece out of the reference's program, with parameters in the same order."""
        counterparts, line = self.matching, self.lines[1]
        if not all(instruction in counterparts for instruction in (*piece.results, *piece.given)):
            return None
        boundary = frozenset(counterparts[instruction] for instruction in piece.given)
        results = tuple(counterparts[result] for result in piece.results)
        reference = extract(line.program.module, line.computation, [Piece(results, boundary)])
        own_ids = {
            counterparts[value.instruction]: value.instruction for value in extracted.parameters[0]
        }
        order = [
            Value(own_ids.get(value.instruction, -1), value.path)
            for value in reference.parameters[0]
        ]
        if sorted(order) != sorted(extracted.parameters[0]):
            return None
        numbers = {value: number for number, value in enumerate(extracted.parameters[0])}
        taken = parameters(entry_computation(reference.module))
        for parameter, value in zip(taken, order, strict=True):
            parameter.parameter_number = numbers[value]
        declare_parameters(reference.module)
        return reference.module


class Base:
    """A program to make smaller ones from.

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
        """Return the instructions whose values are the outputs, without duplicates."""
        return tuple(dict.fromkeys(self.line.root.operand_ids))

    @functools.cached_property
    def computed(self) -> tuple[int, ...]:
        """Return the instructions other than parameters, constants and the root, in order."""
        without = ("parameter", "constant")
        root = self.line.root.id
        return tuple(
            instruction.id
            for instruction in self.line.order
            if instruction.opcode not in without and instruction.id != root
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

        Yields nothing if that program cannot be made, for example if an output's expected value is
        not known, or would not be smaller.
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
        candidate = self.source.cut(piece, values) if values is not None else None
        # Every cut must remove something, so that cutting terminates.
        if candidate is not None and candidate.size < self.candidate.size:
            variants = self.candidate.variants
            yield dataclasses.replace(
                candidate,
                variants=variants,
                expected=expected,
                view=view,
                change=change,
                grain=grain,
            )

    def _expected(self, results: Sequence[int]) -> tuple[np.ndarray, ...] | None:
        assert self.candidate.expected is not None
        by_id = dict(zip(self.line.root.operand_ids, self.candidate.expected, strict=True))
        expected = tuple(by_id[result] for result in results if result in by_id)
        return expected if len(expected) == len(results) else None

    def _values(self, piece: Piece) -> Values | None:
        declared = parameters(self.line.computation)
        inputs = {
            Value(parameter.id): array
            for parameter, array in zip(declared, self.candidate.inputs, strict=True)
        }
        boundary = self._reached(piece)
        self.record(boundary)
        if boundary & self._refused:
            return None
        return {**inputs, **self._recorded}

    def _reached(self, piece: Piece) -> set[int]:
        """Return the instructions of ``piece.given`` that the results depend on."""
        reachable = reached(
            piece.results,
            lambda number: () if number in piece.given else self.line.by_id[number].operand_ids,
        )
        return {instruction for instruction in reachable if instruction in piece.given}

    def record(self, instructions: Iterable[int]) -> None:
        """Record the values of instructions, in one run, if they are not known yet."""
        recorded = {value.instruction for value in self._recorded} | self._refused
        missing = set(instructions) - recorded
        if not missing:
            return
        if len(self.computed) <= _TAPPED_AT_ONCE:
            missing |= set(self.computed) - recorded
        ordered = [instruction.id for instruction in self.line.order if instruction.id in missing]
        for tap in self.taps:
            values = self._tapped(tap, ordered)
            if values is not None:
                self._recorded.update(values)
                break
        else:  # if compilation fails, no instruction has a value
            self._recorded.update(_drawn(self.line, ordered))
        self._refused |= missing - {value.instruction for value in self._recorded}

    def _tapped(self, tap: Tap, instructions: Sequence[int]) -> Values | None:
        """Run the program once with taps; return None if that fails."""
        index = min(tap.side, len(self.source.lines) - 1)
        line, counterparts = self.source.lines[index], self.source.matching
        own = {
            counterparts[instruction] if index else instruction: instruction
            for instruction in instructions
            if instruction in counterparts
        }
        extracted = extract(line.program.module, line.computation, [Piece(tuple(own))])
        numbers = {
            parameter.id: parameter.parameter_number for parameter in parameters(line.computation)
        }
        inputs = [
            self.candidate.inputs[numbers[value.instruction]] for value in extracted.parameters[0]
        ]
        outcome = tap.run(extracted.module.SerializeToString(), inputs).result()
        if outcome.outputs is None:
            return None
        pairs = zip(extracted.results[0], outcome.outputs, strict=True)
        return {Value(own[value.instruction], value.path): array for value, array in pairs}


def matching_of(lines: Sequence[Line]) -> Matching:
    """Match the instructions of the first line to those of the last.

    They are matched by name if nearly all have a counterpart of the same name, shape and scope, as
    in an edited module and in every pair that was cut before. Otherwise they are matched by
    structure, which a single wrong operation can mislead.
    """
    suspect, reference = lines[0], lines[-1]
    reference_ids = {
        _identity(instruction): instruction.id
        for instruction in reference.order
        if instruction.opcode != "parameter"
    }
    named = {
        instruction.id: reference_ids[_identity(instruction)]
        for instruction in suspect.order
        if _identity(instruction) in reference_ids
    }
    takes = zip(parameters(suspect.computation), parameters(reference.computation), strict=False)
    named.update((own.id, counterpart.id) for own, counterpart in takes)
    named[suspect.root.id] = reference.root.id
    is_most = len(named) >= _MOSTLY_NAMED * max(len(suspect.order), len(reference.order))
    return named if is_most else match(suspect, reference)


def _identity(instruction: XlaMessage) -> tuple[str, str, bytes]:
    shape = instruction.shape.SerializeToString(deterministic=True)
    return instruction.name, instruction.metadata.op_name, shape


def normalized(
    modules: Sequence[XlaMessage], inputs: Sequence[np.ndarray]
) -> tuple[Candidate, tuple[int, ...]] | None:
    """Return flat modules as a candidate, and the indices of the outputs that it keeps.

    Returns:
        None if two modules are not the same program.
    """
    lines = tuple(FlatModule(module, {}).entry for module in modules)
    root = lines[0].root
    results = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
    declared = parameters(lines[0].computation)
    values = {Value(parameter.id): array for parameter, array in zip(declared, inputs, strict=True)}
    piece = Piece(tuple(dict.fromkeys(results)))
    candidate = Source(lines, matching_of(lines)).cut(piece, values)
    if candidate is None:
        return None
    arrays = [value for result in results for value, _ in arrays_of(lines[0].by_id[result])]
    return candidate, tuple(arrays.index(value) for value in dict.fromkeys(arrays))


def _without_tuples(line: Line, results: Iterable[int]) -> tuple[int, ...]:
    """Return the results with each tuple replaced by its elements, without duplicates."""
    values: dict[int, None] = {}
    for result in results:
        instruction = line.by_id[result]
        if instruction.opcode == "tuple":
            values.update(dict.fromkeys(_without_tuples(line, instruction.operand_ids)))
        else:
            values[result] = None
    return tuple(values)


def _drawn(line: Line, instructions: Iterable[int]) -> Values:
    """Return random values for the instructions whose arrays are together not too large."""
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
