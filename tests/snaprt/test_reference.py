"""The reference names what there is: each public name, and each counter and metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
XLA_PAGE = REFERENCE / "api" / "torch-xla.md"  # shows a module with all its names
#: Module -> its file; torch need not be installed here, so none of them is imported.
MODULES = {
    "snaprt": "snaprt/__init__.py",
    "snaprt.cache": "snaprt/cache.py",
    "snaprt.metrics": "snaprt/metrics.py",
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
FAMILIES = {"cut": "CAUSE", "eager": "NAME", "host": "CAUSE", "UnstableProgram": "REASON"}


def public_names(file: str) -> set[str]:
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no __all__")


def documented_names() -> list[str]:
    pages = set((REFERENCE / "api").glob("*.md")) - {XLA_PAGE}
    found = [DIRECTIVE.findall(page.read_text(encoding="utf-8")) for page in pages]
    return [heading or name for names in found for name, heading in names]


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_each_public_name_once(module: str) -> None:
    # The version is a string; `snaprt.metrics` has a page.
    names = public_names(MODULES[module]) - {"__version__", "metrics"}
    documented = [name for name in documented_names() if name.rpartition(".")[0] == module]
    assert sorted(documented) == sorted(f"{module}.{name}" for name in names)


def test_the_names_of_pytorch_xla_are_all_shown() -> None:
    page = XLA_PAGE.read_text(encoding="utf-8")
    assert "::: snaprt.torch.xla\n" in page
    assert "filters: public" in page


def test_the_reference_has_each_counter_and_metric() -> None:
    counted = set()
    for folder in ("snaprt", "cache"):
        for path in (ROOT / folder).rglob("*.py"):
            for names in COUNTED.findall(path.read_text(encoding="utf-8")):
                family, _, member = "".join(names).partition("::")
                shown = FAMILIES.get(family, member)
                counted.add(f"{family}::{shown}" if member else family)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert documented - {"xla::NAME"} == counted
