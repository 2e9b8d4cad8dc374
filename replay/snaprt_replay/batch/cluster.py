"""Replay many files on the machines of a Dask cluster.

A Dask worker only hands a file to a process of its own (`many`), so that a crash of XLA ends that
process and neither the worker nor the file after it. A file whose worker is lost goes to another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snaprt.errors import ExecutionError, SnaprtError, UsageError
from snaprt_replay.batch import gather
from snaprt_replay.report import model
from snaprt_replay.report.model import Report

if TYPE_CHECKING:
    from snaprt_replay.batch.many import ReplayRequest
    from snaprt_replay.run.workers import Workers

_CONNECT_SECONDS: Final = 30


def replay_files(
    paths: Sequence[Path], request: ReplayRequest, address: str
) -> Iterator[tuple[int, Report]]:
    """Replay files on a cluster, and yield each one's position and report as it is finished.

    Args:
        paths: They are opened where the workers are: on a file system that all share.
        request: What to do with each.
        address: Of Dask's scheduler, ``tcp://host:8786``, or the path of a scheduler file (.json).

    Raises:
        UsageError: Dask is not installed, or there is no scheduler.
    """
    try:
        import distributed
    except ImportError as error:
        raise UsageError(
            "--cluster needs Dask, which is not installed", hint="pip install 'snaprt[cluster]'"
        ) from error
    is_file = address.endswith(".json")
    hint = "start one with `dask scheduler`, and workers with `dask worker ADDRESS`"
    if is_file and not Path(address).exists():  # Dask would wait for it
        raise UsageError(f"there is no scheduler file {address}", hint=hint)
    try:
        client = distributed.Client(
            None if is_file else address,
            scheduler_file=address if is_file else None,
            timeout=_CONNECT_SECONDS,
            set_as_default=False,
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"there is no Dask scheduler at {address}: {error or type(error).__name__}",
            hint=hint,
        ) from error
    with client:
        futures = {
            client.submit(_replay, str(path.absolute()), request, pure=False): number
            for number, path in enumerate(paths)
        }
        for done in distributed.as_completed(futures, loop=client.loop):
            number = futures[done]
            yield number, _result(done, paths[number])


def _result(done: Any, path: Path) -> Report:
    """Return what a worker said of a file, or the report that no worker survived it."""
    try:
        said = done.result()
    except SnaprtError as error:
        return gather.of_failure(path, error)
    except Exception as error:  # KilledWorker and whatever else a worker's machine may answer
        lost = ExecutionError(
            f"{path}: no worker of the cluster could replay it: {type(error).__name__}: {error}",
            hint="see the logs of the workers; each needs snaprt and access to the file",
        )
        return gather.of_failure(path, lost)
    return model.from_json(said)


def _replay(path: str, request: ReplayRequest) -> Mapping[str, Any]:
    """Replay a file; this is the part that runs in a Dask worker."""
    from snaprt_replay.batch.many import replay_file

    alone = dataclasses.replace(request, isolated=True)
    return model.to_json(replay_file(Path(path), alone, _workers(request.timeout)))


@functools.cache
def _workers(timeout: float | None) -> Workers:
    """Return the processes of this Dask worker; they stay for the files to come."""
    from snaprt_replay.run.trial import PROCESSES
    from snaprt_replay.run.workers import Workers

    return Workers(PROCESSES, timeout)
