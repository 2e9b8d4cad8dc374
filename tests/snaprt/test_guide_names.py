"""What docs/how-to/coming-from-pytorch-xla.md says is here is here, and what is here it says."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import snaprt
from snaprt import settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "coming-from-pytorch-xla.md").read_text(encoding="utf-8")
HERE = PAGE.partition("## What has no counterpart")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| PyTorch/XLA or NeuronX |"))
]


def _found(name: str) -> object:
    if name.startswith("snaprt.torch"):
        if importlib.util.find_spec("torchax") is None:
            pytest.skip("PyTorch is not installed: snaprt[torch]")
        return pkgutil.resolve_name(name)
    value: object = snaprt
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(set(re.findall(r"snaprt(?:\.[A-Za-z_]\w*)+", PAGE))))
def test_a_name_of_snaprt_on_the_page_is_there(name):
    assert _found(name) is not None


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"jax(?:\.[A-Za-z_]\w*)+", PAGE)) - {"jax.distributed.initialize"}),
)
def test_a_name_of_jax_on_the_page_is_there(name):
    value: object = jax
    for part in name.split(".")[1:]:
        value = getattr(value, part)


def test_a_variable_that_is_said_to_be_the_same_is_read():
    said = " ".join(row[0] for row in ROWS if row[1].startswith("the same"))
    names = re.findall(r"`((?:XLA|NEURON|PT_XLA|TF_CPP|GET|SYNC)_\w+|RANK|LOCAL_RANK)", said)
    known = {setting.name for setting in settings.SETTINGS}
    assert names
    assert sorted(set(names) - known) == []
    here = re.findall(r"`(SNAPRT_\w+)", PAGE)
    assert sorted(set(here) - known) == []


def test_every_variable_of_the_guides_that_is_read_is_on_the_page():
    names = [one.name for one in settings.SETTINGS if not one.name.startswith("SNAPRT_")]
    assert [name for name in names if f"`{name}" not in HERE] == []


def test_what_has_no_counterpart_has_a_reason():
    rows = [row for row in ROWS if len(row) == 2]
    assert rows
    assert all(len(reason) > 20 for _, reason in rows)
