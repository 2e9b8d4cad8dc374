"""The facade ``snaprt.replay``: load snapshots, run them again, compare; it holds no code.

from snaprt import replay
result = replay.replay("dump/step.inputs.snap", device="gpu")
print(result.comparison.summary)
"""

from __future__ import annotations

from snaprt_replay.case import Case, NamedArray, Signature
from snaprt_replay.compare import compare
from snaprt_replay.load import load
from snaprt_replay.player import PlayResult, play
from snaprt_replay.rerun import Replay, replay
from snaprt_replay.results import (
    Comparison,
    OutputComparison,
    Place,
    SpecialCounts,
    comparison_from_json,
    to_json,
)
from snaprt_replay.tolerance import Tolerance, ToleranceRequest

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
