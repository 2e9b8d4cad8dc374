"""Writes what SNAPRT_TRACE asks for: a folder for each graph in several forms, and a page.

The page loads nothing and runs nothing: its content policy allows its own style sheet alone. In the
drawing of a graph, inputs stand right above what first reads them. An arrow that would pass many
rows is left out, and the reader of it says what it reads: a long graph stays as readable as a short
one.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jax
import jinja2
from markupsafe import Markup

from snaprt import jaxapi, pages, settings, shown
from snaprt.compile.executable import Executable
from snaprt.compile.lower import placed
from snaprt.compile.times import STAGES, ProgramTimes
from snaprt.explain.nodes import (
    CONSTANT_NAME,
    INPUT_NAME,
    ShownNode,
    as_dot,
    as_text,
    is_wanted,
    node_text,
    operand_text,
    shown_nodes,
    type_text,
)
from snaprt.host.whole_files import (
    going_on_without_room,
    refused,
    write_whole,
    writing,
)
from snaprt.pages import Layout, Sizes, lay_out
from snaprt.runtime.events import Cut, Execution, Subscriber
from snaprt.units import format_duration, format_size

_PACKAGE, _TEMPLATES = "snaprt.explain", "trace"


def render(template: str, **values: Any) -> str:
    """Return a template filled with values."""
    return _environment().get_template(template).render(**values)


@functools.cache
def style(name: str) -> Markup:
    """Return one of our style sheets, in which there is no markup."""
    return Markup(resources.files(_PACKAGE).joinpath(_TEMPLATES, name).read_text(encoding="utf-8"))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = pages.environment(_PACKAGE, shown.lines, _TEMPLATES)
    environment.globals.update(style=style, digest=pages.style_digest)
    return environment


#: More nodes than this are not drawn: a browser would not show them in useful time.
MOST_NODES: Final = 1000

_SIZES: Final = Sizes(width=196, height=76, row=116)
_TEXT: Final = 26  # characters that fit in a box
_FARTHEST: Final = 5  # an arrow reaches over so many rows
_WIDEST: Final = 16  # boxes that stand in one row
_FAR_READS: Final = 3  # what is read from far away and named


@dataclass(frozen=True)
class _Box:
    """What the template shows of a node."""

    x: float
    y: float
    kind: str
    lines: tuple[tuple[str, str], ...]
    whole: str


def draw(nodes: Sequence[ShownNode], name: str, identity: str = "") -> str:
    """Return the drawing of a graph.

    Args:
        nodes: The graph, each node after its operands.
        name: What the drawing is called.
        identity: Unique in the page that the drawing becomes a part of, whose style sheet it then
            has; empty for a drawing in a file of its own.
    """
    drawn = nodes[:MOST_NODES]
    levels = _levels(drawn)
    edges = list(
        dict.fromkeys(
            (operand, number)
            for number, node in enumerate(drawn)
            for operand, _ in node.operands
            if levels[number] - levels[operand] <= _FARTHEST
        )
    )
    layout = lay_out(levels, edges, _SIZES)
    return render(
        "graph.svg.j2",
        name=name,
        identity=identity,
        width=round(layout.width),
        height=round(layout.height),
        sizes=_SIZES,
        paths=[layout.path(way) for way in layout.ways],
        boxes=[_box(number, nodes, layout) for number in range(len(drawn))],
        drawn=len(drawn),
        all=len(nodes),
    )


def _levels(nodes: Sequence[ShownNode]) -> list[int]:
    """Return the row of each node: below all that it reads, and where there is room."""
    rows: dict[int, int] = {}
    counts: dict[int, int] = {}
    first_reader: dict[int, int] = {}
    for number, node in enumerate(nodes):
        if not node.operands:
            continue
        above = [rows[operand] for operand, _ in node.operands if operand in rows]
        level = max(above, default=0) + 1
        while counts.get(level, 0) >= _WIDEST:
            level += 1
        rows[number] = level
        counts[level] = counts.get(level, 0) + 1
        for operand, _ in node.operands:
            first_reader.setdefault(operand, level)
    for number, node in enumerate(nodes):
        if node.operands:
            continue
        level = first_reader.get(number, 1) - 1
        while counts.get(level, 0) >= _WIDEST:
            level -= 1
        rows[number] = level
        counts[level] = counts.get(level, 0) + 1
    highest = min(rows.values())
    return [rows[number] - highest for number in range(len(nodes))]


def _box(number: int, nodes: Sequence[ShownNode], layout: Layout) -> _Box:
    node = nodes[number]
    level = layout.levels[number]
    far = [operand for operand in node.operands if level - layout.levels[operand[0]] > _FARTHEST]
    named = ", ".join(operand_text(operand, nodes) for operand in far[:_FAR_READS])
    more = f", {len(far) - _FAR_READS} more" if len(far) > _FAR_READS else ""
    attributes = dict(node.attributes)
    what = attributes.get("name", node.name.partition("::")[2])
    if node.name == CONSTANT_NAME:
        what = attributes["value"]
    last = f"output {', '.join(map(str, node.roots))}" if node.roots else node.location
    return _Box(
        x=round(layout.middles[number] - _SIZES.width / 2, 1),
        y=_SIZES.top(level),
        kind=_KINDS.get(node.name, "output" if node.roots else "operation"),
        lines=(
            ("name", shown.name(f"%{number} {what}", _TEXT)),
            ("type", shown.name(node.type, _TEXT)),
            ("place", shown.name(last, _TEXT)),
            ("reads", shown.name(f"reads {named}{more}", _TEXT) if far else ""),
        ),
        whole=node_text(number, node, nodes),
    )


_KINDS: Final = {INPUT_NAME: "input", CONSTANT_NAME: "constant"}

SCHEMA: Final = "snaprt.trace.graph"
VERSION: Final = 1


@dataclass
class TracedGraph:
    """A graph that ran."""

    folder: str
    graph_id: str
    operations: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cut: Cut  # the cut that ran it first
    from_cache: bool
    memory: Mapping[str, int]  # bytes by use
    # What XLA estimates of an execution: floating-point operations, bytes accessed, ...
    cost: Mapping[str, float]
    times: ProgramTimes  # where its time has gone until now
    # The forms that could not be made, and why.
    missing: dict[str, str] = field(default_factory=dict)
    drawing: str = ""
    executions: int = 0
    forms: tuple[str, ...] = ()  # the files that were asked for

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
    if loaded is None:
        return {}, {}
    try:
        return jaxapi.executable_memory(loaded), jaxapi.executable_cost(loaded)
    except Exception:  # of a plugin that does not know, in its own words
        return {}, {}


def traced_graph(folder: str, run: Execution, nodes: Sequence[ShownNode]) -> TracedGraph:
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


#: Constants of more elements are left out of the StableHLO.
_LARGEST_CONSTANT: Final = 16


@dataclass(frozen=True)
class GraphForm:
    """A form of a graph."""

    file: str  # the name of its file
    title: str
    make: Callable[[Execution, Sequence[ShownNode]], str]


def _drawing(run: Execution, nodes: Sequence[ShownNode]) -> str:
    return draw(nodes, f"Graph {run.executable.graph_id}")


def _jaxpr(run: Execution, nodes: Sequence[ShownNode]) -> str:
    program = run.program
    with placed(program.placement):
        function, shapes = program.as_function(frozenset()), jaxapi.shapes_of(program.inputs)
        return jax.make_jaxpr(function)(*shapes).pretty_print(source_info=True)


def _stablehlo(run: Execution, nodes: Sequence[ShownNode]) -> str:
    module = run.executable.lowered().compiler_ir("stablehlo")
    return jaxapi.stablehlo_with_locations(module, _LARGEST_CONSTANT)


def _optimized_hlo(run: Execution, nodes: Sequence[ShownNode]) -> str:
    loaded = loaded_executable(run.executable)
    if loaded is None:
        raise ValueError("the graph was not compiled")
    return jaxapi.optimized_program(loaded)[0]


DRAWING: Final = "graph.svg"
FORMS: Final = (
    GraphForm(DRAWING, "Drawing", _drawing),
    GraphForm("graph.txt", "Nodes", lambda run, nodes: as_text(nodes)),
    GraphForm("graph.dot", "Graphviz", lambda run, nodes: as_dot(nodes)),
    GraphForm("jaxpr.txt", "Jaxpr", _jaxpr),
    GraphForm("module.stablehlo.mlir", "StableHLO", _stablehlo),
    GraphForm("optimised.hlo", "Optimized HLO", _optimized_hlo),
)


#: What of XLA's memory and cost analysis the page shows; ``analysis.json`` has all of it.
_MEMORY: Final = (
    ("argument_size", "arguments"),
    ("output_size", "outputs"),
    ("alias_size", "outputs that reuse the memory of arguments"),
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
    """Return the page as HTML."""
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
            if form.file in graph.forms
        ),
        drawing=Markup(graph.drawing),
    )


def _types(types: Sequence[str]) -> str:
    more = f" and {len(types) - _TYPES_SHOWN} more" if len(types) > _TYPES_SHOWN else ""
    return ", ".join(types[:_TYPES_SHOWN]) + more


INDEX: Final = "index.html"
ORDER: Final = "executions.jsonl"
ANALYSIS: Final = "analysis.json"

#: Larger graphs, and those after so many, have their drawings in files alone.
_MOST_NODES_IN_PAGE: Final = 60
_MOST_DRAWINGS_IN_PAGE: Final = 24

#: A page with many graphs is written anew so many seconds after it was written last.
_SECONDS_BETWEEN_PAGES: Final = 2.0

#: How many changes from one graph to another the page tells.
_MOST_TURNS: Final = 1000

_log = logging.getLogger("snaprt.explain")


class TraceFolder(Subscriber):
    """Writes a folder for each graph before it first runs, and a page that links them.

    Where the disk is full, that is said once, and the program goes on.

    Raises:
        UsageError: Nothing can be written there, for another reason than a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = settings.for_rank(path)
        self._forms: tuple[str, ...] = settings.get("SNAPRT_TRACE_FORMS")
        self._lock = threading.Lock()
        self._has_complained = False
        self._begin()
        atexit.register(self._finish)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._graphs: dict[int, TracedGraph] = {}
        self._turns: list[tuple[TracedGraph, int]] = []
        self._page_time = 0.0
        self._claimed: Path | None = None
        elsewhere = "name a writable directory, or one that can be created"
        with (
            writing(f"write to {self._path} (SNAPRT_TRACE)", elsewhere),
            going_on_without_room(self._complain),
        ):
            _write(self._folder() / INDEX, page((), ()))

    def _folder(self) -> Path:
        """Return the folder for this process, claimed once there is room for it."""
        if self._claimed is None:
            self._claimed = _claim(self._path)
        return self._claimed

    def ready(self, run: Execution) -> None:
        """Write the folder of a graph that runs for the first time."""
        if not is_wanted(run.program):
            return
        with self._lock:
            if os.getpid() != self._process:  # a fork has a folder of its own
                self._begin()
            if run.executable.number in self._graphs:
                return
            try:
                self._write_graph(run)
                self._write_page()
            except OSError as error:
                self._complain(error)

    def ran(self, run: Execution, results: Sequence[object]) -> None:
        """Count the execution, and append it to the list of all."""
        graph = self._graphs.get(run.executable.number)
        if graph is None:
            return
        cut = run.cut
        place = cut.stack[-1]._asdict() if cut.stack else None
        row = {"graph": graph.folder, "cut": cut.number, "step": cut.step, "thread": cut.thread}
        line = json.dumps({**row, "cause": cut.cause, "at": place}) + "\n"
        with self._lock:
            graph.executions += 1
            self._turn(graph)
            try:
                with (self._folder() / ORDER).open("a", encoding="utf-8") as file:
                    file.write(line)
                self._write_page(often=False)
            except OSError as error:
                self._complain(error)

    def _turn(self, graph: TracedGraph) -> None:
        if self._turns and self._turns[-1][0] is graph:
            self._turns[-1] = graph, self._turns[-1][1] + 1
        elif len(self._turns) < _MOST_TURNS:
            self._turns.append((graph, 1))

    def _write_graph(self, run: Execution) -> None:
        nodes = shown_nodes(run.program)
        name = f"{len(self._graphs) + 1:04d}-{run.executable.graph_id}"
        folder = self._folder() / name
        folder.mkdir()
        graph = self._graphs[run.executable.number] = traced_graph(name, run, nodes)
        graph.forms = self._forms
        for form in FORMS:
            if form.file not in self._forms:
                continue
            try:
                text = form.make(run, nodes)
            except Exception as error:  # of JAX or XLA, which may not have it on a platform
                graph.missing[form.file] = str(error) or type(error).__name__
            else:
                _write(folder / form.file, text)
        graph.drawing = self._drawing(nodes)
        _write(folder / ANALYSIS, json.dumps(graph.to_json(), indent=1))

    def _drawing(self, nodes: Sequence[ShownNode]) -> str:
        number = len(self._graphs)
        is_too_large = len(nodes) > _MOST_NODES_IN_PAGE or number > _MOST_DRAWINGS_IN_PAGE
        if is_too_large or DRAWING not in self._forms:
            return ""
        return draw(nodes, f"Graph {number}", identity=f"g{number}-")

    def _write_page(self, *, often: bool = True) -> None:
        few = often and len(self._graphs) <= _MOST_DRAWINGS_IN_PAGE
        if few or time.monotonic() - self._page_time > _SECONDS_BETWEEN_PAGES:
            _write(self._folder() / INDEX, page(list(self._graphs.values()), self._turns))
            self._page_time = time.monotonic()

    def _finish(self) -> None:
        """Write once more what has changed since, when the process ends."""
        if os.getpid() != self._process or self._claimed is None:
            return
        try:
            for graph in self._graphs.values():
                text = json.dumps(graph.to_json(), indent=1)
                _write(self._claimed / graph.folder / ANALYSIS, text)
            _write(self._claimed / INDEX, page(list(self._graphs.values()), self._turns))
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            folder = self._claimed or self._path
            _log.warning("%s", refused("SNAPRT_TRACE", folder, error, "folder"))


def _claim(path: Path) -> Path:
    """Return the folder for this process: ``path``, or one in it where another has been before."""
    folders = itertools.chain([path], (path / f"run-{number}" for number in itertools.count(2)))
    return next(folder for folder in folders if _is_first_in(folder))


def _is_first_in(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / INDEX).open("x").close()
    except FileExistsError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    write_whole(path, (text.rstrip("\n") + "\n").encode("utf-8", "backslashreplace"))
