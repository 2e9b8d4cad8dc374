"""Writes the page that links what was traced; it must not know how anything was found.

The page loads nothing and runs nothing: its content policy allows its own style sheet alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from snaprt.compile.times import STAGES
from snaprt.explain.trace.forms import FORMS
from snaprt.explain.trace.templates import render, style
from snaprt.explain.trace.told import TracedGraph
from snaprt.units import format_duration, format_size

#: What of XLA's memory and cost analysis the page shows; ``analysis.json`` has all of it.
_MEMORY: Final = (
    ("argument_size", "arguments"),
    ("output_size", "outputs"),
    ("alias_size", "outputs that take the memory of arguments"),
    ("temp_size", "intermediate values"),
    ("generated_code_size", "generated code"),
    ("peak_memory", "peak"),
)
_COST: Final = (
    ("flops", "floating-point operations"),
    ("transcendentals", "transcendental functions"),
    ("bytes accessed", "bytes read and written"),
)
_TYPES_SHOWN: Final = 12


@dataclass(frozen=True)
class _Shown:
    """A graph as the template shows it."""

    number: int
    graph: TracedGraph
    place: str
    inputs: str
    outputs: str
    facts: tuple[tuple[str, str], ...]
    spent: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str, str], ...]
    drawing: Markup


def page(graphs: Sequence[TracedGraph], turns: Sequence[tuple[TracedGraph, int]]) -> str:
    """Return the page as HTML.

    Args:
        graphs: In the order in which they first ran.
        turns: Which graph ran, and how often in a row, in the order of the run.
    """
    numbers = {id(graph): number for number, graph in enumerate(graphs, 1)}
    return render(
        "index.html.j2",
        sheet=Markup(style("page.css") + style("graph.css")),
        graphs=[_shown(number, graph) for number, graph in enumerate(graphs, 1)],
        turns=[(numbers[id(graph)], count) for graph, count in turns],
        executions=sum(graph.executions for graph in graphs),
    )


def _shown(number: int, graph: TracedGraph) -> _Shown:
    stack = graph.cut.stack
    facts = [
        *((words, format_size(graph.memory[key])) for key, words in _MEMORY if key in graph.memory),
        *((words, f"{graph.cost[key]:,.0f}") for key, words in _COST if key in graph.cost),
    ]
    seconds = graph.seconds
    return _Shown(
        number=number,
        graph=graph,
        place=f"{stack[-1].file}:{stack[-1].line}" if stack else "",
        inputs=_types(graph.inputs),
        outputs=_types(graph.outputs),
        facts=tuple(facts),
        spent=tuple(
            (stage, format_duration(seconds[stage])) for stage in STAGES if stage in seconds
        ),
        links=tuple(
            (form.title, f"{graph.folder}/{form.file}", graph.missing.get(form.file, ""))
            for form in FORMS
        ),
        drawing=Markup(graph.drawing),
    )


def _types(types: Sequence[str]) -> str:
    more = f" and {len(types) - _TYPES_SHOWN} more" if len(types) > _TYPES_SHOWN else ""
    return ", ".join(types[:_TYPES_SHOWN]) + more
