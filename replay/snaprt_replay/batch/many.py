"""Replay many files at once, each in a process of its own; it must not know how it is shown.

A process serves one file after the other and is replaced when one ends it: see `workers`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from snaprt.errors import SnaprtError, UsageError
from snaprt_replay.batch import gather
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.load import load
from snaprt_replay.report.model import Report
from snaprt_replay.run.rerun import replay_case
from snaprt_replay.run.trace_errors import replay_trace_error
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Workers

_RECORDED: Final = ("*.inputs.snap", "*.snapshot.*.pb", "*.hlo_unoptimized_snapshot.pb")
# XLA's names: module_0001.jit_f.cpu_after_optimizations.snapshot.12.pb, and
# module_0001.jit_f.execution_0000.hlo_unoptimized_snapshot.pb.
_MODULE: Final = re.compile(r"module_\d+\.")


@dataclasses.dataclass(frozen=True)
class ReplayRequest:
    """What to do with each file; it can be sent to another machine.

    Args:
        variant: Where and how to run it.
        repeat: How often, to see whether it agrees with itself.
        tolerance: What to allow.
        inputs: An ``.npz`` file with other inputs.
        random_seed: Draw other inputs, from this seed.
        timeout: Seconds for one file.
        words: The options that say all this on a command line.
    """

    variant: Variant
    repeat: int = 1
    tolerance: ToleranceRequest = dataclasses.field(default_factory=ToleranceRequest)
    inputs: Path | None = None
    random_seed: int | None = None
    timeout: float = 120.0
    words: tuple[str, ...] = ()


def recorded_files(folder: Path) -> list[Path]:
    """Return the recorded executions in a folder and those below it, in the order of their names.

    Of an execution that XLA wrote in both of its forms, it is the one that has the results.

    Raises:
        UsageError: There is none.
    """
    found = sorted({path for pattern in _RECORDED for path in folder.rglob(pattern)})
    modules = {_module(path) for path in found if ".snapshot." in path.name}
    kept = [
        path
        for path in found
        if not path.name.endswith(_RECORDED[2][1:]) or _module(path) not in modules
    ]
    if not kept:
        raise UsageError(
            f"{folder} holds no recorded execution",
            hint=f"looked for {', '.join(_RECORDED)}, in folders below it too",
        )
    return kept


def _module(path: Path) -> tuple[Path, str]:
    found = _MODULE.match(path.name)
    return path.parent, found[0] if found else path.name


def replay_files(
    paths: Sequence[Path], request: ReplayRequest, processes: int = 1
) -> Iterator[tuple[int, Report]]:
    """Replay files, some at a time, and yield each one's position and report as it is finished."""
    with (
        Workers(processes, request.timeout) as workers,
        concurrent.futures.ThreadPoolExecutor(processes) as pool,
    ):
        running = {
            pool.submit(replay_file, path, request, workers): number
            for number, path in enumerate(paths)
        }
        try:
            for done in concurrent.futures.as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def replay_file(path: Path, request: ReplayRequest, workers: Workers) -> Report:
    """Replay one file in one of the workers' processes; whatever happens is in the report."""
    try:
        raised = replay_trace_error(path)
        if raised is not None:
            return gather.of_trace_error(raised)
        replayed = replay_case(
            load(path, request.inputs, request.random_seed),
            request.variant,
            workers,
            repeat=request.repeat,
            tolerance=request.tolerance,
            isolated=True,
        )
        return gather.of_replay(replayed, request.words)
    except SnaprtError as error:
        return gather.of_failure(path, error)
