"""Run a case, in this process or in a separate one that protects this one from crashes in XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from snaprt.errors import CompileError, ExecutionError, SnapshotError, UsageError
from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import IDENTICAL, MISMATCH, Comparison
from snaprt_replay.compare.tolerance import EXACTLY
from snaprt_replay.load.case import (
    Case,
    NamedArray,
    ShardedArray,
    all_parts,
    name_arrays,
    sharded,
)
from snaprt_replay.load.modules import hlo_of, without_effects
from snaprt_replay.run.devices import needs_host_devices
from snaprt_replay.run.jobs import HLO, STABLEHLO, ReplayJob
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.work import Outputs
from snaprt_replay.run.workers import Outcome, Workers, run_here

# What Shardy and GSPMD call the parts of a module that are written per device.
_SPREAD_BY_HAND = (b"manual_computation", b"GlobalToLocalShape", b"SPMDFullToShardShape")


@dataclasses.dataclass(frozen=True, eq=False)
class PlayResult:
    """The result of running a case.

    Args:
        outputs: The results of the first run, in order, under the recorded names if known.
        device: The device's name, as in ``cpu:0``; for several, as in ``cpu:0-7``.
        environment: Versions, platform, device, flags: as in `Case.environment`.
        compile_seconds: Time to compile the module, or to load it from the cache.
        execute_seconds: Time of each run, including copies to and from the device.
        from_cache: Whether the executable came from the persistent cache.
        repeats: The comparison of run 1 with the first run that differs from it in any bit, or
            with itself if none does; None if it ran only once.
        isolated: Whether it ran in a separate process.
        parts: What each device held of the outputs, if it ran on several.

    Examples:
        >>> from snaprt import replay
        >>> played = replay.play(replay.load("step.inputs.snap"))
        >>> [array.shape for array in played.outputs]
        [(4,)]
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
        """Return whether all runs gave the same bits; None if it ran only once."""
        return None if self.repeats is None else self.repeats.verdict == IDENTICAL


def play(case: Case, device: str | None = None, repeat: int = 1) -> PlayResult:
    """Compile a case through the persistent cache and run it in this process.

    Args:
        case: With inputs.
        device: See `devices.find_device`.
        repeat: How often to run it, at least once, to see whether it is deterministic.

    Raises:
        UsageError: The case has no inputs.
        DeviceError: There is no such device.
        CompileError: XLA cannot compile the module.
        ExecutionError: It cannot be run with these inputs.

    Examples:
        >>> from snaprt import replay
        >>> played = replay.play(replay.load("step.inputs.snap"), repeat=2)
        >>> played.agrees_with_itself
        True
    """
    return play_variant(case, Variant(device or "default", "device", device), repeat, None)


def play_variant(
    case: Case,
    variant: Variant,
    repeat: int,
    workers: Workers | None,
    profile: Path | None = None,
) -> PlayResult:
    """Run a case, in this process if ``workers`` is None, otherwise in one of theirs.

    If ``profile`` names a folder, one more run is profiled into it.

    Raises:
        SnaprtError: As `play`; or the process ended, or took too long.
    """
    check_playable(case, repeat)

    def job(variant: Variant) -> ReplayJob:
        folder = "" if profile is None else str(profile)
        return dataclasses.replace(job_of(case, variant, repeat), profile=folder)

    if workers is None:
        try:
            outcome = run_here(job(variant))
        except (CompileError, ExecutionError) as error:
            raise type(error)(f"{case.path}: {error.message}", hint=error.hint) from error
    elif needs_host_devices(variant.device, case.devices):
        on_cpu = dataclasses.replace(variant, device="cpu")
        outcome = workers.run_job(job(on_cpu), host_devices=case.devices)
    else:
        outcome = workers.run_job(job(variant))
    if outcome.failure is not None:
        raise outcome.failure.as_error(case.path)
    assert outcome.outputs is not None
    outputs = _named(case, outcome, outcome.outputs)
    repeats = None
    if outcome.agrees_with_itself is not None:
        again = outcome.other_runs[0] if outcome.other_runs else outcome.outputs
        repeats = compare(
            _compared(outputs),
            _compared(_named(case, outcome, again)),
            EXACTLY,
            expected_name="run 1",
            actual_name="another run",
        )
    return PlayResult(
        outputs=tuple(array.whole(case.device if outcome.layout else 0) for array in outputs),
        parts=outputs if outcome.layout else (),
        device=outcome.device,
        environment=outcome.environment,
        compile_seconds=outcome.compile_seconds,
        execute_seconds=outcome.execute_seconds,
        from_cache=outcome.from_cache,
        repeats=repeats,
        isolated=workers is not None,
    )


