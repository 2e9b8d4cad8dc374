"""Replay one file from end to end: load, play, compare; on one device, or on all of a platform."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import numpy as np

from snaprt.errors import SnapshotError, UsageError
from snaprt_replay.compare.compare import compare
from snaprt_replay.compare.results import IDENTICAL, MISMATCH, Comparison, worst_verdict
from snaprt_replay.compare.tolerance import EXACTLY, ToleranceRequest
from snaprt_replay.load.case import (
    Case,
    CompilerOption,
    NamedArray,
    ShardedArray,
    parts_of_device,
)
from snaprt_replay.load.load import load
from snaprt_replay.load.modules import hlo_of
from snaprt_replay.run import devices, player
from snaprt_replay.run.player import PlayResult
from snaprt_replay.run.variants import precision
from snaprt_replay.run.variants.emulate import multiplies_at_default_precision
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.workers import Workers


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """A replayed file.

    Args:
        case: What was replayed.
        played: The result of running it.
        comparison: Of the recorded with the replayed outputs; None if none are recorded.
        warnings: How the environment differs from the recorded one, in sentences.
        by_device: With several devices, the comparisons of what each one held of the outputs, in
            the program's order; without outputs that are distributed differently than recorded.
        agrees_with_run: If the outputs of two runs are recorded, the one, 1 or 2, with which the
            replayed outputs agree bit for bit; 0 for neither.

    Examples:
        >>> from snaprt import replay
        >>> replay.replay("step.inputs.snap").summary
        'the output is identical, bit for bit'
    """

    case: Case
    played: PlayResult
    comparison: Comparison | None
    warnings: tuple[str, ...]
    by_device: tuple[Comparison, ...] = ()
    agrees_with_run: int | None = None

    @property
    def mismatch(self) -> bool:
        """Return whether outputs differ from the recorded ones, on any device, or between runs."""
        compared = [*self.by_device, *([] if self.comparison is None else [self.comparison])]
        differs = worst_verdict(comparison.verdict for comparison in compared) == MISMATCH
        return differs or self.played.agrees_with_itself is False

    @property
    def summary(self) -> str:
        """Return one sentence about the outputs; empty if none are recorded."""
        if self.comparison is None:
            return ""
        bad = [
            str(n) for n, comparison in enumerate(self.by_device) if comparison.verdict == MISMATCH
        ]
        if bad and self.comparison.verdict != MISMATCH:
            return (
                f"the whole arrays match, but the parts on these devices do not: {', '.join(bad)}"
            )
        return self.comparison.summary


def replay(
    path: str | Path,
    *,
    device: str | None = None,
    repeat: int = 1,
    tolerance: ToleranceRequest | None = None,
    inputs: str | Path | None = None,
    random_seed: int | None = None,
    outputs: str | Path | None = None,
    compiler_options: Mapping[str, CompilerOption] | None = None,
    isolated: bool | None = None,
) -> Replay:
    """Run a recorded execution again and compare its outputs with the recorded ones.

    Args:
        path: Any file that `load` takes.
        device: Where to run: ``cpu``, ``gpu:1``, ...; None for JAX's default device.
        repeat: How often to run it, to see whether it is deterministic.
        tolerance: What to allow; None for the defaults, see docs/explanation/comparison.md.
        inputs: An ``.npz`` file with inputs to use instead.
        random_seed: Draw random inputs from this seed instead.
        outputs: An ``.npz`` file with the recorded results of ``inputs``, to compare with.
        compiler_options: XLA options for this replay, by name without dashes.
        isolated: Whether to run in a separate process; None: if snaprt did not write the module,
            or it was recorded on another platform.

    Raises:
        SnaprtError: The file cannot be read, compiled or run.

    Examples:
        >>> from snaprt import replay
        >>> result = replay.replay("step.inputs.snap")
        >>> result.comparison.verdict
        'identical'
    """
    variant = Variant(device or "default", "device", device)
    with Workers(1, timeout=None) as workers:
        return replay_case(
            load(path, inputs, random_seed, outputs),
            with_options(variant, compiler_options or {}),
            workers,
            repeat=repeat,
            tolerance=tolerance,
            isolated=isolated,
        )


def replay_case(
    case: Case,
    variant: Variant,
    workers: Workers,
    *,
    repeat: int = 1,
    tolerance: ToleranceRequest | None = None,
    isolated: bool | None = None,
    profile: Path | None = None,
) -> Replay:
    """Do what `replay` does with a case that is already loaded.

    It runs in one of the ``workers`` if ``isolated``, or if it needs more devices than there are.
    If ``profile`` names a folder, one more run is profiled into it.

    Raises:
        SnaprtError: It cannot be compiled or run.
    """
    player.check_playable(case, repeat)
    if isolated is None:
        isolated = not case.trusted or _is_for_another_platform(case, variant)
    isolated = isolated or devices.needs_host_devices(variant.device, case.devices)
    played = player.play_variant(case, variant, repeat, workers if isolated else None, profile)
    comparison = None
    if case.outputs is not None:
        comparison = compare(case.outputs, played.outputs, tolerance)
    by_device, spread_otherwise = _compare_devices(case, played, tolerance)
    warnings = list(devices.differences(case.environment, played.environment))
    options = dict(with_options(variant, case.compiler_options).options)
    if options:
        listed = ", ".join(f"{name}={value}" for name, value in options.items())
        warnings.append(f"replayed with the compiler options {listed}")
    if "xla_disable_hlo_passes" in options:
        # XLA lists its passes nowhere, so that a wrong name cannot be refused.
        warnings.append("XLA ignores the names of passes that it does not have: check the spelling")
    warnings += [f"{name} is distributed over the devices differently" for name in spread_otherwise]
    agrees_with = _run_that_agrees(case, played)
    if agrees_with is not None:
        warnings.append(_AGREEMENTS[agrees_with])
    result = Replay(case, played, comparison, (), by_device, agrees_with)
    if result.mismatch:

        def outputs_of(run: Case) -> Sequence[NamedArray]:
            if run is case:
                return played.outputs
            return player.play_variant(run, variant, 1, workers if isolated else None).outputs

        player.check_branches(case, outputs_of)
        warnings += _on_low_precision(case, played, variant)
    return dataclasses.replace(result, warnings=tuple(warnings))


def _is_for_another_platform(case: Case, variant: Variant) -> bool:
    """Return whether XLA may crash over a program: nobody compiles such a one for the platform."""
    recorded = case.environment.get("platform", "")
    device = variant.device or devices.default_platform()
    return bool(recorded) and device.partition(":")[0] != recorded


# How these platforms multiply float32 unless a program asks for more.
_LOW_PRECISION: Final = {"gpu": "in TF32", "tpu": "in bfloat16"}


def _on_low_precision(case: Case, played: PlayResult, variant: Variant) -> list[str]:
    """Say of a mismatch that a platform's way to multiply float32 may be all that is behind it."""
    recorded, here = (e.get("platform", "") for e in (case.environment, played.environment))
    platform = recorded if recorded in _LOW_PRECISION else here
    if platform not in _LOW_PRECISION or variant.matmul_precision not in (None, "default"):
        return []
    try:
        module = precision.read_module(hlo_of(case))
    except SnapshotError:
        return []
    if not multiplies_at_default_precision(module):
        return []
    instead = (
        "record with JAX_DEFAULT_MATMUL_PRECISION=highest"
        if platform == recorded
        else f"compare with --a {platform},matmul-precision=highest --b recorded"
    )
    if recorded == here == "gpu":
        instead += (
            "; XLA chooses the same kernels if you record and replay with "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    return [
        f"a {platform.upper()} multiplies float32 {_LOW_PRECISION[platform]} unless the program "
        "asks for more, and XLA may choose another kernel each time it compiles: differences of "
        f"1e-3 are rounding; allow them with --rtol 1e-2, or {instead}"
    ]


_AGREEMENTS = (
    "outputs of two runs are recorded; bit for bit, the replay agrees with neither",
    "outputs of two runs are recorded; the replay agrees with run 1, whose outputs the program "
    "used, so run 2 was wrong",
    "outputs of two runs are recorded; the replay agrees with run 2, so run 1, whose outputs the "
    "program used, was wrong",
)


def _run_that_agrees(case: Case, played: PlayResult) -> int | None:
    if case.outputs is None or case.second_outputs is None:
        return None
    for number, recorded in enumerate((case.outputs, case.second_outputs), 1):
        if compare(recorded, played.outputs, EXACTLY).verdict == IDENTICAL:
            return number
    return 0


def _compare_devices(
    case: Case, played: PlayResult, tolerance: ToleranceRequest | None
) -> tuple[tuple[Comparison, ...], list[str]]:
    """Compare what each device held; also return the outputs that are distributed differently."""
    pairs = list(zip(case.output_parts, played.parts, strict=False))
    alike = [pair for pair in pairs if _spread_alike(*pair)]
    comparisons = tuple(
        compare(
            parts_of_device([recorded for recorded, _ in alike], number),
            parts_of_device([replayed for _, replayed in alike], number),
            tolerance,
        )
        for number in range(case.devices if alike else 0)
    )
    return comparisons, [pair[0].name for pair in pairs if not _spread_alike(*pair)]


def _spread_alike(recorded: ShardedArray, replayed: ShardedArray) -> bool:
    # The data of PRNG keys have one more dimension than the recorded keys.
    cut = (index[: len(own)] for index, own in zip(replayed.indices, recorded.indices, strict=True))
    return recorded.indices == tuple(cut)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceReplays:
    """A case that was replayed on several devices."""

    replays: tuple[Replay, ...]  # one for each device
    # Which of the different results each replay returned: 1 is the most common.
    results: tuple[int, ...]

    @property
    def usual(self) -> Replay:
        """Return the first replay with the most common result."""
        return self.replays[self.results.index(1)]

    @property
    def deviating(self) -> tuple[str, ...]:
        """Return the devices whose result differs from the majority; none without a majority."""
        common = self.results.count(1)
        if 2 * common <= len(self.results):
            return ()
        return tuple(
            replay.played.device
            for replay, result in zip(self.replays, self.results, strict=True)
            if result != 1
        )

    @property
    def unsteady(self) -> tuple[str, ...]:
        """Return the devices on which the runs differ."""
        return tuple(
            replay.played.device
            for replay in self.replays
            if replay.played.agrees_with_itself is False
        )


def replay_on_all_devices(
    case: Case, variant: Variant, replay_as: Callable[[Variant], Replay]
) -> DeviceReplays:
    """Replay a case on each local device of the variant's platform.

    Raises:
        UsageError: The program runs on several devices.
        SnaprtError: It cannot be compiled or run.
    """
    if case.devices > 1:
        raise UsageError(
            f"{case.path} runs on {case.devices} devices at once, and --all-devices takes programs "
            "of one device",
            hint=f"`snaprt replay {case.path}` runs it on as many devices",
        )
    platform = devices.find_device(variant.device).platform
    replays = []
    for device in jax.local_devices(backend=platform):
        name = devices.device_name(device)
        replays.append(replay_as(dataclasses.replace(variant, text=name, device=name)))
    digests = [_digest(replay) for replay in replays]
    order = [digest for digest, _ in Counter(digests).most_common()]
    results = tuple(order.index(digest) + 1 for digest in digests)
    return DeviceReplays(tuple(replays), results)


def _digest(replay: Replay) -> bytes:
    digest = hashlib.sha256()
    for array in replay.played.outputs:
        value = np.ascontiguousarray(array.value)
        digest.update(f"{array.name} {value.dtype} {value.shape} ".encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.digest()
