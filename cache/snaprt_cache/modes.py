"""How a cache may be used: a table of modes, from reading and writing to not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from snaprt_cache.errors import CacheError


@dataclass(frozen=True)
class Mode:
    """What the programs that use a cache may do with it."""

    name: str  # what the user calls it
    reads: bool  # whether an entry that is there is used
    writes: bool  # whether anything in the directory may be made, moved or removed
    misses: bool  # whether a program may compile what it does not find
    help: str  # what it is for, one sentence


READ_WRITE: Final = Mode("read-write", True, True, True, "Use existing entries and store new ones.")
READ_ONLY: Final = Mode("read-only", True, False, True, "Use existing entries; store nothing.")
FAIL_ON_MISS: Final = Mode(
    "fail-on-miss", True, False, False, "Use existing entries; fail if a program must be compiled."
)
REFRESH: Final = Mode("refresh", False, True, True, "Recompile everything and replace the entries.")
OFF: Final = Mode("off", False, False, True, "Do not use the cache.")

MODES: Final[Mapping[str, Mode]] = {
    mode.name: mode for mode in (READ_WRITE, READ_ONLY, FAIL_ON_MISS, REFRESH, OFF)
}


def mode_called(name: str) -> Mode:
    """Return the mode of this name.

    Raises:
        CacheError: There is none.
    """
    try:
        return MODES[name]
    except KeyError:
        raise CacheError(
            f"unknown compile cache mode {name!r}", hint=f"Choose one of: {', '.join(MODES)}."
        ) from None
