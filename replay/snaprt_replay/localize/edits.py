"""The operations in which two programs differ: list them, exchange them, prove which matter.

An edit is a set of instructions that must be exchanged together: one instruction and its partner,
or several where one of the two programs has more instructions or where shapes differ. A function
that is called in several places is a single operation in all of them. Edits are at fault if the
results no longer differ after these instructions in the suspect's program are replaced by the
reference's; of several such sets, the smallest counts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from snaprt.errors import ExecutionError, SnaprtError, SnapshotError
from snaprt.hlo.literals import literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt.shown import cut
from snaprt_replay.hlo.extract import Piece, Value, attributes_of
from snaprt_replay.hlo.hlo_module import copy_of, parameters, shape_text, take_name
from snaprt_replay.localize.findings import InstructionPlace
from snaprt_replay.localize.matching import STEPPED, ComputationDiff, compare, content_of
from snaprt_replay.localize.measure import largest_error
from snaprt_replay.localize.program import NO_WORK, FlatModule, Line
from snaprt_replay.localize.session import Order, Session, Side, Values

RESULT = -1
"""In place of an instruction's id: which instruction is the result of the computation."""


class Exchange(NamedTuple):
    """An instruction of the suspect to be replaced by its partner in the reference."""

    computations: tuple[int, int]  # the ids of the computations that contain the two
    instruction: int  # the suspect's id, or `RESULT`


class CannotCombineError(SnaprtError):
    """The two programs cannot be combined this way: an instruction would depend on itself."""


def exchange_of(compared: ComputationDiff, instruction: int) -> Exchange:
    """Return the exchange of an instruction of the suspect."""
    ours, theirs = compared.lines
    return Exchange((ours.computation.id, theirs.computation.id), instruction)


def substituted(compared: ComputationDiff, exchanges: frozenset[Exchange]) -> FlatModule:
    """Return the suspect's program with instructions in `exchanges` replaced by the reference's.

    Args:
        compared: The two programs' entry computations.
        exchanges: Exchanges in these computations and in those that they call.

    Raises:
        CannotCombineError: There is no such program.
    """
    return FlatModule(_Making(compared, exchanges).module, {})


class _Key(NamedTuple):
    """An instruction of the combined program."""

    # ``suspect``, ``reference``, or ``kept`` for the suspect's instruction with all that it reads.
    source: str
    instruction: int  # its id there


class _Making:
    def __init__(self, compared: ComputationDiff, exchanges: frozenset[Exchange]) -> None:
        self.exchanges = exchanges
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

    def _combine(self, compared: ComputationDiff) -> int:
        """Add a computation combined from two; return its id."""
        ours, _ = compared.lines
        mixture = _Mixture(compared, self.exchanges)
        keys = mixture.ordered()
        called = {
            key: self._called(compared, key)
            for key in keys
            if mixture.found(key).called_computation_ids
        }
        computation = self._started(ours.computation)
        ids: dict[_Key, int] = {}
        for key in keys:
            copy = self._copied(mixture.found(key), key.source == "reference")
            copy.operand_ids[:] = [ids[operand] for operand in mixture.operands(key)]
            copy.called_computation_ids[:] = called.get(key, ())
            computation.instructions.append(copy)
            ids[key] = copy.id
        computation.root_id = ids[mixture.root()]
        self.computations.append(computation)
        return computation.id

    def _called(self, compared: ComputationDiff, key: _Key) -> list[int]:
        ours, theirs = compared.lines
        suspect_id = key.instruction
        if key.source == "reference":
            suspect_id = compared.partners_back.get(suspect_id, -1)
        if key.source != "kept" and suspect_id in compared.inside:
            return [self._combine(nested) for nested in compared.inside[suspect_id]]
        line = theirs if key.source == "reference" else ours
        ids = line.by_id[key.instruction].called_computation_ids
        return [self._copy(line.program, callee) for callee in ids]

    def _copy(self, program: FlatModule, computation_id: int) -> int:
        """Add an unchanged copy of a computation; return its id."""
        key = (id(program), computation_id)
        if key not in self.copied:
            source = program.computations[computation_id]
            called = [
                [self._copy(program, callee) for callee in instruction.called_computation_ids]
                for instruction in source.instructions
            ]
            computation = self._started(source)
            ids: dict[int, int] = {}
            for instruction, inside in zip(source.instructions, called, strict=True):
                copy = self._copied(instruction, True)
                copy.operand_ids[:] = [ids[operand] for operand in instruction.operand_ids]
                copy.called_computation_ids[:] = inside
                computation.instructions.append(copy)
                ids[instruction.id] = copy.id
            computation.root_id = ids[source.root_id]
            self.computations.append(computation)
            self.copied[key] = computation.id
        return self.copied[key]

    def _started(self, like: XlaMessage) -> XlaMessage:
        computation = copy_of(like)
        computation.ClearField("instructions")
        computation.name = take_name(like.name, self.names, ".s")
        computation.id = self._new_id()
        return computation

    def _copied(self, instruction: XlaMessage, without_source: bool) -> XlaMessage:
        copy = copy_of(instruction)
        copy.name, copy.id = take_name(instruction.name, self.names, ".s"), self._new_id()
        copy.ClearField("control_predecessor_ids")
        if without_source:  # its stack frame is another program's
            copy.ClearField("metadata")
        return copy

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id


