"""Keep fewer of the outputs."""

from __future__ import annotations

from collections.abc import Iterator

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base

_NAME = "outputs"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program with one output alone, then with a half, a quarter, ... left out."""
    results = base.results
    if len(results) < 2:
        return
    names = {one: base.line.by_id[one].name for one in results}
    if not grain:
        for one in results:
            made = base.cut([one], [], _NAME, f"of its outputs only {names[one]}", 1)
            if made is not None:
                yield made
    size = grain or len(results) // 2
    while size:
        for start in range(0, len(results), size):
            left = results[:start] + results[start + size :]
            if not left:
                continue
            dropped = ", ".join(names[one] for one in results[start : start + size][:3])
            made = base.cut(left, [], _NAME, f"without the output {dropped}", size)
            if made is not None:
                yield made
        size //= 2
