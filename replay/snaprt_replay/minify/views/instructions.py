"""Put recorded values in place of instructions: delta debugging over all of the program.

Source: A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002.
"""

from __future__ import annotations

from collections.abc import Iterator

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base

_NAME = "instructions"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program without a half of its instructions, a quarter, ..., one.

    What is left reads the recorded values of those that are gone; those that were outputs are no
    longer any, and where one output only is left, what it was made of is the output instead.
    """
    computed = base.computed
    size = min(grain or len(computed) // 2, len(computed) // 2)
    while size:
        for start in range(0, len(computed), size):
            gone = computed[start : start + size]
            results = [one for one in base.results if one not in gone]
            name = base.line.by_id[gone[0]].name
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            what = f"with the recorded value of {name}{more}"
            made = base.cut(results, gone, _NAME, what, size) if results else None
            if made is not None:
                yield made
        size //= 2
    yield from _without_the_last(base)


def _without_the_last(base: Base) -> Iterator[Candidate]:
    line, results = base.line, base.results
    for last in results:
        instruction = line.by_id[last]
        if instruction.opcode in ("parameter", "constant"):
            continue
        operands = [
            one
            for one in instruction.operand_ids
            if line.by_id[one].opcode not in ("parameter", "constant")
        ]
        left = dict.fromkeys([*(one for one in results if one != last), *operands])
        if left:
            made = base.cut(left, [], _NAME, f"without the last instruction {instruction.name}")
            if made is not None:
                yield made