def job_of(case: Case, variant: Variant, repeat: int = 1, devices: int | None = None) -> ReplayJob:
    """Return the job that runs a case, with the options that it was recorded with.

    Args:
        case: What to run.
        variant: How to run it.
        repeat: How often to run it.
        devices: 1 to run a program of several devices on one; None for as many as recorded.

    Raises:
        SnapshotError: It is to run in another environment, and XLA has no HLO for the module.
    """
    if variant.kind in ("device", "compile-only"):
        variant = with_options(variant, case.compiler_options)
    # An older jaxlib elsewhere may not know the StableHLO that this one or a newer one writes.
    is_elsewhere = variant.python is not None
    return ReplayJob(
        variant=variant,
        program=hlo_of(case) if is_elsewhere else case.stablehlo,
        inputs=[
            array.value if devices == 1 else case.input_parts.get(array.name, array.value)
            for array in case.inputs or ()
        ],
        form=HLO if is_elsewhere else STABLEHLO,
        repeat=repeat,
        name=case.name,
        graph_id=case.graph_id,
        devices=devices or case.devices,
        partitioning=None if devices == 1 else case.partitioning,
    )


def check_playable(case: Case, repeat: int) -> None:
    """Raise UsageError or ExecutionError if a case clearly cannot be run."""
    if repeat < 1:
        raise UsageError(f"cannot run it {repeat} times", hint="--repeat needs 1 or more")
    if case.unfinished:
        raise UsageError(
            f"{case.path} contains no execution: an error ended the recording of its graph",
            hint=f"`snaprt replay {case.path}` evaluates the failed operation again",
        )
    if case.inputs is None:
        raise UsageError(
            f"{case.path} contains no inputs",
            hint="pass them with --inputs FILE.npz, or use random ones with --random SEED",
        )
    if case.partitioning is not None and case.partitioning.replicas != 1:
        raise ExecutionError(
            f"{case.path} ran as {case.partitioning.replicas} replicas; replicas are not supported",
            hint=f"`snaprt inspect {case.path}` shows its contents",
        )


def check_runs_on_one_device(case: Case) -> None:
    """Raise UsageError if a program of several devices has parts that one device cannot run.

    Automatic partitioning by JAX or XLA gives the same results on one; `jax.shard_map` does not.
    """
    if case.devices > 1 and any(mark in case.stablehlo for mark in _SPREAD_BY_HAND):
        raise UsageError(
            f"{case.path} is written per device for {case.devices} devices (jax.shard_map), but "
            "variants run on one device",
            hint=f"`snaprt replay {case.path}`, without variants, runs it on all devices",
        )


def check_branches(case: Case, outputs_of: Callable[[Case], Sequence[NamedArray] | None]) -> None:
    """Refuse a case whose recorded outputs depend on what Python returned in a branch.

    Args:
        case: What was recorded.
        outputs_of: Runs a case; None if it returns no outputs.

    Raises:
        SnapshotError: Its outputs change if other values take the place of what Python returned.
    """
    if not case.with_branches_that_call or case.outputs is None:
        return
    other = without_effects(case.with_branches_that_call, second=True).stablehlo
    first, second = outputs_of(case), outputs_of(dataclasses.replace(case, stablehlo=other))
    if first and second and compare(first, second).verdict == MISMATCH:
        raise SnapshotError(
            f"{case.path}: the program takes a branch that calls back into Python, and its outputs "
            "depend on what Python returned: a host callback cannot be replayed",
            hint="remove the callback (jax.pure_callback, io_callback) from the compiled function "
            "and record it again",
        )


def check_branches_alone(case: Case, workers: Workers) -> None:
    """Do what `check_branches` does, on JAX's default device, in processes of ``workers``."""

    def outputs_of(run: Case) -> Sequence[NamedArray] | None:
        outputs = workers.run_job(
            job_of(run, Variant("default", "device", None), devices=1)
        ).outputs
        return None if outputs is None else name_arrays(outputs, "out")

    check_branches(case, outputs_of)


def output_names(case: Case, count: int) -> tuple[str, ...]:
    """Return the names of the outputs: as recorded, or ``out0``, ``out1``, ..."""
    if case.outputs is not None and len(case.outputs) == count:
        return tuple(array.name for array in case.outputs)
    return tuple(f"out{index}" for index in range(count))


def _named(case: Case, outcome: Outcome, values: Outputs) -> tuple[ShardedArray, ...]:
    layout = outcome.layout or [(value.shape, ((),)) for value in values]
    parts = iter(values)
    return tuple(
        sharded(name, shape, [next(parts) for _ in indices], indices)
        for name, (shape, indices) in zip(output_names(case, len(layout)), layout, strict=True)
    )


def _compared(outputs: tuple[ShardedArray, ...]) -> tuple[NamedArray, ...]:
    """Return the arrays to compare two runs by: every part, or the arrays of a single device."""
    if all(len(array.parts) == 1 for array in outputs):
        return tuple(array.whole() for array in outputs)
    return all_parts(outputs)
