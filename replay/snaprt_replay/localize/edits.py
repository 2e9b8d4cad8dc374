"""List in which operations two programs differ, each edit by itself; it must not run any.

An edit is what has to be exchanged together: an instruction that another one stands for, or several
where one of the two programs has more, or where shapes differ. A function that is called in several
places is one operation each time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from snaprt.errors import SnapshotError
from snaprt.hlo.literals import literal_to_array
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.localize.findings import InstructionPlace
from snaprt_replay.localize.matching import STEPPED, Comparison, compare, content_of
from snaprt_replay.localize.program import NO_WORK, Line, shape_text
from snaprt_replay.localize.substitute import RESULT, Pair, pair_of

_GROUPING = frozenset({"tuple", "get-tuple-element"})
_LONGEST = 60  # characters of an attribute that is shown


@dataclasses.dataclass(frozen=True)
class Edit:
    """A difference between two programs.

    Args:
        pairs: What to take from the reference to undo it.
        places: The suspect's instructions that differ.
        reasons: In which way, for each of them.
    """

    pairs: frozenset[Pair]
    places: tuple[InstructionPlace, ...]
    reasons: tuple[str, ...]


class _Node(NamedTuple):
    """An instruction of either program, as a member of an edit."""

    side: int
    computations: tuple[int, int]
    instruction: int


class _Joined:
    """Sets of nodes that grow together."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def find(self, one: Hashable) -> Hashable:
        while self._above.setdefault(one, one) != one:
            one = self._above[one]
        return one

    def join(self, one: Hashable, other: Hashable) -> None:
        self._above[self.find(one)] = self.find(other)


def edits_between(compared: Comparison) -> list[Edit]:
    """Return how two programs differ, in program order, given their entry computations."""
    joined = _Joined()
    members: dict[_Node, tuple[Comparison, tuple[str, ...]]] = {}
    for each, frame in _nested(compared, ()):
        for node in _differing(each, joined):
            members.setdefault(node, (each, frame))
    sets: defaultdict[Hashable, list[_Node]] = defaultdict(list)
    for node in members:
        sets[joined.find(node)].append(node)
    return [_edit([(node, *members[node]) for node in nodes]) for nodes in sets.values()]


def _nested(
    compared: Comparison, frame: tuple[str, ...]
) -> Iterator[tuple[Comparison, tuple[str, ...]]]:
    """Yield a comparison and those in it, with the loops and branches around."""
    yield compared, frame
    for one, inside in compared.inside.items():
        instruction = compared.lines[0].by_id[one]
        for number, each in enumerate(inside):
            if not each.is_same:
                yield from _nested(each, (*frame, _name_inside(instruction, number)))


def _name_inside(instruction: XlaMessage, number: int) -> str:
    if instruction.opcode == "while":
        return f"the {('body', 'condition')[number]} of {instruction.name}"
    return f"branch {number} of {instruction.name}"


def _differing(compared: Comparison, joined: _Joined) -> Iterator[_Node]:
    """Yield the instructions that differ themselves, or read otherwise, joined into edits."""
    ours, theirs = compared.lines
    back, here = compared.partners_back, (ours.computation.id, theirs.computation.id)

    def node(side: int, instruction: int) -> _Node:
        return _Node(side, here, instruction)

    for one in ours.order:
        is_known = one.id not in compared.partners and _known_there(compared, one.id)
        if is_known or one.opcode == "parameter":
            continue
        other = compared.partners.get(one.id)
        own = node(0, one.id)
        if other is None:
            yield own
        elif not (
            compared.has_same_content(one.id, other) and compared.reads_the_same(one.id, other)
        ):
            yield own
            for each in theirs.by_id[other].operand_ids:
                if each not in back and not _known_here(compared, each):
                    joined.join(own, node(1, each))
        origin = ours.program.origins.get(one.id)
        if origin is not None:
            joined.join(own, ("origin", origin))
        for each in one.operand_ids:
            partner = compared.partners.get(each)
            is_extra = partner is None and not _known_there(compared, each)
            if is_extra or (partner is not None and _reshaped(ours, theirs, each, partner)):
                joined.join(own, node(0, each))
    if not compared.has_same_value(ours.root.id, theirs.root.id) and (
        compared.partners.get(ours.root.id) != theirs.root.id
    ):
        yield node(0, RESULT)
        joined.join(node(0, RESULT), node(0, ours.root.id))
        joined.join(node(0, RESULT), node(1, theirs.root.id))
    for one in theirs.order:
        if one.id in back or _known_here(compared, one.id):
            continue
        for each in one.operand_ids:
            if each not in back and not _known_here(compared, each):
                joined.join(node(1, one.id), node(1, each))


