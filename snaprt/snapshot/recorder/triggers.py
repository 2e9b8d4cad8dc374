"""What must happen to an execution, beside its conditions, before it is recorded: one row each.

A condition with a trigger strikes when it is known how the execution ended. `TRIGGERS` is the whole
list; everything else asks its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from snaprt import units

if TYPE_CHECKING:
    from snaprt.snapshot.recorder.pending import HeldExecution


class Ending(NamedTuple):
    """How an execution ended."""

    held: HeldExecution
    error: BaseException | None
    nanoseconds: int  # how long it took, where that is past its limit; else 0 may stand here


def _flag_is_up(value: Any, ending: Ending) -> bool:
    return ending.error is None and ending.held.may_have_infinity_or_nan()


@dataclass(frozen=True)
class Trigger:
    """One word of ``--when`` that waits for the end of an execution."""

    name: str  # what the user writes before `=`, or alone
    help: str  # what it means, one sentence
    strikes: Callable[[Any, Ending], bool]  # given the value and the ending
    allowed: str = ""  # what may stand after `=`, for the user; empty for a word that stands alone
    parse: Callable[[str], Any] = bool  # turns that into a value; raises ValueError
    # Where `strikes` is not enough, reads all arrays in the writer's thread.
    confirms: Callable[[Ending], bool] | None = None
    reason: Callable[[str, Ending], str] = lambda text, ending: text  # for the manifest
    limit: Callable[[Any], float] = lambda value: math.inf  # nanoseconds until it matters
    is_failure: bool = True  # which empties the flight recorder, and may stop the program
    wants_flag: bool = False  # programs should say of themselves that an output has a NaN
    counts_programs: bool = False  # what ends the program is an error of the last execution
    counter: str = ""  # counts what struck, whether it was recorded or not


TRIGGERS: Final = (
    Trigger(
        "slower",
        "Executions that take longer than this; their inputs are held until that is known.",
        lambda seconds, ending: ending.error is None and ending.nanoseconds > 1e9 * seconds,
        allowed="a time, such as 50ms or 2s; without a unit it is seconds",
        parse=units.parse_duration,
        reason=lambda text, ending: f"{text} (it took {ending.nanoseconds / 1e6:.3f} ms)",
        limit=lambda seconds: 1e9 * seconds,
        is_failure=False,
    ),
    Trigger(
        "nan",
        "A NaN or an infinity appears in an output and was in no input.",
        _flag_is_up,
        confirms=lambda ending: ending.held.has_new_infinity_or_nan(),
        wants_flag=True,
        counter="SnapshotNaN",
    ),
    Trigger(
        "error",
        "Compiling or executing fails, or an exception ends the program or leaves a lazy scope.",
        lambda value, ending: ending.error is not None,
        reason=lambda text, ending: "error",
        counts_programs=True,
    ),
)
