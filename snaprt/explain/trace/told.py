"""What the trace tells of each graph; must not know how it is written or shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from snaprt import jaxapi
from snaprt.compile.obtain import Executable
from snaprt.compile.times import ProgramTimes
from snaprt.explain.nodes import ShownNode, type_text
from snaprt.runtime.events import Cut, Run

SCHEMA: Final = "snaprt.trace.graph"
VERSION: Final = 1


@dataclass
class TracedGraph:
    """A graph that ran.

    Attributes:
        folder: The name of its folder.
        graph_id: What identifies it.
        operations: How many operations were recorded.
        inputs: The types of its inputs.
        outputs: The types of its outputs.
        cut: The cut that ran it first.
        from_cache: Whether its executable came from the compile cache.
        memory: Bytes by use.
        cost: What XLA estimates of an execution: floating-point operations, bytes accessed, ...
        times: Where its time has gone until now.
        missing: The forms that could not be made, and why.
        drawing: Its drawing, if it is small enough to stand in the page.
        executions: How often it was started.
    """

    folder: str
    graph_id: str
    operations: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cut: Cut
    from_cache: bool
    memory: Mapping[str, int]
    cost: Mapping[str, float]
    times: ProgramTimes
    missing: dict[str, str] = field(default_factory=dict)
    drawing: str = ""
    executions: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, of all that was done for the graph in this process."""
        stages = {name: spent / 1e9 for name, spent in self.times.nanoseconds.items()}
        return {**stages, "execute": self.times.execute / 1e9}

    def to_json(self) -> dict[str, Any]:
        """Return what ``analysis.json`` has of it."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "graph_id": self.graph_id,
            "operations": self.operations,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "cut": {
                "cause": self.cut.cause,
                "step": self.cut.step,
                "thread": self.cut.thread,
                "stack": [frame._asdict() for frame in self.cut.stack],
            },
            "from_cache": self.from_cache,
            "memory_bytes": self.memory,
            "cost": self.cost,
            "seconds": self.seconds,
            "executions": self.executions,
            "missing": self.missing,
        }


def loaded_executable(executable: Executable) -> Any:
    """Return what XLA made of a graph; ``None`` where it was not compiled but collected."""
    return None if executable.is_collected else jaxapi.loaded_executable(executable.call)


def _memory_and_cost(executable: Executable) -> tuple[dict[str, int], dict[str, float]]:
    loaded = loaded_executable(executable)
    try:
        return ({}, {}) if loaded is None else jaxapi.executable_report(loaded)[:2]
    except Exception:  # of a plugin that does not know, in its own words
        return {}, {}


def traced_graph(folder: str, run: Run, nodes: Sequence[ShownNode]) -> TracedGraph:
    """Return what is told of the graph of ``run``, which is about to run."""
    program, executable = run.program, run.executable
    memory, cost = _memory_and_cost(executable)
    results = [program.nodes[position].results[index] for position, index in program.outputs]
    return TracedGraph(
        folder=folder,
        graph_id=executable.graph_id,
        operations=len(program.nodes),
        inputs=tuple(map(type_text, program.inputs)),
        outputs=tuple(type_text(result.aval) for result in results),
        cut=run.cut,
        from_cache=executable.from_cache,
        memory=memory,
        cost=cost,
        times=executable.times,
    )
