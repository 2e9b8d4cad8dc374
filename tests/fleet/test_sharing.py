"""What one rank records for how it ended, the other ranks record too."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from programs import SNAPRT, finish, run_program, start_program

from snaprt.fleet.launch import free_address

BEGIN = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np, snaprt
jax.distributed.initialize()
rank = jax.process_index()
mesh = jax.make_mesh((jax.device_count(),), ("d",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
def batch(step):
    values = np.arange(12, dtype=np.float32) + 1
    if step == 5:
        values[-1] = -1  # on the last rank alone
    return jax.make_array_from_callback((12,), sharding, lambda at: values[at])
@jax.jit
def train_step(x):
    return jnp.log(x) * 2
"""
OF_ALL = """
for step in range(8):
    y = train_step(batch(step))
    snaprt.mark_step()
"""
FILE = re.compile(r"(\w+)\.\w{16}-process(\d{6})-.*-device(\d{6})-execution(\d{6})\.(\w+)\.snap")


# JAX numbers the processes in another order than the launcher.
IN_ANOTHER_ORDER = BEGIN.replace(
    "initialize()",
    """initialize(
    ":".join(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))), 2, 1 - int(os.environ["RANK"])
)""",
)


def launch(
    folder: Path, code: str, ranks: int, *options: object, begin: str = BEGIN, status: int = 0
) -> str:
    """Run a program as a job that records into ``dump``; return what it wrote."""
    (folder / "train.py").write_text(begin + code)
    words = (*SNAPRT, "launch", "-n", str(ranks), *map(str, options), "--dump", "dump")
    done = run_program((*words, "--", "train.py"), folder=folder, status=status)
    return done.stdout + done.stderr


def recorded(folder: Path) -> set[tuple[str, int, int, int, str]]:
    """Return the name, process, device, number and role of each file."""
    matches = [FILE.fullmatch(path.name) for path in (folder / "dump").glob("*.snap")]
    assert all(matches)
    return {(m[1], int(m[2]), int(m[3]), int(m[4]), m[5]) for m in matches if m}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ranks", "devices"), [("--record", 2, 2), ("--lazy", 2, 1), ("--record", 3, 1)]
)
def test_a_nan_on_one_rank_is_recorded_by_all_and_the_set_replays(
    tmp_path: Path, mode: str, ranks: int, devices: int
):
    text = launch(tmp_path, OF_ALL, ranks, mode, "--when", "nan", "--devices-per-process", devices)
    name = "train_step" if mode == "--record" else "lazy_graph"
    assert recorded(tmp_path) == {
        (name, rank, device, 5, role)
        for rank in range(ranks)
        for device in range(devices)
        for role in ("inputs", "outputs")
    }, text
    assert "no NaN and no infinity" not in text
    replayed = run_program((*SNAPRT, "replay", "dump"), folder=tmp_path)
    assert "MATCH" in replayed.stdout
    if (ranks, devices) == (2, 2):
        next((tmp_path / "dump").glob("*-process000001-*-device000001-*.inputs.snap")).unlink()
        failed = run_program((*SNAPRT, "replay", "dump"), folder=tmp_path, status=2)
        assert "with the inputs of device 3" in " ".join(failed.stderr.split())
        listed = run_program((*SNAPRT, "ls", "dump", "--ranks", "--json"), folder=tmp_path)
        rows = json.loads(listed.stdout)["ranks"]
        assert [len(row["missing"]) for row in rows] == [0, 1]
        assert rows[1]["missing"][0]["why"].startswith("no inputs of device")


