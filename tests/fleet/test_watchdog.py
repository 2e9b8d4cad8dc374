"""``--watchdog``: each rank of a job that hangs writes where it is; the report says who waits."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import SNAPRT, finish, run_program, start_program

from snaprt.fleet.launch import Job, free_address

BEGIN = """
import ctypes, os, signal, sys, threading, time
import jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((12,), sharding, lambda at: np.arange(12.0)[at])
rank = jax.process_index()
"""

STEPS = """
@jax.jit
def train_step(x):
    return jnp.tanh(x), jnp.sum(x)

def wait_for_data():
    {waits}

for step in range(100):
    if rank == 1 and step == 3:
        wait_for_data()
    x, loss = train_step(x)
    float(loss)
"""

LAZY = """
import snaprt

def wait_for_data():
    threading.Event().wait()

for step in range(100):
    if rank == 1 and step == 3:
        wait_for_data()
    x = jnp.tanh(x)
    loss = jnp.sum(x)
    snaprt.mark_step()
    float(loss)
"""

SLEEPS = "threading.Event().wait()"
# A lock that is never released, taken by native code that keeps Python's own lock.
HOLDS_LOCK = """
    from snaprt.fleet.watchdog import _watchdog
    while _watchdog._last_status[0] < _watchdog._progress.changes:
        time.sleep(0.01)
    libc = ctypes.PyDLL(None)
    lock = ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""

Launched = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """Start a job that is ended with the test, whatever it does."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        code: str, *options: object, ranks: int = 2, limit: str = "3s"
    ) -> tuple[subprocess.Popen[str], Path]:
        script = tmp_path / "train.py"
        script.write_text(BEGIN + code)
        process = start_program(
            (*SNAPRT, "launch", "-n", str(ranks), "--watchdog", limit),
            *("--dump", tmp_path / "dump", *options, "--", script),
            folder=tmp_path,
            errors=subprocess.STDOUT,
        )
        processes.append(process)
        return process, tmp_path / "dump"

    yield start
    for process in processes:
        for _ in range(2):  # the second one kills the ranks
            process.terminate()
            time.sleep(0.2)
        process.communicate()


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + 180
    while not what():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)


def wait_for_hang(
    folder: Path,
    process: subprocess.Popen[str],
    is_meant: Callable[[dict[int, dict[str, Any]]], Any],
) -> Path:
    """Return the folder of the hang whose dumps are those that a test means.

    On a machine under load, a job stands still at its start for longer than the limits here: that
    is a hang, too, and has the first folder then.
    """
    wait_for(lambda: any(is_meant(dumps_of(hang)) for hang in hangs_of(folder)), process)
    return next(hang for hang in hangs_of(folder) if is_meant(dumps_of(hang)))


def hangs_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("hang-*"))


def dumps_of(hang: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in hang.glob("rank-*.json")]
    return {dump["rank"]: dump for dump in found}


def report(hang: Path) -> dict[str, Any]:
    done = run_program((*SNAPRT, "report", "--json"), hang, status=1)
    return json.loads(done.stdout)


def frames_of_main(dump: dict[str, Any]) -> list[str]:
    (main,) = [thread for thread in dump["threads"] if thread["thread_name"] == "MainThread"]
    return [frame["name"] for frame in main["frames"]]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_told_from_those_that_wait_for_it(launched: Launched):
    process, folder = launched(STEPS.format(waits=SLEEPS), ranks=3)
    hang = wait_for_hang(
        folder,
        process,
        lambda dumps: len(dumps) == 3 and all(dumps[rank]["collectives"] for rank in (0, 2)),
    )
    dumps = dumps_of(hang)
    assert dumps[1]["state"] == "python"
    assert dumps[1]["where"]["name"] == "wait_for_data"
    assert "wait_for_data" in frames_of_main(dumps[1])
    assert dumps[1]["executions"][-1]["execution"] == 2
    for rank in (0, 2):
        assert dumps[rank]["state"] == "waiting"
        assert dumps[rank]["waits_for"]["name"] == "train_step"
        assert dumps[rank]["waits_for"]["execution"] == 3
        assert [each["operation"] for each in dumps[rank]["collectives"]] == ["all-reduce"]
    found = report(hang)
    line = dumps[1]["where"]["line"]
    name = dumps[0]["collectives"][0]["name"]
    assert found["headline"].startswith(
        f"rank 1 is at execution 2 of train_step, in Python at train.py:{line}, "
        f"the others wait at execution 3 in train_step ({name}) at train.py:"
    )
    assert [row["rank"] for row in found["rows"]] == [0, 1, 2]
    shown = run_program((*SNAPRT, "report"), hang, status=1).stdout
    assert found["headline"] in shown
    assert hangs_of(folder)[-1] == hang


def test_lazy_programs_are_told_by_their_steps(launched: Launched):
    process, folder = launched(LAZY, "--lazy")
    hang = wait_for_hang(folder, process, lambda dumps: len(dumps) == 2 and dumps[0]["collectives"])
    found = report(hang)
    rank_1, rank_0 = found["groups"]
    assert rank_1["ranks"] == [1]
    assert rank_1["does"].startswith("is at step 2 of lazy_graph, in Python at train.py:")
    assert rank_0["ranks"] == [0]
    assert rank_0["does"].startswith("waits at step 3 in lazy_graph (all-reduce")


def test_a_rank_whose_python_cannot_run_is_written_by_the_process_beside(launched: Launched):
    process, folder = launched(STEPS.format(waits=HOLDS_LOCK))
    hang = wait_for_hang(
        folder, process, lambda dumps: len(dumps) == 2 and dumps[1]["state"] == "stuck"
    )
    dump = dumps_of(hang)[1]
    assert "has not run for 3 s" in dump["cause"]
    assert dump["executions"][-1]["name"] == "train_step"
    assert dump["executions"][-1]["execution"] == 2
    if "may not look" not in dump["note"]:
        assert dump["where"]["name"] == "wait_for_data"
        assert "wait_for_data" in frames_of_main(dump)
    assert (
        "rank 1 is stuck in native code that keeps Python from running"
        in (report(hang)["headline"])
    )


COORDINATED = """
if rank == 0:
    print("ready", flush=True)
    threading.Event().wait()

