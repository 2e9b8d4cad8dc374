"""The flight recorder: what it holds, when it is written, and what becomes of it."""

from __future__ import annotations

import signal
import subprocess
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SNAPRT, finish, start_program
from recordings import recorded

from snaprt import dump_now, lazy, mark_step, metrics
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_LAST", "3")
    return tmp_path / "dump"


def steps(count: int, size: int = 4) -> jax.Array:
    """Run ``count`` steps, of which step n adds one to n."""
    with lazy():
        x = jnp.zeros(size)
        for _ in range(count):
            x = x + 1.0
            mark_step()
    return x


def test_the_last_executions_are_written_when_they_are_asked_for(folder: Path) -> None:
    steps(7)
    assert not folder.exists()
    files = dump_now()
    assert sorted(files) == sorted(folder.glob("*.snap"))
    inputs = [open_snapshot(file) for file in files if "inputs" in file.name]
    assert [one.array("arg0")[0] for one in inputs] == [4.0, 5.0, 6.0]
    outputs = [open_snapshot(file) for file in files if "outputs" in file.name]
    assert [one.array("out0")[0] for one in outputs] == [5.0, 6.0, 7.0]
    assert {one.manifest.execution.reason for one in inputs} == {"keep-last"}
    assert dump_now() == []


def test_they_are_written_when_something_fails(folder: Path) -> None:
    with pytest.raises(KeyError), lazy():  # noqa: PT012
        x = jnp.zeros(3)
        for _ in range(5):
            x = x + 1.0
            mark_step()
        _ = {}["x"]
    executions = [file.manifest.execution for file in recorded(folder)]
    assert len(executions) == 3
    assert all("KeyError" in one.error for one in executions)


def test_what_exceeds_the_memory_budget_waits_on_disk_and_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_BYTES", "10K")
    with lazy():
        x = jnp.zeros(2000)
        for _ in range(6):
            x = x + 1.0
            mark_step()
            time.sleep(0.06)  # the ring is weighed every 50 ms
            assert process_recorder().flush(30)
    assert (metrics.counter_value("SnapshotRingSpilled") or 0) >= 4
    spilled = [path.name for path in folder.glob("ring-*/*.inputs.snap")]
    assert len(spilled) == 2  # the third is the newest, and those before are gone
    files = dump_now()
    assert list(folder.glob("ring-*/*.snap")) == []
    inputs = [open_snapshot(file) for file in files if "inputs" in file.name]
    assert [one.array("arg0")[0] for one in inputs] == [3.0, 4.0, 5.0]


def test_the_ring_holds_references_and_not_copies(folder: Path) -> None:
    x = steps(2, 1000)
    pointer = x.unsafe_buffer_pointer()
    ring = process_recorder()._ring
    held = [array for execution in ring.executions() for array in execution.outputs or ()]
    assert pointer in [array.unsafe_buffer_pointer() for array in held]
    dump_now()


# Whole processes

SCRIPT = """
import os, signal, sys, time
import numpy as np, jax, jax.numpy as jnp, snaprt
x = jnp.zeros(4)
def step():
    global x
    x = x + 1.0
    snaprt.mark_step(wait=True)
for _ in range(5):
    step()
"""


def start(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    path = folder / "train.py"
    path.write_text(SCRIPT + textwrap.dedent(script))
    return start_program(
        (*SNAPRT, "run", "--lazy", "--dump", str(folder / "dump"), *options, "--", str(path))
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def wait_for(folder: Path, count: int) -> list[Path]:
    for _ in range(600):
        found = sorted(folder.glob("*.snap"))
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{len(found)} files of {count}")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
def test_a_signal_writes_the_ring_even_while_the_main_thread_hangs_in_an_execution(
    tmp_path: Path,
) -> None:
    script = """
        def hang(a):
            print("ready", flush=True)
            time.sleep(100)
            return np.asarray(a)
        y = jax.pure_callback(hang, jax.ShapeDtypeStruct((4,), jnp.float32), x * 2.0)
        snaprt.mark_step(wait=True)
    """
    process = start(tmp_path, script, "--keep-last", "3")
    try:
        wait_until_ready(process)
        process.send_signal(signal.SIGUSR1)
        files = wait_for(tmp_path / "dump", 5)  # of the one that hangs there are inputs alone
    finally:
        process.kill()
        process.communicate(timeout=30)
    steps_of = [open_snapshot(file).manifest.execution.step for file in files]
    assert sorted(steps_of) == [3, 3, 4, 4, 5]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
def test_the_programs_own_handlers_run_as_well_and_a_clean_end_leaves_nothing(
    tmp_path: Path,
) -> None:
    script = """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("user"))
        os.kill(os.getpid(), signal.SIGUSR1)
        step()
        print(seen)
    """
    assert finish(start(tmp_path, script, "--keep-last", "3")).stdout == "['user']\n"
    assert not list((tmp_path / "dump").glob("ring-*"))


def test_on_sigterm_what_is_queued_is_written_and_the_process_ends_by_the_signal(
    tmp_path: Path,
) -> None:
    script = """
        big = jnp.asarray(np.random.default_rng(0).normal(size=8_000_000).astype(np.float32))
        for _ in range(4):
            y = jnp.sum(big * 2.0)
            snaprt.mark_step(wait=True)
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    """
    process = start(tmp_path, script, "--when", "all")
    wait_until_ready(process)
    process.send_signal(signal.SIGTERM)
    finish(process, status=-signal.SIGTERM)  # 143 in a shell
    files = sorted((tmp_path / "dump").glob("*.snap"))
    assert len(files) >= 2 * 9
    for file in files:
        open_snapshot(file)
    assert not list((tmp_path / "dump").glob(".*.tmp"))


def test_a_handler_for_sigterm_that_was_there_before_still_decides(tmp_path: Path) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        import jax.numpy as jnp, snaprt
        with snaprt.lazy():
            x = jnp.zeros(3) + 1.0
            snaprt.mark_step()
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    """
    process = start_program(program, SNAPRT_DUMP_DIR=tmp_path / "dump")
    wait_until_ready(process)
    process.send_signal(signal.SIGTERM)
    finish(process, status=7)
    assert len(list((tmp_path / "dump").glob("*.snap"))) == 2


def test_unrelated_processes_with_one_folder_write_different_files(tmp_path: Path) -> None:
    processes = [start(tmp_path, "", "--when", "step=4") for _ in range(2)]
    for process in processes:
        finish(process)
    executions = [
        open_snapshot(path).manifest.execution for path in (tmp_path / "dump").glob("*.snap")
    ]
    assert len(executions) == 4
    assert len({one.run for one in executions}) == 2
    assert len({(one.graph_id, one.execution_count) for one in executions}) == 1
    assert np.unique([one.process for one in executions]).tolist() == [0]
