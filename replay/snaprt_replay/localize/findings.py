"""The result of a localization, as data that can be saved and in words.

An *error* here is in multiples of the default tolerance of the value's dtype
(docs/explanation/comparison.md): two correct executions may differ by up to 1.
``from_json(to_json(localization))`` is ``localization``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from snaprt.errors import UsageError
from snaprt_replay.compare.results import json_ready, read_as

SCHEMA = "snaprt.localize"
SCHEMA_VERSION = 1

FindingKind = Literal[
    "instruction", "interaction", "amplification", "candidates", "nothing", "unfinished"
]
"""What a localization ends with.

``instruction``: this instruction goes wrong on correct inputs. ``interaction``: these instructions
go wrong together but not individually: a fusion or a pass over them is the cause.
``amplification``: no instruction exceeds its rounding error, which these instructions amplify.
``candidates``: any of these may be the cause, and none can be proven to be it. ``nothing``: the two
sides agree. ``unfinished``: the budget was spent; the fault is among these instructions.
"""


@dataclasses.dataclass(frozen=True)
class InstructionPlace:
    """One instruction of the program."""

    name: str  # its name in the HLO module
    opcode: str  # XLA's name of the operation
    shape: str  # element type and dimensions of its result, ``f32[8,16]``
    operands: tuple[str, ...] = ()  # names and shapes of what it reads, ``dot.3 f32[8,16]``
    op_name: str = ""  # JAX's name of the operation, with its scopes
    source: str = ""  # ``file:line (function)`` of the user's Python; empty where unknown
    # The called computations or fusions that contain it, outermost first.
    calls: tuple[str, ...] = ()
    # The loops and branches that contain it, outermost first: ``while.3 iteration 4``.
    frame: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RegionError:
    """One region on the way to the fault."""

    first: InstructionPlace  # its first instruction
    last: InstructionPlace
    instructions: int  # how many it has, without constants and the like
    depth: int  # 0 for a region of the whole program, 1 for a region of such a region, ...
    # The error that the suspect makes in it on clean inputs, that is, the reference's values.
    made: float
    carried_in: float  # the error of the suspect's own values where the region starts
    carried_out: float  # the same where it ends
    chosen: bool = False  # whether the search continued inside


@dataclasses.dataclass(frozen=True)
class ValueDifference:
    """One array, compared."""

    name: str  # the array's name
    error: float  # in multiples of the default tolerance, like all errors of this module
    reason: str = ""  # in words, with the first element that differs


@dataclasses.dataclass(frozen=True)
class PassEffect:
    """The error under another variant of the suspect side."""

    variant: str
    error: float
    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Localization:
    """Where two sides of one program start to differ."""

    kind: FindingKind  # see `FindingKind`
    sentence: str  # the answer, for a person
    suspect: str  # the side that is searched
    reference: str  # the side that it is compared with; empty in a search for NaN and Inf
    # The instruction at fault, or the few that are at fault together.
    instructions: tuple[InstructionPlace, ...] = ()
    # The values of the instruction, compared with the correct ones.
    difference: tuple[ValueDifference, ...] = ()
    # The program's outputs without any tap, compared.
    outputs: tuple[ValueDifference, ...] = ()
    path: tuple[RegionError, ...] = ()  # the regions searched, in program order, coarse ones first
    # The largest error of the outputs without taps, and with the first taps; None where no tap was
    # needed.
    observer_effect: tuple[float, float] | None = None
    # Where the two sides run different programs: the outputs' error with the programs unchanged,
    # and with these instructions replaced by the reference's.
    substituted: tuple[float, float] | None = None
    # Where taps made the error vanish: the variants tried, those that remove it first.
    passes: tuple[PassEffect, ...] = ()
    matched: int = 0  # how many instructions of the suspect have a match in the reference
    instruction_count: int = 0  # how many the suspect has
    compiles: int = 0  # how many modules were compiled or loaded from the cache
    executions: int = 0  # how often one was run
    seconds: float = 0.0  # how long it took, without earlier sessions
    notes: tuple[str, ...] = ()  # what the reader should know

    @property
    def share_matched(self) -> float:
        """Return the share of the suspect's instructions that were matched, from 0 to 1."""
        return self.matched / self.instruction_count if self.instruction_count else 1.0