mesh = Mesh(np.array(jax.devices()[1:]), ("data",))  # gloo tells its peers of a death at once
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((12,), sharding, lambda at: np.arange(12.0)[at])

@jax.jit
def train_step(x):
    return jnp.tanh(x), jnp.sum(x)

x, loss = train_step(x)
float(loss)
if rank == 2:
    print("ready", flush=True)
    threading.Event().wait()
print("ready", flush=True)
x, loss = train_step(x)
float(loss)
"""


@pytest.mark.slow
def test_ranks_whose_coordinator_is_killed_are_written_as_xla_ends_them(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + COORDINATED)
    job = Job(processes=3, master=free_address())
    ranks = [
        start_program(
            (*SNAPRT, "run", "--watchdog", "600s", "--dump", str(tmp_path / "dump")),
            *("--", script),
            folder=tmp_path,
            errors=subprocess.STDOUT,
            **job.environment(rank, {}),
        )
        for rank in job.ranks
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            while process.stdout.readline() != "ready\n":
                assert process.poll() is None
        state = tmp_path / "dump" / "ranks" / "rank-000001.json"
        wait_for(lambda: state.exists() and json.loads(state.read_text())["execution"] == 1)
        ranks[0].kill()
        for process in ranks[1:]:
            finish(process, status=None)
            # XLA aborts; where Python raises the error of gloo meanwhile, that can be a crash.
            assert process.returncode in (-signal.SIGABRT, -signal.SIGSEGV)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    hang = tmp_path / "dump" / "hang-001"
    # Where two threads of a rank abort at once, the second ends it before the first has spoken.
    wait_for(lambda: dumps_of(hang) and is_quiet(hang))
    dumps = dumps_of(hang)
    assert dumps.keys() <= {1, 2}
    died = [dump for dump in dumps.values() if dump["state"] == "died"]
    # One that is asked where it is by another's death, just before its own, has written that.
    assert died
    assert {dump["state"] for dump in dumps.values()} <= {"died", "python", "waiting"}
    for dump in died:
        assert "Aborted" in dump["cause"] or "Segmentation fault" in dump["cause"]
    for dump in dumps.values():
        # Where Python raised first, the program has ended: then this is where it was before.
        assert dump["where"]["filename"] == str(script)
    states = [json.loads(path.read_text()) for path in sorted(state.parent.glob("rank-*.json"))]
    assert states[0]["ended"] == "SIGKILL, or a crash without a word"
    assert all(each["ended"] for each in states)
    headline = report(hang)["headline"]
    assert "rank 0 wrote nothing" in headline
    if 1 in dumps:
        assert dumps[1]["waits_for"]["execution"] == 1
        assert "rank 1 died at train.py:" in headline
        assert "while it waited at execution 1 in train_step" in headline
    if 2 in dumps:
        assert dumps[2]["waits_for"] is None


def is_quiet(folder: Path) -> bool:
    """Return whether nothing was written there for 3 s: the helpers look once a second."""
    return time.time() - max(path.stat().st_mtime for path in folder.iterdir()) > 3


PLAIN_HANG = """
import threading
import jax
from jax.experimental import io_callback

