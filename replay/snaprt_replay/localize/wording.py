"""Say in one sentence what localizing found; it must not know how it was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from snaprt_replay.localize.findings import InstructionPlace, Kind, Localization

if TYPE_CHECKING:
    from snaprt_replay.localize.nonfinite import Origin


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
    frame = "".join(f", in {one}" for one in reversed(place.frame))
    calls = f", in {place.calls[-1]}" if place.calls else ""
    return f"{place.name} ({place.opcode} {place.shape}){source}{calls}{frame}"


def sentence(found: Localization) -> str:
    """Return the answer in one sentence."""
    return _SENTENCES[found.kind](found)


def origin_sentence(origin: Origin) -> str:
    """Return the answer of a search for NaN and Inf in one sentence."""
    inputs = "finite inputs" if origin.from_finite else f"inputs without {origin.made}"
    return f"{place_text(origin.place)} makes {origin.made} of {inputs}"


def no_origin_sentence(suspect: str, nonfinite: bool) -> str:
    """Return the answer of such a search where no operation is the origin."""
    if not nonfinite:
        return f"the outputs of {suspect} are finite"
    return f"what is not finite on {suspect} comes with the inputs, or is a constant of the program"


def _edited(found: Localization) -> str:
    assert found.substituted is not None
    before, after = map(error_text, found.substituted)
    several = len(found.instructions) > 1
    what = " and ".join(map(place_text, found.instructions))
    return (
        f"{what} {'differ' if several else 'differs'} between the programs of {found.suspect} and "
        f"{found.reference}: with {'them' if several else 'it'} as in the reference, the outputs "
        f"are {after} the tolerance off instead of {before}"
    )


def _candidates(found: Localization) -> str:
    return (
        f"no operation can be proven to make the difference of {found.suspect} and "
        f"{found.reference}; the candidates are {_span(found)}"
    )


def _instruction(found: Localization) -> str:
    if found.substituted is not None:
        return _edited(found)
    what = " or ".join(map(place_text, found.instructions))
    error = max((one.error for one in found.difference), default=math.inf)
    return (
        f"{what} goes wrong on {found.suspect}: {error_text(error)} the tolerance off "
        f"{found.reference}, on the same inputs"
    )


def _interaction(found: Localization) -> str:
    if found.substituted is not None:
        return _edited(found)
    healing = [one.variant for one in found.passes if one.error <= 1.0 and not one.failed]
    by = f"; {', '.join(healing)} is right" if healing else ""
    return (
        f"{_span(found)} go wrong together on {found.suspect}, and are right as soon as they are "
        f"cut apart: it is a fusion or a pass over them, not one of them{by}"
    )


def _amplification(found: Localization) -> str:
    return (
        f"no instruction goes wrong beyond its rounding on {found.suspect}; the rounding errors "
        f"grow most at {_span(found)}: the program is ill-conditioned there"
    )


def _nothing(found: Localization) -> str:
    agree = f"{found.suspect} and {found.reference} agree within tolerance: nothing to localize"
    if found.instructions:
        agree += f"; the programs differ in {_span(found)}, which changes no output by more"
    return agree


def _unfinished(found: Localization) -> str:
    among = f", and the fault is among {_span(found)}" if found.instructions else ""
    return f"the budget is spent{among}; run it again to go on"


def _span(found: Localization) -> str:
    places = found.instructions
    if len(places) == 1:
        return place_text(places[0])
    return f"the {len(places)} instructions {place_text(places[0])} to {place_text(places[-1])}"


_SENTENCES: Final[Mapping[Kind, Callable[[Localization], str]]] = {
    "instruction": _instruction,
    "interaction": _interaction,
    "amplification": _amplification,
    "candidates": _candidates,
    "nothing": _nothing,
    "unfinished": _unfinished,
}
