"""SNAPRT_TRACE writes every form of every graph, and a page that links them."""

import json
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import run_program

import snaprt
from snaprt import settings
from snaprt.errors import UsageError
from snaprt.explain.nodes import ShownNode
from snaprt.explain.trace_folder import FORMS, MOST_NODES, draw

SVG = "{http://www.w3.org/2000/svg}"
FILES = {
    *("analysis.json", "graph.dot", "graph.svg", "graph.txt"),
    *("jaxpr.txt", "module.stablehlo.mlir", "optimised.hlo"),
}
PROGRAM = """
import sys
import jax.numpy as jnp
import snaprt


def train_step(w, x):
    w = w - 0.1 * (x * (x @ w - 1.0)[:, None]).mean(0)
    snaprt.mark_step()
    return w


with snaprt.lazy():
    w = jnp.zeros(3)
    for number in range(4):
        w = train_step(w, jnp.ones((5, 3)))
        if number % 2:
            print(float(w.sum()))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """Return the folder of a run of PROGRAM."""
    home = tmp_path_factory.mktemp("trace")
    script = home / "train.py"
    script.write_text(PROGRAM)
    run_program(script, without=("RANK",), SNAPRT_TRACE=home / "trace")
    return home / "trace"


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SNAPRT_TRACE", str(tmp_path / "trace"))
    return tmp_path / "trace"


@snaprt.lazy()
def step(x):
    y = lax.exp(x) * 2
    snaprt.mark_step()
    return y


def graphs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[0].isdigit())


class Page(HTMLParser):
    """The links of a page, and what it would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        told = dict(attrs)
        self.links += [told["href"]] if tag == "a" else []
        self.ids += [told["id"]] if "id" in told else []
        assert not {"src", "style", "onclick", "onload"} & told.keys()


def test_each_graph_has_a_folder_with_all_its_forms(traced):
    found = graphs(traced)
    assert len(found) >= 2
    for number, graph in enumerate(found, 1):
        assert re.fullmatch(rf"{number:04d}-[0-9a-f]{{16}}", graph.name)
        assert {path.name for path in graph.iterdir()} == FILES
    train = found[0]
    assert "dot_general" in (train / "jaxpr.txt").read_text()
    assert "train.py:8" in (train / "jaxpr.txt").read_text()
    assert "stablehlo.dot_general" in (train / "module.stablehlo.mlir").read_text()
    assert "train.py" in (train / "module.stablehlo.mlir").read_text()
    assert (train / "optimised.hlo").read_text().startswith("HloModule")
    assert (train / "graph.txt").read_text().startswith("IR {\n")
    assert (train / "graph.dot").read_text().startswith("digraph G {\n")


def test_the_analysis_has_memory_cost_and_timings(traced):
    content = json.loads((graphs(traced)[0] / "analysis.json").read_text())
    assert (content["schema"], content["version"]) == ("snaprt.trace.graph", 1)
    assert content["cut"]["cause"] == "mark_step"
    assert [frame["function"] for frame in content["cut"]["stack"]] == ["<module>", "train_step"]
    assert content["memory_bytes"]["output_size"] > 0
    assert content["cost"]["flops"] > 0
    assert content["seconds"]["lower"] > 0
    assert content["seconds"]["execute"] > 0
    assert content["executions"] >= 1
    assert content["missing"] == {}


def test_the_drawing_has_a_box_for_each_node(traced):
    for graph in graphs(traced):
        root = ElementTree.parse(graph / "graph.svg").getroot()
        nodes = len((graph / "graph.txt").read_text().splitlines()) - 2
        assert len(root.findall(f"{SVG}g")) == nodes
        boxes = [tuple(float(one.get(at)) for at in ("x", "y")) for one in root.iter(f"{SVG}rect")]
        assert len(set(boxes)) == nodes
        width, height = (float(root.get(name)) for name in ("width", "height"))
        assert all(0 <= x <= width - 196 and 0 <= y <= height - 76 for x, y in boxes)
        assert root.find(f"{SVG}title").text


