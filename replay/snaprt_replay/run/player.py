"""Run a case in this process; it must not know files, or what is made of the results.

`isolate.play` does the same in a process of its own, for modules that may end a process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from snaprt.compile.module import LoadedModule, compile_partitioned
from snaprt.errors import CompileError, ExecutionError, UsageError
from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import IDENTICAL, Comparison
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import Case, NamedArray, Signature
from snaprt_replay.load.shards import ShardedArray, all_parts, sharded
from snaprt_replay.run import devices

_EXACTLY = ToleranceRequest(rtol=0.0, atol=0.0, max_ulp=0)
# What Shardy and GSPMD call the parts of a module that say what each device does.
_SPREAD_BY_HAND = (b"manual_computation", b"GlobalToLocalShape", b"SPMDFullToShardShape")


@dataclasses.dataclass(frozen=True, eq=False)
class PlayResult:
    """What running a case gave.

    Args:
        outputs: The results of the first run, in order, under the recorded names where known.
        device: The device's name, as in ``cpu:0``; of several, as in ``cpu:0-7``.
        environment: Versions, platform, device, flags: as in `Case.environment`.
        compile_seconds: Time to compile the module, or to load it from the cache.
        execute_seconds: Time of each run, copies to and from the device included.
        from_cache: Whether the executable came from the persistent cache.
        repeats: The first run that differs from the first one in any bit, compared with it; if
            none does, the last one; None where it ran once only.
        isolated: Whether it ran in a process of its own.
        parts: What each device held of the outputs, where it ran on several.
    """

    outputs: tuple[NamedArray, ...]
    device: str
    environment: Mapping[str, str]
    compile_seconds: float
    execute_seconds: tuple[float, ...]
    from_cache: bool
    repeats: Comparison | None = None
    isolated: bool = False
    parts: tuple[ShardedArray, ...] = ()

    @property
    def agrees_with_itself(self) -> bool | None:
        """Return whether all runs gave the same bits; None where it ran once only."""
        return None if self.repeats is None else self.repeats.verdict == IDENTICAL


def play(case: Case, device: str | None = None, repeat: int = 1) -> PlayResult:
    """Compile a case through the persistent cache and run it.

    Args:
        case: With inputs.
        device: See `devices.find_device`.
        repeat: How often to run it, at least once, to see whether it agrees with itself.

    Raises:
        UsageError: The case has no inputs.
        DeviceError: There is no such device.
        CompileError: XLA cannot compile the module.
        ExecutionError: It cannot be run with these inputs.
    """
    check_playable(case, repeat)
    assert case.inputs is not None
    there = devices.find_devices(device, case.devices)
    try:
        module = compile_partitioned(
            case.stablehlo,
            devices=there,
            partitioning=case.partitioning,
            name=case.name,
            compiler_options=case.compiler_options,
        )
    except CompileError as error:
        raise CompileError(f"{case.path}: {error.message}", hint=error.hint) from error
    _check_inputs(case, module)
    seconds: list[float] = []
    outputs = _run(module, case, seconds)
    repeats = None
    for number in range(2, repeat + 1):
        again = _run(module, case, seconds)
        if repeats is None or repeats.verdict == IDENTICAL:
            repeats = compare(
                _compared(outputs),
                _compared(again),
                _EXACTLY,
                expected_name="run 1",
                actual_name=f"run {number}",
            )
    return PlayResult(
        outputs=tuple(one.whole() for one in outputs),
        parts=outputs if len(there) > 1 else (),
        device=devices.name_devices(there),
        environment=environment(module),
        compile_seconds=module.compile_seconds,
        execute_seconds=tuple(seconds),
        from_cache=module.from_cache,
        repeats=repeats,
    )


def check_playable(case: Case, repeat: int) -> None:
    """Raise UsageError or ExecutionError if it is clear beforehand that a case cannot be run."""
    if repeat < 1:
        raise UsageError(f"it cannot be run {repeat} times", hint="--repeat takes 1 or more")
    if case.unfinished:
        raise UsageError(
            f"{case.path} holds no execution: an error ended the recording of its graph",
            hint=f"`snaprt replay {case.path}` evaluates the operation that failed again",
        )
    if case.inputs is None:
        raise UsageError(
            f"{case.path} holds no inputs",
            hint="give them with --inputs FILE.npz, or draw them with --random SEED",
        )
    if case.partitioning is not None and case.partitioning.replicas != 1:
        raise ExecutionError(
            f"{case.path} ran as {case.partitioning.replicas} replicas, which cannot be replayed",
            hint=f"`snaprt inspect {case.path}` shows what it holds",
        )


def check_runs_on_one_device(case: Case) -> None:
    """Raise UsageError if a program of several devices has parts that one device cannot run.

    What JAX or XLA spreads over devices by itself gives the same on one; `jax.shard_map` does not.
    """
    if case.devices > 1 and any(mark in case.stablehlo for mark in _SPREAD_BY_HAND):
        raise UsageError(
            f"{case.path} says what each of its {case.devices} devices does (jax.shard_map), and "
            "this runs programs on one device",
            hint=f"`snaprt replay {case.path}`, without variants, runs it on as many devices",
        )


def _check_inputs(case: Case, module: LoadedModule) -> None:
    """Raise ExecutionError unless the inputs are what the module takes: XLA would not ask."""
    given = [Signature(array.shape, array.dtype) for array in case.inputs or ()]
    taken = [Signature(shape, dtype) for shape, dtype in module.parameters]
    if given != taken:
        raise ExecutionError(
            f"{case.path}: its inputs ({', '.join(map(str, given))}) are not what its module takes "
            f"({', '.join(map(str, taken))})",
            hint="the file is damaged, or was put together by hand",
        )


def _run(module: LoadedModule, case: Case, seconds: list[float]) -> tuple[ShardedArray, ...]:
    started = time.perf_counter()
    try:
        values = module.run_sharded(
            [case.input_parts.get(array.name, array.value) for array in case.inputs or ()]
        )
    except ExecutionError as error:
        raise ExecutionError(f"{case.path}: {error.message}", hint=error.hint) from error
    seconds.append(time.perf_counter() - started)
    names = [array.name for array in case.outputs or ()]
    if len(names) != len(values):
        names = [f"out{index}" for index in range(len(values))]
    return tuple(
        sharded(name, shape, parts, indices)
        for name, (shape, _), parts, indices in zip(
            names, module.results, values, module.result_indices, strict=True
        )
    )


def _compared(outputs: tuple[ShardedArray, ...]) -> tuple[NamedArray, ...]:
    """Return what two runs are compared by: every part, or the arrays of a single device."""
    if all(len(one.parts) == 1 for one in outputs):
        return tuple(one.whole() for one in outputs)
    return all_parts(outputs)


def environment(module: LoadedModule) -> Mapping[str, str]:
    """Return what a snapshot records of where it ran, for a module that was compiled here."""
    proof = module.proof
    return {
        **devices.environment(module.device),
        "fingerprint": proof.fingerprint,
        "optimised_hlo": proof.optimised_hlo,
        "aliases": ", ".join(proof.aliases),
    }
