"""Killing runs at random moments leaves a cache and a dump folder that the next run uses."""

from pathlib import Path

import pytest
from programs import SNAPRT, run_program

from snaprt.snapshot.format.read import open_snapshot

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.full)])
def test_kills_leave_a_cache_and_a_dump_that_the_next_run_uses(kills, tmp_path, monkeypatch):
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(cache))
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(dump))
    killed = run_program(SUPPORT / "killed_runs.py", kills, 0, timeout=300)
    assert killed.stdout.splitlines()[-1] == f"killed {kills}"
    snapshots = sorted(dump.glob("*.snap"))
    assert snapshots
    for path in snapshots:
        snapshot = open_snapshot(path)
        for name in snapshot.array_names:
            snapshot.array(name)

    next_run = run_program("import killed_runs; killed_runs.run(100)", folder=SUPPORT)
    assert next_run.stdout.startswith("finished")
    assert next_run.stderr == ""
    listing = run_program((*SNAPRT, "cache", "ls", "--json"))
    assert "lazy_graph" in listing.stdout
    assert listing.stderr == ""
    run_program((*SNAPRT, "replay"), *sorted(dump.glob("*.inputs.snap"))[:2])
