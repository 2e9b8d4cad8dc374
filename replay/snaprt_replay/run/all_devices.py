"""Replays a case on every local device of a kind, and tells which one gives different bits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter

import jax
import numpy as np

from snaprt.errors import UsageError
from snaprt_replay.compare.tolerance import ToleranceRequest
from snaprt_replay.load.case import Case
from snaprt_replay.run import devices
from snaprt_replay.run.rerun import Replay, replay_case
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import Workers


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceReplays:
    """A case, replayed on several devices.

    Args:
        replays: One for each device.
        results: Of each, which of the different results it gave first: 1 is the most common.
    """

    replays: tuple[Replay, ...]
    results: tuple[int, ...]

    @property
    def usual(self) -> Replay:
        """Return the first replay that gave the most common result."""
        return self.replays[self.results.index(1)]

    @property
    def deviating(self) -> tuple[str, ...]:
        """Return the devices that gave another result than most; none where most differ."""
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
        """Return the devices that do not agree with themselves."""
        return tuple(
            replay.played.device
            for replay in self.replays
            if replay.played.agrees_with_itself is False
        )


def replay_on_all_devices(
    case: Case,
    variant: Variant,
    workers: Workers,
    *,
    repeat: int = 1,
    tolerance: ToleranceRequest | None = None,
    isolated: bool | None = None,
) -> DeviceReplays:
    """Do what `replay_case` does on each local device of the variant's platform.

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
        on_device = dataclasses.replace(variant, text=name, device=name)
        replays.append(
            replay_case(
                case,
                on_device,
                workers,
                repeat=repeat,
                tolerance=tolerance,
                isolated=isolated,
            )
        )
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
