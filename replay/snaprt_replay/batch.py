"""Replay files, here, in processes of their own, or on a cluster; each gives a report.

A Dask worker only hands a file to a process of its own, so that a crash of XLA ends that process
and neither the worker nor the file after it. A file whose worker is lost goes to another.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from snaprt.errors import ExecutionError, SnaprtError, UsageError
from snaprt.host.regular_files import read_file
from snaprt.host.whole_files import remedy, whole_file, write_whole, writing
from snaprt.snapshot.format import places
from snaprt.snapshot.format.read import sibling_inputs
from snaprt.snapshot.share.executions import executions_in, one_for_each_execution
from snaprt_replay import gather
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.export import write_members
from snaprt_replay.load.case import Case, NamedArray
from snaprt_replay.load.load import load
from snaprt_replay.report import model
from snaprt_replay.report.model import Report
from snaprt_replay.run import player
from snaprt_replay.run.rerun import Replay, replay_case, replay_on_all_devices
from snaprt_replay.run.trial import PROCESSES, try_case
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Workers

_RECORDED: Final = ("*.inputs.snap", "*.snapshot.*.pb", "*.hlo_unoptimized_snapshot.pb")
# XLA's names: module_0001.jit_f.cpu_after_optimizations.snapshot.12.pb, and
# module_0001.jit_f.execution_0000.hlo_unoptimized_snapshot.pb.
_MODULE: Final = re.compile(r"module_\d+\.")


@dataclasses.dataclass(frozen=True)
class ReplayRequest:
    """What to do with each file; it can be sent to another machine."""

    variant: Variant  # where and how to run it; or a kind that compiles only
    # A, B and a reference, where two sides are to be judged.
    sides: tuple[Variant, Variant, Variant] | None = None
    repeat: int = 1  # how often, to see whether it agrees with itself
    all_devices: bool = False  # whether to run it on every local device, to see which one differs
    # What to allow.
    tolerance: ToleranceRequest = dataclasses.field(default_factory=ToleranceRequest)
    inputs: Path | None = None  # an ``.npz`` file with other inputs
    random_seed: int | None = None  # draw other inputs, from this seed
    outputs: Path | None = None  # an ``.npz`` file with the recorded results of ``inputs``
    # Run in a process of its own? None for "if snaprt did not write the module".
    isolated: bool | None = None
    timeout: float | None = 120.0  # seconds for one run in a process of its own; None for any
    profile: Path | None = None  # the folder for a profile of one more run
    save: Path | None = None  # where to save the outputs, as ``.npz``
    save_hlo: Path | None = None  # where to save the optimized HLO of what is compiled only
    words: tuple[str, ...] = ()  # the options that say all this on a command line


def executions(paths: Sequence[Path]) -> list[Path]:
    """Return one file for each recorded execution that files, packed files and folders stand for.

    Of an execution that left several files, for inputs and outputs or for each device, it is one.

    Raises:
        UsageError: A folder holds none.
    """
    files = [file for path in paths for file in _files_of(path)]
    absolute = {path.absolute() for path in files}
    recordings = []
    for path in dict.fromkeys(files):
        inputs = sibling_inputs(path)
        if inputs is None or inputs.absolute() not in absolute:
            recordings.append(path)
    return one_for_each_execution(recordings)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for recorded in _recorded_files(path) for file in _executions_of(recorded)]
    return _executions_of(path)


def _executions_of(file: Path) -> list[Path]:
    return (executions_in(file) if places.is_pack_file(file) else None) or [file]


def _recorded_files(folder: Path) -> list[Path]:
    """Return the recorded executions in a folder and those below it, in the order of their names.

    Of an execution that XLA wrote in both of its forms, it is the one that has the results. A
    folder that cannot be read is among them, so that its replay tells why.
    """
    unreadable: list[Path] = []

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # folders that vanish are passed over
            unreadable.append(Path(error.filename))

    files = [
        Path(parent, name)
        for parent, folders, names in os.walk(folder, onerror=fail)
        for name in (*folders, *names)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _RECORDED)
    ]
    files = sorted([*files, *unreadable])
    modules = {_module(path) for path in files if ".snapshot." in path.name}
    recordings = [
        path
        for path in files
        if not path.name.endswith(_RECORDED[2][1:]) or _module(path) not in modules
    ]
    if not recordings:
        raise UsageError(
            f"{folder} contains no recorded executions",
            hint=f"searched for {', '.join(_RECORDED)}, including subfolders",
        )
    return recordings


def _module(path: Path) -> tuple[Path, str]:
    match = _MODULE.match(path.name)
    return path.parent, match[0] if match else path.name


def replay_files(
    paths: Sequence[Path], request: ReplayRequest, processes: int = 1
) -> Iterator[tuple[int, Report]]:
    """Replay files, some at a time, and yield each one's position and report as it is finished."""
    count = max(processes, PROCESSES if request.sides else 1)
    with Workers(count, request.timeout) as workers:
        if processes == 1:
            for number, path in enumerate(paths):
                yield number, replay_file(path, request, workers)
            return
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            running = {
                pool.submit(replay_file, path, request, workers): number
                for number, path in enumerate(paths)
            }
            try:
                for future in concurrent.futures.as_completed(running):
                    yield running[future], future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def replay_file(path: Path, request: ReplayRequest, workers: Workers) -> Report:
    """Do with one file what is asked; whatever comes of it is in the report."""
    try:
        runs_once = request.sides is None and request.variant.kind != "compile-only"
        raised = gather.of_trace_error(path) if runs_once else None
        if raised is not None:
            return raised
        case = load(path, request.inputs, request.random_seed, request.outputs)
        if request.sides is not None:
            trial = try_case(case, *request.sides, workers=workers, repeat=request.repeat)
            return gather.of_trial(trial, request.words)
        if request.variant.kind == "compile-only":
            return _compile(case, request, workers)

        def replay_as(variant: Variant) -> Replay:
            return replay_case(
                case,
                variant,
                workers,
                repeat=request.repeat,
                tolerance=request.tolerance,
                isolated=request.isolated,
                profile=request.profile,
            )

        if request.all_devices:
            replays = replay_on_all_devices(case, request.variant, replay_as)
            replayed = replays.usual
        else:
            replays, replayed = None, replay_as(request.variant)
        if request.save is not None:
            _save(request.save, replayed.played.outputs)
        report = gather.of_replay(replayed, request.words)
        return report if replays is None else gather.on_devices(report, replays)
    except SnaprtError as error:
        return gather.of_failure(path, error)


