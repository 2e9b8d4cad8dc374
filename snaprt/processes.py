"""Which of the processes of a job this is, as PyTorch/XLA asks for it."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import jax

from snaprt import settings


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this process is the first of its machine, or of the whole job.

    Args:
        local: Whether to ask for the machine: ``LOCAL_RANK`` then says which process it is, and
            where it is not set each is the only one, as JAX has it on TPUs. Otherwise ``RANK``
            does, and where it is not set `jax.process_index`.
    """
    if local:
        return settings.get("LOCAL_RANK") in (None, 0)
    rank = settings.get("RANK")
    return (jax.process_index() if rank is None else rank) == 0


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
    """
    if is_master_ordinal(local=local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)
