"""Start the program later, from recorded values."""

from __future__ import annotations

from collections.abc import Iterator

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base
from snaprt_replay.minify.views.halving import positions

_NAME = "suffix"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program from its middle on, then from the first quarter, ..."""
    line = base.line
    starts = [line.position[base.computed[skipped]] for skipped in positions(base.computed)]
    base.record({one for start in starts for one in line.live(start)})
    for start in starts:
        name = line.order[start].name
        made = base.cut(base.results, line.live(start), _NAME, f"started at {name}")
        if made is not None:
            yield made