def never(x):
    threading.Event().wait()

@jax.jit
def stuck_step(x):
    io_callback(never, None, x, ordered=False)
    return x + 1

print(jax.jit(lambda x: x * 2)(1.0), flush=True)
stuck_step(1.0).block_until_ready()
"""


@pytest.mark.parametrize(
    ("folder", "variables"),
    [
        ("snaprt-dump", {}),
        (
            "dump",
            {
                "XLA_FLAGS": "--xla_dump_to=dump",
                "NEURON_FRAMEWORK_DEBUG": "1",
                "NEURON_DUMP_HLO_SNAPSHOT": "ON_NRT_ERROR",
            },
        ),
    ],
    ids=["by default", "by the names of Neuron"],
)
def test_one_process_alone_is_watched_too_and_writes_no_state(
    tmp_path: Path, folder: str, variables: dict[str, str]
):
    script = tmp_path / "train.py"
    script.write_text(PLAIN_HANG)
    process = start_program(
        (*SNAPRT, "run", "--watchdog", "2s", "--", str(script)), folder=tmp_path, **variables
    )
    try:
        hang = wait_for_hang(
            tmp_path / folder,
            process,
            lambda dumps: dumps and dumps[0]["waits_for"] is not None,
        )
    finally:
        process.kill()
        process.communicate()
    assert report(hang)["headline"].startswith("rank 0 waits at execution 0 in stuck_step")
    assert not (tmp_path / folder / "ranks").exists()
    assert not list((tmp_path / folder).glob("*.snap"))


CANNOT_WRITE = """
import sys, time
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(jnp.ones(3)).block_until_ready()
from snaprt.fleet.watchdog import _watchdog
until = time.monotonic() + 30
while _watchdog._written_at < 0 and time.monotonic() < until:
    time.sleep(0.05)
_watchdog._look()
sys.exit(5)
"""


@pytest.mark.parametrize(
    "meanwhile",
    ["open('place', 'w').close()", "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (0, 0))"],
    ids=["a file in its place", "no room"],
)
def test_a_folder_that_cannot_be_written_is_told_once_and_the_program_goes_on(
    tmp_path: Path, meanwhile: str
):
    script = tmp_path / "train.py"
    script.write_text(meanwhile + CANNOT_WRITE)
    folder = tmp_path / "place" / "dump"
    words = (*SNAPRT, "run", "--watchdog", "1s", "--dump", folder, "--", script)
    done = run_program(words, folder=tmp_path, status=5, SNAPRT_CACHE="0")
    (line,) = done.stderr.splitlines()
    assert line.startswith("no execution or step has ended for 1.00 s")
    assert f"its stacks cannot be written below {folder}: " in line
    assert "se another folder: set the folder with --dump or SNAPRT_DUMP_DIR." in line
    assert "`snaprt stacks " in line


# After the watchdog has started, for it counts the hangs that are there.
WRITES_FOR_ANOTHER = """
import pathlib, time
import jax
jax.devices()
file = pathlib.Path("dump/hang-001/rank-000000.json")
file.parent.mkdir(parents=True)
file.write_text("theirs")
"""


def test_a_dump_that_another_program_has_written_stays(tmp_path: Path):
    script = tmp_path / "train.py"
    theirs = tmp_path / "dump" / "hang-001" / "rank-000000.json"
    script.write_text(WRITES_FOR_ANOTHER + CANNOT_WRITE)
    words = (*SNAPRT, "run", "--watchdog", "1s", "--dump", "dump", "--", script)
    run_program(words, status=5, folder=tmp_path)
    assert theirs.read_text() == "theirs"
    assert (tmp_path / "dump" / "hang-002" / "rank-000000.json").exists()


@pytest.mark.parametrize("mode", ["jit", "lazy"])
def test_nothing_is_written_where_nothing_hangs_and_the_end_is_told(launched: Launched, mode: str):
    code = """
