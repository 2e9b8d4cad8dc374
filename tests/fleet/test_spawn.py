"""``snaprt.spawn``: a function runs as the processes of one job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = """
import os, sys, time
import snaprt

def work(rank, what):
    if what == "sum":
        import jax
        jax.distributed.initialize()
        import jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, P("data"))
        part = np.arange(4.0) + 4 * rank
        batches = [{"x": part, "name": "a"}, {"x": part + 1, "name": "b"}]
        for batch in snaprt.MpDeviceLoader(batches, sharding):
            total = float(jnp.sum(batch["x"]))
            sys.stdout.write(f"{rank} {batch['name']} {batch['x'].shape} {total}\\n")
    elif rank == 1:
        {"raise": lambda: [][0], "kill": lambda: os.kill(os.getpid(), 9)}[what]()
    else:
        time.sleep(600)

if __name__ == "__main__":
    try:
        snaprt.spawn(work, (sys.argv[1],), nprocs=2, devices_per_process=2)
    except snaprt.ProcessError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "spawned.py"
    path.write_text(SCRIPT)
    return path


def test_each_process_gives_its_part_of_every_batch(script: Path):
    done = run_program(script, "sum")
    # Gloo prints to the same pipe, a part of a line at a time.
    printed = re.findall(r"[01] [ab] \(.*?\) \d+\.0", done.stdout)
    assert sorted(printed) == ["0 a (8,) 28.0", "0 b (8,) 36.0", "1 a (8,) 28.0", "1 b (8,) 36.0"]


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ("raise", "IndexError: list index out of range"),
        ("kill", "rank 1 failed: it ended with SIGKILL"),
    ],
)
def test_the_first_failure_ends_the_others_and_is_raised(script: Path, what: str, last: str):
    done = run_program(script, what, status=1, timeout=60)
    assert done.stderr.splitlines()[-1] == last
