"""The forms in which a graph is written down; it must not know where.

Each is made on its own, so that one that cannot be made leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import jax

from snaprt import jaxapi
from snaprt.compile.lower import placed
from snaprt.explain.graph_text import as_dot, as_text
from snaprt.explain.nodes import ShownNode
from snaprt.explain.trace.drawing import draw
from snaprt.explain.trace.told import loaded_executable
from snaprt.runtime.events import Run

#: Constants of more elements are left out of the StableHLO.
_LARGEST_CONSTANT: Final = 16


@dataclass(frozen=True)
class Form:
    """A form of a graph.

    Attributes:
        file: The name of its file.
        title: What the page calls it.
        make: Returns its text.
    """

    file: str
    title: str
    make: Callable[[Run, Sequence[ShownNode]], str]


def _drawing(run: Run, nodes: Sequence[ShownNode]) -> str:
    return draw(nodes, f"Graph {run.executable.graph_id}")


def _jaxpr(run: Run, nodes: Sequence[ShownNode]) -> str:
    program = run.program
    with placed(program.placement):
        function, shapes = program.as_function(frozenset()), jaxapi.shapes_of(program.inputs)
        return jax.make_jaxpr(function)(*shapes).pretty_print(source_info=True)


def _stablehlo(run: Run, nodes: Sequence[ShownNode]) -> str:
    module = run.executable.lowered().compiler_ir("stablehlo")
    return jaxapi.stablehlo_with_locations(module, _LARGEST_CONSTANT)


def _optimised_hlo(run: Run, nodes: Sequence[ShownNode]) -> str:
    loaded = loaded_executable(run.executable)
    if loaded is None:
        raise ValueError("the graph was not compiled")
    return jaxapi.executable_report(loaded)[2]


FORMS: Final = (
    Form("graph.svg", "Drawing", _drawing),
    Form("graph.txt", "Nodes", lambda run, nodes: as_text(nodes)),
    Form("graph.dot", "Graphviz", lambda run, nodes: as_dot(nodes)),
    Form("jaxpr.txt", "Jaxpr", _jaxpr),
    Form("module.stablehlo.mlir", "StableHLO", _stablehlo),
    Form("optimised.hlo", "Optimized HLO", _optimised_hlo),
)
