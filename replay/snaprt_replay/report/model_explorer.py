"""Write a program and its errors for Google's Model Explorer.

Two files: ``graphs.json``, a graph collection with a graph for each computation, and
``errors.json``, node data for it: the error made by each region on the way to the fault. Source:
``graph_builder.py`` and ``node_data_builder.py`` of github.com/google-ai-edge/model-explorer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from snaprt import shown
from snaprt.hlo.proto import XlaMessage
from snaprt.host.whole_files import write_whole
from snaprt_replay.hlo.hlo_module import shape_text, source_of
from snaprt_replay.localize.findings import Localization
from snaprt_replay.localize.program import FlatModule

GRAPHS, ERRORS = "graphs.json", "errors.json"

#: The value shown for an infinite error, since node data are JSON numbers.
LARGEST: Final = 1e30

_THRESHOLDS: Final = (
    {"value": 1, "bgColor": "#dafbe1", "textColor": "#116329"},
    {"value": 100, "bgColor": "#ffd8a8", "textColor": "#7a4d00"},
    {"value": LARGEST, "bgColor": "#ffb3ba", "textColor": "#7d0a1c"},
)


def write(program: FlatModule, localization: Localization | None, folder: Path) -> tuple[Path, ...]:
    """Write the files and return their paths.

    Args:
        program: The program, as localizing reads it.
        localization: The result of localizing in it; without one, there is no node data.
        folder: Where to write; created if missing.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / GRAPHS]
    write_whole(paths[0], json.dumps(graph_collection(program)).encode())
    if localization is not None:
        paths.append(folder / ERRORS)
        data = json.dumps(node_data(program, localization), allow_nan=False)
        write_whole(paths[1], data.encode())
    return tuple(paths)


def graph_collection(program: FlatModule) -> dict[str, Any]:
    """Return a graph for each computation, the entry first."""
    module = program.module
    computations = sorted(
        module.computations, key=lambda computation: computation.id != module.entry_computation_id
    )
    names = {computation.id: _graph_id(computation) for computation in computations}
    return {
        "label": shown.name(module.name),
        "graphs": [_graph(program, computation, names) for computation in computations],
        "graphSorting": "node_count_desc",
    }


def _graph(
    program: FlatModule, computation: XlaMessage, names: Mapping[int, str]
) -> dict[str, Any]:
    return {
        "id": names[computation.id],
        "nodes": [_node(program, instruction, names) for instruction in computation.instructions],
    }


def _node(program: FlatModule, instruction: XlaMessage, names: Mapping[int, str]) -> dict[str, Any]:
    facts = {
        "name": instruction.name,
        "shape": shape_text(instruction.shape),
        "op_name": instruction.metadata.op_name,
        "source": source_of(program.module, instruction),
    }
    node: dict[str, Any] = {
        "id": str(instruction.id),
        "label": shown.name(instruction.opcode),
        "namespace": _namespace(instruction.metadata.op_name),
        "attrs": [
            {"key": key, "value": shown.name(value, 400)} for key, value in facts.items() if value
        ],
        "incomingEdges": [
            {
                "sourceNodeId": str(operand),
                "sourceNodeOutputId": "0",
                "targetNodeInputId": str(number),
            }
            for number, operand in enumerate(instruction.operand_ids)
        ],
        "outputsMetadata": [
            {"id": "0", "attrs": [{"key": "tensor_shape", "value": shape_text(instruction.shape)}]}
        ],
    }
    called = [names[called] for called in instruction.called_computation_ids if called in names]
    return {**node, "subgraphIds": called} if called else node


def _namespace(op_name: str) -> str:
    """Return JAX's scopes of an operation as a path, without the operation's own name."""
    return "/".join(shown.name(part, 60) for part in op_name.split("/")[:-1] if part)


def _graph_id(computation: XlaMessage) -> str:
    return f"{shown.name(computation.name)} ({computation.id})"


def node_data(program: FlatModule, localization: Localization) -> dict[str, Any]:
    """Return the error made by the examined regions, for the instructions in them, by graph."""
    values: dict[str, float] = {}
    for region in localization.path:  # coarse regions first, so that finer ones replace them
        for name in _between(program, region.first.name, region.last.name):
            values[name] = region.made
    for place in localization.instructions:
        worst = max((comparison.error for comparison in localization.difference), default=math.inf)
        values[place.name] = max(worst, values.get(place.name, 0.0))
    graphs = {}
    for computation in program.module.computations:
        results = {
            str(instruction.id): {"value": _number(values[instruction.name])}
            for instruction in computation.instructions
            if instruction.name in values
        }
        if results:
            graphs[_graph_id(computation)] = {
                "results": results,
                "thresholds": [*_THRESHOLDS],
            }
    return graphs


def _number(error: float) -> float:
    return 0.0 if math.isnan(error) else min(error, LARGEST)


def _between(program: FlatModule, first: str, last: str) -> Sequence[str]:
    """Return the names of the instructions of a region that compute something, in order."""
    for computation in program.module.computations:
        names = [instruction.name for instruction in computation.instructions]
        if first in names and last in names:
            working = program.line(computation.id).work()
            work = {instruction.name for instruction in working} | {first, last}
            row = names[names.index(first) : names.index(last) + 1]
            return [name for name in row if name in work]
    return ()