def _known_there(compared: Comparison, one: int) -> bool:
    return compared.digests[0].values[one] in compared.values_there


def _known_here(compared: Comparison, other: int) -> bool:
    return compared.digests[1].values[other] in compared.by_value


def _reshaped(ours: Line, theirs: Line, one: int, other: int) -> bool:
    return shape_text(ours.by_id[one].shape) != shape_text(theirs.by_id[other].shape)


_Member = tuple[_Node, Comparison, tuple[str, ...]]


def _edit(members: Sequence[_Member]) -> Edit:
    pairs = frozenset(
        pair_of(compared, node.instruction)
        for node, compared, _ in members
        if node.instruction == RESULT or node.instruction in compared.partners
    )
    members = [one for one in members if one[0].instruction != RESULT] or [
        (node._replace(instruction=compared.lines[0].root.id), compared, frame)
        for node, compared, frame in members
    ]
    named, origins = [], set()
    for member in _to_name(members):
        origin = member[1].lines[0].program.origins.get(member[0].instruction)
        if origin is None or origin not in origins:
            named.append(member)
        origins.add(origin)
    return Edit(pairs, tuple(map(_place, named)), tuple(map(_reason, named)))


def _instruction(member: _Member) -> XlaMessage:
    node, compared, _ = member
    return compared.lines[0].by_id[node.instruction]


def _to_name(members: Sequence[_Member]) -> Sequence[_Member]:
    """Return what differs itself; else what was taken out, or what reads something else."""
    own = [one for one in members if _partner(one) is not None and _is_changed(one)]
    extra = [one for one in members if _partner(one) is None]
    reading = [one for one in members if _partner(one) is not None and not _is_changed(one)]
    working = [one for one in extra if _works(one)]
    sources = {one[1].lines[0].program.origins.get(_id(one), _id(one)) for one in working}
    if len(sources) == 1 and reading and all(_is_passed_by(one, working) for one in reading):
        reading = working
    elif working and all(_instruction(one).opcode in _GROUPING for one in reading):
        # A tuple does nothing: what it no longer holds is what became something else.
        reading = reading if all(map(_reads_known, reading)) else working[-1:]
    found = own or reading or extra
    return [one for one in found if _instruction(one).opcode not in _GROUPING] or found


def _partner(member: _Member) -> int | None:
    node, compared, _ = member
    return compared.partners.get(node.instruction)


def _is_changed(member: _Member) -> bool:
    """Return whether the instruction itself differs from its partner, not only what it reads."""
    node, compared, _ = member
    return not compared.has_same_content(node.instruction, compared.partners[node.instruction])


def _reads_known(reader: _Member) -> bool:
    """Return whether all that the partner reads is in the suspect's program too."""
    compared, other = reader[1], _partner(reader)
    assert other is not None
    return all(
        each in compared.partners_back or _known_here(compared, each)
        for each in compared.lines[1].by_id[other].operand_ids
    )


def _works(member: _Member) -> bool:
    line = member[1].lines[0]
    return _instruction(member).opcode not in NO_WORK and _id(member) not in line.free


def _id(member: _Member) -> int:
    return member[0].instruction


def _is_passed_by(reader: _Member, taken_out: Sequence[_Member]) -> bool:
    """Return whether the reference reads directly what one instruction more stands before here."""
    compared = reader[1]
    other = _partner(reader)
    assert other is not None
    read = compared.lines[1].by_id[other].operand_ids
    before = [each for one in taken_out for each in _instruction(one).operand_ids]
    return any(
        compared.has_same_value(one, each) or compared.partners.get(one) == each
        for one in before
        for each in read
    )


