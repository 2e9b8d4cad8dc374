"""Choose where to cut a range of instructions into regions; it must not know runs or errors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.localize.matching import Matching
from snaprt_replay.localize.program import Line, bytes_of


@dataclasses.dataclass(frozen=True)
class Region:
    """The instructions of a line from position `start` to before `stop`."""

    start: int
    stop: int


def choose_cuts(line: Line, matching: Matching, region: Region, most: int) -> list[int]:
    """Return the positions at which to cut a region into at most ``most`` regions.

    The regions have about as many instructions that do something, at least one, and are cut where
    few bytes are live, rather between two named scopes or calls than within one, and never where
    a value is live that the other side has not.
    """
    work = {one.id for one in line.work(region.start, region.stop)}
    unmatched = line.live_totals(lambda one: one.id not in matching)
    # Right behind work only: what follows it without doing anything belongs to its users.
    behind = [
        position
        for position in range(region.start + 1, region.stop)
        if line.order[position - 1].id in work
    ]
    ranks = {position: rank for rank, position in enumerate(behind, 1) if not unmatched[position]}
    ranks = {position: rank for position, rank in ranks.items() if rank < len(work)}
    if len(ranks) < most:
        return list(ranks)
    live_bytes = line.live_totals(lambda one: bytes_of(one.shape))

    def cost(position: int) -> float:
        scopes = {_scope(line, line.order[one]) for one in (position - 1, position)}
        return (live_bytes[position] + 1) / len(scopes)

    chosen = []
    step = len(work) / most
    for number in range(1, most):
        near = [one for one, rank in ranks.items() if -0.5 < rank / step - number <= 0.5]
        if near:
            chosen.append(min(near, key=cost))
    return chosen


def between(region: Region, cuts: Sequence[int]) -> list[Region]:
    """Return the regions that cuts make of a region."""
    bounds = [region.start, *cuts, region.stop]
    return [Region(*pair) for pair in itertools.pairwise(bounds)]


def _scope(line: Line, instruction: XlaMessage) -> tuple[str, ...]:
    calls = line.program.scopes.get(instruction.id, ())
    return (*calls, instruction.metadata.op_name.rpartition("/")[0])
