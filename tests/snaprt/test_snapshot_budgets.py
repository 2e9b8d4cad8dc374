"""Budgets: what is recorded until one is used up, and what is said and counted past it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from programs import SNAPRT, run_program

from snaprt import lazy, mark_step, metrics
from snaprt.snapshot.recorder.filing import Budget
from snaprt.snapshot.recorder.record import Recorder, process_recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # How large the outputs of a graph are is known when it has run once.
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "before"))
    steps(2)
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    # Budgets are a process's: this one has used up some.
    recorder = process_recorder()
    monkeypatch.setattr(recorder._filing, "budget", Budget())
    return tmp_path / "dump"


def steps(count: int) -> None:
    with lazy():
        x = jnp.zeros(250)
        for _ in range(count):
            x = x + 1.0
            mark_step()
    assert process_recorder().flush(30)


@pytest.mark.parametrize(
    ("variable", "value", "files"),
    [
        ("SNAPRT_RECORD_MAX_FILES", "5", 4),
        ("SNAPRT_RECORD_MAX_BYTES", "6K", 6),  # of 1 KB each; there is no input in the first
        ("SNAPRT_RECORD_MAX_RATE", "10", 2),  # the first is more than is ever saved up
        ("SNAPRT_RECORD_MIN_FREE", "1000T", 0),
    ],
)
def test_past_a_budget_recording_ends_is_said_once_and_counted(
    variable: str,
    value: str,
    files: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING, "snaprt.snapshot"):
        steps(10)
    assert len(list(folder.glob("*.snap"))) == files
    (line,) = caplog.records
    assert variable in line.getMessage()
    assert metrics.counter_value("SnapshotOverBudget") == 10 - files // 2


def test_a_rate_lets_recording_go_on_when_time_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_MAX_RATE", "1M")
    budget = Budget()
    assert budget.admits(1, 100 << 20, tmp_path)  # more than it ever saves up: when all is saved
    assert not budget.admits(1, 1 << 20, tmp_path)
    budget._saved_at -= 100  # seconds
    assert budget.admits(1, 1 << 20, tmp_path)


def test_free_disk_counts_what_is_queued_and_not_yet_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setenv("SNAPRT_RECORD_MIN_FREE", str(free // 2))
    budget = Budget()
    assert budget.admits(1, free // 4, tmp_path / "not" / "there")
    budget.queued(free // 4)
    assert not budget.admits(1, free // 3, tmp_path)
    budget.queued(-(free // 4))
    assert budget.admits(1, free // 4, tmp_path)


BYTES_PROGRAM = """
import contextlib, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import snaprt
from snaprt.snapshot.recorder.record import process_recorder

mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
x = jax.device_put(np.zeros(800, np.float32), NamedSharding(mesh, PartitionSpec("x")))

def raise_error(value):
    raise ValueError("not today")

@jax.jit
def fails(x):
    return jax.pure_callback(raise_error, jax.ShapeDtypeStruct((), np.float32), x.sum())

with snaprt.record(sys.argv[1], "dump"):
    step = jax.jit(lambda x: x + 1)
    for _ in range(5):
        x = step(x)
    with contextlib.suppress(Exception):
        jax.block_until_ready(fails(np.zeros(800, np.float32)))  # on one device: none waits for it
    assert process_recorder().flush(30)
budget = process_recorder()._filing.budget
print(budget._bytes, budget._waiting)
"""


@pytest.mark.parametrize(
    ("condition", "nbytes"),
    [
        ("all", 32_000),  # of the first of a program, it is not known how large outputs are
        ("record=inputs", 19_200),
        ("record=outputs", 12_800),
        ("record=outputs, device=1", 6_400),
    ],
)
def test_only_what_is_queued_counts_and_none_of_it_once_it_is_written(
    condition: str, nbytes: int, tmp_path: Path
) -> None:
    process = run_program(
        BYTES_PROGRAM, condition, folder=tmp_path, devices=2, SNAPRT_RECORD_MIN_FREE="1"
    )
    assert process.stdout.split() == [str(nbytes), "0"]
    assert list(tmp_path.glob("dump/*.snap"))


PARTS_PROGRAM = """
import jax
jax.distributed.initialize()
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from snaprt.snapshot.recorder.pending import bytes_held, bytes_on_a_device

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
host = np.arange(8, dtype=np.float32)

def put(value, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

alone = jax.device_put(host, jax.local_devices()[0])
keys = jax.random.wrap_key_data(put(np.zeros((8, 2), np.uint32), "a"))
arrays = [put(host, ("a", "b")), put(host, "a"), put(host), put(host[:0]), alone, host, keys]
print([(bytes_on_a_device([array]), bytes_held([array])) for array in arrays])
print(bytes_on_a_device(arrays[:2]), bytes_held(arrays[:2]))
"""


def test_of_an_array_what_lies_on_a_device_or_in_the_process_counts(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PARTS_PROGRAM)
    words = (*SNAPRT, "launch", "-n", "2", "--devices-per-process", "2", "--", str(program))
    lines = sorted(run_program(words).stdout.splitlines())
    parts = [(8, 16), (16, 32), (32, 64), (0, 0), (32, 32), (32, 32), (32, 64)]
    assert lines == [f"[{rank}] {line}" for rank in (0, 1) for line in ("24 48", str(parts))]


def test_without_budgets_everything_is_recorded(folder: Path) -> None:
    steps(3)
    assert len(list(folder.glob("*.snap"))) == 6
    assert metrics.counter_value("SnapshotOverBudget") is None
    assert isinstance(process_recorder(), Recorder)