def test_the_page_links_every_file_that_is_there_in_the_order_of_the_run(traced):
    text = (traced / "index.html").read_text()
    page = Page(text)
    files = [link for link in page.links if not link.startswith("#")]
    assert [link for link in files if not (traced / link).exists()] == []
    assert {link for link in files if link.count("/") == 1 and not link.endswith("/")} == {
        f"{graph.name}/{name}" for graph in graphs(traced) for name in FILES
    }
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    assert len(set(page.ids)) == len(page.ids)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert "default-src 'none'" in text
    rows = [json.loads(one) for one in (traced / "executions.jsonl").read_text().splitlines()]
    assert f"{len(rows)} executions" in text
    assert [row["cut"] for row in rows] == sorted(row["cut"] for row in rows)
    first = list(dict.fromkeys(row["graph"] for row in rows))
    assert first == [graph.name for graph in graphs(traced)]
    assert {row["cause"] for row in rows} == {"mark_step", "float"}


def test_a_graph_that_runs_again_is_written_once_and_counted(folder):
    for _ in range(3):
        y = step(jnp.ones((3, 5)))
    np.testing.assert_allclose(y, np.full((3, 5), 2 * np.e), rtol=1e-6)
    assert len(graphs(folder)) == 1
    assert len((folder / "executions.jsonl").read_text().splitlines()) == 3
    assert Page((folder / "index.html").read_text()).links


def test_what_is_shown_is_escaped(folder):
    def _():
        with snaprt.lazy():
            x = jnp.arange(3.0) + 1
            snaprt.mark_step()
        return x

    hostile = "</style><script>alert(1)</script>\x1b\u202e"
    _.__code__ = _.__code__.replace(co_name=hostile, co_qualname=hostile, co_filename=hostile)
    _()
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    (graph,) = graphs(folder)
    ElementTree.parse(graph / "graph.svg")
    assert "<script" not in (graph / "graph.svg").read_text(encoding="utf-8")


def test_a_run_does_not_write_into_the_folder_of_another(folder, monkeypatch):
    step(jnp.ones((3, 5)))
    for rank in ("1", "", "1"):
        monkeypatch.setenv("RANK", rank)
        step(jnp.ones((3, 5)))
    pages = folder.parent.glob("*/**/index.html")
    names = sorted(path.relative_to(folder.parent).as_posix() for path in pages)
    assert names == [
        "trace.1/index.html",
        "trace.1/run-2/index.html",
        "trace/index.html",
        "trace/run-2/index.html",
    ]


def test_a_function_can_be_named_whose_graphs_alone_are_traced(folder, monkeypatch):
    monkeypatch.setenv("SNAPRT_DEBUG_FUNCTION", "nobody")
    step(jnp.ones((3, 5)))
    assert graphs(folder) == []
    assert (
        "none of the function that SNAPRT_DEBUG_FUNCTION names"
        in (folder / "index.html").read_text()
    )
    monkeypatch.setenv("SNAPRT_DEBUG_FUNCTION", "step")
    step(jnp.ones((3, 5)))
    assert len(graphs(folder)) == 1


def test_a_folder_that_cannot_be_made_is_refused_with_its_name(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SNAPRT_TRACE", str(tmp_path / "file"))
    with pytest.raises(UsageError) as caught:
        step(jnp.ones((3, 5)))
    assert "SNAPRT_TRACE" in caught.value.message
    assert str(tmp_path / "file") in caught.value.message


def test_a_disk_that_is_full_from_the_start_is_told_once_and_the_program_goes_on(tmp_path):
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
import jax.numpy as jnp
import snaprt
with snaprt.lazy():
    for size in 3, 4:
        print(float(jnp.ones(size).sum()))
"""
    process = run_program(program, SNAPRT_CACHE="0", SNAPRT_TRACE=tmp_path / "graphs")
    assert process.stdout == "3.0\n4.0\n"
    (line,) = process.stderr.splitlines()
    assert "SNAPRT_TRACE: cannot write to" in line
    assert "Raise the file size limit (ulimit -f), or set SNAPRT_TRACE to another folder." in line


NO_ROOM = """
import errno, os, sys
import jax.numpy as jnp
import snaprt

is_full = True

def refuse(event, details):
    if is_full and event in ("open", "os.mkdir") and str(details[0]).endswith("wanted"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), details[0])