def to_json(localization: Localization) -> dict[str, Any]:
    """Return the localization as JSON data; numbers that JSON cannot represent become text."""
    plain = json_ready(dataclasses.asdict(localization))
    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **plain}


def from_json(plain: Mapping[str, Any]) -> Localization:
    """Undo `to_json`; raise UsageError for data of another schema or version."""
    if (plain.get("schema"), plain.get("version")) != (SCHEMA, SCHEMA_VERSION):
        raise UsageError(
            f"not {SCHEMA} version {SCHEMA_VERSION}: "
            f"{plain.get('schema')} version {plain.get('version')}",
            hint="it was written by another version of snaprt",
        )
    return read_as(Localization, plain)


def error_text(error: float) -> str:
    """Return an error in tolerances as text: ``3.2x``, ``infinite``."""
    if math.isnan(error):
        return "none"
    if math.isinf(error):
        return "infinite"
    return f"{error:,.0f}x" if error >= 100 else f"{error:.2g}x"


def place_text(place: InstructionPlace) -> str:
    """Return an instruction as ``dot.3 (dot f32[8,16]) at model.py:12 (loss)``."""
    source = f" at {place.source}" if place.source else ""
    frame = "".join(f", in {scope}" for scope in reversed(place.frame))
    calls = f", in {place.calls[-1]}" if place.calls else ""
    return f"{place.name} ({place.opcode} {place.shape}){source}{calls}{frame}"


def sentence(localization: Localization) -> str:
    """Return the answer in one sentence."""
    return _SENTENCES[localization.kind](localization)


def _edited(localization: Localization) -> str:
    assert localization.substituted is not None
    before, after = map(error_text, localization.substituted)
    several = len(localization.instructions) > 1
    what = " and ".join(map(place_text, localization.instructions))
    return (
        f"{what} {'differ' if several else 'differs'} between the programs of "
        f"{localization.suspect} and {localization.reference}: with "
        f"{'them' if several else 'it'} as in the reference, the outputs are off by {after} the "
        f"tolerance instead of {before}"
    )


def _candidates(localization: Localization) -> str:
    return (
        f"no operation can be proven to cause the difference between {localization.suspect} and "
        f"{localization.reference}; the candidates are {_span(localization)}"
    )


def _instruction(localization: Localization) -> str:
    if localization.substituted is not None:
        return _edited(localization)
    what = " or ".join(map(place_text, localization.instructions))
    error = max((value.error for value in localization.difference), default=math.inf)
    return (
        f"{what} goes wrong on {localization.suspect}: with the same inputs, it is off "
        f"{localization.reference} by {error_text(error)} the tolerance"
    )


def _interaction(localization: Localization) -> str:
    if localization.substituted is not None:
        return _edited(localization)
    healing = [
        pass_.variant for pass_ in localization.passes if pass_.error <= 1.0 and not pass_.failed
    ]
    by = f"; {', '.join(healing)} is right" if healing else ""
    return (
        f"{_span(localization)} go wrong together on {localization.suspect}, but are right when "
        f"separated: the cause is a fusion or a pass over them, not one instruction{by}"
    )


def _amplification(localization: Localization) -> str:
    return (
        f"no instruction exceeds its rounding error on {localization.suspect}; the rounding "
        f"errors grow most at {_span(localization)}: the program is ill-conditioned there"
    )


def _nothing(localization: Localization) -> str:
    agree = (
        f"{localization.suspect} and {localization.reference} agree within tolerance: nothing to "
        "localize"
    )
    if localization.instructions:
        agree += (
            f"; the programs differ in {_span(localization)}, which changes no output by more than "
            "the tolerance"
        )
    return agree


def _unfinished(localization: Localization) -> str:
    among = f", and the fault is among {_span(localization)}" if localization.instructions else ""
    return f"the budget ran out{among}; run it again to continue"


def _span(localization: Localization) -> str:
    places = localization.instructions
    if len(places) == 1:
        return place_text(places[0])
    return f"the {len(places)} instructions {place_text(places[0])} to {place_text(places[-1])}"


_SENTENCES: Final[Mapping[FindingKind, Callable[[Localization], str]]] = {
    "instruction": _instruction,
    "interaction": _interaction,
    "amplification": _amplification,
    "candidates": _candidates,
    "nothing": _nothing,
    "unfinished": _unfinished,
}
