"""Finds the lines of source that made a module; reads the bytes of its proto, and needs no schema.

Source: ``StackFrameIndexProto`` in openxla's ``xla/service/hlo.proto``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

_STACK_FRAME_INDEX = 17  # of HloModuleProto
_FILE_NAMES, _FUNCTION_NAMES, _FILE_LOCATIONS = 1, 2, 3  # of StackFrameIndexProto
_FILE_NAME_ID, _FUNCTION_NAME_ID, _LINE = 1, 2, 3  # of FileLocation; ids count from 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@functools.lru_cache(maxsize=8)  # every execution of a program has the same
def source_locations(hlo: bytes, limit: int = 500) -> tuple[str, ...]:
    """Return ``file:line (function)`` for each line that a module's operations came from.

    Args:
        hlo: A serialized ``xla.HloModuleProto``.
        limit: How many locations to return at most.

    Returns:
        Each location once, in the module's order; none where the module has none or cannot be read.
    """
    files: list[str] = []
    functions: list[str] = []
    found: dict[str, None] = {}
    try:
        for number, index in _fields(hlo):
            if number != _STACK_FRAME_INDEX or not isinstance(index, bytes):
                continue
            for kind, value in _fields(index):
                if isinstance(value, int):
                    continue
                if kind == _FILE_NAMES:
                    files.append(value.decode(errors="replace"))
                elif kind == _FUNCTION_NAMES:
                    functions.append(value.decode(errors="replace"))
                elif kind == _FILE_LOCATIONS:
                    found[_location(value, files, functions)] = None
    except (IndexError, ValueError):
        return ()
    return tuple(found)[:limit]


def _location(location: bytes, files: list[str], functions: list[str]) -> str:
    numbers = {number: value for number, value in _fields(location) if isinstance(value, int)}
    file = files[numbers[_FILE_NAME_ID] - 1] if _FILE_NAME_ID in numbers else "?"
    line = numbers.get(_LINE, 0)
    if _FUNCTION_NAME_ID not in numbers:
        return f"{file}:{line}"
    return f"{file}:{line} ({functions[numbers[_FUNCTION_NAME_ID] - 1]})"


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field number and value of each field of a serialized proto."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(message):
            raise ValueError("the message ends too early")
        yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
