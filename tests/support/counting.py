"""What the tests of the lazy runtime count: graphs run, programs compiled, reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snaprt import metrics


@dataclass
class Counts:
    graphs: int = 0
    compiled: int = 0
    reads: dict[str, int] | None = None


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what happens inside the context."""
    before = _now()
    counts = Counts()
    yield counts
    after = _now()
    difference = {name: after[name] - before.get(name, 0) for name in after}
    counts.compiled = difference.get("UncachedCompile", 0)
    counts.graphs = counts.compiled + difference.get("CachedCompile", 0)
    counts.reads = {
        name.removeprefix("host::"): number
        for name, number in difference.items()
        if name.startswith("host::") and number
    }


def _now() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in metrics.counter_names()}
