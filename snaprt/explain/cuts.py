"""What happened while a program ran lazily: graph breaks, operations that ran alone, a table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from snaprt import jaxapi
from snaprt.explain.reasons import Guard, argument_names, guards_of
from snaprt.runtime.events import Cut, Execution, Subscriber, subscribe, unsubscribe
from snaprt.runtime.graph_breaks import describe_break
from snaprt.runtime.lazy_scope import lazy
from snaprt.runtime.step import mark_step
from snaprt.units import counted

#: Where a graph's executable came from: the compiler, the compile cache, or an earlier run of it.
COMPILED: Final = "compiled"
LOADED: Final = "loaded"
KNOWN: Final = "known"


@dataclass(frozen=True)
class GraphRecord:
    """A graph that ran.

    Attributes:
        graph_id: Its id in logs, errors and snapshots.
        inputs: The number of arrays it reads.
        outputs: The number of its results.
        origin: ``compiled``, ``loaded`` from the compile cache, or ``known`` to the process.
        guards: What must stay for it to run again without a compilation; of `explain` only.
    """

    graph_id: str
    operations: int
    inputs: int
    outputs: int
    origin: str
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class CutRecord:
    """A graph break, and the graphs that it ran.

    Attributes:
        cause: ``mark_step``, or what read a value (``float``, ``bool``, ``nonzero``, ...).
        stack: The user's frames, innermost last.
        step: How many steps the thread had marked before.
    """

    cause: str
    stack: tuple[jaxapi.Frame, ...]
    step: int
    thread: str
    graphs: tuple[GraphRecord, ...]

    @property
    def place(self) -> jaxapi.Frame | None:
        """The user's line."""
        return jaxapi.users_place(self.stack)

    @property
    def operations(self) -> int:
        """The number of operations that ran."""
        return sum(graph.operations for graph in self.graphs)

    @property
    def advice(self) -> str:
        """What to write instead; empty if the break was requested."""
        return describe_break(self.cause).advice


@dataclass(frozen=True)
class AtOnceRecord:
    """An operation that ran alone because it cannot be part of a graph.

    Attributes:
        cause: The reason, such as ``device_put`` or ``ref``.
        stack: The user's frames, innermost last.
    """

    name: str
    cause: str
    stack: tuple[jaxapi.Frame, ...]

    @property
    def place(self) -> jaxapi.Frame | None:
        """The user's line."""
        return jaxapi.users_place(self.stack)

    @property
    def advice(self) -> str:
        """What to write instead."""
        return describe_break(self.cause).advice


GraphBreakEvent = CutRecord | AtOnceRecord


class Collector(Subscriber):
    """Makes a record of each cut and of each operation that runs alone, and hands it on.

    Attributes:
        at_steps: What the cause of a marked step is called.

    With ``names`` of arrays, by their ``id``, the record of a graph has its guards.
    """

    def __init__(
        self, take: Callable[[GraphBreakEvent], None], names: Mapping[int, str] | None = None
    ) -> None:
        self.at_steps = "mark_step"
        self._take = take
        self._names = names
        self._graphs: dict[int, list[GraphRecord]] = {}

    def cut(self, cut: Cut) -> None:
        """Begin a record."""
        self._graphs[cut.number] = []

    def ready(self, run: Execution) -> None:
        """Add a graph to it."""
        executable = run.executable
        origin = KNOWN if not run.is_new else LOADED if executable.from_cache else COMPILED
        graph = GraphRecord(
            graph_id=executable.graph_id,
            operations=len(run.program.nodes),
            inputs=len(run.arguments),
            outputs=len(executable.output_names),
            origin=origin,
            guards=() if self._names is None else guards_of(run, self._names),
        )
        self._graphs[run.cut.number].append(graph)

    def cut_done(self, cut: Cut) -> None:
        """Hand it on."""
        cause = self.at_steps if cut.cause == "mark_step" else cut.cause
        graphs = tuple(self._graphs.pop(cut.number, ()))
        self._take(CutRecord(cause, cut.stack, cut.step, cut.thread, graphs))

    def at_once(self, name: str, cause: str) -> None:
        """Hand on a record of an operation."""
        self._take(AtOnceRecord(name, cause, jaxapi.user_frames()))


@dataclass(frozen=True)
class GraphBreakRow:
    """What happened at one place of a program for one cause, once or several times."""

    cause: str  # see `CutRecord` and `AtOnceRecord`
    operation: str  # the operation that ran alone; empty for a cut
    place: jaxapi.Frame | None
    times: int
    graphs: int
    fewest: int  # the fewest operations that ran at one time
    most: int
    operations: int
    compiled: int  # how many of the graphs were compiled for it
    loaded: int  # how many were loaded from the compile cache

    def plus(self, other: GraphBreakRow) -> GraphBreakRow:
        """Return this row with what happened at the same place another time."""
        return replace(
            self,
            times=self.times + other.times,
            graphs=self.graphs + other.graphs,
            fewest=min(self.fewest, other.fewest),
            most=max(self.most, other.most),
            operations=self.operations + other.operations,
            compiled=self.compiled + other.compiled,
            loaded=self.loaded + other.loaded,
        )


