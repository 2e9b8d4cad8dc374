"""What must happen to an execution, beside its conditions, before it is recorded: one row each.

A condition with a trigger strikes when it is known how the execution ended. `TRIGGERS` is the whole
list; everything else asks its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from snaprt import units

if TYPE_CHECKING:
    from snaprt.snapshot.recorder.pending import HeldExecution


Strikes = Callable[[Any, "HeldExecution", BaseException | None, int], bool]
"""``strikes(value, execution, error, nanoseconds)`` is asked when an execution has ended: with the
value of the word, what it failed with, and how long it took where that is past its limit (else 0
may stand there)."""


@dataclass(frozen=True, eq=False)
class Trigger:
    """One word of ``--when`` that waits for the end of an execution."""

    name: str  # what the user writes before `=`, or alone
    help: str  # what it means, one sentence
    strikes: Strikes
    allowed: str = ""  # what may stand after `=`, for the user; empty for a word that stands alone
    may_stand_alone: bool = False  # whether nothing need stand there; `parse` is then given ""
    parse: Callable[[str], Any] = bool  # turns that into a value; raises ValueError
    # Where `strikes` is not enough, reads all arrays in the writer's thread; given the error, too.
    confirms: Callable[[HeldExecution, BaseException | None], bool] | None = None
    # What the manifest says, given the condition's text and the nanoseconds.
    reason: Callable[[str, int], str] = lambda text, nanoseconds: text
    limit: Callable[[Any], float] = lambda value: math.inf  # nanoseconds until it matters
    is_failure: bool = True  # which empties the flight recorder, and may stop the program
    wants_flag: bool = False  # programs should say of themselves that an output has a NaN
    counts_programs: bool = False  # what ends the program is an error of the last execution
    counter: str = ""  # counts what struck, whether it was recorded or not
    # The execution runs again when the other words hold of it, `every` and `first` included.
    runs_again: bool = False
    strikes_success: bool = True  # whether it may strike an execution that has not failed


SAME_DEVICE: Final = "same"
OTHER_DEVICE: Final = "device"
"""The values of `recheck`."""


def _where(text: str) -> str:
    if text.strip() not in ("", OTHER_DEVICE):
        raise ValueError(text)
    return text.strip() or SAME_DEVICE


TRIGGERS: Final = (
    Trigger(
        "slower",
        "Executions that take longer than this; their inputs are held until that is known. A call "
        "that compiles the program is not timed.",
        lambda seconds, execution, error, took: error is None and took > 1e9 * seconds,
        allowed="a time, such as 50ms or 2s; without a unit it is seconds",
        parse=units.parse_duration,
        reason=lambda text, nanoseconds: f"{text} (it took {nanoseconds / 1e6:.3f} ms)",
        limit=lambda seconds: 1e9 * seconds,
        is_failure=False,
    ),
    Trigger(
        "nan",
        "A NaN or an infinity appears in an output and was in no input.",
        lambda value, execution, error, took: execution.may_have_infinity_or_nan(error),
        confirms=lambda execution, error: execution.has_new_infinity_or_nan(error),
        wants_flag=True,
        counter="SnapshotNaN",
    ),
    Trigger(
        "error",
        "Compiling or executing fails, or an exception ends the program or leaves a lazy scope.",
        lambda value, execution, error, took: error is not None,
        reason=lambda text, nanoseconds: "error",
        counts_programs=True,
        strikes_success=False,
    ),
    Trigger(
        "recheck",
        "Running it again gives different bits. With `every=N`, only every Nth runs again.",
        lambda value, execution, error, took: False,  # `recheck.py` judges it when it begins
        allowed="device, to use another device of this process for it; or stands alone",
        may_stand_alone=True,
        parse=_where,
        runs_again=True,
    ),
)
