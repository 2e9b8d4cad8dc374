"""Find the instructions of one program in another by structure alone; this must not run any.

Names, source lines and layouts do not count. Two instructions have the same *value* if they apply
the same operation to the same values, starting at the parameters. After the first difference no
value is the same: from there on, instructions are matched backward from the result, as the operands
that matched users read in the same position.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import copy_of, parameters, shape_text
from snaprt_replay.localize.program import FlatModule, Line

Matching = Mapping[int, int]
"""For each instruction of the suspect that has a match in the reference, the match's id."""

STEPPED = frozenset({"while", "conditional"})
"""Opcodes whose called computations are compared instruction by instruction."""

_COMMUTATIVE = frozenset({"add", "multiply", "maximum", "minimum", "and", "or", "xor"})

# Fields that do not change what an instruction computes, or that are compared separately.
_NOT_CONTENT = (
    *("name", "id", "metadata", "original_value", "sharding", "control_predecessor_ids"),
    *("operand_ids", "called_computation_ids", "operand_shapes_with_layout"),
)


def content_of(instruction: XlaMessage) -> XlaMessage:
    """Return a copy of an instruction that has only the fields that say what it computes."""
    copy = copy_of(instruction)
    for field in _NOT_CONTENT:
        copy.ClearField(field)
    _clear_layouts(copy.shape)
    return copy


def _clear_layouts(shape: XlaMessage) -> None:
    shape.ClearField("layout")
    for element in shape.tuple_shapes:
        _clear_layouts(element)


class Digests:
    """Digests of a line's instructions."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.own: dict[int, bytes] = {}
        """By id: what an instruction does, without the computations of loops and branches."""
        self.values: dict[int, bytes] = {}
        """By id: what an instruction computes from the parameters."""
        called = _called_values(line)
        for instruction in line.order:
            inside = [called(callee) for callee in instruction.called_computation_ids]
            content = content_of(instruction).SerializeToString(deterministic=True)
            own = _digest(content, *(() if instruction.opcode in STEPPED else inside))
            self.own[instruction.id] = own
            read = [self.values[i] for i in instruction.operand_ids]
            read = sorted(read) if instruction.opcode in _COMMUTATIVE else read
            self.values[instruction.id] = _digest(own, *inside, *read)

    @property
    def result(self) -> bytes:
        """Return the digest of the whole computation."""
        return self.values[self.line.root.id]


def _called_values(line: Line) -> functools._lru_cache_wrapper[bytes]:
    @functools.cache
    def value(computation_id: int) -> bytes:
        return Digests(line.program.line(computation_id)).result

    return value


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclasses.dataclass(frozen=True, eq=False)
class ComputationDiff:
    """Two computations, compared."""

    digests: tuple[Digests, Digests]  # of the suspect's and of the reference's
    # Which instruction of the suspect takes the place of which of the reference: the parameters and
    # the instructions whose values differ.
    partners: Matching
    # For the loops and branches among them, comparisons of the computations that they call, where
    # the instructions in these can be exchanged individually.
    inside: Mapping[int, tuple[ComputationDiff, ...]]

    @property
    def lines(self) -> tuple[Line, Line]:
        """Return the two computations."""
        return self.digests[0].line, self.digests[1].line

    @property
    def is_same(self) -> bool:
        """Return whether both compute the same result."""
        return self.digests[0].result == self.digests[1].result

    @functools.cached_property
    def partners_back(self) -> Matching:
        """Return the suspect's instruction for each instruction of the reference that has one."""
        return {reference_id: suspect_id for suspect_id, reference_id in self.partners.items()}

    @functools.cached_property
    def by_value(self) -> Mapping[bytes, int]:
        """Return the suspect's first instruction that has each value."""
        values = self.digests[0].values
        return {
            values[instruction.id]: instruction.id for instruction in reversed(self.lines[0].order)
        }

    @functools.cached_property
    def values_there(self) -> frozenset[bytes]:
        """Return all values that the reference computes."""
        return frozenset(self.digests[1].values.values())

    def has_same_value(self, suspect_id: int, reference_id: int) -> bool:
        """Return whether two instructions, one of each side, compute the same value."""
        return self.digests[0].values[suspect_id] == self.digests[1].values[reference_id]

    def has_same_content(self, suspect_id: int, reference_id: int) -> bool:
        """Return whether they apply the same operation, whatever their operands are."""
        return self.digests[0].own[suspect_id] == self.digests[1].own[reference_id] and (
            suspect_id in self.inside or self._calls_the_same(suspect_id, reference_id)
        )

    def _calls_the_same(self, suspect_id: int, reference_id: int) -> bool:
        if self.lines[0].by_id[suspect_id].opcode not in STEPPED:
            return True
        called = [
            [
                Digests(line.program.line(i)).result
                for i in line.by_id[caller].called_computation_ids
            ]
            for line, caller in zip(self.lines, (suspect_id, reference_id), strict=True)
        ]
        return called[0] == called[1]

    def reads_the_same(self, suspect_id: int, reference_id: int) -> bool:
        """Return whether their operands have the same values, or are partners of each other."""
        ours = self.lines[0].by_id[suspect_id].operand_ids
        theirs = self.lines[1].by_id[reference_id].operand_ids
        orders = [ours]
        if self.lines[0].by_id[suspect_id].opcode in _COMMUTATIVE:
            orders.append(ours[::-1])
        return len(ours) == len(theirs) and any(
            all(
                self.has_same_value(*pair) or self.partners.get(pair[0]) == pair[1]
                for pair in zip(order, theirs, strict=True)
            )
            for order in orders
        )