sys.addaudithook(refuse)
with snaprt.lazy():
    for size in 3, 4, 5:
        x = jnp.ones(size)
        snaprt.mark_step()
        print(float(x.sum()))
        is_full = size < 4
"""


@pytest.mark.parametrize(
    "variable", ["SNAPRT_TRACE", "SNAPRT_LOG_FILE", "XLA_METRICS_FILE", "XLA_SAVE_TENSORS_FILE"]
)
def test_a_file_for_which_there_is_no_room_is_told_once_and_is_written_later(tmp_path, variable):
    wanted = tmp_path / "wanted"
    setting = {variable: wanted}
    process = run_program(NO_ROOM, without=("RANK",), SNAPRT_CACHE="0", **setting)
    assert process.stdout == "3.0\n4.0\n5.0\n"
    (line,) = process.stderr.splitlines()
    assert line.startswith(
        f"{variable}: cannot write to {wanted}: No space left on device. Free some space, or set"
    )
    assert wanted.exists()


def test_a_folder_that_is_gone_is_told_once_and_the_program_goes_on(folder, caplog):
    step(jnp.ones((3, 5)))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    with caplog.at_level(logging.WARNING, "snaprt.explain"):
        for size in (3, 4, 5):
            y = step(jnp.ones((2, size)))
    assert y.shape == (2, 5)
    assert len([one for one in caplog.records if "SNAPRT_TRACE" in one.getMessage()]) == 1


def test_a_graph_that_was_collected_instead_of_compiled_says_so(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPRT_COLLECT", str(tmp_path / "collected"))
    step(jnp.ones((3, 6)))
    (graph,) = graphs(folder)
    assert {path.name for path in graph.iterdir()} == FILES - {"optimised.hlo"}
    assert (
        "Optimized HLO: not there (the graph was not compiled)"
        in (folder / "index.html").read_text()
    )


def test_a_long_graph_is_drawn_as_far_as_a_browser_shows_it():
    leaf = ShownNode("xla::device_data", ("f32[]",), (), (), "", (), "")
    nodes = [leaf]
    for number in range(MOST_NODES + 500):
        reads = ((number, 0), (0, 0))
        nodes.append(ShownNode("xla::add", ("f32[]",), reads, (), "f@a.py:1", (), ""))
    root = ElementTree.fromstring(draw(nodes, "A chain"))
    assert len(root.findall(f"{SVG}g")) == MOST_NODES
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert f"The first {MOST_NODES} of {MOST_NODES + 501} nodes" in texts[-1]
    assert texts.count("reads %0") == MOST_NODES - 1 - 5


def test_many_operations_side_by_side_do_not_make_one_endless_row():
    leaf = ShownNode("xla::device_data", ("f32[]",), (), (), "", (), "")
    nodes = [leaf]
    nodes += [ShownNode("xla::exp", ("f32[]",), ((0, 0),), (), "", (), "") for _ in range(200)]
    root = ElementTree.fromstring(draw(nodes, "Wide"))
    assert float(root.get("width")) < 6000


def test_only_the_forms_that_are_asked_for_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("SNAPRT_TRACE_FORMS", "jaxpr.txt, graph.dot")
    with snaprt.lazy():
        _ = jnp.arange(5.0) * 2.5
        snaprt.mark_step()
    (folder,) = (path for path in (tmp_path / "trace").iterdir() if path.is_dir())
    assert {path.name for path in folder.iterdir()} == {"analysis.json", "jaxpr.txt", "graph.dot"}
    index = (tmp_path / "trace" / "index.html").read_text()
    assert "jaxpr.txt" in index
    assert "<svg" not in index
    assert "optimised.hlo" not in index
    monkeypatch.setenv("SNAPRT_TRACE_FORMS", "jaxpr.txt, pictures")
    with snaprt.lazy():
        _ = jnp.arange(5.0) * 3.5
        with pytest.raises(UsageError, match="SNAPRT_TRACE_FORMS"):
            snaprt.mark_step()
        monkeypatch.delenv("SNAPRT_TRACE_FORMS")


def test_the_forms_of_the_settings_are_those_that_are_written():
    assert tuple(form.file for form in FORMS) == settings.TRACE_FORMS
