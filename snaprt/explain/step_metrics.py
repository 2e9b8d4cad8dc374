"""Appends the metrics to the file that XLA_METRICS_FILE names after each step; counts nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from snaprt import metrics, settings
from snaprt.explain.appended import AppendedFile
from snaprt.runtime.events import Watcher

_FILE: Final = "XLA_METRICS_FILE"


def step_metrics() -> StepMetrics | None:
    """Return what appends the metrics, if the environment asks for it.

    Raises:
        UsageError: The file cannot be written to.
    """
    path = settings.get(_FILE)
    if path is None:
        return None
    stream = _STREAMS.get(str(path))
    return StepMetrics(AppendedFile(_FILE, path).append if stream is None else stream)


class StepMetrics(Watcher):
    """Appends the metrics after each step."""

    def __init__(self, append: Callable[[str], object]) -> None:
        self._append = append

    def step_ended(self, step: int) -> None:
        """Append what was counted until now; as in PyTorch/XLA, the first step is step 0."""
        self._append(f"[MetricsData; step={step - 1}]\n{metrics.metrics_report()}\n")


# The streams of the moment, for a program may put others in their place.
_STREAMS: Final[dict[str, Callable[[str], object]]] = {
    "STDERR": lambda text: sys.stderr.write(text),
    "STDOUT": lambda text: sys.stdout.write(text),
}
