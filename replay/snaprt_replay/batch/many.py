"""Replay files, here or in processes of their own, some at a time; each gives a report."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from snaprt.errors import SnaprtError, UsageError
from snaprt.refusals import remedy, writing
from snaprt.snapshot.format import places
from snaprt.snapshot.format.read import sibling_inputs
from snaprt.snapshot.share.executions import executions_in, one_for_each_execution
from snaprt.whole_files import whole_file, write_whole
from snaprt_replay.batch import gather
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.export.formats import write_members
from snaprt_replay.load.case import Case, NamedArray
from snaprt_replay.load.load import load
from snaprt_replay.report.model import Report
from snaprt_replay.run import player
from snaprt_replay.run.all_devices import DeviceReplays, replay_on_all_devices
from snaprt_replay.run.rerun import Replay, replay_case
from snaprt_replay.run.trial import PROCESSES, try_case
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
        variant: Where and how to run it; or a kind that compiles only.
        sides: A, B and a reference, where two sides are to be judged.
        repeat: How often, to see whether it agrees with itself.
        all_devices: Whether to run it on every local device, to see which one differs.
        tolerance: What to allow.
        inputs: An ``.npz`` file with other inputs.
        random_seed: Draw other inputs, from this seed.
        outputs: An ``.npz`` file with the recorded results of ``inputs``.
        isolated: Run in a process of its own? None for "if snaprt did not write the module".
        timeout: Seconds for one run in a process of its own; None for any.
        profile: The folder for a profile of one more run.
        save: Where to save the outputs, as ``.npz``.
        save_hlo: Where to save the optimized HLO of what is compiled only.
        words: The options that say all this on a command line.
    """

    variant: Variant
    sides: tuple[Variant, Variant, Variant] | None = None
    repeat: int = 1
    all_devices: bool = False
    tolerance: ToleranceRequest = dataclasses.field(default_factory=ToleranceRequest)
    inputs: Path | None = None
    random_seed: int | None = None
    outputs: Path | None = None
    isolated: bool | None = None
    timeout: float | None = 120.0
    profile: Path | None = None
    save: Path | None = None
    save_hlo: Path | None = None
    words: tuple[str, ...] = ()


def executions(paths: Sequence[Path]) -> list[Path]:
    """Return one file for each recorded execution that files, packed files and folders stand for.

    Of an execution that left several files, for inputs and outputs or for each device, it is one.

    Raises:
        UsageError: A folder holds none.
    """
    files = [file for path in paths for file in _files_of(path)]
    given = {path.absolute() for path in files}
    kept = []
    for path in dict.fromkeys(files):
        inputs = sibling_inputs(path)
        if inputs is None or inputs.absolute() not in given:
            kept.append(path)
    return one_for_each_execution(kept)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for one in _recorded_files(path) for file in _files_of(one)]
    return (executions_in(path) if places.is_pack_file(path) else None) or [path]


def _recorded_files(folder: Path) -> list[Path]:
    """Return the recorded executions in a folder and those below it, in the order of their names.

    Of an execution that XLA wrote in both of its forms, it is the one that has the results.
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
            f"{folder} holds no recorded executions",
            hint=f"searched for {', '.join(_RECORDED)}, including subfolders",
        )
    return kept


def _module(path: Path) -> tuple[Path, str]:
    found = _MODULE.match(path.name)
    return path.parent, found[0] if found else path.name


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
                for done in concurrent.futures.as_completed(running):
                    yield running[done], done.result()
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
        if request.all_devices:
            replay_on: Callable[..., Replay | DeviceReplays] = replay_on_all_devices
        else:
            replay_on = functools.partial(replay_case, profile=request.profile)
        found = replay_on(
            case,
            request.variant,
            workers,
            repeat=request.repeat,
            tolerance=request.tolerance,
            isolated=request.isolated,
        )
        replayed = found.usual if isinstance(found, DeviceReplays) else found
        if request.save is not None:
            _save(request.save, replayed.played.outputs)
        report = gather.of_replay(replayed, request.words)
        return gather.on_devices(report, found) if isinstance(found, DeviceReplays) else report
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
