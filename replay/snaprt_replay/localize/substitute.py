"""Make a program of two: the suspect's, with some instructions as the reference has them.

It must not know why; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snaprt.errors import SnaprtError
from snaprt.hlo.proto import HloInstructionProto, XlaMessage
from snaprt_replay.hlo.extract import attributes_of
from snaprt_replay.localize.matching import Comparison
from snaprt_replay.localize.program import Program

RESULT = -1
"""In place of an instruction: what of a computation its result is."""


class Pair(NamedTuple):
    """An instruction of the suspect, and its partner in the reference.

    Args:
        computations: The ids of the computations that they are in.
        instruction: The suspect's id, or `RESULT`.
    """

    computations: tuple[int, int]
    instruction: int


class CannotCombineError(SnaprtError):
    """The two programs cannot be mixed so: it would go round in a circle."""


def pair_of(compared: Comparison, instruction: int) -> Pair:
    """Return the pair that an instruction of the suspect is one of."""
    ours, theirs = compared.lines
    return Pair((ours.computation.id, theirs.computation.id), instruction)


def substituted(compared: Comparison, taken: frozenset[Pair]) -> Program:
    """Return the suspect's program with the pairs of `taken` as the reference has them.

    Args:
        compared: The two programs' entry computations.
        taken: Pairs of it, and of the computations in it.

    Raises:
        CannotCombineError: There is no such program.
    """
    return Program(_Making(compared, taken).module, {})


class _Key(NamedTuple):
    """An instruction of the program that is made.

    Args:
        source: ``suspect``, ``reference``, or ``kept`` for one of the suspect's with all it reads.
        instruction: Its id there.
    """

    source: str
    instruction: int


class _Making:
    def __init__(self, compared: Comparison, taken: frozenset[Pair]) -> None:
        self.taken = taken
        self.computations: list[XlaMessage] = []
        self.copied: dict[tuple[int, int], int] = {}
        self.names: set[str] = set()
        self.last_id = 0
        entry = self._combine(compared)
        source = compared.lines[0].program.module
        module: XlaMessage = attributes_of(source)
        module.computations.extend(self.computations)
        module.host_program_shape.CopyFrom(source.host_program_shape)
        module.entry_computation_id = entry
        module.entry_computation_name = self.computations[-1].name
        self.module = module

    def _combine(self, compared: Comparison) -> int:
        """Add a computation made of two; return its id."""
        ours, _ = compared.lines
        made = _ordered(compared, self.taken)
        called = {key: self._called(compared, key) for key in made if _calls(_found(compared, key))}
        computation = self._started(ours.computation)
        ids: dict[_Key, int] = {}
        for key in made:
            copy = self._copied(_found(compared, key), key.source == "reference")
            operands = _operands(compared, self.taken, key)
            copy.operand_ids[:] = [ids[each] for each in operands]
            copy.called_computation_ids[:] = called.get(key, ())
            computation.instructions.append(copy)
            ids[key] = copy.id
        computation.root_id = ids[_root(compared, self.taken)]
        self.computations.append(computation)
        return computation.id

    def _called(self, compared: Comparison, key: _Key) -> list[int]:
        ours, theirs = compared.lines
        one = key.instruction
        if key.source == "reference":
            one = compared.partners_back.get(one, -1)
        if key.source != "kept" and one in compared.inside:
            return [self._combine(each) for each in compared.inside[one]]
        line = theirs if key.source == "reference" else ours
        ids = line.by_id[key.instruction].called_computation_ids
        return [self._copy(line.program, each) for each in ids]

    def _copy(self, program: Program, computation_id: int) -> int:
        """Add a computation as it is; return its id."""
        known = (id(program), computation_id)
        if known not in self.copied:
            source = program.computations[computation_id]
            called = [
                [self._copy(program, each) for each in one.called_computation_ids]
                for one in source.instructions
            ]
            computation = self._started(source)
            ids: dict[int, int] = {}
            for one, inside in zip(source.instructions, called, strict=True):
                copy = self._copied(one, True)
                copy.operand_ids[:] = [ids[each] for each in one.operand_ids]
                copy.called_computation_ids[:] = inside
                computation.instructions.append(copy)
                ids[one.id] = copy.id
            computation.root_id = ids[source.root_id]
            self.computations.append(computation)
            self.copied[known] = computation.id
        return self.copied[known]

    def _started(self, like: XlaMessage) -> XlaMessage:
        computation = type(like)()
        computation.CopyFrom(like)
        computation.ClearField("instructions")
        computation.name = self._free(like.name)
        computation.id = self._new_id()
        return computation

    def _copied(self, one: XlaMessage, without_source: bool) -> XlaMessage:
        copy = HloInstructionProto()
        copy.CopyFrom(one)
        copy.name, copy.id = self._free(one.name), self._new_id()
        copy.ClearField("control_predecessor_ids")
        if without_source:  # its stack frame is another program's
            copy.ClearField("metadata")
        return copy

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _free(self, name: str) -> str:
        free, number = name, 0
        while free in self.names:
            number += 1
            free = f"{name}.s{number}"
        self.names.add(free)
        return free


def _calls(instruction: XlaMessage) -> bool:
    return bool(instruction.called_computation_ids)


def _found(compared: Comparison, key: _Key) -> XlaMessage:
    return compared.lines[key.source == "reference"].by_id[key.instruction]


def _root(compared: Comparison, taken: frozenset[Pair]) -> _Key:
    ours, theirs = compared.lines
    if pair_of(compared, RESULT) in taken:
        return _theirs(compared, taken, theirs.root.id)
    return _mixed(compared, taken, ours.root.id)


def _theirs(compared: Comparison, taken: frozenset[Pair], other: int) -> _Key:
    """Return what stands for an instruction of the reference."""
    if other in compared.partners_back:
        return _mixed(compared, taken, compared.partners_back[other])
    like = compared.by_value.get(compared.digests[1].values[other])
    return _Key("reference", other) if like is None else _Key("kept", like)


def _mixed(compared: Comparison, taken: frozenset[Pair], one: int) -> _Key:
    """Return what stands for an instruction of the suspect."""
    if pair_of(compared, one) in taken:
        return _Key("reference", compared.partners[one])
    if compared.lines[0].by_id[one].opcode == "parameter":
        return _Key("kept", one)
    if one not in compared.partners and compared.digests[0].values[one] in compared.values_there:
        return _Key("kept", one)
    return _Key("suspect", one)


def _operands(compared: Comparison, taken: frozenset[Pair], key: _Key) -> list[_Key]:
    ours, theirs = compared.lines
    if key.source == "kept":
        return [_Key("kept", each) for each in ours.by_id[key.instruction].operand_ids]
    is_theirs = key.source == "reference"
    partners = compared.partners_back if is_theirs else compared.partners
    partner = partners.get(key.instruction)
    read = (theirs if is_theirs else ours).by_id[key.instruction].operand_ids
    beside: Sequence[int] = ()
    if partner is not None:
        beside = (ours if is_theirs else theirs).by_id[partner].operand_ids
    found = []
    for index, each in enumerate(read):
        other = beside[index] if index < len(beside) else None
        one, their = (other, each) if is_theirs else (each, other)
        if one is not None and their is not None and compared.has_same_value(one, their):
            found.append(_Key("kept", one))
        elif not is_theirs:
            found.append(_mixed(compared, taken, each))
        else:
            found.append(_theirs(compared, taken, each))
    return found


def _ordered(compared: Comparison, taken: frozenset[Pair]) -> list[_Key]:
    """Return the parameters, and what the result depends on, operands first."""
    first = [
        _Key("kept", one.id)
        for one in compared.lines[0].computation.instructions
        if one.opcode == "parameter"
    ]
    made: dict[_Key, None] = dict.fromkeys(first)
    open_: set[_Key] = set()

    def operands(key: _Key) -> Iterator[_Key]:
        return iter(_operands(compared, taken, key))

    root = _root(compared, taken)
    waiting = [] if root in made else [(root, operands(root))]
    open_.add(root)
    while waiting:
        key, rest = waiting[-1]
        for each in rest:
            if each in open_:
                raise CannotCombineError("the two programs order their operations otherwise")
            if each not in made:
                open_.add(each)
                waiting.append((each, operands(each)))
                break
        else:
            waiting.pop()
            open_.discard(key)
            made[key] = None
    return list(made)
