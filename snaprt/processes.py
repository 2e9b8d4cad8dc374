"""Which of the processes of a job this is: the one identity that all of snaprt uses."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from snaprt import settings


@dataclass(frozen=True)
class ProcessPlace:
    """Which process of a job this is."""

    rank: int  # its rank, which no other process of the job has
    process: int  # JAX's number of the process
    processes: int  # how many there are
    host: str  # the name of its machine
    pid: int  # its process id there
    run: str  # 8 hexadecimal digits that tell it from all others, earlier ones of this rank too


def place_in_job() -> ProcessPlace:
    """Return which process of a job this is, without starting a backend of JAX.

    The rank is JAX's number of the process where JAX knows of several: a launcher may set RANK per
    machine, in another order or not at all. RANK counts where JAX knows of one process only.
    """
    from snaprt import jaxapi

    process, processes = jaxapi.process_of_job()
    rank = process
    if processes == 1:
        launcher_rank: int | None = settings.get("RANK")
        rank = process if launcher_rank is None else launcher_rank
        processes = settings.get("WORLD_SIZE") or 1
    return ProcessPlace(rank, process, processes, socket.gethostname(), os.getpid(), run_mark())


_run_marks: dict[int, str] = {}  # process id to mark: a forked child has one of its own


def run_mark() -> str:
    """Return 8 hexadecimal digits that tell this process from all others that write to a folder."""
    process = os.getpid()
    if process not in _run_marks:
        _run_marks[process] = os.urandom(4).hex()
    return _run_marks[process]


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this process is the first of its machine, or of the whole job.

    Args:
        local: Whether to ask for the machine: ``LOCAL_RANK`` then says which process it is, and
            where it is not set each is the only one, as JAX has it on TPUs. Otherwise
            `jax.process_index` does, and ``RANK`` where JAX knows of one process only.

    Examples:
        >>> snaprt.is_master_ordinal()
        True
    """
    if local:
        return settings.get("LOCAL_RANK") in (None, 0)
    if settings.get("RANK") is None:
        import jax

        return jax.process_index() == 0
    return place_in_job().rank == 0


def master_print(
    *args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False
) -> None:
    """Print in the first process alone.

    Lazy arrays are read if they are printed, there and not in the other processes: print them in
    a step closure.

    Args:
        args: What `print` takes.
        fd: Where to; None for standard output.
        local: Whether the first of each machine prints, see `is_master_ordinal`.
        flush: As in `print`.

    Examples:
        >>> snaprt.master_print("step", 3)
        step 3
    """
    if is_master_ordinal(local=local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)
