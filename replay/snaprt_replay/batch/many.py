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

from snaprt.errors import CompileError, ExecutionError, SnaprtError, UsageError
from snaprt_replay.batch import gather
from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import Comparison
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import Case, NamedArray
from snaprt_replay.load.load import load
from snaprt_replay.report.model import Report
from snaprt_replay.run import devices, player
from snaprt_replay.run.player import PlayResult
from snaprt_replay.run.rerun import Replay, replay_case
from snaprt_replay.run.trace_errors import replay_trace_error
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.work import STABLEHLO
from snaprt_replay.run.workers import Outcome, Workers

_EXACTLY: Final = ToleranceRequest(rtol=0.0, atol=0.0, max_ulp=0)
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
        case = load(path, request.inputs, request.random_seed)
        if case.devices > 1:
            return gather.of_replay(_replay_on_devices(case, request), request.words)
        player.check_playable(case, request.repeat)
        outcome = workers.run(
            with_options(request.variant, case.compiler_options),
            case.stablehlo,
            [one.value for one in case.inputs or ()],
            repeat=request.repeat,
            form=STABLEHLO,
            name=case.name,
        )
        return gather.of_replay(_replay(case, outcome, request), request.words)
    except SnaprtError as error:
        return gather.of_failure(path, error)


def _replay_on_devices(case: Case, request: ReplayRequest) -> Replay:
    """Replay a program of several devices: the workers' processes have one each.

    Raises:
        SnaprtError: It cannot be compiled or run.
    """
    return replay_case(
        case,
        device=request.variant.device,
        repeat=request.repeat,
        tolerance=request.tolerance,
        compiler_options=dict(request.variant.options),
        isolated=True,
        timeout=request.timeout,
    )


def _replay(case: Case, outcome: Outcome, request: ReplayRequest) -> Replay:
    """Return a worker's outcome as a replay, compared.

    Raises:
        CompileError: It could not be compiled.
        ExecutionError: It could not be run.
    """
    if outcome.failure is not None:
        failed = CompileError if outcome.failure.kind.startswith("compile") else ExecutionError
        raise failed(f"{outcome.failure}: {outcome.failure.message}", hint=outcome.failure.hint)
    assert outcome.outputs is not None
    outputs = _named(case, outcome.outputs)
    played = PlayResult(
        outputs=outputs,
        device=outcome.device,
        environment=outcome.environment,
        compile_seconds=outcome.compile_seconds,
        execute_seconds=outcome.execute_seconds,
        from_cache=outcome.from_cache,
        repeats=_repeats(case, outcome),
        isolated=True,
    )
    comparison = None
    if case.outputs is not None:
        comparison = compare(case.outputs, outputs, request.tolerance)
    warnings = devices.differences(case.environment, outcome.environment)
    options = {**case.compiler_options, **dict(request.variant.options)}
    if options:
        told = ", ".join(f"{name}={value}" for name, value in options.items())
        warnings = (*warnings, f"replayed with the compiler options {told}")
    return Replay(case, played, comparison, warnings)


def _repeats(case: Case, outcome: Outcome) -> Comparison | None:
    if outcome.outputs is None or outcome.agrees_with_itself is None:
        return None
    other = outcome.other_runs[0] if outcome.other_runs else outcome.outputs
    first, again = _named(case, outcome.outputs), _named(case, other)
    return compare(first, again, _EXACTLY, expected_name="run 1", actual_name="another run")


def _named(case: Case, values: Sequence) -> tuple[NamedArray, ...]:
    names = [array.name for array in case.outputs or ()]
    if len(names) != len(values):
        names = [f"out{index}" for index in range(len(values))]
    return tuple(NamedArray(name, value) for name, value in zip(names, values, strict=True))
