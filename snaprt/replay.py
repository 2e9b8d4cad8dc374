"""The facade ``snaprt.replay``: load snapshots, run them again, compare; it holds no code.

from snaprt import replay
result = replay.replay("dump/step.inputs.snap", device="gpu")
print(result.comparison.summary)
"""

from __future__ import annotations

from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import (
    Comparison,
    OutputComparison,
    Place,
    SpecialCounts,
    comparison_from_json,
    to_json,
)
from snaprt_replay.compare.tolerance import Tolerance, ToleranceRequest
from snaprt_replay.load.case import Case, NamedArray, Signature
from snaprt_replay.load.load import load
from snaprt_replay.run.player import PlayResult, play
from snaprt_replay.run.rerun import Replay, replay

__all__ = [
    "Case",
    "Comparison",
    "NamedArray",
    "OutputComparison",
    "Place",
    "PlayResult",
    "Replay",
    "Signature",
    "SpecialCounts",
    "Tolerance",
    "ToleranceRequest",
    "compare",
    "comparison_from_json",
    "load",
    "play",
    "replay",
    "to_json",
]