def compare(suspect: Line, reference: Line) -> ComputationDiff:
    """Compare two computations and the computations that their loops and branches call."""
    digests = (Digests(suspect), Digests(reference))
    partners = _Pairing(digests).partners
    inside = {
        suspect_id: compared
        for suspect_id, reference_id in partners.items()
        for compared in [_inside(suspect, reference, suspect_id, reference_id)]
        if compared
    }
    return ComputationDiff(digests, partners, inside)


def _inside(
    suspect: Line, reference: Line, suspect_id: int, reference_id: int
) -> tuple[ComputationDiff, ...]:
    pair = suspect.by_id[suspect_id], reference.by_id[reference_id]
    if (
        any(instruction.opcode not in STEPPED for instruction in pair)
        or pair[0].opcode != pair[1].opcode
    ):
        return ()
    called = [
        [line.program.line(i) for i in instruction.called_computation_ids]
        for line, instruction in zip((suspect, reference), pair, strict=True)
    ]
    if list(map(signature, called[0])) != list(map(signature, called[1])):
        return ()
    return tuple(itertools.starmap(compare, zip(*called, strict=True)))


def signature(line: Line) -> tuple[str, ...]:
    """Return the shapes of a computation's parameters and of its result."""
    return tuple(
        shape_text(instruction.shape) for instruction in (*parameters(line.computation), line.root)
    )


