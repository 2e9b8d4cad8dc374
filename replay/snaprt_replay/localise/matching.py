"""Find the instructions of one program in another, by structure and location; it must not run any.

The two are the same program: edited, compiled by another version, or recorded on another device.
Instructions are lined up in an order that depends on the data flow alone, first by what they are,
where they come from and what they read, then, in the gaps that are left, by place and shape.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Hashable, Mapping, Sequence

from snaprt.snapshot.xla import XlaMessage
from snaprt.snapshot.xla_literals import leaf_shapes
from snaprt_replay.hlo import parameters
from snaprt_replay.localise.program import Line

Matching = Mapping[int, int]
"""The id in the reference of each instruction of the suspect that has its like there."""


def match(suspect: Line, reference: Line) -> Matching:
    """Match the instructions of two computations.

    Parameters match by number.
    """
    if suspect.computation == reference.computation:
        return {one: one for one in suspect.by_id}
    pairs = zip(parameters(suspect.computation), parameters(reference.computation), strict=False)
    found = {one.id: other.id for one, other in pairs}
    _align(_by_data_flow(suspect), _by_data_flow(reference), (suspect, reference), 0, found)
    return found


def count_matched(suspect: Line, reference: Line, matching: Matching) -> tuple[int, int]:
    """Count the suspect's instructions that do something and are matched, and all of them.

    Those of loops and branches count too.
    """
    work = suspect.work()
    matched, count = sum(one.id in matching for one in work), len(work)
    for one in work:
        if one.opcode not in ("while", "conditional"):
            continue
        other = reference.by_id.get(matching.get(one.id, -1))
        there = () if other is None else other.called_computation_ids
        for called, other_called in itertools.zip_longest(one.called_computation_ids, there):
            if called is None:
                break
            line = suspect.program.line(called)
            if other_called is None:
                count += len(line.work())
                continue
            other_line = reference.program.line(other_called)
            inner = count_matched(line, other_line, match(line, other_line))
            matched, count = matched + inner[0], count + inner[1]
    return matched, count


def _align(
    ones: Sequence[XlaMessage],
    others: Sequence[XlaMessage],
    lines: tuple[Line, Line],
    level: int,
    found: dict[int, int],
) -> None:
    """Line up two runs of instructions, and what is between the matches by the next signature."""
    if not ones or not others or level == len(_SIGNATURES):
        return
    signature = _SIGNATURES[level]
    left = [signature(one, lines[0]) for one in ones]
    right = [signature(one, lines[1]) for one in others]
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, start, stop, other_start, other_stop in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(ones[start:stop], others[other_start:other_stop], strict=True)
            found.update((one.id, other.id) for one, other in pairs)
        elif tag == "replace":
            gap, other_gap = ones[start:stop], others[other_start:other_stop]
            _align(gap, other_gap, lines, level + 1, found)


def _exactly(instruction: XlaMessage, line: Line) -> tuple[Hashable, ...]:
    operands = tuple(line.by_id[one].opcode for one in instruction.operand_ids)
    return (*_operation(instruction, line), instruction.metadata.op_name, operands)


def _operation(instruction: XlaMessage, line: Line) -> tuple[Hashable, ...]:
    return (instruction.opcode, instruction.tuple_index, *_shape(instruction, line))


def _shape(instruction: XlaMessage, line: Line) -> tuple[Hashable, ...]:
    leaves = leaf_shapes(instruction.shape)
    return tuple((leaf.element_type, *leaf.dimensions) for leaf in leaves)


# From strict to loose; the last matches an operation with another one in its place.
_SIGNATURES = (_exactly, _operation, _shape)


def _by_data_flow(line: Line) -> list[XlaMessage]:
    """Return all but the parameters in the order in which going back from the root leaves them."""
    done: set[int] = set()
    ordered: list[XlaMessage] = []
    waiting = [(line.root.id, False)]
    while waiting:
        one, left = waiting.pop()
        if left:
            if line.by_id[one].opcode != "parameter":
                ordered.append(line.by_id[one])
        elif one not in done:
            done.add(one)
            waiting.append((one, True))
            waiting += [(operand, False) for operand in reversed(line.by_id[one].operand_ids)]
    return ordered
