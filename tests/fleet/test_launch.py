"""``snaprt launch``: the processes of a job start together, are told apart, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from programs import SNAPRT, finish, run_program, start_program

LAUNCH = (*SNAPRT, "launch")


def script(folder: Path, code: str) -> Path:
    path = folder / "train.py"
    path.write_text(code)
    return path


def lines_of(text: str, rank: int) -> list[str]:
    return [line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] ")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(*pids: int) -> None:
    for _ in range(400):
        if not any(map(is_alive, pids)):
            return
        time.sleep(0.05)
    raise AssertionError([pid for pid in pids if is_alive(pid)])


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[-1]) for _ in range(count)]


SHARDED = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda at: np.arange(8.)[at])
total = jax.jit(jnp.sum)(x)
print(jax.process_index(), jax.local_device_count(), jax.device_count(), float(total))
"""


def test_jax_needs_no_arguments_and_each_line_names_its_rank(tmp_path: Path):
    done = run_program(
        LAUNCH, "-n", 2, "--devices-per-process", 2, "--record", "--dump", tmp_path / "dump",
        "--metrics", tmp_path / "run.json", "--", script(tmp_path, SHARDED),
    )  # fmt: skip
    assert [lines_of(done.stdout, rank)[-1] for rank in (0, 1)] == ["0 2 4 28.0", "1 2 4 28.0"]
    assert len(list(tmp_path.glob("run.json.[01]"))) == 2
    assert len(list((tmp_path / "dump").glob("sum.*-process00000[01]-*.inputs.snap"))) == 4


LONE_CALLS = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp
import snaprt

@jax.jit
def step(x):
    return x + 1, x.sum()

with snaprt.lazy():
    x = jnp.zeros(4)
    for _ in range(400):
        x, y = step(x)
        float(y)
print(snaprt.metrics.counter_value("JitLeftToJax"), float(x[0]))
"""


@pytest.mark.parametrize(("count", "left"), [(1, "1"), (2, "None")])
def test_processes_of_a_job_leave_no_call_to_jax(count: int, left: str, tmp_path: Path):
    done = run_program(LAUNCH, "-n", count, "--", script(tmp_path, LONE_CALLS))
    for rank in range(count):
        assert lines_of(done.stdout, rank)[-1] == f"{left} 400.0"


def test_processes_find_the_variables_of_torchrun(tmp_path: Path):
    code = """
import os
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(*(os.environ[name] for name in names), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
"""
    done = run_program(
        LAUNCH, "-n", 2, "--nnodes", 3, "--node-rank", 1, "--master", "node0:29500",
        "--", script(tmp_path, code),
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        "[2] 2 0 1 6 2 node0 29500",
        "[3] 3 1 1 6 2 node0 29500",
    ]


def test_the_first_failure_ends_the_others_and_its_output_comes_last(tmp_path: Path):
    code = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    sys.exit("no such data")
time.sleep(600)
"""
    started = time.monotonic()
    done = run_program(LAUNCH, "-n", 3, "--", script(tmp_path, code), status=1)
    assert time.monotonic() - started < 60
    said = done.stderr.splitlines()
    last = said.index("rank 1 failed first, with exit status 1; the end of its output:")
    assert set(said[last + 1 :]) == {"[1] rank 1", "[1] no such data"}


def test_a_process_that_waits_for_the_others_when_it_fails_does_not_hold_the_job(tmp_path: Path):
    code = """
import atexit, os, time
if os.environ["RANK"] == "0":
    atexit.register(time.sleep, 600)
    raise ValueError("broken")
time.sleep(600)
"""
    done = run_program(LAUNCH, "-n", 2, "--", script(tmp_path, code), status=1, timeout=60)
    assert done.stderr.splitlines()[-1] == "[0] ValueError: broken"


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "os._exit(77)"])
def test_the_exit_status_is_that_of_the_first_failure(tmp_path: Path, ends: str):
    code = f"import os, time\nif os.environ['RANK'] == '1': {ends}\ntime.sleep(600)"
    status = 137 if "kill" in ends else 77
    done = run_program(LAUNCH, "-n", 2, "--", script(tmp_path, code), status=status)
    how = "SIGKILL" if "kill" in ends else "exit status 77"
    assert f"rank 1 failed first, with {how}; it printed nothing" in done.stderr


STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), flush=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_launcher_is_ended(tmp_path: Path, number: int):
    process = start_program(LAUNCH, "-n", 2, "--", script(tmp_path, STUBBORN))
    pids = read_pids(process, 4)
    assert all(map(is_alive, pids))
    os.kill(process.pid, number)
    status = -number if number == signal.SIGKILL else 128 + number
    finish(process, status=status, timeout=60)
    wait_for_end(*pids)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no program to run"),
        (("--nnodes", "2", "--", "x.py"), "--nnodes needs the address of the first machine"),
        (("--nnodes", "2", "--node-rank", "2", "--", "x.py"), "--node-rank 2 is out of range"),
        (("--master", "node0", "--", "x.py"), "'node0' is not a coordinator address"),
        (("-n", "0", "--", "x.py"), "Invalid value for '-n'"),
        (("--when", "wrongly", "--", "x.py"), "wrongly"),
        (("-n", "2", "--", "nope.py"), "no such program: nope.py"),
    ],
)
def test_wrong_words_are_told_before_or_by_the_first_process(tmp_path: Path, words, complaint):
    done = run_program(LAUNCH, *words, folder=tmp_path, status=2)
    assert complaint in done.stderr
