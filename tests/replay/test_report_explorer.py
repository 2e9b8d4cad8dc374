"""The graph and the node data for Model Explorer, and the surroundings of an instruction."""

import json
import math
from pathlib import Path

import pytest
from flat_programs import flat_program
from planted_faults import mlp
from snaprt_replay.localize.findings import Localization, RegionError, ValueDifference
from snaprt_replay.localize.program import FlatModule
from snaprt_replay.report import model_explorer
from snaprt_replay.report.charts import neighborhood
from snaprt_replay.report.surroundings import surroundings


@pytest.fixture(scope="module")
def program() -> FlatModule:
    function, arguments = mlp()
    return flat_program(function, *arguments)


@pytest.fixture(scope="module")
def found(program: FlatModule) -> Localization:
    line = program.entry
    work = line.work()
    first, bad, last = (line.place(one) for one in (work[3], work[5], work[8]))
    return Localization(
        kind="instruction",
        sentence="",
        suspect="a",
        reference="b",
        instructions=(bad,),
        difference=(ValueDifference(bad.name, math.inf),),
        path=(RegionError(first, last, 6, 0, 12.5, 0.0, 20.0, chosen=True),),
    )


def test_the_graphs_are_whole(program: FlatModule) -> None:
    collection = model_explorer.graph_collection(program)
    assert set(collection) == {"label", "graphs", "graphSorting"}
    ids = [graph["id"] for graph in collection["graphs"]]
    assert len(ids) == len(set(ids)) == len(program.module.computations)
    count = 0
    for graph in collection["graphs"]:
        nodes = {node["id"] for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"])
        for node in graph["nodes"]:
            assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= nodes
            assert set(node.get("subgraphIds", ())) <= set(ids)
            assert all(isinstance(one["value"], str) for one in node["attrs"])
        count += len(nodes)
    assert count == sum(len(one.instructions) for one in program.module.computations)


def test_the_errors_are_those_of_the_regions_and_of_what_was_found(
    program: FlatModule, found: Localization, tmp_path: Path
) -> None:
    graphs, errors = model_explorer.write(program, found, tmp_path / "new" / "folder")
    data = json.loads(errors.read_text())
    (results,) = [one["results"] for one in data.values()]
    names = {str(one.id): one.name for one in program.entry.computation.instructions}
    values = {names[key]: one["value"] for key, one in results.items()}
    assert values[found.instructions[0].name] == model_explorer.LARGEST
    assert values[found.path[0].first.name] == values[found.path[0].last.name] == 12.5
    opcodes = {one.name: one.opcode for one in program.entry.computation.instructions}
    assert not {"parameter", "constant"} & {opcodes[name] for name in values}
    assert set(data) <= {graph["id"] for graph in json.loads(graphs.read_text())["graphs"]}


def test_the_surroundings_have_what_is_read_above_what_reads_it(
    program: FlatModule, found: Localization
) -> None:
    around = surroundings(program, found.instructions)
    assert around is not None
    assert [node.name for node in around.nodes if node.at_fault] == [found.instructions[0].name]
    assert 3 <= len(around.nodes) <= 16
    for start, stop in around.edges:
        assert around.nodes[start].level < around.nodes[stop].level
    drawn = neighborhood("g", around)
    assert drawn.count("<rect") == len(around.nodes)
    assert drawn.count('class="edge"') == len(around.edges)


def test_an_instruction_that_is_not_there_has_no_surroundings(program: FlatModule) -> None:
    assert surroundings(program, ()) is None
