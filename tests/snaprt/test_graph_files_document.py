"""What docs/how-to/graph-files.md shows is what its program writes."""

import re
from pathlib import Path

import pytest
from programs import run_program

DOCUMENT = (Path(__file__).parents[2] / "docs" / "how-to" / "graph-files.md").read_text(
    encoding="utf-8"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return where the document's program has run, for each of the formats."""
    folder = tmp_path_factory.mktemp("document")
    program = re.search(r"```python\n(import jax.*?)```", DOCUMENT, re.DOTALL)
    assert program
    (folder / "train.py").write_text(program[1])
    for form, others in (("text", {"SNAPRT_TRACE": "trace"}), ("dot", {"XLA_METRICS_FILE": "m"})):
        graphs = f"graphs.{form.replace('text', 'txt')}"
        variables = {"XLA_SAVE_TENSORS_FILE": graphs, "XLA_SAVE_TENSORS_FMT": form, **others}
        run_program(Path("train.py"), folder=folder, without=("RANK",), **variables)
    return folder


def masked(text: str) -> str:
    """Return text without what differs from one machine and version to another."""
    text = re.sub(r"\S*/train\.py", "train.py", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"[0-9a-f]{16,32}", "ID", text))


def block_with(words: str) -> str:
    (found,) = [
        one for one in re.findall(r"^```\w*\n(.*?)^```", DOCUMENT, re.M | re.S) if words in one
    ]
    return found


@pytest.mark.parametrize("name", ["graphs.txt", "graphs.dot"])
def test_the_lines_of_the_files_are_those_that_are_written(folder, name):
    command, _, shown = block_with(f"p {name}").partition(f"p {name}\n")
    first, last = re.findall(r"sed -n (\d+),(\d+)$", command)[0]
    lines = (folder / name).read_text().splitlines()[int(first) - 1 : int(last)]
    assert masked(shown).splitlines() == masked("\n".join(lines)).splitlines()


def test_the_files_of_the_trace_are_those_that_are_named(folder):
    listing = block_with("trace/index.html")
    named = set(re.findall(r"[\w.]+\.(?:html|jsonl|svg|txt|dot|mlir|hlo|json)\b", listing))
    assert {path.name for path in (folder / "trace").rglob("*.*")} == named


def test_the_jaxpr_is_the_one_that_is_written(folder):
    (written,) = [one / "jaxpr.txt" for one in (folder / "trace").glob("0001-*")]
    assert masked(block_with("{ lambda ;")) == masked(written.read_text())


def test_the_metrics_have_the_header_that_is_shown(folder):
    shown = block_with("[MetricsData; step=1]").splitlines()
    assert "\n".join(shown[:3]) in (folder / "m").read_text()
