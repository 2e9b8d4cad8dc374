"""Inline the calls of an HLO module, so that a program is one list.

XLA's own compilers inline calls first, so this does not affect the code they generate. Computations
that run many times or not at all remain nested: loops, branches, and the small computations of
`reduce`, `sort` and similar instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import (
    Editor,
    copy_of,
    drop_uncalled,
    instructions,
    root_instruction,
    take_name,
)

_CALLERS_OF_STEPS = frozenset({"while", "conditional"})

Scopes = Mapping[int, tuple[str, ...]]
"""The names of the called computations that inlined instructions come from, by id."""


class Inlined(NamedTuple):
    """Where the inlined instructions come from, by their new ids."""

    # The calls that each one was in, outermost first; an optimized module's fusions have become
    # such calls (see `restore`).
    scopes: Scopes
    origins: Mapping[int, int]  # which instruction of the called computation each is a copy of


def inline_calls(module: XlaMessage) -> Inlined:
    """Replace every `call` that is reachable from the entry, in place, by what it calls.

    Inlined instructions get new names if theirs are taken, the source line of the call if they have
    none, and its scope before the name of their operation.

    Args:
        module: An HloModuleProto that `hlo.verify` accepts. Uncalled computations are removed.
    """
    inlining = _Inlining(module)
    inlining.flatten(module.entry_computation_id)
    drop_uncalled(module)
    return Inlined(inlining.scopes, inlining.origins)


class _Inlining:
    """The state of `inline_calls`: the computations done so far, and the names that are taken."""

    def __init__(self, module: XlaMessage) -> None:
        self.editor = Editor(module)
        self.computations = {computation.id: computation for computation in module.computations}
        self.scopes: dict[int, tuple[str, ...]] = {}
        self.origins: dict[int, int] = {}
        self.done: set[int] = set()
        self.names = {instruction.name for instruction in instructions(module)}

    def flatten(self, computation_id: int) -> None:
        """Inline the calls of a computation and of the loops and branches in it."""
        if computation_id in self.done:
            return
        self.done.add(computation_id)
        computation = self.computations[computation_id]
        replaced: dict[int, int] = {}

        def expand(instruction: XlaMessage) -> list[XlaMessage]:
            _read_instead(instruction, replaced)
            if instruction.opcode in _CALLERS_OF_STEPS:
                for called in instruction.called_computation_ids:
                    self.flatten(called)
            if instruction.opcode != "call":
                return [instruction]
            return self._body_of(instruction, replaced)

        self.editor.replace_each(computation, expand)
        computation.root_id = replaced.get(computation.root_id, computation.root_id)

    def _body_of(self, call: XlaMessage, replaced: dict[int, int]) -> list[XlaMessage]:
        called = self.computations[call.called_computation_ids[0]]
        self.flatten(called.id)
        now: dict[int, int] = {}
        body = []
        for instruction in called.instructions:
            if instruction.opcode == "parameter":
                now[instruction.id] = call.operand_ids[instruction.parameter_number]
                continue
            copy = copy_of(instruction)
            copy.id = self.editor.new_id(call)
            now[instruction.id] = copy.id
            _read_instead(copy, now)
            copy.name = take_name(instruction.name, self.names)
            _lend_metadata(call, copy)
            self.scopes[copy.id] = (called.name, *self.scopes.get(instruction.id, ()))
            inlined: int = instruction.id
            self.origins[copy.id] = self.origins.get(inlined, inlined)
            body.append(copy)
        replaced[call.id] = now[root_instruction(called).id]
        return body


def _read_instead(instruction: XlaMessage, replaced: Mapping[int, int]) -> None:
    for field in (instruction.operand_ids, instruction.control_predecessor_ids):
        field[:] = [replaced.get(instruction_id, instruction_id) for instruction_id in field]


def _lend_metadata(call: XlaMessage, instruction: XlaMessage) -> None:
    own = instruction.metadata
    outer = call.metadata.op_name
    # An instruction from a fusion already has its complete name.
    if outer and not own.op_name.startswith(outer.partition("/")[0]):
        own.op_name = "/".join(filter(None, (outer, own.op_name)))
    if not own.stack_frame_id and not own.source_file:
        own.stack_frame_id = call.metadata.stack_frame_id
        own.source_file = call.metadata.source_file
        own.source_line = call.metadata.source_line
