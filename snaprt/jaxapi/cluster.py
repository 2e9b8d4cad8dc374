"""The variables of torchrun, as a cluster that ``jax.distributed.initialize()`` finds by itself.

Uses ``jax._src.clusters.ClusterEnv``, which has no public name: it is the same in JAX 0.10 to 0.12.
JAX takes the first subclass, in the order of their definitions, whose variables are set.
"""

from __future__ import annotations

import os
from typing import Final

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
