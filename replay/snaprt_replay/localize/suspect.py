"""Choose the side that is searched: how to run a program so that its failure is seen.

Knows nothing of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay.load.case import Case
from snaprt_replay.load.modules import hlo_of
from snaprt_replay.localize.nonfinite import is_finite
from snaprt_replay.run.variants.variants import Variant, parse_variant, with_options
from snaprt_replay.run.workers import Outcome

#: Runs an HLO module on a variant.
RunVariant = Callable[[Variant, bytes, Sequence[np.ndarray]], "Future[Outcome]"]

_PLATFORMS: Final = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
_AS_WRITTEN: Final = "op-by-op"


def runnable(variant: Variant | None) -> Variant | None:
    """Return a variant that a user named, if any.

    Raises:
        UsageError: It is the recorded outputs.
    """
    if variant is not None and variant.kind == "recorded":
        raise UsageError(
            "the recording has only outputs and no program to search",
            hint="name a side that runs the program, such as the device it was recorded on",
        )
    return variant


def suspect_of(case: Case, variant: Variant | None) -> Variant:
    """Return side A: the requested one, or the platform that the case was recorded on."""
    platform = str(case.environment.get("platform", "")).lower()
    return runnable(variant) or parse_variant(_PLATFORMS.get(platform, "cpu"))


def nonfinite_suspect(
    case: Case, variant: Variant | None, run: RunVariant
) -> tuple[Variant, tuple[str, ...]]:
    """Return side A for the search for a NaN or an infinity, and notes on that choice.

    A search runs HLO, in which instructions have another order than in the recorded StableHLO. XLA
    may then simplify ``g / p / s`` to ``g / (p * s)`` or not, and with that, a NaN may be gone. One
    operation at a time, nothing is simplified.
    """
    suspect = suspect_of(case, variant)
    outputs = [output.value for output in case.outputs or ()]
    if variant is not None or all(map(is_finite, outputs)):
        return suspect, ()
    as_written = parse_variant(_AS_WRITTEN)
    program, inputs = hlo_of(case), [array.value for array in case.inputs or ()]

    def is_nonfinite(side: Variant) -> bool | None:  # None if it fails
        found = run(with_options(side, case.compiler_options), program, inputs).result().outputs
        return None if found is None else not all(map(is_finite, found))

    if is_nonfinite(suspect) is not False or not is_nonfinite(as_written):
        return suspect, ()
    return as_written, (
        f"{suspect.text} does not reproduce the NaN or infinity of the recorded outputs: XLA "
        f"simplifies the searched program differently; side A is {_AS_WRITTEN}, which does",
    )
