"""Killing runs at random moments leaves a cache and a dump folder that the next run uses."""

import subprocess
import sys
from pathlib import Path

import pytest

from snaprt.snapshot.format.read import open_snapshot

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.full)])
def test_kills_leave_a_cache_and_a_dump_that_the_next_run_uses(kills, tmp_path, monkeypatch):
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(cache))
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(dump))
    killed = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_runs.py"), str(kills), "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert killed.stdout.splitlines()[-1] == f"killed {kills}"
    snapshots = sorted(dump.glob("*.snap"))
    assert snapshots
    for path in snapshots:
        snapshot = open_snapshot(path)
        for name in snapshot.array_names:
            snapshot.array(name)

    next_run = subprocess.run(
        [sys.executable, "-c", "import killed_runs; killed_runs.run(100)"],
        cwd=SUPPORT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert next_run.stdout.startswith("finished")
    assert next_run.stderr == ""
    listing = subprocess.run(
        [sys.executable, "-m", "snaprt", "cache", "ls", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "lazy_graph" in listing.stdout
    assert listing.stderr == ""
    some = [str(path) for path in sorted(dump.glob("*.inputs.snap"))[:2]]
    replayed = subprocess.run(
        [sys.executable, "-m", "snaprt", "replay", *some],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
