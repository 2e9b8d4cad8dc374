"""Runs a function in several new processes of this machine, as the processes of one job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from snaprt.errors import ProcessError
from snaprt.fleet.launch import GRACE, Job, free_address


def spawn(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    devices_per_process: int | None = None,
) -> None:
    """Run ``function(rank, *args)`` in new processes, and wait until all have ended.

    They find torchrun's variables, and ``jax.distributed.initialize()`` needs no arguments. When
    one fails, the others are ended. To be called under ``if __name__ == "__main__":``, for each
    process imports the script first.

    Args:
        function: A function that a new process can import.
        args: What it gets besides its rank; pickled.
        nprocs: How many processes.
        devices_per_process: How many devices each sees, see ``snaprt launch``.

    Raises:
        ProcessError: A process failed; the message holds its traceback.
        ValueError: ``nprocs`` is less than 1.

    Examples:
        >>> import operator
        >>> snaprt.spawn(operator.add, args=(1,), nprocs=2)  # rank + 1, in two processes
    """
    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs}; a job has at least one process")
    context = multiprocessing.get_context("spawn")
    job = Job(nprocs, free_address(), devices_per_process=devices_per_process)
    processes: dict[int, SpawnProcess] = {}
    connections: dict[int, Connection] = {}
    try:
        for rank in job.ranks:
            connections[rank], sender = context.Pipe(duplex=False)
            with _environment(job.environment(rank, os.environ)):
                processes[rank] = context.Process(
                    target=_run, args=(sender, function, rank, tuple(args)), name=f"rank {rank}"
                )
                processes[rank].start()
            sender.close()
        _wait(processes, connections)
    finally:
        _end(processes.values())


def _wait(processes: dict[int, SpawnProcess], connections: dict[int, Connection]) -> None:
    """Wait until all have ended.

    Raises:
        ProcessError: One has failed.
    """
    running = dict(connections)
    while running:
        for ready in wait(list(running.values())):
            rank = next(rank for rank, connection in running.items() if connection is ready)
            try:
                error = running.pop(rank).recv()
            except EOFError:  # it has ended without a word
                processes[rank].join()
                status = processes[rank].exitcode or 0
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                error = f"it ended with {how}"
            if error is not None:
                raise ProcessError(f"rank {rank} failed: {error}")
    for process in processes.values():
        process.join()


def _end(processes: Collection[SpawnProcess]) -> None:
    """End those that still run: SIGTERM, and SIGKILL after a while."""
    for process in processes:
        process.terminate()
    kill_at = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, kill_at - time.monotonic()))
        process.kill()
        process.join()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set what a process that is started meanwhile inherits."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    sender: Connection, function: Callable[..., object], rank: int, args: tuple[Any, ...]
) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    from snaprt import jaxapi

    jaxapi.register_torchrun()
    try:
        function(rank, *args)
    except BaseException:
        sender.send(traceback.format_exc().rstrip())
        raise SystemExit(1) from None
    sender.send(None)


def _die_with(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
