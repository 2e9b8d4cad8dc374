"""Which of the debug modes that `docs/how-to/debug-modes.md` explains hold now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from snaprt import jaxapi, settings


@dataclass(frozen=True, eq=False)
class Modes:
    """The modes that hold; there is one object for each combination."""

    eager: bool = False  # each operation is compiled and run as soon as it is recorded
    steps_by_operation: bool = False  # at a step, each operation is a program of its own
    reads_by_operation: bool = False  # at a read, each operation is
    # Where an operation stands in the source is noted each time it is recorded.
    notes_places: bool = False
    places_in_modules: bool = False  # a program whose operations stand elsewhere is lowered again
    waits: bool = False  # a step ends when the devices have finished

    def by_operation(self, *, at_step: bool) -> bool:
        """Return whether a cut, at a step or at a read, runs each operation on its own."""
        return self.eager or (self.steps_by_operation if at_step else self.reads_by_operation)

    @property
    def sees_each_operation(self) -> bool:
        """Whether a step that repeats must be recorded anew rather than followed."""
        return self.eager or self.notes_places


_EAGER: Final = ("NEURON_USE_EAGER_DEBUG_MODE", "XLA_USE_EAGER_DEBUG_MODE")
_OTHERS: Final = ("GET_TENSORS_OPBYOP", "SYNC_TENSORS_OPBYOP", "XLA_HLO_DEBUG", "XLA_IR_DEBUG")
_FUNCTION: Final = "SNAPRT_DEBUG_FUNCTION"
_WAIT: Final = "XLA_SYNC_WAIT"

NONE: Final = Modes()
_instances: Final[dict[tuple[bool, ...], Modes]] = {(False,) * 6: NONE}
_texts: Final = settings.Texts(*_EAGER, *_OTHERS, _FUNCTION, _WAIT)
_last: tuple[list[Any], Modes] = ([None] * 8, NONE)
_chosen_eager: bool | None = None


def current_modes() -> Modes:
    """Return the modes that the environment, or `choose_eager`, asks for now."""
    global _last
    now = _texts.now()
    texts, modes = _last
    if now != texts:
        modes = _read()
        _last = now, modes
    return modes


def choose_eager(enable: bool | None) -> None:
    """Turn eager mode on or off for the process; ``None`` leaves it to the environment."""
    global _chosen_eager, _last
    _chosen_eager = enable
    _last = _texts.now(), _read()
    jaxapi.end_all_rests()


def _read() -> Modes:
    eager = _chosen_eager
    if eager is None:
        eager = any(map(settings.get, _EAGER))
    reads, steps, modules, places = map(settings.get, _OTHERS)
    places = places or settings.get(_FUNCTION) is not None
    notes = eager or steps or reads or modules or places
    key = (eager, steps, reads, notes, modules, settings.get(_WAIT))
    return _instances.setdefault(key, Modes(*key))
