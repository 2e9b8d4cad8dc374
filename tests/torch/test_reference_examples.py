"""The examples of `snaprt.torch` in the reference run."""

from __future__ import annotations

import inspect
from pathlib import Path

from programs import run_program
from reference_examples import resolve

import snaprt.torch

SCRIPT = Path(__file__).parents[1] / "support" / "reference_examples.py"


def test_each_name_has_an_example_that_runs(tmp_path: Path) -> None:
    names = [f"snaprt.torch.{name}" for name in snaprt.torch.__all__]
    assert [name for name in names if ">>> " not in (inspect.getdoc(resolve(name)) or "")] == []
    done = run_program(SCRIPT, *names, folder=tmp_path, SNAPRT_CACHE_DIR=tmp_path / "cache")
    assert "failed=0" in done.stdout