def _place(member: _Member) -> InstructionPlace:
    """Describe an instruction; what is made of constants has the source of its reader."""
    node, compared, frame = member
    line = compared.lines[0]
    place = line.place(line.by_id[node.instruction], frame)
    read = node.instruction
    while _is_constant(line, read):
        readers = [one for one in line.order if read in one.operand_ids]
        changed = (one for one in readers if not _known_there(compared, one.id))
        reader = next(changed, readers[0] if readers else None)
        if reader is None:
            break
        read, at = reader.id, line.place(reader)
        place = dataclasses.replace(place, op_name=at.op_name, source=at.source)
    return place


def _is_constant(line: Line, instruction: int) -> bool:
    """Return whether it is a constant, or made of constants: XLA keeps no metadata of these."""
    one = line.by_id[instruction]
    if one.opcode == "constant":
        return True
    read = one.operand_ids
    return bool(read) and instruction in line.free and all(_is_constant(line, i) for i in read)


def _reason(member: _Member) -> str:
    node, compared, _ = member
    ours, theirs = compared.lines
    other_id = compared.partners.get(node.instruction)
    if other_id is None:
        return "is not in the reference"
    one, other = ours.by_id[node.instruction], theirs.by_id[other_id]
    told = list(_attributes(content_of(one), content_of(other)))
    if not told and not compared.has_same_content(one.id, other.id):
        told = list(_called(compared, one, other)) or ["its attributes differ"]
    if not told:
        told = list(_reads(compared, one, other))
    return "; ".join(told)


def _attributes(one: XlaMessage, other: XlaMessage) -> Iterator[str]:
    fields = {field.name for each in (one, other) for field, _ in each.ListFields()}
    for name in sorted(fields, key=lambda each: (each != "opcode", each)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine == theirs:
            continue
        if name == "literal":
            yield _literals(mine, theirs)
        elif name == "shape":
            yield f"shape {shape_text(mine)}, {shape_text(theirs)} in the reference"
        else:
            yield f"{name} {_short(mine)}, {_short(theirs)} in the reference"


def _short(value: object) -> str:
    text = " ".join(str(value).split()) or "none"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _literals(one: XlaMessage, other: XlaMessage) -> str:
    try:
        mine, theirs = literal_to_array(one), literal_to_array(other)
    except SnapshotError:
        return "another constant"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return "another constant"
    where = np.argwhere(mine != theirs)
    if not len(where):
        return "a constant of other bits"
    first = tuple(map(int, where[0]))
    at = f" at {list(first)}" if mine.ndim else ""
    return f"constant {mine[first]}{at}, {theirs[first]} in the reference"


def _called(compared: Comparison, one: XlaMessage, other: XlaMessage) -> Iterator[str]:
    """Tell how the computations that two instructions call differ."""
    if one.opcode in STEPPED:
        yield "what it calls takes or gives other shapes"
        return
    here, there = (line.program for line in compared.lines)
    for ids in zip(one.called_computation_ids, other.called_computation_ids, strict=False):
        pair = (here.line(ids[0]), there.line(ids[1]))
        for edit in edits_between(compare(*pair)):
            for place, reason in zip(edit.places, edit.reasons, strict=True):
                yield f"{place.name} in {pair[0].computation.name}: {reason}"


def _reads(compared: Comparison, one: XlaMessage, other: XlaMessage) -> Iterator[str]:
    ours, theirs = compared.lines
    if len(one.operand_ids) != len(other.operand_ids):
        yield f"reads {len(one.operand_ids)} values, {len(other.operand_ids)} in the reference"
        return
    for mine, their in zip(one.operand_ids, other.operand_ids, strict=True):
        if compared.has_same_value(mine, their) or compared.partners.get(mine) == their:
            continue
        if ours.by_id[mine].opcode == theirs.by_id[their].opcode == "constant":
            yield _literals(ours.by_id[mine].literal, theirs.by_id[their].literal)
            continue
        like = compared.partners_back.get(their)
        if like is None:
            like = compared.by_value.get(compared.digests[1].values[their])
        there = theirs.by_id[their].name if like is None else ours.by_id[like].name
        yield f"reads {ours.by_id[mine].name}, {there} in the reference"