@dataclasses.dataclass(frozen=True, eq=False)
class _Mixture:
    """Two computations, of which one has some instructions of the other."""

    compared: ComputationDiff
    exchanges: frozenset[Exchange]

    def found(self, key: _Key) -> XlaMessage:
        return self.compared.lines[key.source == "reference"].by_id[key.instruction]

    def root(self) -> _Key:
        ours, theirs = self.compared.lines
        if exchange_of(self.compared, RESULT) in self.exchanges:
            return self._theirs(theirs.root.id)
        return self._mixed(ours.root.id)

    def _theirs(self, reference_id: int) -> _Key:
        """Return the instruction that takes the place of an instruction of the reference."""
        compared = self.compared
        if reference_id in compared.partners_back:
            return self._mixed(compared.partners_back[reference_id])
        like = compared.by_value.get(compared.digests[1].values[reference_id])
        return _Key("reference", reference_id) if like is None else _Key("kept", like)

    def _mixed(self, suspect_id: int) -> _Key:
        """Return the instruction that takes the place of an instruction of the suspect."""
        compared = self.compared
        if exchange_of(compared, suspect_id) in self.exchanges:
            return _Key("reference", compared.partners[suspect_id])
        is_parameter = compared.lines[0].by_id[suspect_id].opcode == "parameter"
        is_known = suspect_id not in compared.partners and _known_there(compared, suspect_id)
        return _Key("kept" if is_parameter or is_known else "suspect", suspect_id)

    def operands(self, key: _Key) -> list[_Key]:
        compared = self.compared
        ours, theirs = compared.lines
        if key.source == "kept":
            return [_Key("kept", operand) for operand in ours.by_id[key.instruction].operand_ids]
        is_theirs = key.source == "reference"
        partners = compared.partners_back if is_theirs else compared.partners
        partner = partners.get(key.instruction)
        read = (theirs if is_theirs else ours).by_id[key.instruction].operand_ids
        beside: Sequence[int] = ()
        if partner is not None:
            beside = (ours if is_theirs else theirs).by_id[partner].operand_ids
        operands = []
        for index, operand in enumerate(read):
            counterpart = beside[index] if index < len(beside) else None
            our_id, their_id = (counterpart, operand) if is_theirs else (operand, counterpart)
            if (
                our_id is not None
                and their_id is not None
                and compared.has_same_value(our_id, their_id)
            ):
                operands.append(_Key("kept", our_id))
            else:
                operands.append(self._theirs(operand) if is_theirs else self._mixed(operand))
        return operands

    def ordered(self) -> list[_Key]:
        """Return the parameters and all instructions that the result needs, operands first."""
        first = [
            _Key("kept", instruction.id)
            for instruction in self.compared.lines[0].computation.instructions
            if instruction.opcode == "parameter"
        ]
        ordered: dict[_Key, None] = dict.fromkeys(first)
        root = self.root()
        open_ = {root}
        waiting = [] if root in ordered else [(root, iter(self.operands(root)))]
        while waiting:
            key, pending = waiting[-1]
            for operand in pending:
                if operand in open_:
                    raise CannotCombineError("the two programs order their operations differently")
                if operand not in ordered:
                    open_.add(operand)
                    waiting.append((operand, iter(self.operands(operand))))
                    break
            else:
                waiting.pop()
                open_.discard(key)
                ordered[key] = None
        return list(ordered)


