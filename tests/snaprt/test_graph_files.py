"""XLA_SAVE_TENSORS_FILE gets each graph that runs, XLA_METRICS_FILE the metrics of each step."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import finish, run_program, start_program
from threads import in_thread, in_threads

import snaprt
from snaprt.errors import UsageError

FILE = Path(__file__).name
BLOCK = re.compile(
    r"\[ScheduleSyncTensorsGraph\]\nTensorsGraphInfo:\n(?P<stack>(?:  \S+ \([^\n]+:\d+\)\n)+)"
    r"\nHashes: \((?P<hashes>[0-9a-f, ]+)\)\n"
    r"\n## BEGIN_GRAPH\n(?P<graph>.*?)\n## END_GRAPH\n\n\n",
    re.DOTALL,
)


@pytest.fixture
def graphs(monkeypatch, tmp_path) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    return tmp_path / "graphs"


def blocks(file: Path) -> list[re.Match[str]]:
    text = file.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    assert "".join(one[0] for one in found) == text
    return found


@snaprt.lazy()
def step(x, scale=2.0):
    y = lax.exp(x) * scale
    z = y @ y.T
    snaprt.mark_step()
    return y, z


def test_a_graph_has_one_line_a_node_with_type_location_and_root(graphs):
    step(jnp.ones((2, 7)))  # as nothing else: locations are those of the first time
    (block,) = blocks(graphs)
    lines = block["graph"].splitlines()
    assert (lines[0], lines[-1]) == ("IR {", "}")
    numbered = [re.match(r"  %(\d+) = ", line) for line in lines[1:-1]]
    assert [int(one[1]) for one in numbered if one] == list(range(len(lines) - 2))
    assert "  %0 = f32[2,7]{1,0} xla::device_data(), device=CPU:0" in lines
    assert any("f32[] prim::Constant(), value=2.0" in line for line in lines)
    source = Path(__file__).read_text().splitlines()
    line = next(number for number, one in enumerate(source, 1) if "y = lax.exp" in one)
    assert f"  %1 = f32[2,7]{{1,0}} xla::exp(%0), location=step@{FILE}:{line}" in lines[2]
    assert [re.findall(r"ROOT=\d", one) for one in lines if "ROOT" in one] == [
        ["ROOT=0"],
        ["ROOT=1"],
    ]


def test_a_block_says_where_the_graph_was_cut_innermost_frame_first(graphs):
    def cut_here():
        snaprt.mark_step()

    with snaprt.lazy():
        kept = jnp.arange(3.0) + 1
        cut_here()
    (block,) = blocks(graphs)
    first, second, *_ = block["stack"].splitlines()
    assert "cut_here (" in first
    assert __file__ in first
    assert test_a_block_says_where_the_graph_was_cut_innermost_frame_first.__name__ in second
    assert kept[0] == 1


def test_a_node_has_its_whole_stack_where_that_is_asked_for(graphs, monkeypatch):
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    step(jnp.ones((2, 3)))
    (line,) = [one for one in blocks(graphs)[0]["graph"].splitlines() if "xla::exp(" in one]
    assert re.search(rf", location=step@{FILE}:\d+, from=test_a_node_has_its\w+@{FILE}:\d+", line)


def test_every_execution_is_appended_in_order_a_read_too(graphs):
    graphs.write_text("")
    with snaprt.lazy():
        x = jnp.arange(4.0)
        float(x.sum())
        y = x * 3
        snaprt.mark_step()
    del y
    step(jnp.ones((2, 3)))
    step(jnp.ones((2, 3)))
    texts = [one["graph"] for one in blocks(graphs)]
    assert len(texts) == 4
    assert "reduce_sum" in texts[0]
    assert "mul" in texts[1]
    assert texts[2] == texts[3]


def test_a_graph_that_cannot_be_compiled_is_there_too(graphs):
    with snaprt.lazy():
        call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((2,), jnp.float32))
        y = call(jnp.ones(2))
        with pytest.raises(snaprt.CompileError):
            snaprt.mark_step()
        del y
    (block,) = blocks(graphs)
    assert "xla::ffi_call(" in block["graph"]


def test_hashes_are_equal_for_what_computes_the_same_alone(graphs):
    for scale in (2.0, 2.0, 3.0):
        step(jnp.ones((2, 3)), scale)
    step(jnp.ones((2, 4)))
    first, second, third, fourth = (one["hashes"].split(", ") for one in blocks(graphs))
    assert len(first) == 2
    assert first == second
    assert not set(first) & set(third)
    assert not set(first) & set(fourth)


def test_hashes_know_what_is_inside_of_a_called_function(graphs):
    x = jnp.arange(3.0)
    with snaprt.lazy():
        for function in (lambda x: x * 2, lambda x: x * 3, lambda x: x * 2):
            y = lax.map(function, x)
            a, b = lax.top_k(y, 2)
            snaprt.mark_step()
            del y, a, b
    first, second, third = (one["hashes"].split(", ") for one in blocks(graphs))
    assert first == third
    assert not set(first) & set(second)
    assert len(set(first)) == len(first)


def test_dot_has_a_box_for_each_node_and_an_arrow_for_each_operand(graphs, monkeypatch):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "dot")
    step(jnp.ones((2, 3)))
    graph = blocks(graphs)[0]["graph"]
    assert graph.startswith("digraph G {\n")
    assert graph.endswith("}\n")
    boxes = re.findall(r'^  node(\d+) \[label="((?:[^"\\]|\\.)*)"\]$', graph, re.M)
    assert [int(number) for number, _ in boxes] == list(range(len(boxes)))
    assert "xla::exp\\nf32[2,3]{1,0}\\nlocation=step@" in boxes[1][1]
    arrows = re.findall(r"^  node(\d+) -> node(\d+)(?: \[label=\"i=\d\"\])?$", graph, re.M)
    assert len(boxes) + len(arrows) + 2 == len(graph.splitlines())
    assert all(int(start) < int(stop) for start, stop in arrows)


def test_hlo_is_the_module_as_xla_gets_it(graphs, monkeypatch):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    step(jnp.ones((2, 3)))
    step(jnp.ones((2, 3)))
    one, other = (block["graph"] for block in blocks(graphs))
    assert one == other
    assert one.startswith("HloModule ")
    assert "exponential(" in one


def test_threads_and_processes_append_whole_blocks(tmp_path):
    program = """
