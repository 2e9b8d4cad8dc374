"""`snaprt demo` as the README runs it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snaprt.cli.demo import command


@pytest.mark.ecosystem
def test_the_demo_trains_and_finds_the_line_of_a_nan(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snaprt", "demo", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    cold, warm = (told["training"][start]["counters"] for start in ("cold", "warm"))
    assert cold["UncachedCompile"] == warm["PersistentCacheHit"] > 0
    assert warm["UncachedCompile"] == 0
    assert told["comparison"]["verdict"] == "identical"
    assert "execution000023" in told["nan"]["snapshot"]
    page = (tmp_path / told["nan"]["page"]).read_text()
    source = Path(command.__file__).with_name("nan_at_step_23.py").read_text().splitlines()
    line = 1 + source.index("    return centered / signals.std(axis=1, keepdims=True)")
    assert f"train.py:{line}" in page
    assert "stablehlo.divide" in (tmp_path / told["nan"]["repro"] / "ISSUE.md").read_text()
