"""``--when recheck`` in a job: all processes run again or none, and all name the culprit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

from snaprt.snapshot.format.read import open_snapshot

SUPPORT = Path(__file__).parents[1] / "support"

SCRIPT = """
import os, sys
sys.path.insert(0, os.environ["SUPPORT"])
import jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from broken_chips import faulty
import snaprt
from snaprt import metrics

mode, place, calls = sys.argv[1:]
calls = range(10**6) if calls == "all" else [int(calls)]
fault = faulty(
    lambda where, number: where == int(place) and number in calls, varies=mode != "replica")
mesh = Mesh(np.array(jax.devices()), ("data",))

def part(w, x):
    at = jax.lax.axis_index("data")
    h = jnp.tanh(x @ w)
    loss = jnp.sum(fault(h, at))[None] if mode != "replica" else jnp.sum(h)[None]
    w = w - 0.1 * jax.lax.psum(x.T @ h, "data")
    return fault(w, at) if mode == "replica" else w, loss

step = jax.jit(jax.shard_map(
    part, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")), check_vma=False))

def spread(whole, spec):
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda i: whole[i])

w = spread(np.ones((4, 4), np.float32), P())
rows = 2 * jax.device_count()
x = spread(np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4) / 16, P("data"))
if mode == "late":
    from snaprt.snapshot.recorder import recheck
    recheck.SECONDS_TO_MEET = 2
    if jax.process_index() == 1:
        os.environ["SNAPRT_RECORD"] = "recheck, every=5, first=1"
for _ in range(4):
    if mode == "lazy":
        with snaprt.lazy():
            w, loss = step(w, x)
            snaprt.mark_step()
    else:
        w, loss = step(w, x)
loss.block_until_ready()
names = ("Rechecks", "RecheckMismatch", "RecheckReplicaMismatch")
print("counts", *(int(metrics.counter_value(name) or 0) for name in names))
"""


def run(folder: Path, processes: int, *words: object, devices: int = 2) -> tuple[str, list[str]]:
    """Run the script; return all that it said, and what each process counted."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = run_program(
        *((*SNAPRT, "launch", "-n", str(processes)), "--devices-per-process", devices),
        *("--when", "recheck, every=2", "--dump", folder / "dump", "--", script, *words),
        SUPPORT=SUPPORT,
    )
    said = done.stdout + done.stderr
    return said, re.findall(r"counts (.*)", said)


@pytest.mark.parametrize(("processes", "mode"), [(2, "jit"), (2, "lazy"), (3, "jit")])
def test_the_rank_and_device_that_computed_wrong_once_are_named(
    tmp_path: Path, processes: int, mode: str
):
    # Of the last device, the calls of execution 2 are 3 and 4: 0 runs twice.
    devices = 2 if processes == 2 else 1
    last = processes * devices - 1
    said, counts = run(tmp_path, processes, mode, last, 3, devices=devices)
    assert counts == ["2 1 0"] * processes
    rank = processes - 1
    accused = re.findall(
        r"run (\d) differs from runs . and 3, which agree.* on (.*)\. Recorded", said
    )
    assert len(accused) == processes
    assert {(run, re.sub(r"\d+ of", "N of", who)) for run, who in accused} == {
        ("1", f"cpu:N of rank {rank}")
    }
    files = [open_snapshot(path) for path in (tmp_path / "dump").glob("*.snap")]
    assert len(files) == 3 * processes * devices
    for file in files:
        execution = file.manifest.execution
        assert execution.recheck is not None
        assert [(one.process, one.id) for one in execution.recheck.suspects] == [
            (rank, execution.devices[last].id)
        ]
        assert execution.execution_count == 2


def test_a_device_that_always_computes_wrong_has_other_copies_than_the_others(tmp_path: Path):
    said, counts = run(tmp_path, 2, "replica", 2, "all")
    assert [count.split()[2] for count in counts] == ["2", "2"]
    told = re.findall(r"differ from those on most devices.*, on (.*) of (.*)\. ", said)
    assert [rank for _, rank in told] == ["rank 1", "rank 1"]


@pytest.mark.slow
def test_processes_that_do_not_agree_go_on_without_re_checking(tmp_path: Path):
    # Process 1 asks for execution 0 alone, process 0 for execution 2 as well.
    said, counts = run(tmp_path, 2, "late", 0, 99)
    assert "not all of its processes were ready to run execution 2 again within 2 s" in said
    assert counts == ["1 0 0", "1 0 0"]


LATE = """
import sys, time
from pathlib import Path
import jax
jax.distributed.initialize()
from snaprt import jaxapi
gave_up = Path(sys.argv[1])
print("answer", jaxapi.all_arrive("together", [0, 1], 60))
while jax.process_index() == 1 and not gave_up.exists():
    time.sleep(0.1)
print("answer", jaxapi.all_arrive("apart", [0, 1], 1))
gave_up.touch()
"""


def test_a_process_that_comes_too_late_gets_the_answer_of_the_others(tmp_path: Path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    done = run_program((*SNAPRT, "launch", "-n", "2", "--", str(script), str(tmp_path / "x")))
    answers = [re.findall(rf"\[{rank}\] answer (.*)", done.stdout) for rank in (0, 1)]
    assert answers == [["True", "False"], ["True", "False"]]