_GROUPING = frozenset({"tuple", "get-tuple-element"})
_LONGEST = 60  # characters of an attribute that is shown


@dataclasses.dataclass(frozen=True)
class Edit:
    """A difference between two programs."""

    pairs: frozenset[Exchange]  # what to take from the reference to undo it
    places: tuple[InstructionPlace, ...]  # the suspect's instructions that differ
    reasons: tuple[str, ...]  # how each of them differs


class _Node(NamedTuple):
    """An instruction of either program, as a member of an edit."""

    side: int
    computations: tuple[int, int]
    instruction: int


class _Joined:
    """Disjoint sets of nodes that can be joined."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def find(self, node: Hashable) -> Hashable:
        while self._above.setdefault(node, node) != node:
            node = self._above[node]
        return node

    def join(self, first: Hashable, second: Hashable) -> None:
        self._above[self.find(first)] = self.find(second)


def edits_between(compared: ComputationDiff) -> list[Edit]:
    """Return how two programs differ, in program order, given their entry computations."""
    joined = _Joined()
    members: dict[_Node, _Member] = {}
    for nested, frame in with_nested(compared):
        for node in _differing(nested, joined):
            members.setdefault(node, _Member(node.instruction, nested, frame))
    sets: defaultdict[Hashable, list[_Member]] = defaultdict(list)
    for node, member in members.items():
        sets[joined.find(node)].append(member)
    return list(map(_edit, sets.values()))


def with_nested(
    compared: ComputationDiff, frame: tuple[str, ...] = ()
) -> Iterator[tuple[ComputationDiff, tuple[str, ...]]]:
    """Yield a comparison and those nested in it, with the enclosing loops and branches."""
    yield compared, frame
    for instruction_id, inside in compared.inside.items():
        instruction = compared.lines[0].by_id[instruction_id]
        for number, nested in enumerate(inside):
            if not nested.is_same:
                yield from with_nested(nested, (*frame, _name_inside(instruction, number)))


def _name_inside(instruction: XlaMessage, number: int) -> str:
    if instruction.opcode == "while":
        return f"the {('body', 'condition')[number]} of {instruction.name}"
    return f"branch {number} of {instruction.name}"


def _differing(compared: ComputationDiff, joined: _Joined) -> Iterator[_Node]:
    """Yield the instructions that differ or read different values, joined into edits."""
    ours, theirs = compared.lines
    back, here = compared.partners_back, (ours.computation.id, theirs.computation.id)

    def node(side: int, instruction: int) -> _Node:
        return _Node(side, here, instruction)

    for instruction in ours.order:
        is_known = instruction.id not in compared.partners and _known_there(
            compared, instruction.id
        )
        if is_known or instruction.opcode == "parameter":
            continue
        reference_id = compared.partners.get(instruction.id)
        own = node(0, instruction.id)
        if reference_id is None:
            yield own
        elif not (
            compared.has_same_content(instruction.id, reference_id)
            and compared.reads_the_same(instruction.id, reference_id)
        ):
            yield own
            for operand in theirs.by_id[reference_id].operand_ids:
                if operand not in back and not _known_here(compared, operand):
                    joined.join(own, node(1, operand))
        origin = ours.program.origins.get(instruction.id)
        if origin is not None:
            joined.join(own, ("origin", origin))
        for operand in instruction.operand_ids:
            partner = compared.partners.get(operand)
            is_extra = partner is None and not _known_there(compared, operand)
            if is_extra or (partner is not None and _reshaped(ours, theirs, operand, partner)):
                joined.join(own, node(0, operand))
    if not compared.has_same_value(ours.root.id, theirs.root.id) and (
        compared.partners.get(ours.root.id) != theirs.root.id
    ):
        yield node(0, RESULT)
        joined.join(node(0, RESULT), node(0, ours.root.id))
        joined.join(node(0, RESULT), node(1, theirs.root.id))
    for instruction in theirs.order:
        if instruction.id in back or _known_here(compared, instruction.id):
            continue
        for operand in instruction.operand_ids:
            if operand not in back and not _known_here(compared, operand):
                joined.join(node(1, instruction.id), node(1, operand))


def _known_there(compared: ComputationDiff, suspect_id: int) -> bool:
    return compared.digests[0].values[suspect_id] in compared.values_there


def _known_here(compared: ComputationDiff, reference_id: int) -> bool:
    return compared.digests[1].values[reference_id] in compared.by_value


def _reshaped(ours: Line, theirs: Line, suspect_id: int, reference_id: int) -> bool:
    return shape_text(ours.by_id[suspect_id].shape) != shape_text(theirs.by_id[reference_id].shape)


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """An instruction of the suspect that belongs to an edit."""

    id: int
    compared: ComputationDiff  # of the computation that contains it
    frame: tuple[str, ...]  # the enclosing loops and branches

    @property
    def line(self) -> Line:
        return self.compared.lines[0]

    @property
    def instruction(self) -> XlaMessage:
        return self.line.by_id[self.id]

    @property
    def partner(self) -> int | None:
        return self.compared.partners.get(self.id)

    @property
    def origin(self) -> int | None:
        return self.line.program.origins.get(self.id)

    @property
    def is_changed(self) -> bool:
        """Return whether it differs from a partner itself, not just in its operands."""
        partner = self.partner
        return partner is not None and not self.compared.has_same_content(self.id, partner)

    @property
    def works(self) -> bool:
        return self.instruction.opcode not in NO_WORK and self.id not in self.line.free

    @property
    def groups(self) -> bool:
        return self.instruction.opcode in _GROUPING


def _edit(members: Sequence[_Member]) -> Edit:
    pairs = frozenset(
        exchange_of(member.compared, member.id)
        for member in members
        if member.id == RESULT or member.partner is not None
    )
    members = [member for member in members if member.id != RESULT] or [
        dataclasses.replace(member, id=member.line.root.id) for member in members
    ]
    named, origins = [], set()
    for member in _to_name(members):
        if member.origin is None or member.origin not in origins:
            named.append(member)
        origins.add(member.origin)
    return Edit(pairs, tuple(map(_place, named)), tuple(map(_reason, named)))


def _to_name(members: Sequence[_Member]) -> Sequence[_Member]:
    """Return the changed instructions; else the removed ones or those with other operands."""
    own = [member for member in members if member.is_changed]
    extra = [member for member in members if member.partner is None]
    reading = [member for member in members if member.partner is not None and not member.is_changed]
    working = [member for member in extra if member.works]
    sources = {member.id if member.origin is None else member.origin for member in working}
    if len(sources) == 1 and reading and all(_is_passed_by(member, working) for member in reading):
        reading = working
    elif working and all(member.groups for member in reading):
        # A tuple computes nothing: the value that it no longer contains is the one that changed.
        reading = reading if all(map(_reads_known, reading)) else working[-1:]
    named = own or reading or extra
    return [member for member in named if not member.groups] or named


def _read_by_partner(member: _Member) -> Sequence[int]:
    """Return what the partner of an instruction reads."""
    assert member.partner is not None
    operands: Sequence[int] = member.compared.lines[1].by_id[member.partner].operand_ids
    return operands


def _reads_known(reader: _Member) -> bool:
    """Return whether the suspect's program has everything that the partner reads."""
    compared = reader.compared
    return all(
        operand in compared.partners_back or _known_here(compared, operand)
        for operand in _read_by_partner(reader)
    )


