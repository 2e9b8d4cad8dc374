"""Reads protocol buffers field by field, for who needs a few fields of a file of gigabytes.

Importing protobuf takes 50 ms, which the first snapshot of a process is not to wait for; and a file
that was cut off is still to be recognized, where protobuf refuses all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of a message's fields: a number, or what is length-delimited.

    Numbers of fixed width are left out. The last field may be cut off.

    Raises:
        ValueError: These bytes are no protobuf message.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise ValueError("invalid field number")
        if wire == _VARINT:
            value, position = _varint(message, position)
            yield number, value
        elif wire in (_FIXED32, _FIXED64):
            position += 4 if wire == _FIXED32 else 8
        elif wire == _BYTES:
            length, position = _varint(message, position)
            yield number, message[position : position + length]
            position += length
        else:
            raise ValueError("invalid wire type")


def delimited(content: memoryview) -> tuple[memoryview, memoryview]:
    """Split content into the message that its length stands before, and what follows the message.

    The message may be cut off.

    Raises:
        ValueError: These bytes do not begin with a length.
    """
    length, position = _varint(content, 0)
    return content[position : position + length], content[position + length :]


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            return value, position
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number that does not end")
