"""Stop the program earlier: what is computed by then is the output."""

from __future__ import annotations

from collections.abc import Iterator

from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base
from snaprt_replay.minify.views.halving import positions

_NAME = "prefix"


def candidates(base: Base, grain: int) -> Iterator[Candidate]:
    """Yield the program up to its middle, then to three quarters, ..."""
    line = base.line
    for left_out in positions(base.computed):
        kept = base.computed[: len(base.computed) - left_out]
        end = line.position[kept[-1]] + 1
        made = line.live(end)
        if made:
            name = line.by_id[kept[-1]].name
            found = base.cut(made, [], _NAME, f"stopped behind {name}")
            if found is not None:
                yield found