def _is_passed_by(reader: _Member, taken_out: Sequence[_Member]) -> bool:
    """Return whether the partner reads directly what a removed instruction reads here."""
    compared = reader.compared
    before = [operand for member in taken_out for operand in member.instruction.operand_ids]
    return any(
        compared.has_same_value(operand, other) or compared.partners.get(operand) == other
        for operand in before
        for other in _read_by_partner(reader)
    )


def _place(member: _Member) -> InstructionPlace:
    """Describe an instruction; one computed from constants gets the source of its reader."""
    line = member.line
    place = line.place(member.instruction, member.frame)
    read = member.id
    while _is_constant(line, read):
        readers = [instruction for instruction in line.order if read in instruction.operand_ids]
        changed = (reader for reader in readers if not _known_there(member.compared, reader.id))
        reader = next(changed, readers[0] if readers else None)
        if reader is None:
            break
        read, at = reader.id, line.place(reader)
        place = dataclasses.replace(place, op_name=at.op_name, source=at.source)
    return place


def _is_constant(line: Line, instruction_id: int) -> bool:
    """Return whether it is computed from constants alone: XLA keeps no metadata of these."""
    instruction = line.by_id[instruction_id]
    if instruction.opcode == "constant":
        return True
    read = instruction.operand_ids
    return bool(read) and instruction_id in line.free and all(_is_constant(line, i) for i in read)