def row_of(event: GraphBreakEvent) -> GraphBreakRow:
    """Return the row of one event."""
    if isinstance(event, AtOnceRecord):
        return GraphBreakRow(event.cause, event.name, event.place, 1, 0, 0, 0, 0, 0, 0)
    origins = [graph.origin for graph in event.graphs]
    operations = event.operations
    return GraphBreakRow(
        cause=event.cause,
        operation="",
        place=event.place,
        times=1,
        graphs=len(event.graphs),
        fewest=operations,
        most=operations,
        operations=operations,
        compiled=origins.count(COMPILED),
        loaded=origins.count(LOADED),
    )


class GraphBreakRows:
    """Rows of all that happened, by place, in the order of their first time."""

    def __init__(self) -> None:
        self._rows: dict[Any, GraphBreakRow] = {}
        self._lock = threading.Lock()

    def add(self, event: GraphBreakEvent) -> None:
        """Add what happened."""
        row = row_of(event)
        key = (row.place, row.cause, row.operation)
        with self._lock:
            earlier = self._rows.get(key)
            self._rows[key] = row if earlier is None else earlier.plus(row)

    def __call__(self) -> tuple[GraphBreakRow, ...]:
        """Return them."""
        return tuple(self._rows.values())


@dataclass(frozen=True)
class Explanation:
    """What a function did in the lazy runtime.

    Attributes:
        events: The graph breaks, and the operations that ran alone, in order.
        result: The result of the function.
    """

    events: tuple[GraphBreakEvent, ...]
    result: Any = None

    @property
    def cuts(self) -> tuple[CutRecord, ...]:
        """The graph breaks."""
        return tuple(event for event in self.events if isinstance(event, CutRecord))

    @property
    def at_once(self) -> tuple[AtOnceRecord, ...]:
        """The operations that ran alone."""
        return tuple(event for event in self.events if isinstance(event, AtOnceRecord))

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """The graphs, in the order they ran."""
        return tuple(graph for cut in self.cuts for graph in cut.graphs)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What would make a graph compile again if it changed, each once, in the graphs' order."""
        return tuple(dict.fromkeys(guard for graph in self.graphs for guard in graph.guards))

    @property
    def compilations(self) -> int:
        """The number of graphs that were compiled."""
        return sum(graph.origin == COMPILED for graph in self.graphs)

    def __str__(self) -> str:
        return explain_rows([row_of(event) for event in self.events])


def explain_rows(rows: Iterable[GraphBreakRow]) -> str:
    """Return a table of what happened where, and what to write instead."""
    rows = list(rows)
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_summary(rows), ""]
    for times, operations, new, cause, place in cells:
        start = (
            f"{times:>{widths[0]}}  {operations:>{widths[1]}}  {new:>{widths[2]}}  "
            f"{cause:<{widths[3]}}"
        )
        lines.append(f"{start}  {place}")
    advice = {row.cause: describe_break(row.cause) for row in rows}
    for cause, (what, instead) in advice.items():
        if instead:
            lines += ["", f"{cause}: {what}", f"  instead: {instead}"]
    return "\n".join(lines)


_HEAD: Final = ("times", "operations", "new graphs", "cause", "where")


def _cells(row: GraphBreakRow) -> tuple[str, ...]:
    if row.operation:
        return (
            str(row.times),
            "at once",
            "",
            row.cause,
            f"{jaxapi.place_text(row.place)}: {row.operation}",
        )
    operations = f"{row.fewest}" if row.fewest == row.most else f"{row.fewest}-{row.most}"
    kinds = ((row.compiled, COMPILED), (row.loaded, LOADED))
    new = ", ".join(f"{count} {word}" for count, word in kinds if count)
    return str(row.times), operations, new, row.cause, jaxapi.place_text(row.place)


def _summary(rows: Iterable[GraphBreakRow]) -> str:
    total = GraphBreakRow("", "", None, 0, 0, 0, 0, 0, 0, 0)
    alone = 0
    for row in rows:
        total = total.plus(row)
        alone += row.times if row.operation else 0
    parts = [
        counted(total.graphs, "graph"),
        counted(total.operations, "operation"),
        f"{counted(total.compiled, 'graph')} compiled",
    ]
    if total.loaded:
        parts.append(f"{counted(total.loaded, 'graph')} loaded from the compile cache")
    if alone:
        parts.append(f"{counted(alone, 'operation')} run immediately")
    return ", ".join(parts)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run a function lazily, and return what it did in the lazy runtime.

    A step is marked before, so that pending operations do not count, and one after it.

    Returns:
        The graphs that ran, with their operations, and for each graph break its cause and the
        user's line, in order; and its guards, what would make a graph compile again. Print it, or
        inspect its attributes. It holds the function's result.

    Examples:
        >>> def positives(x):
        ...     return x[x > 0]
        >>> explained = snaprt.explain(positives, jnp.arange(-3.0, 4.0))
        >>> explained.cuts[0].cause
        'bool_mask'
        >>> print(explained.result)
        [1. 2. 3.]
    """
    events: list[GraphBreakEvent] = []
    collector = Collector(events.append, argument_names(function, args, kwargs))
    with lazy():
        mark_step()
        subscribe(collector)
        try:
            result = function(*args, **kwargs)
            collector.at_steps = "end"
            mark_step()
        finally:
            unsubscribe(collector)
    return Explanation(tuple(events), result)