import sys, threading
from pathlib import Path
from snaprt.explain.debug_files import AppendedFile
file = AppendedFile("V", Path(sys.argv[1]))
def work(letter):
    for _ in range(40):
        file.append(letter * 100_000 + "\\n")
threads = [threading.Thread(target=work, args=(one,)) for one in sys.argv[2]]
[one.start() for one in threads]
"""
    file = tmp_path / "lines"
    for process in [start_program(program, file, letters) for letters in ("ab", "cd")]:
        finish(process)
    lines = file.read_text().splitlines()
    assert len(lines) == 160
    assert all(line == line[0] * 100_000 for line in lines)


def test_each_thread_of_a_program_has_its_graphs_there(graphs):
    def work(_):
        for size in (2, 3):
            step(jnp.ones((size, 5)))

    in_threads(3, work)
    assert len(blocks(graphs)) == 6


def test_each_rank_has_files_of_its_own(graphs, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_METRICS_FILE", str(tmp_path / "metrics"))
    for rank in ("0", "12"):
        monkeypatch.setenv("RANK", rank)
        step(jnp.ones((2, 3)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["graphs.0", "graphs.12", "metrics.0", "metrics.12"]
    assert len(blocks(tmp_path / "graphs.12")) == 1


def test_the_metrics_that_are_saved_at_exit_are_the_ranks_own(tmp_path):
    program = "import snaprt; snaprt.metrics.counter_add('Seen')"
    for name in ("m.json", "m.txt"):
        run_program(program, RANK=3, SNAPRT_METRICS_FILE=tmp_path / name)
    assert "Counter: Seen" in (tmp_path / "m.txt.3").read_text()
    assert snaprt.metrics.load(tmp_path / "m.json.3").counters == {"Seen": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_format_that_is_none_is_refused_and_nothing_is_lost(graphs, monkeypatch):
    with snaprt.lazy():
        x = jnp.arange(3.0) * 2
        monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "pdf")
        with pytest.raises(UsageError) as caught:
            snaprt.mark_step()
        assert "XLA_SAVE_TENSORS_FMT" in caught.value.message
        assert "text, dot, hlo" in caught.value.hint
        monkeypatch.delenv("XLA_SAVE_TENSORS_FMT")
        snaprt.mark_step()
    np.testing.assert_array_equal(x, [0, 2, 4])


@pytest.mark.parametrize("variable", ["XLA_SAVE_TENSORS_FILE", "XLA_METRICS_FILE"])
def test_a_file_that_cannot_be_written_is_refused_with_its_name(monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, str(tmp_path / "no" / "file"))
    with pytest.raises(UsageError) as caught:
        step(jnp.ones((2, 3)))
    assert variable in caught.value.message
    assert str(tmp_path / "no" / "file") in caught.value.message
    assert "existing, writable directory" in caught.value.hint


def test_a_file_that_cannot_be_written_any_more_is_told_once_and_the_program_goes_on(
    graphs, caplog
):
    step(jnp.ones((2, 3)))
    graphs.unlink()
    graphs.mkdir()
    for _ in range(3):
        y, _ = step(jnp.ones((2, 3)))
    np.testing.assert_allclose(y, np.full((2, 3), 2 * np.e), rtol=1e-6)
    (said,) = [one for one in caplog.records if "XLA_SAVE_TENSORS_FILE" in one.getMessage()]
    assert str(graphs) in said.getMessage()


def test_a_function_can_be_named_whose_graphs_alone_are_of_interest(graphs, monkeypatch):
    class Model:
        def loss(self, x):
            return jnp.tanh(x).sum()

    def other(x):
        return jnp.exp(x).sum()

    def run():
        with snaprt.lazy():
            x = jnp.arange(3.0)
            float(Model().loss(x))
            float(other(x))

    for name, expected in (("loss", 1), ("Model.loss", 1), ("other", 1), ("run", 2), ("oss", 0)):
        graphs.write_text("")
        monkeypatch.setenv("SNAPRT_DEBUG_FUNCTION", name)
        run()
        assert len(blocks(graphs)) == expected, name


def test_equal_graphs_of_two_functions_are_told_apart(graphs, monkeypatch):
    def one(x):
        return float(lax.cos(x))

    def other(x):
        return float(lax.cos(x))

    monkeypatch.setenv("SNAPRT_DEBUG_FUNCTION", "other")
    with snaprt.lazy():
        x = jnp.float32(1)
        for function in (one, other, one):
            function(x)
    (block,) = blocks(graphs)
    assert ".other@" in block["graph"]


def test_the_metrics_are_appended_after_every_step(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "metrics"
    file.write_text("here before\n")
    monkeypatch.setenv("XLA_METRICS_FILE", str(file))

    def work():
        for _ in range(2):
            step(jnp.ones((2, 3)))

    in_thread(work)  # a thread counts its own steps
    before, first, second = re.split(r"\[MetricsData; step=(?:0|1)\]\n", file.read_text())
    assert before == "here before\n"
    assert "Counter: MarkStep\n  Value: 1\n" in first
    assert "Counter: MarkStep\n  Value: 2\n" in second
    assert "Metric: ExecuteTime\n" in second
    assert second.endswith("\n\n")


@pytest.mark.parametrize("stream", ["STDERR", "STDOUT"])
def test_the_metrics_may_go_to_a_stream(monkeypatch, tmp_path, capsys, stream):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_METRICS_FILE", stream)
    step(jnp.ones((2, 3)))
    out, err = capsys.readouterr()
    shown, other = (out, err) if stream == "STDOUT" else (err, out)
    assert "[MetricsData; step=" in shown
    assert other == ""
    assert not list(tmp_path.iterdir())
