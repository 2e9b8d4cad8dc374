"""The reference names what there is: each public name, with an example, and each metric."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from programs import run_program
from reference_examples import resolve

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
XLA_PAGE = REFERENCE / "api" / "torch-xla.md"  # shows a module with all its names
#: Module -> its file; torch need not be installed here, so none of them is imported.
MODULES = {
    "snaprt": "snaprt/__init__.py",
    "snaprt.cache": "snaprt/cache.py",
    "snaprt.metrics": "snaprt/metrics/__init__.py",
    "snaprt.replay": "snaprt/replay.py",
    "snaprt.torch": "snaprt/torch/__init__.py",
}
#: A directive of mkdocstrings: the object, and the heading if another name is to be shown.
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.MULTILINE)
#: A name in a call that counts or times, or in a constant that is one.
COUNTED = re.compile(
    r'(?:counter_add|metric_add|timed|count_event|FinalizerCounter)\(\s*f?"([^"]+)"'
    r'|counter="([^"]+)"|"(PersistentCache\w+|[SG]ync\w*OpByOp|GetTensorsOpByOp|\w+Compile)"'
)
EXAMPLE_LINE = re.compile(r"^ *(>>>|\.\.\.) .*$", re.MULTILINE)
FAMILIES = {"cut": "CAUSE", "eager": "NAME", "host": "CAUSE", "UnstableProgram": "REASON"}


def public_names(file: str) -> set[str]:
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no __all__")


def documented_names() -> dict[str, str]:
    """Return the object that is shown under each name."""
    pages = set((REFERENCE / "api").glob("*.md")) - {XLA_PAGE}
    found = [DIRECTIVE.findall(page.read_text(encoding="utf-8")) for page in sorted(pages)]
    return {heading or name: name for names in found for name, heading in names}


def objects_with_examples() -> list[str]:
    """Return what a call or an instance can be shown of; torch has its own tests."""
    names = [name for name in documented_names().values() if not name.startswith("snaprt.torch.")]
    return [name for name in names if callable(resolve(name))]


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_each_public_name(module: str) -> None:
    # The version is a string; `snaprt.metrics` has a page.
    names = public_names(MODULES[module]) - {"__version__", "metrics"}
    documented = [name for name in documented_names() if name.rpartition(".")[0] == module]
    assert sorted(documented) == sorted(f"{module}.{name}" for name in names)


def test_the_names_of_pytorch_xla_are_all_shown() -> None:
    page = XLA_PAGE.read_text(encoding="utf-8")
    assert "::: snaprt.torch.xla\n" in page
    assert "filters: public" in page


def test_each_public_name_has_an_example() -> None:
    assert [
        name
        for name in objects_with_examples()
        if ">>> " not in (inspect.getdoc(resolve(name)) or "")
    ] == []


@pytest.mark.ecosystem
def test_the_examples_run(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "reference_examples.py"
    names = objects_with_examples()
    done = run_program(script, *names, folder=tmp_path, SNAPRT_CACHE_DIR=tmp_path / "cache")
    assert "failed=0" in done.stdout


def test_the_reference_has_each_counter_and_metric() -> None:
    counted = set()
    for folder in ("snaprt", "cache"):
        for path in (ROOT / folder).rglob("*.py"):
            code = EXAMPLE_LINE.sub("", path.read_text(encoding="utf-8"))
            for names in COUNTED.findall(code):
                family, _, member = "".join(names).partition("::")
                shown = FAMILIES.get(family, member)
                counted.add(f"{family}::{shown}" if member else family)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert documented - {"xla::NAME"} == counted
