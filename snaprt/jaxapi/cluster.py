"""The variables of torchrun, as a cluster that ``jax.distributed.initialize()`` finds by itself.

Uses ``jax._src.clusters.ClusterEnv``, which has no public name: it is the same in JAX 0.10 to 0.12.
JAX takes the first subclass, in the order of their definitions, whose variables are set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import jax

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def all_arrive(name: str, processes: Sequence[int], seconds: float) -> bool:
    """Wait until these processes of a job have all come here; return whether they have.

    All of them get the same answer: who comes too late is told so, and so are those that waited.

    Args:
        name: Of this place and time: it can be used once.
        processes: Of JAX's, this one among them.
        seconds: How long to wait.
    """
    from jax._src.distributed import global_state

    client = global_state.client
    if client is None:
        return False
    try:
        client.wait_at_barrier(name, int(1000 * seconds), process_ids=list(processes))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def register_torchrun() -> None:
    """Have ``jax.distributed.initialize()`` take the variables of torchrun, where they are set.

    They come before those of SLURM and Open MPI: who launches processes inside of an allocation
    means these processes.
    """
    from jax._src.clusters import ClusterEnv

    class Torchrun(ClusterEnv):
        name = "torchrun"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(variable) for variable in _VARIABLES)

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            port = override_coordinator_port or os.environ["MASTER_PORT"]
            return f"{os.environ['MASTER_ADDR']}:{port}"

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            # One device for each process of a machine, unless there is one process, or the
            # launcher has shown each its own devices.
            if (
                os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
                or "SNAPRT_LAUNCH_DEVICES" in os.environ
            ):
                return None
            return int(os.environ.get("LOCAL_RANK", "0"))

    known = ClusterEnv._cluster_types
    known.insert(0, known.pop(known.index(Torchrun)))


def process_of_job() -> tuple[int, int]:
    """Return JAX's number of this process in its job, and how many there are.

    Unlike `jax.process_index` it starts no backend, and does not wait for one that starts. Without
    `jax.distributed.initialize` it is 0 of 1, unless the backend knows of others, as on TPUs.
    Checked with jax 0.10.2 and 0.12.0.
    """
    from jax._src import xla_bridge
    from jax._src.distributed import global_state

    backend = xla_bridge._default_backend
    if (global_state.num_processes or 1) > 1 or backend is None:
        return global_state.process_id, global_state.num_processes or 1
    return backend.process_index(), 1 + max(device.process_index for device in backend.devices())
