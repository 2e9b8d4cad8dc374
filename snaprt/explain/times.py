"""The time spent on each graph, as a table and as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from snaprt.compile import times
from snaprt.units import aligned

_COUNTS: Final = ("operations", "compiled", "loaded", "executions")
_HEADS: Final = ("graph", "name", "ops", *_COUNTS[1:-1], "runs", *times.STAGES, "total")
_LEFT: Final = 2  # how many columns are text


@dataclass(frozen=True)
class GraphTimes:
    """The time spent on one graph, in seconds.

    Attributes:
        graph_id: Its id: for a lazy graph, the id in snapshots and messages; for a `jax.jit`
            program, the start of its key in the compile cache.
        name: The name of its module.
        kind: ``lazy`` or ``jit``.
        operations: The number of recorded operations; ``None`` if JAX traced it.
        compiled: How often it was compiled in this process.
        loaded: How often its executable was loaded from the compile cache.
        executions: How often it was started; ``None`` if JAX starts it without us.
        record: Recording its operations, except those that repeat an earlier step, because timing
            them would take longer than recording.
        key: Computing cache keys.
        cache: Reading and writing the cache, and waiting for another process to compile it.
        lower: Tracing and lowering it to StableHLO.
        compile: XLA's compiler.
        load: Loading the executable from its cache entry, unless that happened in the background.
        execute: Its executions until JAX returned the results, which may still be in progress: on
            an asynchronous device, the time to start them.
    """

    graph_id: str
    name: str
    kind: str
    operations: int | None
    compiled: int
    loaded: int
    executions: int | None
    record: float
    key: float
    cache: float
    lower: float
    compile: float
    load: float
    execute: float

    @property
    def total(self) -> float:
        """The sum of all stages, in seconds."""
        return float(sum(getattr(self, stage) for stage in times.STAGES))


@dataclass(frozen=True)
class CompileTimes:
    """The time spent on each graph of this process; print it for a table.

    Attributes:
        graphs: The graphs, slowest first.
        forgotten: The number of graphs that were dropped because there were too many.
    """

    graphs: tuple[GraphTimes, ...]
    forgotten: int = 0

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by stage, over all graphs."""
        return {
            stage: float(sum(getattr(graph, stage) for graph in self.graphs))
            for stage in times.STAGES
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON-compatible values."""
        graphs = [{**dataclasses.asdict(graph), "total": graph.total} for graph in self.graphs]
        return {"graphs": graphs, "totals": self.totals, "forgotten": self.forgotten}

    def __str__(self) -> str:
        rows = [_HEADS, *map(_cells, self.graphs)]
        if len(self.graphs) > 1:
            sums = self.totals
            seconds = [*sums.values(), sum(sums.values())]
            counts = [
                str(sum(getattr(graph, name) or 0 for graph in self.graphs)) for name in _COUNTS
            ]
            rows.append(("all", "", *counts, *map(_seconds, seconds)))
        lines = aligned(rows, _LEFT)
        if self.forgotten:
            lines.append(f"and {self.forgotten} earlier graphs")
        return "\n".join(lines)


def compile_times() -> CompileTimes:
    """Return how long recording, keys, cache, lowering, compiling, loading and running took.

    The times are by graph, since the process began: every graph that ran lazily, and every
    `jax.jit` program that was looked up in the compile cache, except those that failed to compile.
    ``print(snaprt.compile_times())`` prints a table.

    Examples:
        >>> with snaprt.lazy():
        ...     y = jnp.arange(5.0) ** 3
        ...     snaprt.mark_step()
        >>> times = snaprt.compile_times()
        >>> sorted(times.totals)
        ['cache', 'compile', 'execute', 'key', 'load', 'lower', 'record']
    """
    programs, forgotten = times.programs()
    graphs = sorted(map(_graph_times, programs), key=lambda graph: -graph.total)
    return CompileTimes(tuple(graphs), forgotten)


def _graph_times(program: times.ProgramTimes) -> GraphTimes:
    seconds = {stage: program.nanoseconds.get(stage, 0) / 1e9 for stage in times.STAGES}
    return GraphTimes(
        graph_id=program.graph_id,
        name=program.name,
        kind=program.kind,
        operations=program.operations,
        compiled=program.compiled,
        loaded=program.loaded,
        executions=program.executions if program.kind == times.LAZY else None,
        **{**seconds, times.EXECUTE: program.execute / 1e9},
    )


def _cells(graph: GraphTimes) -> tuple[str, ...]:
    counts = (getattr(graph, name) for name in _COUNTS)
    seconds = (getattr(graph, stage) for stage in (*times.STAGES, "total"))
    return (
        graph.graph_id,
        graph.name,
        *("-" if count is None else str(count) for count in counts),
        *map(_seconds, seconds),
    )


_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (0.0, "us"))
"""The least number of seconds for which a unit is used, and its name."""


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return "0"
    least, unit = next(row for row in _UNITS if seconds >= row[0])
    return f"{seconds / (least or 1e-6):.3g} {unit}"