def test_an_error_on_one_rank_empties_the_flight_recorders_of_all(tmp_path: Path):
    code = """
for step in range(6):
    jax.block_until_ready(train_step(batch(0)))
jax._src.distributed.global_state.client.wait_at_barrier("ran", 60_000)
if rank:
    raise RuntimeError("the loss is too large")
time.sleep(5)
"""
    launch(tmp_path, code, 2, "--record", "--keep-last", 3, status=1)
    assert {(each[1], each[3]) for each in recorded(tmp_path)} == {
        (rank, execution) for rank in (0, 1) for execution in (3, 4, 5)
    }
    listed = run_program((*SNAPRT, "ls", "dump", "--ranks", "--json"), folder=tmp_path)
    states = [row["state"] for row in json.loads(listed.stdout)["ranks"]]
    assert [state["program"] for state in states] == ["train_step"] * 2
    assert [state["ended"] for state in states] == [
        "terminated",
        "RuntimeError: the loss is too large",
    ]


def test_a_rank_that_is_told_to_end_runs_and_records_what_another_has_recorded(tmp_path: Path):
    code = """
@jax.jit
def too_large(x):
    zeros = jnp.zeros((1 << 21, 1 << 24), jnp.float32)
    return jax.lax.fori_loop(0, 2, lambda i, a: a + x.sum(), zeros).sum()
x = batch(0)
jax._src.distributed.global_state.client.wait_at_barrier("ready", 60_000)
if rank:
    time.sleep(2)  # until the other one has failed, and the launcher ends this one
too_large(x).block_until_ready()
"""
    text = launch(tmp_path, code, 2, "--when", "error", status=1)
    assert "rank 0 failed first" in text
    assert recorded(tmp_path) == {("too_large", rank, 0, 0, "inputs") for rank in (0, 1)}, text


def test_a_rank_that_holds_an_execution_no_longer_says_so(tmp_path: Path):
    code = """
own = jax.jit(lambda x: jnp.log(x) * 3)
for step in range(3 if rank else 500):
    own(np.ones(3, np.float32)).block_until_ready()
jax._src.distributed.global_state.client.wait_at_barrier("ran", 60_000)
if rank == 1:
    own(np.full(3, -1, np.float32)).block_until_ready()
"""
    text = launch(tmp_path, code, 2, "--record", "--when", "nan", begin=IN_ANOTHER_ORDER)
    assert {(each[1], each[3]) for each in recorded(tmp_path)} == {(1, 3)}
    assert "is recorded without rank 0: it no longer holds that execution" in text
    missing = (tmp_path / "dump" / "ranks" / "missing-000000.jsonl").read_text()
    line = json.loads(missing)
    assert line["execution"] == 3
    assert line["reason"] == "rank 1: nan"
    listed = run_program((*SNAPRT, "ls", "dump", "--ranks", "--json"), folder=tmp_path)
    rows = json.loads(listed.stdout)["ranks"]
    assert [(row["rank"], row["recorded"], len(row["missing"])) for row in rows] == [
        (0, 0, 1),
        (1, 1, 0),
    ]
    assert rows[0]["missing"][0]["why"] == "it no longer holds that execution"
    assert [row["state"]["rank"] for row in rows] == [0, 1]
    assert rows[0]["state"]["execution"] == 499
    assert rows[0]["state"]["ended"] == "finished"
    shown = run_program((*SNAPRT, "ls", "dump", "--ranks"), folder=tmp_path, COLUMNS=160).stdout
    assert "<lambda> 3 (it no longer holds that execution)" in " ".join(shown.split())
    for file in (tmp_path / "dump").glob("*.snap"):
        file.write_bytes(file.read_bytes()[:100])
    damaged = run_program((*SNAPRT, "ls", "dump", "--ranks"), status=1, folder=tmp_path)
    assert "error: " in damaged.stderr, damaged.stderr
    assert "499" in damaged.stdout


def test_a_rank_records_what_it_has_not_run_yet_when_it_is_asked(tmp_path: Path):
    code = """
own = jax.jit(lambda x: jnp.log(x) * 3)
client = jax._src.distributed.global_state.client
if rank == 0:
    client.wait_at_barrier("struck", 60_000)
    time.sleep(2)  # until it has heard, while nobody listens yet
for step in range(4):
    own(np.full(3, -1.0 if rank and step == 3 else 1.0, np.float32)).block_until_ready()
if rank == 1:
    time.sleep(1)  # until it has looked
    client.wait_at_barrier("struck", 60_000)
"""
    launch(tmp_path, code, 2, "--record", "--when", "nan")
    assert {(each[1], each[3]) for each in recorded(tmp_path)} == {(1, 3), (0, 3)}