def _reason(member: _Member) -> str:
    compared = member.compared
    if member.partner is None:
        return "is not in the reference"
    suspect, reference = member.instruction, compared.lines[1].by_id[member.partner]
    reasons = list(_attributes(content_of(suspect), content_of(reference)))
    if not reasons and not compared.has_same_content(suspect.id, reference.id):
        reasons = list(_called(compared, suspect, reference)) or ["its attributes differ"]
    if not reasons:
        reasons = list(_reads(compared, suspect, reference))
    return "; ".join(reasons)


def _attributes(suspect: XlaMessage, reference: XlaMessage) -> Iterator[str]:
    fields = {
        field.name for instruction in (suspect, reference) for field, _ in instruction.ListFields()
    }
    for name in sorted(fields, key=lambda field: (field != "opcode", field)):
        value, other = getattr(suspect, name), getattr(reference, name)
        if value == other:
            continue
        if name == "literal":
            yield _literals(value, other)
        elif name == "shape":
            yield f"shape {shape_text(value)}, {shape_text(other)} in the reference"
        else:
            yield f"{name} {_short(value)}, {_short(other)} in the reference"


def _short(value: object) -> str:
    return cut(" ".join(str(value).split()) or "none", _LONGEST)


def _literals(suspect: XlaMessage, reference: XlaMessage) -> str:
    try:
        ours, theirs = literal_to_array(suspect), literal_to_array(reference)
    except SnapshotError:
        return "a different constant"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return "a different constant"
    where = np.argwhere(ours != theirs)
    if not len(where):
        return "a constant with different bits"
    first = tuple(map(int, where[0]))
    at = f" at {list(first)}" if ours.ndim else ""
    return f"constant {ours[first]}{at}, {theirs[first]} in the reference"


def _called(compared: ComputationDiff, suspect: XlaMessage, reference: XlaMessage) -> Iterator[str]:
    """Yield how the computations that two instructions call differ."""
    if suspect.opcode in STEPPED:
        yield "the shapes of the called computation differ"
        return
    suspect_program, reference_program = (line.program for line in compared.lines)
    for ids in zip(suspect.called_computation_ids, reference.called_computation_ids, strict=False):
        pair = (suspect_program.line(ids[0]), reference_program.line(ids[1]))
        for edit in edits_between(compare(*pair)):
            for place, reason in zip(edit.places, edit.reasons, strict=True):
                yield f"{place.name} in {pair[0].computation.name}: {reason}"


def _reads(compared: ComputationDiff, suspect: XlaMessage, reference: XlaMessage) -> Iterator[str]:
    ours, theirs = compared.lines
    counts = len(suspect.operand_ids), len(reference.operand_ids)
    if counts[0] != counts[1]:
        yield f"reads {counts[0]} values, {counts[1]} in the reference"
        return
    for our_id, their_id in zip(suspect.operand_ids, reference.operand_ids, strict=True):
        if compared.has_same_value(our_id, their_id) or compared.partners.get(our_id) == their_id:
            continue
        if ours.by_id[our_id].opcode == theirs.by_id[their_id].opcode == "constant":
            yield _literals(ours.by_id[our_id].literal, theirs.by_id[their_id].literal)
            continue
        like = compared.partners_back.get(their_id)
        if like is None:
            like = compared.by_value.get(compared.digests[1].values[their_id])
        reference_name = theirs.by_id[their_id].name if like is None else ours.by_id[like].name
        yield f"reads {ours.by_id[our_id].name}, {reference_name} in the reference"


