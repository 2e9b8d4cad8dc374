"""PT_XLA_DEBUG tells of compilations and executions in the blocks of PyTorch/XLA's guide."""

import re

import jax.numpy as jnp
import pytest

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

RULE = "=" * 80


def train(size):
    """Run two steps of one program, and read a value before each ends."""
    with snaprt.lazy():
        for _ in range(2):
            x = jnp.ones((size, 3)) * 2
            float(x.sum())
            y = x * 3
            snaprt.mark_step()
    return y


def blocks_in(text):
    """Return the kind and the lines of each block."""
    found = []
    for line in filter(None, text.splitlines()):
        kind, _, rest = line.partition(" Analysis: ")
        if rest == RULE and not (found and found[-1][1][-1] != RULE and found[-1][0] == kind):
            found.append((kind, []))
        found[-1][1].append(rest)
    return found


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(tmp_path / "debug.txt"))
    return tmp_path / "debug.txt"


def test_each_compilation_and_execution_is_told_to_stderr(monkeypatch, capsys):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    train(101)
    blocks = blocks_in(capsys.readouterr().err)
    compiled = ["Compilation", "Post Compilation", "Execution"]
    assert [kind for kind, _ in blocks] == [*compiled, *compiled, "Execution", "Execution"]
    _, read = blocks[0]
    assert read[:3] == [
        RULE,
        "Compilation Cause",
        "  user code trying to access tensor value before mark_step: `float(x)`",
    ]
    assert read[3] == "Graph Info: "
    assert re.fullmatch("  Graph Hash: [0-9a-f]{16}", read[4])
    assert read[5:8] == [
        "  Number of Graph Inputs: 0",
        "  Number of Graph Outputs: 2",
        "Python Frame Triggered Execution: ",
    ]
    assert re.fullmatch(r"  train \(.*test_explain_analysis\.py:\d+\)", read[8])
    assert read[-2:] == ["-" * 80, RULE]
    assert blocks[5][1][1:3] == ["Execution Cause", "  user mark_step"]
    assert blocks[5][1][4] == blocks[3][1][4]  # the hash


def test_after_a_compilation_its_memory_is_told(monkeypatch, file):
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "1")
    with snaprt.lazy():
        x = jnp.ones((512, 512))
        x.block_until_ready()
        y = x * 2
        snaprt.mark_step()
    assert y.shape == (512, 512)
    kinds = [kind for kind, _ in blocks_in(file.read_text())]
    assert kinds == ["Compilation", "Post Compilation"] * 2
    assert blocks_in(file.read_text())[-1][1][1:4] == [
        "Graph input size: 0.000977 GB",
        "Graph output size: 0.000977 GB",
        "Aliased Input size: 0.000000 GB",
    ]


def test_fewer_frames_are_shown_where_that_is_asked_for(monkeypatch, file):
    monkeypatch.setenv("PT_XLA_DEBUG", "on")
    monkeypatch.setenv("PT_XLA_DEBUG_MAX_FRAME", "1")
    train(103)
    lines = file.read_text().splitlines()
    start = lines.index("Execution Analysis: Python Frame Triggered Execution: ")
    assert lines[start + 2] == "Execution Analysis:   .........."


@pytest.mark.parametrize(("rank", "tells"), [("0", True), ("1", False)])
def test_one_process_of_a_job_tells_to_stderr(monkeypatch, capsys, rank, tells):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    monkeypatch.setenv("RANK", rank)
    train(104)
    assert ("Execution Analysis" in capsys.readouterr().err) is tells


def test_each_process_of_a_job_has_a_file_of_its_own(monkeypatch, tmp_path, file):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    monkeypatch.setenv("RANK", "3")
    train(104)
    assert [path.name.endswith("3") for path in tmp_path.iterdir()] == [True]


def test_graphs_of_other_functions_are_left_out(monkeypatch, file):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    monkeypatch.setenv("SNAPRT_DEBUG_FUNCTION", "nowhere")
    train(105)
    assert file.read_text() == ""


def test_a_level_of_0_says_nothing(monkeypatch, capsys):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "0")
    train(106)
    assert capsys.readouterr().err == ""
