"""The examples of `snaprt.torch` and `snaprt.torch.xla` in the reference run."""

from __future__ import annotations

import inspect
from pathlib import Path

from programs import run_program
from reference_examples import resolve

import snaprt.torch
import snaprt.torch.xla

SCRIPT = Path(__file__).parents[1] / "support" / "reference_examples.py"


def test_each_name_has_an_example_that_runs(tmp_path: Path) -> None:
    names = [f"snaprt.torch.{name}" for name in snaprt.torch.__all__]
    # What it only passes on, as from snaprt.metrics, is shown and run elsewhere.
    names += [
        f"snaprt.torch.xla.{name}"
        for name in snaprt.torch.xla.__all__
        if getattr(getattr(snaprt.torch.xla, name), "__module__", "").startswith("snaprt.torch")
    ]
    assert [name for name in names if ">>> " not in (inspect.getdoc(resolve(name)) or "")] == []
    done = run_program(SCRIPT, *names, folder=tmp_path, SNAPRT_CACHE_DIR=tmp_path / "cache")
    assert "failed=0" in done.stdout