def test_what_an_execution_took_is_recorded_while_it_still_runs(tmp_path: Path):
    code = """
from pathlib import Path
from snaprt.snapshot.recorder.ranks import sharing
sharing.SECONDS = 600
def wait(x):
    if rank:
        raise ValueError("no")
    until = time.monotonic() + 60
    while not any(Path("dump").glob("*-process000000-*.inputs.snap")) and time.monotonic() < until:
        time.sleep(0.05)
    return np.float32(time.monotonic() < until)
own = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x))
try:
    print("in time", float(own(np.float32(1))))
except Exception:
    print("failed", rank)
"""
    text = launch(tmp_path, code, 2, "--record", "--when", "error", "--keep-last", 2)
    assert "[0] in time 1.0" in text
    assert {(each[1], each[4]) for each in recorded(tmp_path)} == {
        (0, "inputs"),
        (0, "outputs"),
        (1, "inputs"),
    }


def test_a_condition_of_one_rank_lets_all_ranks_run_the_same_program(tmp_path: Path):
    launch(tmp_path, OF_ALL, 2, "--record", "--when", "nan, rank=1")
    assert {(each[1], each[3]) for each in recorded(tmp_path)} == {(1, 5)}


def test_a_rank_that_records_nothing_is_named_and_waited_for_once(tmp_path: Path):
    code = """
from contextlib import nullcontext
from snaprt.snapshot.recorder.ranks import sharing
sharing.SECONDS = 2
with nullcontext() if rank == 0 else snaprt.record(when="nan", folder="dump"):
"""
    text = launch(tmp_path, code + OF_ALL.replace("\n", "\n    "), 2)
    assert {(each[1], each[3]) for each in recorded(tmp_path)} == {(1, 5)}
    assert text.count("not all ranks record what rank 1 does (nan); those that do not: 0") == 1


def test_a_stopped_coordinator_keeps_nobody_from_recording_and_ending(tmp_path: Path):
    code = """
import signal
from pathlib import Path
own = jax.jit(lambda x: jnp.log(x) * 3)
own(np.ones(3, np.float32)).block_until_ready()
jax._src.distributed.global_state.client.wait_at_barrier("ran", 60_000)
print("ran", flush=True)
while rank == 0 or not Path("go").exists():
    time.sleep(0.05)
own(np.full(3, -1, np.float32)).block_until_ready()
while not any(Path("dump").glob("*.outputs.snap")):
    time.sleep(0.05)
print("recorded", flush=True)
while True:
    signal.pause()
"""
    (tmp_path / "train.py").write_text(BEGIN + code)
    address, port = free_address().split(":")
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    words = (*SNAPRT, "run", "--record", "--when", "nan", "--dump", "dump", "--", "train.py")
    coordinator, other = (
        start_program(words, folder=tmp_path, RANK=rank, **job) for rank in (0, 1)
    )
    try:
        assert next(iter(other.stdout or ())) == "ran\n"
        coordinator.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert next(iter(other.stdout or ())) == "recorded\n"
        other.terminate()
        began = time.monotonic()
        finish(other, status=-signal.SIGTERM, timeout=60)
        assert time.monotonic() - began < 10
    finally:
        for process in (coordinator, other):
            process.kill()
            process.communicate()
    assert {(each[1], each[4]) for each in recorded(tmp_path)} == {(1, "inputs"), (1, "outputs")}
    listed = run_program((*SNAPRT, "ls", "dump", "--ranks"), folder=tmp_path, COLUMNS=160).stdout
    _, of_coordinator, of_other = listed.splitlines()
    assert "killed, or crashed" in of_coordinator
    assert "terminated" in of_other