MOST_NAMED = 16
"""How many operations are named where none can be proven to be the cause."""


@dataclasses.dataclass(frozen=True)
class EditProof:
    """The result of putting operations of the reference into the suspect's program."""

    # Those whose exchange removes the difference; the candidates where none does.
    edits: tuple[Edit, ...]
    is_proven: bool  # whether the exchange removed the difference
    before: float  # the outputs' error with the programs unchanged
    after: float  # the outputs' error with these operations replaced by the reference's
    others: int  # how many more operations differ between the programs


def prove(
    session: Session,
    side: Side,
    compared: ComputationDiff,
    inputs: Sequence[np.ndarray],
    outputs: Values,
    reference: Values,
) -> EditProof:
    """Find the fewest operations whose exchange removes the difference of two programs.

    Args:
        session: Runs them.
        side: The suspect, with its program.
        compared: The suspect's program compared with the reference's.
        inputs: The inputs of both.
        outputs: The outputs of the suspect's program.
        reference: The outputs of the reference's program, run the same way.

    Raises:
        BudgetSpentError: The time ran out.
    """
    edits = edits_between(compared)
    trial = _Trial(session, side, compared, inputs, list(reference.values()))
    before = largest_error(reference.values(), outputs.values())
    fewest = _fewest(edits, trial)
    after = trial.error(fewest)
    is_proven = bool(fewest) and after <= 1.0
    named = fewest if is_proven else edits[:MOST_NAMED]
    return EditProof(tuple(named), is_proven, before, after, len(edits) - len(named))


def whole(side: Side, inputs: Sequence[np.ndarray]) -> Order:
    """Return an order that runs a side's whole program on its inputs."""
    line = side.program.entry
    arguments = {
        Value(parameter.id): inputs[parameter.parameter_number]
        for parameter in parameters(line.computation)
    }
    return Order(side, line, [Piece((line.root.id,))], [arguments])


class _Trial:
    def __init__(
        self,
        session: Session,
        side: Side,
        compared: ComputationDiff,
        inputs: Sequence[np.ndarray],
        expected: Sequence[np.ndarray],
    ) -> None:
        self.session = session
        self.side = side
        self.compared = compared
        self.inputs = inputs
        self.expected = expected
        self.errors: dict[frozenset[int], float] = {}

    def error(self, edits: Sequence[Edit]) -> float:
        """Return the outputs' error with some operations replaced by the reference's."""
        key = frozenset(map(id, edits))
        if key not in self.errors:
            self.session.tell(f"with {len(edits)} of the operations as in the reference")
            self.errors[key] = self._run(edits)
        return self.errors[key]

    def _run(self, edits: Sequence[Edit]) -> float:
        exchanges = frozenset(pair for edit in edits for pair in edit.pairs)
        try:
            program = substituted(self.compared, exchanges)
            side = dataclasses.replace(self.side, program=program)
            ((values,),) = self.session.run(whole(side, self.inputs))
        except (CannotCombineError, ExecutionError):
            return float("inf")
        return largest_error(self.expected, values.values())


def _fewest(edits: Sequence[Edit], trial: _Trial) -> Sequence[Edit]:
    """Return a minimal set of edits (delta debugging, Zeller and Hildebrandt 2002)."""
    remaining = list(edits)
    if len(remaining) > 1 and trial.error(remaining) > 1.0:
        return remaining
    parts = 2
    while len(remaining) > 1:
        size = -(-len(remaining) // parts)
        chunks = [remaining[start : start + size] for start in range(0, len(remaining), size)]
        complements = [
            [edit for other in chunks if other is not chunk for edit in other] for chunk in chunks
        ]
        tried = [*chunks, *(complements if len(chunks) > 2 else ())]
        smaller = next((subset for subset in tried if trial.error(subset) <= 1.0), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(2, parts - 1)
            remaining = smaller
        elif size == 1:
            break
        else:
            parts = min(len(remaining), parts * 2)
    return remaining
