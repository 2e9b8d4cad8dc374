"""The libraries that compare the exact types of arrays, which no lazy array can answer for itself.

In their modules the name `type` gives the type that the value of a lazy array has.
"""

from __future__ import annotations

import sys
from functools import cache, partial

from snaprt.after_import import call_after_import
from snaprt.trace.array import LazyArray

#: Modules that compare ``type(array)`` of two arrays; all they do with ``type`` is to call it.
_COMPARING = ("equinox._serialisation",)


def type_of_value(value: object) -> type:
    """Return the type of an object, of a lazy array that of its value."""
    return value.__class__ if type(value) is LazyArray else type(value)


@cache
def answer_for_exact_types() -> None:
    """Let the modules that compare types of arrays take lazy ones for others, once imported."""
    for name in _COMPARING:
        call_after_import(name, partial(_shadow, name))


def _shadow(name: str) -> None:
    vars(sys.modules[name])["type"] = type_of_value