for step in range(5):
    x = jax.jit(jnp.tanh)(x)
    total = float(jnp.sum(x))
if rank == 1:
    sys.exit(0)
"""
    started = time.monotonic()
    # Lazily, a folder without a condition is a recording.
    options = ["--lazy", "--when", "name=^nothing$"] if mode == "lazy" else []
    process, folder = launched(code, *options, limit="600s")
    finish(process)
    assert time.monotonic() - started < 120
    assert [path.name for path in folder.iterdir()] == ["ranks"]
    states = [json.loads(path.read_text()) for path in sorted((folder / "ranks").iterdir())]
    assert [(state["rank"], state["ended"]) for state in states] == [
        (0, "finished"),
        (1, "finished"),
    ]


@pytest.mark.slow
def test_neither_slow_progress_just_under_the_limit_nor_input_is_a_hang(
    launched: Launched, tmp_path: Path
):
    script = tmp_path / "asks" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "import os\nimport jax\nos.dup2(os.pipe()[0], 0)  # nobody writes into it\n"
        "print(jax.jit(lambda x: x)(1.0), flush=True)\ninput()\n"
    )
    asks = start_program(
        (*SNAPRT, "run", "--watchdog", "1s", "--", str(script)), folder=script.parent
    )
    try:
        assert asks.stdout is not None
        assert asks.stdout.readline() == "1.0\n"
        code = """
step = jax.jit(lambda x: (jnp.tanh(x), jnp.sum(x)))
for number in range(2):
    x, loss = step(x)
    float(loss)
    time.sleep(7)
"""
        process, folder = launched(code, limit="12s")
        finish(process)
        assert asks.poll() is None
    finally:
        asks.kill()
        asks.communicate()
    assert not list(folder.glob("hang-*"))
    assert not (script.parent / "snaprt-dump").exists()


def test_a_second_hang_is_written_again_and_one_hang_once(launched: Launched, tmp_path: Path):
    code = """
step = jax.jit(lambda x: (jnp.tanh(x), jnp.sum(x)))
for number in (1, 2):
    x, loss = step(x)
    float(loss)
    while not os.path.exists(f"go-{number}"):
        time.sleep(0.1)
"""
    process, folder = launched(code, limit="2s")

    def wait_for_hang_after(execution: int) -> Path:
        return wait_for_hang(
            folder,
            process,
            lambda dumps: (
                [dump["executions"][-1]["execution"] for dump in dumps.values() if is_idle(dump)]
                == [execution, execution]
            ),
        )

    def is_idle(dump: dict[str, Any]) -> bool:
        return dump["state"] == "python" and bool(dump["executions"])

    first = wait_for_hang_after(0)
    time.sleep(6)  # three limits more
    assert hangs_of(folder)[-1] == first
    (tmp_path / "go-1").touch()
    second = wait_for_hang_after(1)
    (tmp_path / "go-2").touch()
    finish(process)
    assert hangs_of(folder)[-2:] == [first, second]


def test_a_duration_that_is_none_is_refused(tmp_path: Path):
    for command in ("run", "launch"):
        done = run_program((*SNAPRT, command, "--watchdog", "soon", "--", "train.py"), status=2)
        assert "'soon' is not a duration such as 90s, 5m or 1h" in done.stderr
