"""The graph so far when an error ended its recording, in the form in which graphs are recorded.

It is lowered, never compiled: what is to be shown of it is which operations it had.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.compile.ahead.collect import GRAPH_NAME
from snaprt.compile.key import module_digest
from snaprt.compile.lower import lowering
from snaprt.compile.obtain import artifacts_of, new_number
from snaprt.graph.artifacts import ModuleArtifacts
from snaprt.graph.program import Program


@dataclass(frozen=True, eq=False)
class UnfinishedGraph:
    """A graph whose recording an error ended; see `snaprt.compile.obtain.Executable`.

    Attributes:
        graph_id: As of an executable.
        number: As of an executable.
        devices: Where it would have run.
        input_names: A name for each argument.
        output_names: A name for each result.
        lowered: The graph, lowered.
        trace_error: What a snapshot says of the error.
    """

    graph_id: str
    number: int
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    lowered: jax.stages.Lowered
    trace_error: Any
    name: str = f"{GRAPH_NAME}.error"
    donated: tuple[int, ...] = ()

    def artifacts(self) -> ModuleArtifacts:
        """Return the graph in the forms in which it is recorded, with the error."""
        found = artifacts_of(self.lowered, None)
        return dataclasses.replace(found, trace_error=self.trace_error)


def unfinished_graph(program: Program | None, trace_error: Any) -> UnfinishedGraph:
    """Lower what was recorded before an error.

    Args:
        program: The graph so far; None where there was nothing in it.
        trace_error: What a snapshot says of the error.
    """
    if program is None:
        with jaxapi.evaluating():
            lowered = jaxapi.lower(_nothing, ())
    else:
        lowered = lowering(program, frozenset())()
    return UnfinishedGraph(
        graph_id=module_digest(jaxapi.stablehlo_without_locations(lowered))[:16],
        number=new_number(),
        devices=jaxapi.devices_of_lowered(lowered),
        input_names=tuple(f"arg{i}" for i in range(len(program.inputs) if program else 0)),
        output_names=tuple(f"out{i}" for i in range(len(program.outputs) if program else 0)),
        lowered=lowered,
        trace_error=trace_error,
    )


def _nothing() -> list[Any]:
    return []