class _Pairing:
    """Pairs of instructions whose values differ, found from the result back, users first."""

    def __init__(self, digests: tuple[Digests, Digests]) -> None:
        self.ours, self.theirs = digests
        lines = self.ours.line, self.theirs.line
        takes = zip(*(parameters(line.computation) for line in lines), strict=False)
        self.partners = {suspect.id: reference.id for suspect, reference in takes}
        self.used = set(self.partners.values())
        self.counts = [Counter(digest.values.values()) for digest in digests]
        self.votes: defaultdict[int, Counter[int]] = defaultdict(Counter)
        if self.ours.result != self.theirs.result:
            self.votes[lines[0].root.id][lines[1].root.id] += 1
        for instruction in reversed(lines[0].order):
            if instruction.id not in self.partners:
                self._pair(instruction)

    def _pair(self, suspect: XlaMessage) -> None:
        candidates = self.votes[suspect.id].most_common()
        candidates.sort(key=lambda vote: self.theirs.own[vote[0]] != self.ours.own[suspect.id])
        for reference_id, votes in candidates:
            if reference_id in self.used:
                continue
            reference = self.theirs.line.by_id[reference_id]
            beyond = self._extra_operand(reference, suspect.id)
            if beyond is not None and beyond not in self.used:
                reference = self.theirs.line.by_id[beyond]
            elif not self._alike(suspect, reference):
                for operand in suspect.operand_ids:
                    if self._is_extra(suspect, reference, operand):
                        self.votes[operand][reference_id] += votes
                continue
            self.partners[suspect.id] = reference.id
            self.used.add(reference.id)
            for our_id, their_id in self._beside(suspect, reference):
                if self.ours.values[our_id] != self.theirs.values[their_id]:
                    self.votes[our_id][their_id] += 1
            return

    def _beside(self, suspect: XlaMessage, reference: XlaMessage) -> list[tuple[int, int]]:
        """Return the pairs of operands of two instructions that correspond to each other."""

        def same(pairs: Sequence[tuple[int, int]]) -> int:
            return sum(self.ours.values[pair[0]] == self.theirs.values[pair[1]] for pair in pairs)

        ours, theirs = list(suspect.operand_ids), list(reference.operand_ids)
        in_order = list(zip(ours, theirs, strict=False))
        if suspect.opcode == reference.opcode and suspect.opcode in _COMMUTATIVE:
            turned = list(zip(ours, theirs[::-1], strict=True))
            return max(in_order, turned, key=same)
        return in_order

    def _alike(self, suspect: XlaMessage, reference: XlaMessage) -> bool:
        """Return whether one instruction may be an edited form of the other."""
        if any(self._is_extra(suspect, reference, operand) for operand in suspect.operand_ids):
            return False
        # A value that the other program computes too is a different operand there, unless this
        # program computes it more often: then one of these instructions was edited.
        if not (self._is_more(suspect.id, 0) and self._is_more(reference.id, 1)):
            return False
        if suspect.opcode == reference.opcode == "get-tuple-element":
            sources = (
                self.ours.values[suspect.operand_ids[0]],
                self.theirs.values[reference.operand_ids[0]],
            )
            # Another element of the same tuple is not an edit: its reader reads a different value.
            return sources[0] != sources[1] or suspect.tuple_index == reference.tuple_index
        if suspect.opcode == reference.opcode:
            return True
        # XLA's converter folds expressions of constants, and puts the constant of a sum last.
        return (
            shape_text(suspect.shape) == shape_text(reference.shape)
            and self._is_free(suspect.id, 0) != self._is_free(reference.id, 1)
        ) or self._read_alike(suspect, reference)

    def _read_alike(self, suspect: XlaMessage, reference: XlaMessage) -> bool:
        return (
            shape_text(suspect.shape) == shape_text(reference.shape)
            and len(suspect.operand_ids) == len(reference.operand_ids)
            and any(
                self.ours.values[our_id] == self.theirs.values[their_id]
                or self.ours.own[our_id] == self.theirs.own[their_id]
                for our_id, their_id in itertools.product(
                    suspect.operand_ids, reference.operand_ids
                )
            )
        )

    def _is_free(self, instruction: int, side: int) -> bool:
        return instruction in (self.ours, self.theirs)[side].line.free

    def _is_more(self, instruction: int, side: int) -> bool:
        """Return whether one program computes a value more often than the other."""
        sides = (self.ours, self.theirs)
        value = sides[side].values[instruction]
        if self._is_free(instruction, side) and not self.counts[not side][value]:
            # It may be a constant that moved into a loop or out of one.
            return value not in _free_values(sides[not side].line.program)
        return self.counts[side][value] > self.counts[not side][value]

    def _is_extra(self, suspect: XlaMessage, reference: XlaMessage, operand: int) -> bool:
        """Return whether the suspect has an extra instruction, which reads the other."""
        return (
            self.ours.own[operand] == self.theirs.own[reference.id] != self.ours.own[suspect.id]
            and len(suspect.operand_ids) != len(reference.operand_ids)
            and not self.counts[0][self.theirs.values[reference.id]]
        )

    def _extra_operand(self, reference: XlaMessage, suspect_id: int) -> int | None:
        """Return the operand of an extra instruction of the reference that is the suspect's."""
        for operand in reference.operand_ids:
            if (
                self.theirs.own[operand]
                == self.ours.own[suspect_id]
                != self.theirs.own[reference.id]
                and len(self.ours.line.by_id[suspect_id].operand_ids) != len(reference.operand_ids)
                and not self.counts[0][self.theirs.values[operand]]
            ):
                return operand
        return None


@functools.lru_cache(maxsize=4)
def _free_values(program: FlatModule) -> frozenset[bytes]:
    """Return the values that any computation of a program computes from constants alone."""
    lines = map(program.line, program.computations)
    return frozenset(
        value
        for line in lines
        for instruction_id, value in Digests(line).values.items()
        if instruction_id in line.free
    )


def match(suspect: Line, reference: Line) -> Matching:
    """Match the instructions of two computations; those of the same value match in order."""
    if suspect.computation == reference.computation:
        return {instruction_id: instruction_id for instruction_id in suspect.by_id}
    compared = compare(suspect, reference)
    matched = set(compared.partners.values())
    remaining: defaultdict[bytes, list[int]] = defaultdict(list)
    for instruction in reversed(reference.order):
        if instruction.id not in matched:
            remaining[compared.digests[1].values[instruction.id]].append(instruction.id)
    matching = dict(compared.partners)
    for instruction in suspect.order:
        candidates = remaining[compared.digests[0].values[instruction.id]]
        if instruction.id not in matching and candidates:
            matching[instruction.id] = candidates.pop()
    return matching


def count_matched(compared: ComputationDiff) -> tuple[int, int]:
    """Count the suspect's instructions that compute something: the matched ones, and all.

    Instructions in loops and branches count too.
    """

    def counted(compared: ComputationDiff) -> Iterator[bool]:
        for instruction in compared.lines[0].work():
            is_same = compared.digests[0].values[instruction.id] in compared.values_there
            is_matched = is_same or instruction.id in compared.partners
            yield is_matched
            if instruction.id in compared.inside:
                for nested in compared.inside[instruction.id]:
                    yield from counted(nested)
            elif instruction.opcode in STEPPED:
                called = map(compared.lines[0].program.line, instruction.called_computation_ids)
                yield from (is_matched for line in called for _ in line.work())

    matched = list(counted(compared))
    return sum(matched), len(matched)
