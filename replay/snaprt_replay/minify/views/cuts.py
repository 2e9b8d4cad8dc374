"""Cut parts of a program away: outputs, its end, its beginning, any instructions, loops.

Recorded values stand in for what is gone. Sizes go from a half of the instructions down to one, as
in delta debugging (A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002).
"""

from __future__ import annotations

from collections.abc import Iterator

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import copy_of, entry_computation
from snaprt_replay.hlo.inline import inline_calls
from snaprt_replay.minify.candidate import Candidate, changed
from snaprt_replay.minify.cutting import Base


def halves(size: int) -> Iterator[int]:
    """Yield a size, its half, its quarter, ..., one."""
    while size:
        yield size
        size //= 2


def outputs(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with one output alone, then with a half, a quarter, ... left out."""
    results = base.results
    if len(results) < 2:
        return
    names = {result: base.line.by_id[result].name for result in results}
    if not grain:
        for result in results:
            yield from base.cut([result], [], "outputs", f"only the outputs {names[result]}", 1)
    for size in halves(grain or len(results) // 2):
        for start in range(0, len(results), size):
            left = results[:start] + results[start + size :]
            dropped = ", ".join(names[one] for one in results[start : start + size][:3])
            yield from base.cut(left, [], "outputs", f"without the output {dropped}", size)


def prefix(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program up to its middle, then to three quarters, ...: that is the output."""
    line = base.line
    for left_out in halves(len(base.computed) // 2):
        last = base.computed[len(base.computed) - left_out - 1]
        results = line.live(line.position[last] + 1)
        yield from base.cut(results, [], "prefix", f"stopped after {line.by_id[last].name}")


def suffix(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program from its middle on, then from the first quarter, ..."""
    line = base.line
    skipped = halves(len(base.computed) // 2)
    starts = [line.position[base.computed[number]] for number in skipped]
    base.record({one for start in starts for one in line.live(start)})
    for start in starts:
        what = f"started at {line.order[start].name}"
        yield from base.cut(base.results, line.live(start), "suffix", what)


def loops(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with each loop run once, each conditional replaced by each branch."""
    if base.candidate.expected is not None:
        return  # it would compute something else
    for one in base.line.order:
        if one.opcode == "while":
            yield from _called_once(base, one.name, 0, f"only one iteration of {one.name}")
        if one.opcode == "conditional":
            for branch in range(len(one.called_computation_ids)):
                what = f"only branch {branch} of {one.name}"
                yield from _called_once(base, one.name, branch, what)


def _called_once(base: Base, name: str, number: int, what: str) -> Iterator[Candidate]:
    modules = []
    for module in base.candidate.modules:
        copy = copy_of(module)
        found = [
            instruction
            for instruction in entry_computation(copy).instructions
            if instruction.name == name
        ]
        if not found:
            return
        _call(found[0], number)
        inline_calls(copy)
        modules.append(copy)
    yield changed(base.candidate, "loops", what, modules=modules)


def _call(instruction: XlaMessage, number: int) -> None:
    called = instruction.called_computation_ids[number]
    if instruction.opcode == "conditional":
        instruction.operand_ids[:] = [instruction.operand_ids[number + 1]]
    instruction.opcode = "call"
    instruction.called_computation_ids[:] = [called]
    instruction.ClearField("backend_config")


def instructions(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without a half of its instructions, a quarter, ..., one.

    What is left reads the recorded values of those that are gone; those that were outputs are no
    longer any, and where one output only is left, what it was made of is the output instead.
    """
    computed, by_id = base.computed, base.line.by_id
    most = len(computed) // 2
    for size in halves(min(grain or most, most)):
        for start in range(0, len(computed), size):
            gone = computed[start : start + size]
            results = [result for result in base.results if result not in gone]
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            what = f"with the recorded value of {by_id[computed[start]].name}{more}"
            yield from base.cut(results, gone, "instructions", what, size)
    given = ("parameter", "constant")
    for last in base.results:
        if by_id[last].opcode not in given:
            read = [one for one in by_id[last].operand_ids if by_id[one].opcode not in given]
            left = dict.fromkeys([*(result for result in base.results if result != last), *read])
            what = f"without the last instruction {by_id[last].name}"
            yield from base.cut(left, [], "instructions", what)