def _compile(case: Case, request: ReplayRequest, workers: Workers) -> Report:
    job = dataclasses.replace(player.job_of(case, request.variant), inputs=())
    outcome = workers.run_job(job)
    device = re.sub(r"[^\w.-]+", "-", request.variant.text)
    saved = request.save_hlo or Path(f"{case.path.name}.{device}.hlo.txt")
    if outcome.failure is None:
        elsewhere = "name a file in an existing folder: --save-hlo FILE"
        with writing(f"save the HLO to {saved}", elsewhere, hint=remedy):
            write_whole(saved, outcome.report["hlo"].encode())
    return gather.of_compilation(case, request.variant, outcome, saved)


def _save(path: Path, arrays: Sequence[NamedArray]) -> None:
    elsewhere = "name a file in an existing folder: --save FILE"
    with writing(f"save outputs to {path}", elsewhere, hint=remedy), whole_file(path) as file:
        write_members([(array.name, array.value) for array in arrays], file, bits=False)


_CONNECT_SECONDS: Final = 30


def replay_on_cluster(
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
    hint = "start one with `dask scheduler`, and workers with `dask worker ADDRESS`"
    if address.endswith(".json"):
        address = _address_in(Path(address), hint)
    if not re.search(r":\d+$", address):  # Dask would say so, and end a minute later
        raise UsageError(
            f"{address!r} is not the address of a Dask scheduler",
            hint="name it as tcp://HOST:PORT, or name a scheduler file that ends in .json",
        )
    try:
        client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
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
        for future in distributed.as_completed(futures, loop=client.loop):
            number = futures[future]
            yield number, _result(future, paths[number])


def _address_in(file: Path, hint: str) -> str:
    """Return the address in a scheduler file; Dask would wait for one that is not there."""
    try:
        return str(json.loads(read_file(file))["address"])
    except FileNotFoundError as error:
        raise UsageError(f"there is no scheduler file {file}", hint=hint) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{file} is not a scheduler file of Dask",
            hint="`dask scheduler --scheduler-file FILE` writes one",
        ) from error


def _result(future: Any, path: Path) -> Report:
    """Return what a worker said of a file, or the report that no worker survived it."""
    try:
        result = future.result()
    except SnaprtError as error:
        return gather.of_failure(path, error)
    except Exception as error:  # KilledWorker and whatever else a worker's machine may answer
        lost = ExecutionError(
            f"{path}: no worker of the cluster could replay it: {type(error).__name__}: {error}",
            hint="see the logs of the workers; each needs snaprt and access to the file",
        )
        return gather.of_failure(path, lost)
    return model.from_json(result)


def _replay(path: str, request: ReplayRequest) -> Mapping[str, Any]:
    """Replay a file; this is the part that runs in a Dask worker."""
    alone = dataclasses.replace(request, isolated=True)
    return model.to_json(replay_file(Path(path), alone, _workers(request.timeout)))


@functools.cache
def _workers(timeout: float | None) -> Workers:
    """Return the processes of this Dask worker; they stay for the files to come."""
    return Workers(PROCESSES, timeout)
