"""The order that outputs are shown in; it must not know how they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from snaprt_replay.compare.results import IDENTICAL, MISMATCH, OutputComparison


def worst_first(outputs: Sequence[OutputComparison]) -> list[int]:
    """Return the positions of outputs, the worst first, equally bad ones in their own order."""
    return sorted(range(len(outputs)), key=lambda number: _badness(outputs[number]), reverse=True)


def _badness(output: OutputComparison) -> tuple[float, ...]:
    return (
        output.verdict == MISMATCH,
        output.verdict != IDENTICAL,
        output.specials.confused > 0,
        output.beyond / max(1, output.elements),
        output.max_ulp or 0,
        output.max_abs_error,
    )
