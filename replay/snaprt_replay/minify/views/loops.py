"""Run one iteration of a loop from its first state, one branch of a conditional, alone."""

from __future__ import annotations

from collections.abc import Iterator

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import entry_computation
from snaprt_replay.hlo.inline import inline_calls
from snaprt_replay.minify.candidate import Candidate, changed, copy_module
from snaprt_replay.minify.cutting import Base

_NAME = "loops"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with each loop run once, each conditional replaced by each branch."""
    if base.candidate.expected is not None:
        return  # it would compute something else
    for one in base.line.order:
        if one.opcode == "while":
            yield from _called_once(base, one.name, 0, f"one iteration of {one.name} alone")
        if one.opcode == "conditional":
            for branch in range(len(one.called_computation_ids)):
                what = f"branch {branch} of {one.name} alone"
                yield from _called_once(base, one.name, branch, what)


def _called_once(base: Base, name: str, number: int, what: str) -> Iterator[Candidate]:
    modules = []
    for module in base.candidate.modules:
        copy = copy_module(module)
        found = [one for one in entry_computation(copy).instructions if one.name == name]
        if not found:
            return
        _call(found[0], number)
        inline_calls(copy)
        modules.append(copy)
    yield changed(base.candidate, _NAME, what, modules=modules)


def _call(instruction: XlaMessage, number: int) -> None:
    called = instruction.called_computation_ids[number]
    if instruction.opcode == "conditional":
        instruction.operand_ids[:] = [instruction.operand_ids[number + 1]]
    instruction.opcode = "call"
    instruction.called_computation_ids[:] = [called]
    instruction.ClearField("backend_config")
