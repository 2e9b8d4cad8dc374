"""``snaprt ls --ranks``: what became of each rank, and what each recorded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from programs import SNAPRT, run_program

from snaprt.cli.main import main
from snaprt.errors import UsageError
from snaprt.snapshot.recorder.ranks.states import RankState, read_states, state_file

SLEEPS = "print('sleeping', flush=True); import time; time.sleep(600)"


def write_state(folder: Path, rank: int, pid: int, **fields: Any) -> None:
    """Write the state of a rank of a job whose processes JAX knows nothing of."""
    state = RankState(
        rank=rank,
        process=0,
        processes=6,
        host=socket.gethostname(),
        pid=pid,
        run="0badcafe",
        step=0,
        program="",
        graph_id="",
        execution=0,
        time=time.time(),
    )
    path = state_file(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(asdict(replace(state, **fields))))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps."""
    words = [sys.executable, "-c", SLEEPS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "sleeping\n"
        yield started
        started.kill()


def test_a_rank_that_said_nothing_is_looked_for_on_its_machine(
    tmp_path: Path, process: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    def statuses() -> list[str]:
        assert main(["ls", str(tmp_path), "--ranks", "--json"]) == 0
        return [row["status"] for row in json.loads(capfd.readouterr().out)["ranks"]]

    write_state(tmp_path, 0, os.getpid())
    write_state(tmp_path, 1, process.pid)
    write_state(tmp_path, 2, os.getpid(), time=time.time() - 10 * 24 * 3600)
    write_state(tmp_path, 3, process.pid, host="another")
    write_state(tmp_path, 4, process.pid, ended="ValueError: no\nwhole text")
    killed = "killed, or crashed"
    others = [killed, "running, or killed", "ValueError: no"]
    assert statuses() == ["running", "running", *others]
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert statuses() == ["running", "stopped", *others]
    process.kill()
    process.wait()
    assert statuses() == ["running", killed, *others]


def test_a_rank_whose_calls_nobody_sees_says_how_far_it_is(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jax, jax.numpy as jnp\n"
        "step, x = jax.jit(lambda x: x + 1), jnp.zeros(3)\n"
        "for _ in range(130): x = step(x)\n"
    )
    run_program(
        *((*SNAPRT, "launch", "-n", "2"), "--when", "every=50", "--dump", tmp_path / "dump"),
        *("--", script),
    )
    states = read_states(tmp_path / "dump")
    # The first call has the state kept from there on.
    assert [(state.execution, state.ended) for state in states] == [(128, "finished")] * 2
    assert len({(state.program, state.graph_id) for state in states}) == 1


def test_a_state_of_a_newer_version_is_refused_by_name(tmp_path: Path):
    write_state(tmp_path, 0, os.getpid())
    path = state_file(tmp_path, 0)
    assert read_states(tmp_path)[0].run == "0badcafe"  # written before states named their version
    path.write_bytes(msgspec.json.encode({"schema": "snaprt.rank", "version": 2, "rank": 0}))
    with pytest.raises(UsageError, match=path.name):
        read_states(tmp_path)
