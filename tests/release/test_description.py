"""What PyPI shows of README.md has no link that leads nowhere."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = "https://git.example/somebody/snaprt/"


@pytest.fixture
def description(monkeypatch):
    # hatchling itself is installed only where a distribution is built.
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook.description


def test_links_lead_to_the_repository_where_it_is_named(description):
    text = "![a picture](docs/a.png) [a page](docs/a.md#part) [JAX](https://jax.dev) [here](#part)"
    assert description(text, SOURCE) == (
        "![a picture](https://git.example/somebody/snaprt/raw/main/docs/a.png) "
        "[a page](https://git.example/somebody/snaprt/blob/main/docs/a.md#part) "
        "[JAX](https://jax.dev) [here](#part)"
    )
    assert description(text, None) == " a page [JAX](https://jax.dev) [here](#part)"


@pytest.mark.parametrize("source", [SOURCE, None])
def test_no_link_of_the_readme_stays_relative(description, source):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", description(readme, source))
    assert [one for one in targets if not one.startswith(("https://", "#"))] == []
    words = re.sub(r"!?\[|\]\([^)]*\)", "", description(readme, SOURCE))
    assert words == re.sub(r"!?\[|\]\([^)]*\)", "", readme)
